"""An environment of any spaces, which returns any numbers; `--env=random_envs:Current` plays what is set here."""

from typing import Any

import gymnasium as gym
import numpy as np

observation_space = action_space = gym.spaces.Discrete(2)
reward: Any = 1.0
ends: Any = True  # after LENGTH steps: terminated
info: dict[str, Any] = {}
LENGTH = 5


class Current(gym.Env):
    """What is set when it is made."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_space.seed(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), dict(info)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        return self.observation_space.sample(), reward, ends if self.t >= LENGTH else np.bool_(0), False, dict(info)
