"""Environments of JAX, thousands in one call: what PGX's, Brax's and gymnax's are made of here."""

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


class JaxBatch(gym.vector.VectorEnv):
    """N environments; an episode begins in the step that ends the one before."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, observations: gym.Space, actions: gym.Space, init: Callable[[Any], tuple],
                 step: Callable[[Any, Any, Any], tuple], limit: int = 0) -> None:
        """Make them.

        init(key) returns a first state and its observation; step(state, action, key) the next ones, the reward, and
        whether the episode is over, as it also is after `limit` steps (0: there is no limit).
        """
        self.num_envs, self.max_episode_length = num_envs, limit
        self.single_observation_space, self.observation_space = observations, batch_space(observations, num_envs)
        self.single_action_space, self.action_space = actions, batch_space(actions, num_envs)
        self.init, self.advance = jax.jit(jax.vmap(init)), jax.jit(jax.vmap(step))
        self.choose = jax.jit(jax.vmap(lambda over, *each: jax.tree.map(lambda *of: jnp.where(over, *of), *each)))

    def keys(self) -> Any:
        return jax.random.split(jax.random.key(self.random.integers(2**31)), self.num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.random = np.random.default_rng(seed)
        self.episode_length_buf = np.zeros(self.num_envs, np.int64)
        self.state, obs = self.init(self.keys())
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.state, obs, rewards, terminated = self.advance(self.state, actions, self.keys())
        self.episode_length_buf += 1
        over, infos = terminated | (self.episode_length_buf == self.max_episode_length), {}
        if over.any():
            infos = {"final_obs": obs}
            self.state, obs = self.choose(over, self.init(self.keys()), (self.state, obs))
            self.episode_length_buf[over] = 0
        return obs, rewards, terminated, over & ~terminated, infos
