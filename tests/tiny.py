"""One way of making tiny environments, of one agent or of several: what differs is an attribute or a method."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

NUMBERS = spaces.Box(-1, 1, (2,), np.float32)
Result = tuple[Any, float, bool, bool, dict[str, Any]]


class Tiny(gym.Env):
    """Shows anything of its space and rewards each step; an episode ends after `length` steps."""

    observation_space: Any = NUMBERS
    action_space: Any = spaces.Discrete(2)
    length = 3
    truncates = False

    def __init__(self, **parts: Any) -> None:
        """Replace attributes and methods, which then get no self."""
        vars(self).update(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return self.observe(), self.info()

    def step(self, action: Any) -> Result:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.action = action
        reward = self.reward(action)
        self.t += 1
        is_over = self.t == self.length
        return self.observe(), reward, is_over and not self.truncates, is_over and self.truncates, self.info()

    def begin(self) -> None:
        """Begin an episode."""

    def observe(self) -> Any:
        return self.observation_space.sample()

    def reward(self, action: Any) -> Any:
        """Return the reward of an action, before the clock `t` goes on."""
        return 1.0

    def info(self) -> dict[str, Any]:
        return {}


class TinyGame:
    """The same for several agents, behind PettingZoo's parallel API; all stay until the end."""

    possible_agents = ("left", "right")
    length = 3

    def observation_space(self, agent: str) -> spaces.Space:
        return NUMBERS

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        self.agents, self.t = list(self.possible_agents), 0
        self.begin()
        return self.observe(), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        rewards = self.rewards(actions)
        self.t += 1
        over = dict.fromkeys(self.agents, self.t == self.length)
        self.agents = [agent for agent in self.agents if not over[agent]]
        return self.observe(), rewards, over, {}, {}

    def begin(self) -> None:
        """Begin an episode."""

    def observe(self) -> dict[str, Any]:
        return {agent: self.observation_space(agent).sample() for agent in self.possible_agents}

    def rewards(self, actions: dict[str, Any]) -> dict[str, float]:
        """Return the rewards of a step, before the clock `t` goes on."""
        return dict.fromkeys(actions, 0.0)
