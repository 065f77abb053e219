"""Everything the processes share: trajectories, weights, counters, and the queues of tiny messages.

All data lies in tensors that are allocated once, here, in shared memory; a queue carries only a few small integers
at a time. Nothing is serialized while the system runs.

A *slot* holds one trajectory: T steps, and observation and hidden state number T, for the bootstrap value. It belongs
to one policy and one rollout worker for good. Every agent (one of the A agents of one environment of one split) fills a
slot of the policy it plays, row by row; which policy, slot and row, `agent_policy`, `agent_slot` and `agent_t` tell, so
that a message only has to name the split.

The protocol, as tuples (kind, index, ...); p is a policy:

    queue                 from                 message             meaning
    requests[p]           rollout worker    -> (SPLIT, split)      obs[slot, t] of the split's agents of p await actions
    inboxes[worker]       policy worker     -> (SPLIT, split)      ... actions, log_probs, values, ... of p are written
    trajectories_done[p]  rollout worker    -> (SLOTS, slot, ...)  these trajectories are complete
    inboxes[worker]       learner           -> (SLOTS, slot, ...)  these slots are copied (or trained on), free again
    inboxes[worker]       supervisor        -> (PAUSE | RESUME, 0) hold all requests back | go on
    trajectories_done[p]  supervisor        -> (SAVE, kind)        write a checkpoint when this message's turn comes
    trajectories_done[p]  supervisor        -> (COPY, donor)       take over the weights that policy `donor` saved
    trajectories_done[p]  supervisor        -> (CONFIGURE, 0)      read the policy's new settings
    evaluations           supervisor        -> (EVALUATE, 0)       score the newest policies
    all four              supervisor        -> (STOP, 0)           leave run(); one for each reader

Free slots are a message in their owner's inbox like any other: the worker never blocks on one thing while it could do
another, and no split can starve a split of another worker. The slots of agents that step together come together, in one
message: a message takes about 20 us (`benchmark.py components`), as much as 17 steps of CartPole.

Weights travel in one flat shared vector for each policy (in GPU memory on a GPU) with a version, the number of SGD
steps so far; beside it lie the frozen snapshots for self-play. Read next: `rollout_worker.py`.
"""

import copy
import math
import os
import queue
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config, UserError
from flat_spaces import num_action_parameters, num_columns
from pbt import flatten_shaping, hyperparameters
from vector_env import EnvInfo

SPLIT, SLOTS, PAUSE, RESUME, SAVE, COPY, CONFIGURE, EVALUATE, STOP = range(9)
SAVE_PERIODIC, SAVE_BEST, SAVE_MILESTONE, SAVE_DONOR = range(4)
CURRENT = -1  # the "snapshot" of an agent that plays the newest weights
IDLE = -1  # the policy of an agent that awaits no action
MAX_SLOTS_PER_WORKER = 2000  # so many messages fit into the pipe of a queue; more could block writer and reader at once
Message = tuple[int, ...]


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
        "valid": Spec((T,), torch.bool),  # False: a step that only reset the environment, or was never taken
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
    """The newest weights of one policy, their version, and snapshots of earlier ones.

    Written by the policy's learner, copied by its policy workers. Row 0 of one flat float32 tensor holds all parameters
    and buffers of the newest weights, row 1 + k those of snapshot k. The lock makes weights and version change
    together; versions alone are read without it.
    """

    def __init__(self, model: nn.Module, device: torch.device, num_snapshots: int, lock: Any) -> None:
        state = model.state_dict()
        self._flat = torch.empty(1 + num_snapshots, sum(tensor.numel() for tensor in state.values()), device=device)
        if device.type == "cpu":
            self._flat.share_memory_()
        # of the newest weights and the snapshots; then the number of snapshots taken, and `first_version`
        self.versions = torch.zeros(3 + num_snapshots, dtype=torch.int64).share_memory_()
        self._max_snapshots, self._lock = num_snapshots, lock
        self.publish(model, 0)

    @property
    def version(self) -> int:
        """Return the version of the newest weights."""
        return int(self.versions[0])

    @property
    def num_snapshots(self) -> int:
        """Count the snapshots there are."""
        return min(int(self.versions[-2]), self._max_snapshots)

    @property
    def first_version(self) -> int:
        """Return the version from which on the weights are this policy's (population-based training).

        What older ones have acted is of another policy, whose place this one has taken.
        """
        return int(self.versions[-1])

    @first_version.setter
    def first_version(self, version: int) -> None:
        self.versions[-1] = version

    @torch.no_grad()
    def publish(self, model: nn.Module, version: int) -> None:
        """Make the model's weights the newest ones."""
        self._write(0, model, version)

    @torch.no_grad()
    def add_snapshot(self, model: nn.Module, version: int) -> None:
        """Keep the model's weights as a snapshot, in the place of the oldest one."""
        taken = int(self.versions[-2])
        self._write(1 + taken % self._max_snapshots, model, version)
        self.versions[-2] = taken + 1

    def _write(self, row: int, model: nn.Module, version: int) -> None:
        with self._lock:
            parts = self._flat[row].split([tensor.numel() for tensor in model.state_dict().values()])
            for part, tensor in zip(parts, model.state_dict().values(), strict=True):
                part.copy_(tensor.reshape(-1))
            self._finish_copies()
            self.versions[row] = version

    @torch.no_grad()
    def refresh(self, model: nn.Module, snapshot: int = CURRENT) -> int:
        """Copy the newest weights, or a snapshot, into a model (of any dtype), return their version."""
        row = snapshot + 1
        with self._lock:
            state = model.state_dict()
            for name, part in unflatten(self._flat[row], state).items():
                state[name].copy_(part)
            self._finish_copies()
            return int(self.versions[row])

    @torch.no_grad()
    def copy_newest(self, model: nn.Module) -> tuple[dict[str, Tensor], int]:
        """Return a copy of the newest weights, {name: float32} on the CPU, and their version.

        model: one with the same parameters, of any dtype; it stays as it is.
        """
        with self._lock:
            flat = self._flat[0].to("cpu", copy=True)
            return unflatten(flat, model.state_dict()), int(self.versions[0])

    def _finish_copies(self) -> None:
        if self._flat.device.type == "cuda":  # copies on a GPU are only queued; the lock must cover their end
            torch.cuda.current_stream(self._flat.device).synchronize()


