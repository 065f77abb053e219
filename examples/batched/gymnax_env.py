"""Gymnax's environments (pip install gymnax six).

    python train.py --env examples.batched.gymnax_env:make --env_kwargs '{"name": "Catch-bsuite"}'
"""

import math
from typing import Any

import gymnax
from gymnasium import spaces

from examples.batched.jax_batch import JaxBatch


def make(num_envs: int, name: str = "Catch-bsuite") -> JaxBatch:
    """Make N environments with one choice of actions."""
    env, params = gymnax.make(name)

    def init(key: Any) -> tuple:
        return env.reset(key, params)[::-1]

    def step(state: Any, action: Any, key: Any) -> tuple:
        obs, state, reward, terminated, *_ = env.step_env(key, state, action, params)
        return state, obs, reward, terminated

    observations = spaces.Box(-math.inf, math.inf, env.observation_space(params).shape)
    limit = getattr(params, "max_steps_in_episode", 0)
    return JaxBatch(num_envs, observations, spaces.Discrete(env.num_actions), init, step, limit)
