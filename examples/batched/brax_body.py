"""Brax's robots (pip install brax).

    python train.py --env examples.batched.brax_body:make --env_kwargs '{"name": "inverted_pendulum"}'
"""

import math
from typing import Any

from brax import envs
from gymnasium import spaces

from examples.batched.jax_batch import JaxBatch


def make(num_envs: int, name: str = "halfcheetah", backend: str = "spring", limit: int = 1000) -> JaxBatch:
    """Make N robots; an episode has at most `limit` steps."""
    env = envs.get_environment(name, backend=backend)

    def init(key: Any) -> tuple:
        return (state := env.reset(key)), state.obs

    def step(state: Any, action: Any, key: Any) -> tuple:
        after = env.step(state, action)
        return after, after.obs, after.reward, after.done > 0

    return JaxBatch(num_envs, spaces.Box(-math.inf, math.inf, (env.observation_size,)),
                    spaces.Box(-1.0, 1.0, (env.action_size,)), init, step, limit)
