"""Buffers for tests of components with one policy and one agent in each environment; a look into inboxes."""

import fcntl
import struct
import termios

import torch
from gymnasium import spaces
from torch import nn

from algorithms import algorithm_class
from config import Config
from envs.vector_env import EnvInfo
from shared_buffers import Inbox, SharedBuffers

CPU = torch.device("cpu")


def make_buffers(cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space,
                 model: nn.Module) -> SharedBuffers:
    """Allocate what the components of one policy share."""
    info = EnvInfo(["agent"], [0], [(obs_space, action_space)], None, [spaces.Dict(obs_space)])
    return SharedBuffers(cfg, algorithm_class(cfg.algo)(cfg), info, [0], [model], [CPU])


def take_one(inbox: Inbox) -> tuple[int, int]:
    """Take one record out of an inbox, where `get` would take all."""
    return tuple(inbox.get(1)[0])


def drain(inbox: Inbox) -> list[tuple[int, ...]]:
    """Take all messages that are in an inbox."""
    return [] if inbox.empty() else [tuple(message) for message in inbox.get()]


def num_waiting(inbox: Inbox) -> int:
    """Count the records in an inbox."""
    size = struct.unpack("i", fcntl.ioctl(inbox.pipe, termios.FIONREAD, b"\0" * 4))[0]
    return size // Inbox.RECORD.size
