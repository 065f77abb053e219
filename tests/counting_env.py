"""A vector environment whose observations name the environment, the episode and the step, to trace every transition."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from gymnasium import spaces

from config import Config
from flat_spaces import Observation


class CountingEnv:
    """Observation: (first environment's seed + i, episode, step in the episode); reward: a code of all three.

    Episode lengths vary by a fixed rule, every third episode is truncated instead of terminated. It follows the
    contract of `envs.VectorEnv` and records on `tape` when its step begins and ends.
    """

    obs_space: ClassVar = {"obs": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    action_space = spaces.Discrete(5)

    def __init__(self, num_envs: int, on_step: Callable[[], None] = lambda: None) -> None:
        self.num_envs, self.on_step = num_envs, on_step

    def reset(self, seed: int) -> Observation:
        self.ids = seed + np.arange(self.num_envs)
        self.episode, self.t = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.done = np.zeros(self.num_envs, bool)
        return self.observe()

    def observe(self) -> Observation:
        return {"obs": np.stack([self.ids, self.episode, self.t], 1).astype(np.float32)}

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray]:
        self.on_step()
        resetting = self.done
        self.episode = self.episode + resetting
        rewards = np.where(resetting, 0.0, reward_code(self.ids, self.episode, self.t, actions[:, 0]))
        self.t = np.where(resetting, 0, self.t + 1)
        ended = ~resetting & (self.t >= episode_length(self.ids, self.episode))
        truncated = ended & (self.episode % 3 == 2)
        self.done = ended
        return self.observe(), rewards, ended & ~truncated, truncated

    def close(self) -> None: ...


def episode_length(env: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """Vary the length of episodes between 1 and 11 steps."""
    return 1 + (env * 7 + episode * 5) % 11


def reward_code(env: np.ndarray, episode: np.ndarray, t: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Give each transition a reward of its own, exact in float32."""
    return (((env % 64) * 64 + episode % 64) * 16 + t) * 8.0 + action


def make_counting_env(cfg: Config, num_envs: int) -> CountingEnv:
    """Make the environment for a rollout worker."""
    return CountingEnv(num_envs)