def unflatten(flat: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of a vector that holds all tensors of a state dict, in their shapes, as views."""
    parts = flat.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), parts, strict=True)}


class PolicyBuffers:
    """What belongs to one policy: its queues, its weights, and where in the storage of its kind its slots begin."""

    def __init__(self, kind: int, first_slot: int, weights: SharedWeights, make_queue: Any, make_lock: Any) -> None:
        self.kind, self.first_slot = kind, first_slot
        self.weights = weights
        self.requests, self.requests_lock = make_queue(), make_lock()
        self.trajectories_done = make_queue()


class SharedBuffers:
    """All that the components share. Made by the supervisor, handed to every process at its start.

    Raises `UserError` when shared memory is too small; the sizes are known before anything is allocated.
    """

    def __init__(self, cfg: Config, info: EnvInfo, kind_of_policy: list[int], models: list[nn.Module],
                 devices: list[torch.device], context: Any) -> None:
        """Allocate.

        Args:
            kind_of_policy: which kind of agents (`EnvInfo.kinds`) each policy plays.
            models, devices: of each policy.
            context: a multiprocessing context, or None when everything runs in one process.
        """
        self.info = info
        self.start = 0  # how often the run was started before (`seeding.py`); the supervisor sets it
        agents_per_split = cfg.envs_per_split * len(info.agents)
        self.slots_per_worker = cfg.num_envs_per_worker * len(info.agents)  # of each policy: all agents may play it
        self.num_slots = cfg.num_workers * self.slots_per_worker  # of each policy
        state_sizes = {kind: model.state_size for kind, model in zip(kind_of_policy, models, strict=True)}
        self.specs = [trajectory_specs(cfg, *spaces_of_kind, state_sizes[kind])
                      for kind, spaces_of_kind in enumerate(info.kinds)]
        counts = [self.num_slots * kind_of_policy.count(kind) for kind in range(len(info.kinds))]
        self.num_bytes = sum(map(num_bytes, self.specs, counts))
        if context is not None:
            check_shared_memory(self.num_bytes)
        print(f"{sum(counts)} trajectories of {cfg.rollout} steps take {self.num_bytes / 1e6:.1f} MB", flush=True)
        # The slots of all policies of a kind lie in one tensor, so that a rollout worker writes them together; slots
        # are numbered through all kinds.
        self.storage = [allocate(specs, count, shared=context is not None)
                        for specs, count in zip(self.specs, counts, strict=True)]
        self.first_slot_of_kind = [sum(counts[:kind]) for kind in range(len(counts))]

        make_queue = queue.SimpleQueue if context is None else context.SimpleQueue
        make_lock = _NoLock if context is None else context.Lock
        num_snapshots = cfg.self_play_snapshots if cfg.self_play_past_fraction else 0
        self.policies = []
        for policy, kind in enumerate(kind_of_policy):
            first = self.first_slot_of_kind[kind] + self.num_slots * kind_of_policy[:policy].count(kind)
            weights = SharedWeights(models[policy], devices[policy], num_snapshots, make_lock())
            self.policies.append(PolicyBuffers(kind, first, weights, make_queue, make_lock))
        self.inboxes = [make_queue() for _ in range(cfg.num_workers)]
        self.evaluations = make_queue()

        def shared(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype).share_memory_()

        # one tensor, since each takes a file descriptor in every process: policy, snapshot, slot, t, version
        self._agents = shared(5, cfg.num_splits, agents_per_split)
        self.agent_policy.fill_(IDLE)
        self.agent_snapshot.fill_(CURRENT)
        # env_steps sampled by each rollout worker; a resumed run begins with its earlier ones in the first
        self.env_steps = shared(cfg.num_workers)
        self.policy_steps = shared(cfg.num_workers, cfg.num_policies)  # decisions of the agents of each policy
        self.evaluation_steps = shared()  # a sign of life of the evaluator
        # set once, by the supervisor: a learner leaves its dataset after at most one more SGD step
        self.stopping = shared(dtype=torch.bool)
        # of each policy: the score of best.pt, its sort, its decisions at its last update by population-based training
        self._of_policies = shared(3, cfg.num_policies, dtype=torch.float64)
        self.best_score.fill_(-math.inf)
        # population-based training: the settings of each policy, in the order of their names
        self.settings = shared(cfg.num_policies, len(hyperparameters(cfg)), dtype=torch.float64)
        num_shaping = len(flatten_shaping(info.shaping)) if cfg.with_pbt and info.shaping is not None else 0
        self.shaping = shared(cfg.num_policies, num_shaping, dtype=torch.float64)

    # of each agent, [splits, M] int64
    agent_policy = property(lambda self: self._agents[0], doc="The policy that must act for it; IDLE: none.")
    agent_snapshot = property(lambda self: self._agents[1], doc="The snapshot that it plays, or CURRENT.")
    agent_slot = property(lambda self: self._agents[2], doc="Its trajectory.")
    agent_t = property(lambda self: self._agents[3], doc="Its row there.")
    agent_version = property(lambda self: self._agents[4], doc="That of the weights that gave it its hidden state.")
    # of each policy, [P] float64
    best_score = property(lambda self: self._of_policies[0], doc="The score of best.pt; -inf: there is none.")
    best_sort = property(lambda self: self._of_policies[1], doc="Its sort, `checkpoint.sort_of_score`.")
    last_update = property(lambda self: self._of_policies[2], doc="Decisions at the last update of the population.")

    @property
    def kind_of_policy(self) -> list[int]:
        return [policy.kind for policy in self.policies]

    def spaces_of(self, policy: int) -> tuple[dict[str, spaces.Space], spaces.Space]:
        """Return the observation leaves and the action space of a policy."""
        return self.info.kinds[self.policies[policy].kind]

    def trajectories_of(self, policy: int) -> dict[str, Tensor]:
        """Return the trajectories of a policy, {name: [num_slots, T(+1), ...]}."""
        own = self.policies[policy]
        first = own.first_slot - self.first_slot_of_kind[own.kind]
        return {name: tensor[first : first + self.num_slots] for name, tensor in self.storage[own.kind].items()}

    def worker_of_slot(self, slot: int) -> int:
        """Tell which rollout worker owns a slot."""
        return slot % self.num_slots // self.slots_per_worker

    def policy_of_slot(self, slot: int) -> int:
        """Tell to which policy a slot belongs."""
        first = slot - slot % self.num_slots
        return next(number for number, policy in enumerate(self.policies) if policy.first_slot == first)

    def worker_of_split(self, split: int) -> int:
        """Tell which rollout worker steps a split."""
        return split // (len(self.agent_slot) // len(self.inboxes))

    def without_weights(self) -> "SharedBuffers":
        """Return the same buffers for a rollout worker, which must not open the GPU that holds the weights.

        It still counts the snapshots.
        """
        sampler = copy.copy(self)
        sampler.policies = [copy.copy(policy) for policy in self.policies]
        for policy in sampler.policies:
            policy.weights = copy.copy(policy.weights)
            del policy.weights._flat, policy.weights._lock
        return sampler


def check_num_slots(cfg: Config, num_agents: int) -> None:
    """Raise `UserError` when a rollout worker would own too many slots."""
    most = MAX_SLOTS_PER_WORKER // (cfg.num_policies * num_agents)
    most -= most % cfg.worker_num_splits
    if cfg.num_envs_per_worker > most:
        cure = f"use at most {most} and more --num_workers" if most else "use fewer --num_policies"
        raise UserError(f"--num_envs_per_worker={cfg.num_envs_per_worker}, each with {num_agents} agents of "
                        f"{cfg.num_policies} policies, is too many for one process; {cure}")
    if not cfg.async_rl and cfg.num_workers * cfg.num_envs_per_worker * num_agents != cfg.trajectories_per_dataset:
        samples = cfg.num_workers * cfg.num_envs_per_worker * num_agents * cfg.rollout
        agents = f" x {num_agents} agents" if num_agents > 1 else ""
        raise UserError(
            f"with --async_rl=False a dataset must hold one trajectory of every agent: --batch_size x "
            f"--num_batches_per_epoch = {cfg.batch_size * cfg.num_batches_per_epoch} must equal --num_workers x "
            f"--num_envs_per_worker{agents} x --rollout = {samples}; set --num_batches_per_epoch=1 "
            f"--batch_size={samples}")


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
