"""Everything the processes share: trajectories, weights, counters, and the queues of tiny messages.

All data lies in tensors that are allocated once, here, in shared memory; a queue carries only pairs of small
integers. Nothing is serialized while the system runs.

A *slot* holds one trajectory of one agent: T steps, and observation and hidden state number T, for the bootstrap
value. An *agent* is one environment of one split of one rollout worker. It fills its slot row by row; which
slot and which row, `agent_slot` and `agent_t` tell, so that a message only has to name the split.

The protocol, as (kind, index) pairs:

    queue              from                 message             meaning
    requests           rollout worker    -> (SPLIT, split)      obs[slot, t] of the split's agents await actions
    inboxes[worker]    policy worker     -> (SPLIT, split)      ... actions, log_probs, values, ... are written
    trajectories_done  rollout worker    -> (SLOT, slot)        the trajectory is complete
    inboxes[worker]    learner           -> (SLOT, slot)        the slot is copied (or trained on) and free again
    inboxes[worker]    supervisor        -> (PAUSE | RESUME, 0) hold all requests back | go on
    trajectories_done  supervisor        -> (SAVE, kind)        write a checkpoint when this message's turn comes
    evaluations        supervisor        -> (EVALUATE, 0)       score the newest policy
    all four           supervisor        -> (STOP, 0)           leave run(); one for each reader

Each slot belongs to one rollout worker for good. So a free slot is a message in its owner's inbox like any other,
the worker never blocks on one thing while it could do another, and no split can starve a split of another worker.

Weights travel in one flat shared vector (in GPU memory on a GPU) with a version, the number of SGD steps so far.
Read next: `rollout_worker.py`.
"""

import copy
import os
import queue
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config, UserError
from flat_spaces import num_action_parameters, num_columns

SPLIT, SLOT, PAUSE, RESUME, SAVE, EVALUATE, STOP = range(7)
SAVE_PERIODIC, SAVE_BEST, SAVE_MILESTONE = range(3)
Message = tuple[int, int]


class Spec(NamedTuple):
    """Shape of one slot's part of a trajectory tensor, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def trajectory_specs(
    cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space, state_size: int,
) -> dict[str, Spec]:
    """List the tensors of a trajectory. Rows align as obs[t] -> actions[t] -> rewards[t] -> obs[t+1]."""
    T = cfg.rollout
    return {
        # written by the rollout worker
        **{f"obs/{name}": Spec((T + 1, *space.shape), obs_dtype(space)) for name, space in obs_space.items()},
        "rewards": Spec((T,), torch.float32),
        "terminated": Spec((T,), torch.bool),
        "truncated": Spec((T,), torch.bool),
        "valid": Spec((T,), torch.bool),  # False: the step that only reset the environment
        "new_episode": Spec((T + 1,), torch.bool),  # obs[t] is an episode's first: the hidden state before it is 0
        # written by the policy worker
        "rnn_states": Spec((T + 1, state_size), torch.float32),  # row t: the hidden state before obs[t] is seen
        "actions": Spec((T, num_columns(action_space)), torch.float32),
        "action_parameters": Spec((T, num_action_parameters(action_space)), torch.float32),
        "log_probs": Spec((T,), torch.float32),
        "values": Spec((T,), torch.float32),  # in units of the scaled rewards
        "policy_version": Spec((T,), torch.int64),
    }


def obs_dtype(space: spaces.Space) -> torch.dtype:
    """Store images of bytes and bits as uint8, indices as int64 and everything else as float32."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return torch.int64
    return torch.uint8 if isinstance(space, spaces.MultiBinary) or space.dtype == np.uint8 else torch.float32


def num_bytes(specs: dict[str, Spec], count: int) -> int:
    """Compute the bytes of `count` slots of a table of specs."""
    return sum(count * int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in specs.values())


