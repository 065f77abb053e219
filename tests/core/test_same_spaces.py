"""A policy meets only the spaces that it was trained with: their parts are found by name, anything else is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from parts import SMALL
from tiny import NUMBERS, Tiny
from tiny_games import HunterAndPrey

from evaluate import main as evaluate
from runtime.utils import UserError
from trainer import APPO, load

TWO = spaces.Discrete(2)
IN_ORDER, SWAPPED = (spaces.Dict([(name, TWO if name == "left" else NUMBERS) for name in names])
                     for names in (("left", "right"), ("right", "left")))


class Shows(Tiny):
    """Shows and takes what a test sets."""


def make(train_dir: Path, env: type, experiment: str = "run", **settings: Any) -> APPO:
    return APPO(env, train_dir=str(train_dir), experiment=experiment, serial_mode=True, **SMALL, **settings)


def give(monkeypatch: pytest.MonkeyPatch, both: tuple[spaces.Space, spaces.Space]) -> None:
    monkeypatch.setattr(Shows, "observation_space", both[0])
    monkeypatch.setattr(Shows, "action_space", both[1])


@pytest.mark.parametrize(("trained", "played", "changed"), [
    ((spaces.Dict(b_signal=NUMBERS, c_noise=NUMBERS), TWO), (spaces.Dict(c_noise=NUMBERS, d_signal=NUMBERS), TWO),
     "observation d_signal"),
    *(((NUMBERS, one), (NUMBERS, other), "action") for one, other in (
        (TWO, spaces.Discrete(2, start=5)), (NUMBERS, spaces.Box(-2, 2, (2,), np.float32)), (IN_ORDER, SWAPPED),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([3, 2])))),
    *(((one, TWO), (other, TWO), "observation obs") for one, other in (
        (spaces.Discrete(3), spaces.Discrete(3, start=1)), (NUMBERS, spaces.Box(0, 255, (2,), np.uint8)),
        (spaces.Text(9), spaces.MultiBinary(64))))], ids=lambda _: "")
def test_other_spaces_are_refused_wherever_a_policy_is_loaded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, trained: Any, played: Any,
        changed: str) -> None:
    give(monkeypatch, trained)
    with make(tmp_path, Shows) as appo:
        appo.save()
    run_dir = appo.cfg.run_dir
    assert load(run_dir).predict(trained[0].sample())
    give(monkeypatch, played)
    with make(tmp_path, Shows, "other") as other:
        for meets in (lambda: load(run_dir), lambda: make(tmp_path, Shows), lambda: other.load(run_dir)):
            with pytest.raises(UserError, match=f"was trained with other spaces: .*{changed} is "):
                meets()
    assert evaluate([f"--env={__name__}:Shows", f"--train_dir={tmp_path}", "--experiment=run"]) == 2
    assert changed in capsys.readouterr().err.splitlines()[-1]


def test_parts_are_found_by_name_in_whatever_order_and_bounds_of_observations_do_not_matter(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, (IN_ORDER, TWO))
    IN_ORDER.seed(0)
    seen = [IN_ORDER.sample() for _ in range(200)]
    with make(tmp_path, Shows, normalize_input=False) as appo:
        appo.train(40)
        parameters = appo.get_parameters()
        parameters[0]["policy_head.weight"].mul_(1000)
        appo.set_parameters(parameters)
        chosen = appo.predict(seen, deterministic=True)[0].tolist()
    assert 20 < sum(chosen) < 180
    wider = spaces.Box(-9, 9, (2,), np.float32)
    give(monkeypatch, (spaces.Dict([("right", wider), ("left", TWO)]), TWO))
    assert load(appo.cfg.run_dir, checkpoint="latest").predict(seen, deterministic=True)[0].tolist() == chosen
    for _ in range(2):  # what the resumed run has saved, too
        with make(tmp_path, Shows, learning_rate=1e-12, lr_schedule="constant") as resumed:
            assert resumed.predict(seen, deterministic=True)[0].tolist() == chosen
            resumed.train(40)
            assert resumed.predict(seen, deterministic=True)[0].tolist() == chosen
    assert evaluate([f"--env={__name__}:Shows", f"--train_dir={tmp_path}", "--experiment=run"]) == 0


def test_each_kind_of_agents_has_spaces_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with make(tmp_path, HunterAndPrey, num_policies=2) as appo:
            appo.save()
    monkeypatch.setattr(HunterAndPrey, "action_space", lambda self, agent: (
        spaces.Discrete(3) if agent == "hunter" else spaces.Discrete(4, start=1)))
    assert load(appo.cfg.run_dir, policy=0)
    for meets in (lambda: load(appo.cfg.run_dir, policy=1), lambda: make(tmp_path, HunterAndPrey, num_policies=2)):
        with pytest.raises(UserError, match=r"action is Discrete\(4, start=1\) and was Discrete\(4\);"):
            meets()
