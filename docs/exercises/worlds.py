"""The small environments of the exercises. Each is learned once its exercise is solved, and not before."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Observation = np.ndarray | dict[str, np.ndarray]
LIMIT = 100  # steps of an episode in the corridor
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class Corridor(gym.Env):
    """Walk from place 0 to the last one. That pays 1, all else nothing; who only guesses hardly ever arrives.

    The observation is 1 at the own place and 0 at all others. At places of even number action 1 leads a place up and
    action 0 a place down, at the others it is the other way round; nothing is below place 0. After 100 steps the time
    is up.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 40) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (length + 1,), np.float32)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        self.place, self.steps = 0, 0
        return self.observe(), {}

    def upward(self) -> int:
        """Return the action that leads up."""
        return 1 - self.place % 2

    def step(self, action: int) -> Step:
        self.place = max(self.place + (1 if action == self.upward() else -1), 0)
        self.steps += 1
        arrived = self.place == self.length
        truncated = self.steps == LIMIT and not arrived
        return self.observe(), float(arrived), arrived, truncated, {"true_objective": float(arrived)}

    def observe(self) -> Observation:
        obs = np.zeros(self.length + 1, np.float32)
        obs[self.place] = 1
        return obs


class Compass(gym.Env):
    """One of four sides of a picture is bright, and a needle says how many sides further the right action is.

    So neither part of the observation is of use without the other. A right action pays 1/8; an episode has 8 steps.
    """

    observation_space = spaces.Dict({"needle": spaces.Box(0.0, 1.0, (4,), np.float32),
                                     "picture": spaces.Box(0, 255, (8, 8, 1), np.uint8)})
    action_space = spaces.Discrete(4)
    sides = ((slice(0, 2), slice(2, 6)), (slice(2, 6), slice(6, 8)), (slice(6, 8), slice(2, 6)),
             (slice(2, 6), slice(0, 2)))  # top, right, bottom, left

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> Step:
        reward = float(action == (self.side + self.needle) % 4) / 8
        self.steps += 1
        return self.observe(), reward, self.steps == 8, False, {}

    def observe(self) -> Observation:
        self.side, self.needle = self.np_random.integers(4, size=2).tolist()
        picture = np.zeros((8, 8, 1), np.uint8)
        picture[self.sides[self.side]] = 255
        return {"needle": np.eye(4, dtype=np.float32)[self.needle], "picture": picture}


class Recall(gym.Env):
    """A sign is shown for one step; the action of the seventh step after it must name it. That pays 1.

    The observation is [1, 0] or [0, 1] in the first step of an episode and [0, 0] in all others.
    """

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        self.steps, self.sign = 0, int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.sign], {}

    def step(self, action: int) -> Step:
        self.steps += 1
        over = self.steps == 8
        return np.zeros(2, np.float32), float(over and action == self.sign), over, False, {}
