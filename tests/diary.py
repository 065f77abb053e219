"""An environment that writes every action into a file."""

import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Diary(gym.Env):
    """Episodes of 7 steps; path: of the file, to which all environments add their actions, 0 or 1."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        os.write(self.file, b"01"[action : action + 1])
        self.t += 1
        return self.observe(), float(action), self.t == 7, False, {}

    def close(self) -> None:
        os.close(self.file)
