"""An environment whose every number tells where it comes from, and an algorithm that checks all that it learns from.

The environment misbehaves as a file named `fault` says. Used by the tests and by `chaos.py`.
"""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from tiny import Tiny
from torch import Tensor, nn

from appo import AsyncPPO

LONGEST = 30  # steps of an episode
FAULT = Path("fault")  # what one environment shall do; then it is called fault.<number of its process>
WRONG = "a transition is put together wrongly"


def misbehave() -> None:
    """Do what the file says, in the process that takes it first."""
    taken = FAULT.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        what = FAULT.read_text()
        FAULT.rename(taken)
        if what == "raise":
            raise ValueError("the wheel came off")
        if what == "leave":
            os._exit(3)
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        ctypes.PyDLL(None).sleep(10_000) if what == "hold the interpreter's lock" else time.sleep(10_000)


class Telling(Tiny):
    """The observation tells the episode, the step and the action before; the reward tells the step and the action."""

    observation_space = spaces.Box(-1, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(5)

    def begin(self) -> None:
        misbehave()
        self.episode, self.action = float(self.np_random.integers(1, 2**20)), -1
        self.length = int(self.np_random.integers(1, LONGEST))
        self.truncates = self.length % 2 == 1

    def observe(self) -> np.ndarray:
        return np.array([self.episode, self.t, self.action], np.float32)

    def reward(self, action: Any) -> float:
        return self.t + action / 8


class Checked(AsyncPPO):
    """APPO on rows that all fit together, or not at all."""

    def prepare(self, model: nn.Module, data: dict[str, Tensor], ask: Any) -> dict[str, Tensor]:
        obs, actions, valid = data["obs/obs"], data["actions"][..., 0], data["valid"]
        over = data["terminated"] | data["truncated"]
        episode, t, before = obs.unbind(-1)
        right = (data["rewards"] - (t[:, :-1] + actions / 8)).abs() < 1e-4
        # the row after the last observation of an episode is not valid, and neither is what was never filled
        follows = (episode[:, 1:] == episode[:, :-1]) & (t[:, 1:] == t[:, :-1] + 1) & (before[:, 1:] == actions)
        cut = over & ~valid.roll(-1, 1)  # the rows behind it may be of anybody
        right &= follows | cut
        begins, is_first = data["new_episode"][:, :-1], t[:, :-1] == 0
        right &= begins | ~is_first
        right[:, 1:] &= (~begins | is_first)[:, 1:]  # what was played ahead of the training is of no trajectory
        assert bool((right | ~valid).all()), WRONG
        return super().prepare(model, data, ask)
