"""An environment whose observations and rewards tell which one it is, the episode and the step."""

import numpy as np
from gymnasium import spaces
from tiny import Tiny


class Counting(Tiny):
    """Observation: (number of the environment, episode, step in the episode); reward: a code of all three.

    Episode lengths vary by a fixed rule, every third episode is truncated instead of terminated.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(5)
    episode = -1

    def begin(self) -> None:
        self.number, self.episode = number_of(self.np_random_seed), self.episode + 1
        self.length = episode_length(self.number, self.episode)
        self.truncates = self.episode % 3 == 2

    def observe(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.t], np.float32)

    def reward(self, action: int) -> float:
        return reward_code(self.number, self.episode, self.t, action)


def number_of(seed: int) -> int:
    """Return the number of an environment, exact in float32."""
    return seed % 2**16


def episode_length(env: int, episode: int) -> int:
    """Vary the length of episodes between 1 and 11 steps."""
    return 1 + (env * 7 + episode * 5) % 11


def reward_code(env: int, episode: int, t: int, action: int) -> float:
    """Give each transition a reward of its own, exact in float32."""
    return (((env % 64) * 64 + episode % 64) * 16 + t) * 8.0 + action
