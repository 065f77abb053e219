"""EnvPool's Atari games, stepped in C++ (pip install envpool).

    python train.py --env examples.batched.envpool_atari:Games --env_kwargs '{"game": "Pong-v5"}'
"""

from typing import Any, ClassVar

import envpool
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


class Games(gym.vector.VectorEnv):
    """A game that begins anew in the step after its end. Observations [N, 4, 84, 84] uint8: the last four pictures."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int, game: str = "Pong-v5", num_threads: int = 1) -> None:
        self.make = lambda seed: envpool.make_gymnasium(game, num_envs=num_envs, num_threads=num_threads, seed=seed)
        env = self.make(0)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 255, env.observation_space.shape, np.uint8)
        self.single_action_space = spaces.Discrete(int(env.action_space.n))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.env = self.make((seed or 0) % 2**31)  # it takes its seed when it is made
        return self.env.reset()[0], {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        return *self.env.step(actions.astype(np.int32))[:4], {}
