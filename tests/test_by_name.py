"""Names of functions that go along with their functions into other processes."""

import functools
import json
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from parts import SMALL

from envs.families import find_spec
from evaluate import main as evaluate
from runtime.utils import NO_MODULE, Named, UserError, find_function, reference
from train import main as train
from trainer import APPO, load


def make(render_mode: str | None = None) -> gym.Env:
    return gym.make("CartPole-v1", render_mode=render_mode)


class Factory:
    def __call__(self, cfg: Any, obs_space: Any) -> int:
        return 7


def local(seconds: float) -> Any:
    return lambda: seconds


@pytest.mark.parametrize(("value", "name"), [
    (make, "test_by_name:make"), (functools.partial(make, render_mode=None), f"{NO_MODULE}:make"),
    (local(3), f"{NO_MODULE}:lambda"), (Factory(), f"{NO_MODULE}:Factory"),
    (Factory.__call__, f"{NO_MODULE}:__call__")])
def test_what_is_named_goes_along_and_the_name_stays_text(value: Any, name: str) -> None:
    named = reference(value)
    assert named == name
    assert json.loads(json.dumps({"env": named})) == {"env": name}
    assert find_function("encoder", named) is value
    sent = pickle.loads(pickle.dumps(named))
    assert (type(sent), sent) == (Named, name)
    assert callable(find_function("encoder", sent))


def test_a_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lies_here.py").write_text("def function(): return 5\n")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    with pytest.raises(UserError, match="no module 'lies_here'; run it from the folder of its file"):
        find_function("encoder", "lies_here:function")
    monkeypatch.chdir(tmp_path)
    assert find_function("encoder", "lies_here:function")() == 5
    del sys.modules["lies_here"]
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    with pytest.raises(UserError, match="no module 'no_such_package'"):
        find_function("encoder", "imports:function")


def test_a_script_that_trains_when_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin another system in itself, and that one more."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unguarded.py").write_text("from test_by_name import make\nfrom trainer import APPO\n"
                                           f"APPO('unguarded:make', train_dir='{tmp_path}')\n")
    with pytest.raises(UserError, match="put what starts the training under 'if __name__"):
        APPO("unguarded:make", train_dir=str(tmp_path))


def test_what_cannot_be_sent_is_refused_only_where_it_must_be_sent() -> None:
    lock = threading.Lock()
    named = reference(lambda: lock)
    assert find_function("env", named)() is lock
    with pytest.raises(TypeError, match="lock"):
        pickle.dumps(named)


def test_an_environment_that_this_program_has_registered_goes_along() -> None:
    gym.register("Along-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=7)
    try:
        sent = pickle.dumps((reference("Along-v0"), reference(make)))
    finally:
        del gym.registry["Along-v0"]
    with pytest.raises(UserError, match="Along-v0 is unknown"):
        find_spec("Along-v0")
    env, function = pickle.loads(sent)
    assert find_spec(env).max_episode_steps == 7
    assert find_spec(function).entry_point is make
    assert gym.registry.pop("Along-v0").max_episode_steps == 7, "functions may make it, too"


def test_a_run_of_a_local_class_is_resumed_from_python_only(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    class Local(gym.Wrapper):
        def __init__(self) -> None:
            super().__init__(make())

    settings = SMALL | {"train_dir": str(tmp_path), "serial_mode": True}
    for total in (100, 200):
        with APPO(Local, **settings) as appo:
            appo.train(100)
        assert appo.env_steps >= total
    assert load(tmp_path / "Local").predict(np.zeros(4))[0] in (0, 1)
    for run in "a", "b", "a":  # each its own; a cell of a notebook that is run again defines what it names again
        with APPO(local(make()), **settings, experiment=run) as appo:
            appo.save()
        assert load(tmp_path / run).predict(np.zeros(4))[0] in (0, 1)
    for command in (train, evaluate):  # other programs, as far as they can know
        assert command([f"--env={NO_MODULE}:Local", f"--train_dir={tmp_path}"]) == 2
        assert f"no module named '{NO_MODULE}'" in capsys.readouterr().err.lower()
