"""PGX's MinAtar games (pip install pgx pgx-minatar).

    python train.py --env examples.batched.pgx_minatar:make --env_kwargs '{"game": "minatar-breakout"}'
"""

from typing import Any

import numpy as np
import pgx
from gymnasium import spaces

from examples.batched.jax_batch import JaxBatch


def make(num_envs: int, game: str = "minatar-breakout") -> JaxBatch:
    """Make N games. An observation is an image [10, 10, channels] uint8, each 0 or 255."""
    env = pgx.make(game)

    def init(key: Any) -> tuple:
        return (state := env.init(key)), 255 * state.observation.astype(np.uint8)

    def step(state: Any, action: Any, key: Any) -> tuple:
        after = env.step(state, action, key)
        return after, 255 * after.observation.astype(np.uint8), after.rewards[0], after.terminated

    image = spaces.Box(0, 255, env.observation_shape, np.uint8)
    return JaxBatch(num_envs, image, spaces.Discrete(env.num_actions), init, step)
