"""Small environments that misbehave on purpose, to be named as `--env failing_envs:NanObservation`.

Most do so in one place: the environment whose first reset was seeded with FAILING_SEED, in call number FAILING_STEP of
step() and reset() since then. Other ones fail, or take their time, only in an evaluation.
"""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from tiny import Result, Tiny

from runtime.utils import ENVIRONMENT, EVALUATION, derive_seed

SEED = 4  # of the runs
FAILING_SEED = derive_seed(SEED, ENVIRONMENT, index=1, part=1)  # the second split's second environment
EVALUATION_SEEDS = {derive_seed(seed, EVALUATION, index=i) for seed in (0, SEED, 5) for i in range(20)}
FAILING_STEP = 6  # in the middle of an episode, after the reset that is step 4
FAILING_RESET = 8
EPISODE_LENGTH = 3


class Steady(Tiny):
    """Counts its calls; every episode takes 3 steps and gives a reward of 1 in each."""

    action_space: Any = spaces.Discrete(3)
    length: Any = EPISODE_LENGTH
    first_seed, num_calls = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.num_calls += 1
        if seed is not None:
            self.first_seed, self.num_calls = seed, 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Result:
        self.num_calls += 1
        return super().step(action)

    def fails_in(self, call: int) -> bool:
        return self.first_seed == FAILING_SEED and self.num_calls == call

    def in_evaluation(self) -> bool:
        return self.first_seed in EVALUATION_SEEDS

    def observe(self) -> Any:
        return np.full(2, self.t / EPISODE_LENGTH, np.float32)


# ---- numbers that cannot be learned from -----------------------------------------------------------------------------


class NanObservation(Steady):
    def observe(self) -> np.ndarray:
        return super().observe() * (math.nan if self.fails_in(FAILING_STEP) else 1)


class HugeReward(Steady):
    def reward(self, action: Any) -> float:
        return 1e30 if self.fails_in(FAILING_STEP) else 1.0


class LargeReward(Steady):
    def reward(self, action: Any) -> float:
        return 9e11 if self.num_calls % 3 else -9e11


class LargeObservation(Steady):
    def observe(self) -> np.ndarray:
        return np.full(2, 9e11 if self.num_calls % 3 else -9e11, np.float32)


# ---- errors ----------------------------------------------------------------------------------------------------------


class AlwaysRaises(Steady):
    """Fails in each environment, also of a worker that takes the place of another."""

    def reward(self, action: Any) -> float:
        if self.num_calls == 250:
            raise ValueError("the wheel came off")
        return 1.0


class AlwaysHangs(Steady):
    """Hangs in the second step: the first one is looked at before the run begins."""

    def reward(self, action: Any) -> float:
        if self.num_calls > 1:
            time.sleep(1000)
        return 1.0


class ResetRaises(Steady):
    def begin(self) -> None:
        if self.fails_in(FAILING_RESET):
            raise KeyError("no more levels")


# ---- masks and spaces ------------------------------------------------------------------------------------------------


class NothingAllowedInObservation(Steady):
    """Gives a mask for two choices with the observation, that at last forbids all options of the second."""

    observation_space = spaces.Dict({"obs": Steady.observation_space, "action_mask": spaces.MultiBinary(5)})
    action_space = spaces.MultiDiscrete([3, 2])

    def observe(self) -> dict[str, Any]:
        mask = np.ones(5, np.int8)
        mask[3:] = not self.fails_in(FAILING_STEP)
        return {"obs": super().observe(), "action_mask": mask}


class LateMask(Steady):
    """Gives a mask, but not with the first observation, so that only the workers see it."""

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.ones(3, np.int8)} if self.t else {}


# ---- evaluations -----------------------------------------------------------------------------------------------------


class ActionIsReward(Steady):
    """Rewards an action with its number, so that a return tells what was played."""

    def reward(self, action: Any) -> float:
        return float(action)


class FailsInEvaluation(Steady):
    def reward(self, action: Any) -> float:
        if self.in_evaluation():
            raise ValueError("not in the test, please")
        return 1.0


class EndlessEvaluation(Steady):
    """Has short episodes in training and endless ones of slow steps in an evaluation."""

    @property
    def length(self) -> int:
        if self.in_evaluation():
            time.sleep(0.02)
            return 10**9
        return EPISODE_LENGTH


class GatedEvaluation(Steady):
    """Waits in an evaluation's steps until a file is there; makes another one, beside it, to tell that it waits."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    @property
    def length(self) -> int:
        while self.in_evaluation() and not self.gate.exists():
            self.gate.with_suffix(".waiting").touch()
            time.sleep(0.01)
        return EPISODE_LENGTH


# ---- making and closing them -----------------------------------------------------------------------------------------


class MakingLeaves(Steady):
    def __init__(self) -> None:
        os._exit(3)


class MakingCrashes(Steady):
    def __init__(self) -> None:
        self.program = subprocess.Popen(["sleep", "1000"])  # which keeps its pipes
        os.kill(os.getpid(), signal.SIGSEGV)


class MakingHangs(Steady):
    def __init__(self) -> None:
        time.sleep(1000)


class StepExits(Steady):
    def reward(self, action: Any) -> float:
        sys.exit(0)
