"""Whatever is typed or comes from an environment: one line or a run, no traceback of ours.

Hypothesis draws the input, and shrinks what fails to something small.
"""

import contextlib
import io
import os
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_envs
from gymnasium import spaces
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import train
from config import Config
from runtime.user_error import EnvironmentFailure

TINY = ["--env=CartPole-v1", "--experiment=run", "--serial_mode", "--device=cpu", "--num_workers=1",
        "--num_envs_per_worker=2", "--rollout=4", "--batch_size=8", "--num_epochs=1", "--num_batches_per_epoch=1",
        "--encoder_mlp_layers=8", "--train_for_env_steps=24", "--train_for_seconds=2"]
# EXAMPLES=400 draws others each time; without it they are the same, so that what fails is what has changed
FEW = settings(max_examples=int(os.environ.get("EXAMPLES", "6")), derandomize="EXAMPLES" not in os.environ,
               deadline=None, suppress_health_check=list(HealthCheck))


def call(main: Callable[[list[str]], int], *argv: str) -> tuple[int, str, str]:
    """Call a command in this process; return its status, its output and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(argv))
        except SystemExit as end:  # --help
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def check(status: int, err: str) -> None:
    """Check that a command has worked, or has said in one line what to do."""
    event(f"status {status}")  # how many work is told by --hypothesis-show-statistics
    assert status in (0, 2), err
    assert "Traceback" not in err
    if status == 2:
        assert len(err.splitlines()) == 1, err


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)


# ---- the command line --------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(-3, 20), st.integers(), st.floats(-2, 2), st.floats())
WORDS = st.text(string.printable, max_size=8)
VALUES = st.one_of(NUMBERS.map(str), WORDS, st.sampled_from(["True", "False", "inf", "nan", "1e3", "none", "cpu", ""]))
# these would write elsewhere, or do what takes long by intent
LEFT_OUT = {"train_dir", "experiment", "serial_mode", "env", "trace_sec"}


@FEW
@given(st.lists(st.tuples(st.sampled_from(sorted(Config.__dataclass_fields__.keys() - LEFT_OUT)),
                          st.lists(VALUES, min_size=1, max_size=2)), max_size=3))
def test_a_random_command_line_trains_or_is_refused_in_one_line(flags: list[tuple[str, list[str]]]) -> None:
    shutil.rmtree("train_dir", ignore_errors=True)
    argv = [word for name, values in flags for word in (f"--{name}", *values)]
    status, _, err = call(train.main, *TINY, *argv)
    check(status, err)


# ---- environments ------------------------------------------------------------------------------------------------

FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
DTYPES = st.one_of(FLOATS, st.sampled_from([np.uint8, np.int8, np.int32, np.int64]))
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


BOXES = st.one_of(st.builds(spaces.Box, st.just(0), st.sampled_from([1, 100]), SHAPES, DTYPES),
                  st.builds(spaces.Box, st.sampled_from([-np.inf, -1e4]), st.sampled_from([1, np.inf]), SHAPES, FLOATS))
LEAVES = st.one_of(
    BOXES, st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-3, 3)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(spaces.Text, st.integers(1, 3)))
SPACES = st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=3).map(spaces.Tuple),
    st.dictionaries(st.sampled_from(["obs", "a", "b c", "action_mask"]), inner, max_size=3).map(spaces.Dict)),
    max_leaves=4)
REWARDS = st.one_of(st.integers(-3, 3), st.floats(), st.booleans(), st.none(), WORDS,
                    st.sampled_from([np.float32(1), np.array(1.0), np.array([1.0]), np.array([1.0, 2.0])]))
ENDS = st.sampled_from([True, np.True_, 1, None, "yes", np.array([True])])
INFOS = st.sampled_from([{}, {"action_mask": np.ones(3, np.int8)}, {"action_mask": None}, {"true_objective": 2.0},
                         {"true_objective": "x"}, {"is_active": False}, {"_x": object()}])


@FEW
@given(SPACES, SPACES, REWARDS, ENDS, INFOS)
def test_a_random_environment_is_learned_or_refused(obs: Any, action: Any, reward: Any, ends: Any, info: Any) -> None:
    shutil.rmtree("train_dir", ignore_errors=True)
    random_envs.observation_space, random_envs.action_space = obs, action
    random_envs.reward, random_envs.ends, random_envs.info = reward, ends, info
    try:
        status, _, err = call(train.main, *TINY, "--env=random_envs:Current")
        check(status, err)
    except EnvironmentFailure as error:
        assert str(error).startswith("random_envs:Current, seed ")
