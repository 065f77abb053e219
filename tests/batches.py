"""A vector environment whose every number follows from its seed: in any autoreset mode, its arrays overwritten."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


def length_of(number: Any, episode: Any) -> Any:
    """Return how many steps an episode of an environment has."""
    return (number + episode) % 7 + 1


class Batch(gym.vector.VectorEnv):
    """Shows the number of the environment, of its episode and of the step; every third episode is truncated."""

    def __init__(self, num_envs: int, mode: str = "NEXT_STEP", last: str = "final_obs", *, as_tensors: bool = False,
                 one_by_one: bool = False, pay: float = 0.0) -> None:
        """Make it.

        last: what the info calls the last observations. one_by_one: they are an array of objects. pay: of an action.
        """
        self.num_envs, self.mode, self.last = num_envs, AutoresetMode[mode], last
        self.as_tensors, self.one_by_one, self.pay = as_tensors, one_by_one, pay
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.obs = np.zeros((num_envs, 3), np.float32)
        self.rewards, self.ended = np.zeros(num_envs, np.float32), np.zeros((2, num_envs), bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.obs[:, 0] = seed % 2**19 + np.arange(self.num_envs)
            self.obs[:, 1] = 0
        if options:
            self.begin(np.asarray(options["reset_mask"]))
        self.obs[:, 2] *= options is not None
        return self.give(self.obs), {}

    def begin(self, where: np.ndarray) -> None:
        self.obs[where, 1] += 1
        self.obs[where, 2] = 0
        if self.mode == AutoresetMode.DISABLED:  # as gymnasium's own
            self.rewards[where], self.ended[:, where] = 0, False

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert isinstance(actions, torch.Tensor if self.as_tensors else np.ndarray)
        before = self.ended.any(0) & (self.mode == AutoresetMode.NEXT_STEP)
        self.obs[:, 2] += 1
        self.rewards[:] = np.where(before, 99, self.obs[:, 2] + self.pay * np.asarray(actions))
        self.begin(before)
        over = ~before & (self.obs[:, 2] == length_of(*self.obs[:, :2].T))
        self.ended[:] = over & (self.obs[:, 1] % 3 < 2), over & (self.obs[:, 1] % 3 == 2)
        infos = {}
        if self.mode == AutoresetMode.SAME_STEP:
            infos = {self.last: self.give_last(over)} if over.any() else {}
            self.begin(over)
        return self.give(self.obs), self.give(self.rewards), *map(self.give, self.ended), infos

    def give_last(self, over: np.ndarray) -> Any:
        if not self.one_by_one:
            return self.give(self.obs.copy())
        found = np.full(self.num_envs, None, object)
        for i in over.nonzero()[0]:
            found[i] = self.obs[i].copy()
        return found

    def give(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array) if self.as_tensors else array
