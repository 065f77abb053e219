"""Buffers for tests of components with one policy and one agent in each environment; a look into inboxes."""

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from algorithms import algorithm_class
from config import Config
from envs.flat_spaces import AgentKind
from envs.vector_env import EnvInfo
from shared_buffers import Inbox, SharedBuffers

CPU = torch.device("cpu")


def make_buffers(cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space,
                 model: nn.Module) -> SharedBuffers:
    """Allocate what the components of one policy share."""
    kind = AgentKind(spaces.Dict(obs_space), action_space, np.arange(1), squash=False)
    kind.obs_space = obs_space
    info = EnvInfo(["agent"], [0], [kind], None)
    buffers = SharedBuffers(cfg, algorithm_class(cfg.algo)(cfg), info, [0], [model], [CPU])
    buffers.goal.fill_(10**9)
    return buffers


def take_one(inbox: Inbox) -> tuple[int, int]:
    """Take one record out of an inbox, where `get` would take all."""
    return tuple(inbox.get(1)[0])


def drain(inbox: Inbox) -> list[tuple[int, ...]]:
    """Take all messages that are in an inbox."""
    return [] if inbox.empty() else [tuple(message) for message in inbox.get()]


def num_waiting(inbox: Inbox) -> int:
    """Count the messages in an inbox."""
    messages = drain(inbox)
    for message in messages:
        inbox.put(message)
    return len(messages)
