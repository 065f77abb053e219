"""Buffers for tests of components with one policy and one agent in each environment."""

from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from config import Config
from shared_buffers import SharedBuffers
from vector_env import EnvInfo

CPU = torch.device("cpu")


def make_buffers(cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space, model: nn.Module,
                 context: Any = None) -> SharedBuffers:
    """Allocate what the components of one policy share; without a context for one process."""
    info = EnvInfo(["agent"], [0], [(obs_space, action_space)], None)
    return SharedBuffers(cfg, info, [0], [model], [CPU], context)