def allocate(specs: dict[str, Spec], count: int, *, shared: bool) -> dict[str, Tensor]:
    """Allocate [count, *shape] tensors of zeros for a table of specs, in shared memory if asked."""
    tensors = {name: torch.zeros(count, *spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    return {name: tensor.share_memory_() if shared else tensor for name, tensor in tensors.items()}


def check_shared_memory(needed_bytes: int) -> None:
    """Raise `UserError` when shared memory is too small (in containers /dev/shm is often 64 MB)."""
    try:
        stat = os.statvfs("/dev/shm")  # where Linux keeps shared memory
    except OSError:
        return
    free_bytes = stat.f_bavail * stat.f_frsize
    if needed_bytes > free_bytes:
        raise UserError(
            f"the trajectories need {needed_bytes / 1e6:.0f} MB of shared memory, /dev/shm has "
            f"{free_bytes / 1e6:.0f} MB free; "
            "lower --num_envs_per_worker, --num_workers or --rollout, or enlarge it (docker run --shm-size=2g)")


class SharedWeights:
    """The newest weights of one policy and their version: written by its learner, copied by its policy workers.

    All parameters and buffers lie in one flat float32 vector: one piece of shared memory, whatever the model. The lock
    makes weights and version change together; the version alone is read without it.
    """

    def __init__(self, model: nn.Module, device: torch.device, lock: Any) -> None:
        state = model.state_dict()
        self._flat = torch.empty(sum(tensor.numel() for tensor in state.values()), device=device)
        if device.type == "cpu":
            self._flat.share_memory_()
        self.version = torch.zeros((), dtype=torch.int64).share_memory_()
        self._lock = lock
        self.publish(model, 0)

    @torch.no_grad()
    def publish(self, model: nn.Module, version: int) -> None:
        """Make the model's weights the newest ones."""
        with self._lock:
            parts = self._flat.split([tensor.numel() for tensor in model.state_dict().values()])
            for part, tensor in zip(parts, model.state_dict().values(), strict=True):
                part.copy_(tensor.reshape(-1))
            self._finish_copies()
            self.version.fill_(version)

    @torch.no_grad()
    def refresh(self, model: nn.Module) -> int:
        """Copy the newest weights into a model (of any dtype), return their version."""
        with self._lock:
            parts = self._flat.split([tensor.numel() for tensor in model.state_dict().values()])
            for part, tensor in zip(parts, model.state_dict().values(), strict=True):
                tensor.copy_(part.view_as(tensor))
            self._finish_copies()
            return int(self.version)

    def _finish_copies(self) -> None:
        if self._flat.device.type == "cuda":  # copies on a GPU are only queued; the lock must cover their end
            torch.cuda.current_stream(self._flat.device).synchronize()


class SharedBuffers:
    """All that the components of one policy share. Made by the supervisor, handed to every process at its start.

    Raises `UserError` when shared memory is too small; the sizes are known before anything is allocated.
    """

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space, model: nn.Module,
                 device: torch.device, context: Any) -> None:
        """Allocate. `context` is a multiprocessing context, or None when everything runs in one process."""
        self.obs_space, self.action_space = obs_space, action_space
        self.specs = trajectory_specs(cfg, obs_space, action_space, model.state_size)
        self.num_slots = cfg.num_workers * cfg.slots_per_worker
        self.num_bytes = num_bytes(self.specs, self.num_slots)
        if context is not None:
            check_shared_memory(self.num_bytes)
        print(f"{self.num_slots} trajectories of {cfg.rollout} steps take {self.num_bytes / 1e6:.1f} MB", flush=True)
        self.trajectories = allocate(self.specs, self.num_slots, shared=context is not None)
        self.agent_slot = torch.zeros(cfg.num_splits, cfg.envs_per_split, dtype=torch.int64).share_memory_()
        self.agent_t = torch.zeros(cfg.num_splits, cfg.envs_per_split, dtype=torch.int64).share_memory_()
        # env_steps sampled by each rollout worker; a resumed run begins with its earlier ones in the first
        self.env_steps = torch.zeros(cfg.num_workers, dtype=torch.int64).share_memory_()
        self.evaluation_steps = torch.zeros((), dtype=torch.int64).share_memory_()  # a sign of life of the evaluator
        # set once, by the supervisor: the learner leaves its dataset after at most one more SGD step
        self.stopping = torch.zeros((), dtype=torch.bool).share_memory_()

        make_queue = queue.SimpleQueue if context is None else context.SimpleQueue
        make_lock = _NoLock if context is None else context.Lock
        self.inboxes = [make_queue() for _ in range(cfg.num_workers)]
        self.requests, self.requests_lock = make_queue(), make_lock()
        self.trajectories_done = make_queue()
        self.evaluations = make_queue()
        self.weights = SharedWeights(model, device, make_lock())

    def worker_of_slot(self, slot: int) -> int:
        """Tell which rollout worker owns a slot."""
        return slot // (self.num_slots // len(self.inboxes))

    def worker_of_split(self, split: int) -> int:
        """Tell which rollout worker steps a split."""
        return split // (len(self.agent_slot) // len(self.inboxes))

    def without_weights(self) -> "SharedBuffers":
        """Return the same buffers for a rollout worker, which must not open the GPU that holds the weights."""
        sampler = copy.copy(self)
        del sampler.weights
        return sampler


def take_all(messages: Any, lock: Any) -> list[Message]:
    """Wait for a message, then take all that are there.

    Readers of one queue take turns under the lock: whoever waits inside holds nothing that others wait for.
    """
    with lock:
        taken = [messages.get()]
        while taken[-1][0] != STOP and not messages.empty():
            taken.append(messages.get())
        return taken


class _NoLock:
    """A lock for a single process."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...
