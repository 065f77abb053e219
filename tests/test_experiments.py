"""The experiments of the walkthrough, shortened: the claims that hold for runs of any length."""

import importlib
import math
import re
import sys
from collections.abc import Callable

import gymnasium as gym
import pytest
import torch
from parts import make_config
from torch import nn

from docs.experiments import chain
from docs.experiments.late_policy import KEPT, LatePolicy

Rows = list[list[float]]


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Rows]:
    """Return a function that runs an experiment and returns the numbers of each line that it prints."""

    def run(name: str, env_steps: int | None = None) -> Rows:
        monkeypatch.setattr(sys, "argv", [name] if env_steps is None else [name, "--env_steps", str(env_steps)])
        importlib.import_module(f"docs.experiments.{name}").main()
        return [[float(number.replace(",", "")) for number in re.findall(r" (-?\d[\d,.]*)", line)]
                for line in capsys.readouterr().out.splitlines()]

    return run


def test_time_limits(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of("time_limits", 3000)
    assert rows[1] == [rows[1][0]] * 3  # what cannot be seen has no value
    assert rows[1][0] > 1.3 * rows[2][0]
    assert rows[4:6] == [[20.0] * 3, [12.83, 8.03, 1.0]]


def test_normalization(rows_of: Callable[..., Rows]) -> None:
    rows = [row for row in rows_of("normalization", 2500) if row]
    assert [row[0] for row in rows] == [1, 10_000, 0.0001, 1, 1000, 0.001]
    assert rows[0][1] == rows[1][1] == rows[2][1] == rows[3][1]  # the size of the rewards changes nothing
    assert len({row[2] for row in rows[:3]}) == 3  # but it does without


@pytest.mark.parametrize(("name", "env_steps", "holds"), [
    ("memory", 2500, lambda rows: all(0 <= number <= 1 for number, in rows)),
    ("stale_states", 5000, lambda rows: [row[1] for row in rows[1:]] == sorted({row[1] for row in rows[1:]})),
    ("lag", 2500, lambda rows: [row[1] for row in rows[1:]] == [0, 0, 16, 16, 16, 16])])
def test_claims(rows_of: Callable[..., Rows], name: str, env_steps: int, holds: Callable[[Rows], bool]) -> None:
    assert holds(rows_of(name, env_steps))


def test_chain(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of("chain")[2:]
    old = float(chain.chain_values(chain.MU)[2])
    for lag, true, gae, vtrace, wide in rows:
        pi = 1 / (1 + math.exp(-chain.STEP * lag))
        kept = min(chain.MU, pi), min(1 - chain.MU, 1 - pi)  # the policy of rho_bar = 1 (IMPALA, equation 3)
        assert gae == pytest.approx(old, abs=0.015)
        assert wide == pytest.approx(true, abs=0.015)
        assert vtrace == pytest.approx(float(chain.chain_values(kept[0] / sum(kept))[2]), abs=0.015)
    assert rows[2][1] > rows[1][1] + 0.2 > rows[0][1] + 0.4


def test_a_late_policy_acts_with_the_weights_of_so_many_sgd_steps_ago() -> None:
    algorithm = LatePolicy(make_config({"algo": "docs.experiments.late_policy:LatePolicy", "late": 2},
                                       {"serial_mode": True, "async_rl": False}))
    spaces = {"obs": gym.spaces.Box(-1, 1, (3,))}, gym.spaces.Discrete(2)
    learned, acting = algorithm.make_model(*spaces), algorithm.make_model(*spaces)
    KEPT.clear()
    for step, expected in enumerate((1, 1, 1, 2, 3), 1):  # of the first steps the oldest
        nn.init.constant_(learned.value_head.bias, step)
        algorithm.after_sgd_step(learned, step)
        algorithm.act(acting, {"obs": torch.zeros(1, 3)}, torch.zeros(1, 0), torch.ones(1, dtype=torch.bool))
        assert acting.value_head.bias.tolist() == [expected]
    KEPT.clear()
