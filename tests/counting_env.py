"""Vector environments whose observations name the agent, the episode and the step, to trace every transition."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from gymnasium import spaces

from config import Config
from envs.flat_spaces import Observation
from envs.vector_env import Step, VectorEnv


class CountingEnv(VectorEnv):
    """Observation: (number of the environment, episode, step in the episode); reward: a code of all three.

    Episode lengths vary by a fixed rule, every third episode is truncated instead of terminated. `on_step` is called
    when a step begins.
    """

    obs_space: ClassVar = {"obs": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    action_space = spaces.Discrete(5)

    def __init__(self, num_envs: int, on_step: Callable[[], None] = lambda: None) -> None:
        super().__init__("counting", num_envs, ["agent"], [(self.obs_space["obs"], self.action_space)], squash=False)
        self.on_step = on_step

    def _reset(self) -> Step:
        self.ids = np.array([number_of(each) for each in self.seeds])
        self.episode, self.t = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.done = np.zeros(self.num_envs, bool)
        return self.show(np.zeros(self.num_envs), self.done, self.done, ~self.done)

    def _step(self, actions: list[np.ndarray]) -> Step:
        self.on_step()
        resetting = self.done
        self.episode = self.episode + resetting
        rewards = np.where(resetting, 0.0, reward_code(self.ids, self.episode, self.t, actions[0][:, 0]))
        self.t = np.where(resetting, 0, self.t + 1)
        self.done = ~resetting & (self.t >= episode_length(self.ids, self.episode))
        truncated = self.done & (self.episode % 3 == 2)
        return self.show(rewards, self.done & ~truncated, truncated, resetting)

    def observe(self) -> Observation:
        return {"obs": np.stack([self.ids, self.episode, self.t], 1).astype(np.float32)}

    def show(self, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, was_reset: np.ndarray) -> Step:
        return Step([self.observe()], rewards, terminated, truncated, ~self.done, was_reset,
                    np.full(self.num_envs, np.nan))


def number_of(seed: int) -> int:
    """Return the number of an environment, exact in float32."""
    return seed % 2**16


def episode_length(env: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """Vary the length of episodes between 1 and 11 steps."""
    return 1 + (env * 7 + episode * 5) % 11


def reward_code(env: np.ndarray, episode: np.ndarray, t: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Give each transition a reward of its own, exact in float32."""
    return (((env % 64) * 64 + episode % 64) * 16 + t) * 8.0 + action


def make_counting_env(cfg: Config, num_envs: int) -> CountingEnv:
    """Make the environment for a rollout worker."""
    return CountingEnv(num_envs)
