"""Everything the processes share: trajectories, counters, and the inboxes for tiny messages.

All data lies in tensors that are allocated once, here, in shared memory. A message is a few small integers.

A *slot* holds one trajectory: T steps, and observation and hidden state number T, for the bootstrap value. It belongs
to one policy and one rollout worker for good. Every agent (one of the A agents of one environment of one split) fills a
slot of the policy it plays, row by row. `awaited_policy`, `agent_slot` and `agent_t` hold each agent's policy, slot and
row, so that a message only has to name the split.

The protocol, as (kind, index, ...); p is a policy:

    inbox                 from                 message             meaning
    requests[p]           rollout worker    -> (SPLIT, request)    obs[slot, t] of the split's agents of p await actions
    worker_inboxes[w]     policy worker     -> (SPLIT, request)    ... actions, log_probs, values, ... of p are written
    trajectories_done[p]  rollout worker    -> (SLOTS, slot, ...)  these trajectories are complete
    passed_on[p][0]       learner           -> (SLOTS, slot, ...)  ... and stored by the first of two learners (PQL)
    worker_inboxes[w]     learner           -> (SLOTS, slot, ...)  these slots are copied (or trained on), free again
    worker_inboxes[w]     supervisor        -> (PAUSE, number)     hold all requests back, report when none is under way
    worker_inboxes[w]     supervisor        -> (RESUME, 0)         go on
    commands[p][0]        supervisor        -> (SAVE, reason)      write a checkpoint
    commands[p][0]        supervisor        -> (COPY, donor)       take over the weights that policy `donor` saved last
    commands[p][0]        supervisor        -> (LOAD, reset)       take over the parameters in a file, a new optimizer
    commands[p][:]        supervisor        -> (FINISH, number)    report when all that was handed in is trained on
    commands[p][:]        supervisor        -> (CONFIGURE, 0)      read the policy's new settings
    evaluations           supervisor        -> (EVALUATE, 0)       score the newest policies
    all but the feeds'    supervisor        -> (STOP, 0)           leave run(); one for each reader

Free slots are a message in their owner's inbox like any other: the worker never blocks on one thing while it could do
another, and no split can starve a split of another worker. The slots of agents that step together travel together.
Commands travel apart from trajectories, and the learner obeys them between two datasets.

A message only says where to look; what is true stands in tables: `slot_place` says who has each slot. A request names
its split and the `generation` of the rollout worker, which is another one when the worker was replaced: nobody answers
one that is gone, and no answer to it reaches its successor. When anything else has died, all processes begin again with
empty inboxes (`runtime/recovery.py`).

The weights lie beside them (`SharedWeights`). Read next: `rollout_worker.py`.
"""

import contextlib
import copy
import fcntl
import math
import multiprocessing
import os
import select
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config, tunable
from envs.flat_spaces import num_columns, obs_dtype
from envs.vector_env import EnvInfo
from pbt import flatten_shaping
from reducer import SharedTraining
from runtime.children import make_pipe
from runtime.heartbeat import ANYTHING, COUNT, WAITS
from runtime.user_error import UserError

SPLIT, SLOTS, PAUSE, RESUME, SAVE, COPY, LOAD, FINISH, CONFIGURE, EVALUATE, STOP = range(11)
Message = Sequence[int]  # (kind, index, ...)
SAVE_PERIODIC, SAVE_BEST, SAVE_MILESTONE = range(3)
SHM = Path("/dev/shm")  # where Linux keeps shared memory; in containers it often has 64 MB
IDLE = -1  # the policy of an agent that awaits no action
CURRENT = -1  # the "snapshot" of an agent that plays the newest weights
WITH_WORKER, HANDED_IN, TAKEN = range(3)  # where a slot is: the learner has not looked at it yet; is done with it later
MAX_COMMANDS = 100  # of the supervisor, at once


# ---- messages ----------------------------------------------------------------------------------------------------


class Inbox:
    """A queue of messages: a pipe of 8-byte records (kind, index), with any number of writers and readers, and no lock.

    The kernel makes a write of up to PIPE_BUF bytes whole or not at all, and a read takes whole records. So a process
    that dies inside either blocks nobody; the locks of multiprocessing's own queues stay locked when their holder dies.
    """

    RECORD = struct.Struct("ii")
    PER_READ = select.PIPE_BUF // RECORD.size  # records of one read
    AT_ONCE = 64  # records of one write; the kernel begins a new page where one does not fit: small ones waste little
    heartbeat = np.zeros(3, np.int64)  # of the component whose main thread waits here: set in its process

    def __init__(self, context: Any, num_records: int) -> None:
        """Make it so large that no writer waits while at most num_records are there."""
        size = num_records * self.RECORD.size * 8 // 7 + select.PIPE_BUF  # an eighth of a page is wasted at most
        self.reader, self.writer = make_pipe(context, size)

    def to_write(self) -> "Inbox":
        """Return the same inbox for a process that only writes: a pipe's other end is one more descriptor."""
        end = copy.copy(self)
        end.reader = None
        return end

    def put(self, message: Message) -> None:
        """Write (kind, index, ...), one record for each index."""
        kind, *indices = message
        for start in range(0, len(indices), self.AT_ONCE):
            records = (self.RECORD.pack(kind, index) for index in indices[start : start + self.AT_ONCE])
            os.write(self.writer.fileno(), b"".join(records))

    def get(self, max_records: int = PER_READ) -> list[Message]:
        """Wait for messages; return all that are there, those of slots joined: (SLOTS, slot, ...)."""
        messages: list[Message] = []
        size = self.RECORD.size * min(max_records, self.PER_READ)
        self.heartbeat[WAITS] = True
        records = os.read(self.reader.fileno(), size)
        self.beat()
        for kind, index in self.RECORD.iter_unpack(records):
            if kind == SLOTS and messages and messages[-1][0] == SLOTS:
                messages[-1].append(index)
            else:
                messages.append([kind, index])
        return messages

    def beat(self, kind: int = ANYTHING) -> None:
        """Note that the component goes on, with a kind of work that has a limit of its own."""
        self.heartbeat[:] = self.heartbeat[COUNT] + 1, False, kind

    def serve(self, handle: Callable[..., None], max_records: int = PER_READ) -> bool:
        """Wait for messages and pass each on as handle(kind, index, ...); return False when told to stop."""
        for message in self.get(max_records):
            if message[0] == STOP:
                return False
            handle(*message)
        return True

    def empty(self) -> bool:
        """Tell whether nothing is there."""
        return not self.reader.poll(0)

    def drain(self) -> None:
        """Throw away all that is there."""
        while not self.empty():
            self.get()


# ---- tables ------------------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """Shape of one slot's part of a trajectory tensor, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def trajectory_specs(T: int, obs_space: dict[str, spaces.Space], action_space: spaces.Space, state_size: int,
                     columns: dict[str, Spec]) -> dict[str, Spec]:
    """List the tensors of a trajectory. Rows align as obs[t] -> actions[t] -> rewards[t] -> obs[t+1].

    columns: of each row, those of the algorithm.
    """
    specs = {
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
        "policy_version": Spec((T,), torch.int64),
    }
    if taken := specs.keys() & columns.keys():
        raise UserError(f"every trajectory has {min(taken)} already; give the column of the algorithm another name")
    return specs | {name: Spec((T, *spec.shape), spec.dtype) for name, spec in columns.items()}


def num_bytes(specs: dict[str, Spec], count: int) -> int:
    """Compute the bytes of `count` slots of a table of specs."""
    return sum(count * int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in specs.values())


def allocate(specs: dict[str, Spec], count: int, *, shared: bool) -> dict[str, Tensor]:
    """Allocate [count, *shape] tensors of zeros for a table of specs, in shared memory if asked.

    Raises `UserError` when they do not fit there.
    """
    needed = num_bytes(specs, count)
    if shared and SHM.is_dir() and needed > (free := shutil.disk_usage(SHM).free):
        raise UserError(f"the trajectories take {needed:,} bytes of shared memory, {SHM} has {free:,}; enlarge it "
                        "(docker run --shm-size=2g), or lower --num_envs_per_worker, --num_workers or --rollout")
    tensors = {name: torch.zeros(count, *spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    return {name: tensor.share_memory_() if shared else tensor for name, tensor in tensors.items()}


class Arena:
    """One shared tensor of bytes in which many tables lie, each with its own shape and dtype.

    Each shared tensor takes a file descriptor in every process, so this one is pickled, and the tables are views of it.
    Those of larger words come first, so that each begins at a whole one.
    """

    def __init__(self, tables: dict[str, Spec], device: torch.device | str = "cpu") -> None:
        """Allocate zeros, in shared memory."""
        self.tables = tables
        self.bytes = torch.zeros(num_bytes(tables, 1), dtype=torch.uint8, device=device)
        if self.bytes.is_cpu:
            self.bytes.share_memory_()

    def views(self) -> dict[str, Tensor]:
        """Return the tables."""
        by_word = sorted(self.tables, key=lambda name: -self.tables[name].dtype.itemsize)
        parts = self.bytes.split([num_bytes({name: self.tables[name]}, 1) for name in by_word])
        part_of = dict(zip(by_word, parts, strict=True))
        return {name: part_of[name].view(table.dtype).view(table.shape) for name, table in self.tables.items()}


def small_tables(cfg: Config, num_agents: int, num_slots: int, num_shapings: int) -> dict[str, Spec]:
    """List what is shared beside trajectories and weights. num_agents: of an environment; num_slots: of all kinds."""
    agents = (cfg.num_splits, cfg.envs_per_split * num_agents)
    workers, policies = cfg.num_workers, cfg.num_policies
    num_components = workers + policies * (len(cfg.learners) + cfg.policy_workers_per_policy)
    return {
        # of each agent
        "awaited_policy": Spec(agents, torch.int64),  # the policy that must act for it; IDLE: none
        "agent_snapshot": Spec(agents, torch.int64),  # the snapshot that it plays, or CURRENT
        "agent_slot": Spec(agents, torch.int64),  # its trajectory
        "agent_t": Spec(agents, torch.int64),  # its row there
        "agent_version": Spec(agents, torch.int64),  # that of the weights that gave it its hidden state
        "agent_return": Spec(agents, torch.float64),  # that of its episode so far
        "heartbeats": Spec((num_components + 1, 3), torch.int64),  # the table of `runtime/heartbeat.py`
        "generation": Spec((workers,), torch.int64),  # how often each rollout worker was replaced
        "restarts": Spec((), torch.int64),  # how often all processes have begun again
        # sampled by each rollout worker; in the last row what was sampled elsewhere: before a resume, by other ranks
        "env_steps": Spec((workers + 1,), torch.int64),
        "policy_steps": Spec((workers + 1, policies), torch.int64),  # decisions of the agents of each policy
        "goal": Spec((1,), torch.int64),  # env_steps after which no more actions are asked for
        # of each policy
        "decisions_trained": Spec((policies,), torch.int64),  # for a learner that takes the place of another
        "sgd_steps_begun": Spec((policies,), torch.int64),  # by this system: whether anybody goes on
        "first_version": Spec((policies,), torch.int64),  # older weights are another's, whose place this one has taken
        "best_score": Spec((policies,), torch.float64),  # of best.pt; -inf: there is none
        "best_sort": Spec((policies,), torch.float64),  # its sort, `checkpoint.sort_of_score`
        "last_update": Spec((policies,), torch.float64),  # decisions at the last update of the population
        "settings": Spec((policies, len(tunable(cfg))), torch.float64),  # that may change, in the order of `tunable`
        "shaping": Spec((policies, num_shapings), torch.float64),
        "slot_place": Spec((num_slots,), torch.int8),  # WITH_WORKER, HANDED_IN or TAKEN
        # set once: learners leave their datasets after at most one more SGD step, the evaluator its episodes
        "stopping": Spec((), torch.bool),
        "training_over": Spec((), torch.bool),  # set once: no learner of any rank begins another dataset
    }


# ---- weights -----------------------------------------------------------------------------------------------------


class SharedWeights:
    """The parameters and buffers of one policy's model, their version, and frozen snapshots of them for self-play.

    The newest weights lie twice in shared memory (in GPU memory on a GPU), each tensor in its own dtype: the learner
    fills the older row, then names it the newest. Who writes or reads a row locks it meanwhile. The kernel keeps the
    lock: it frees it when its holder dies, and lets each holder see what the one before has written, on every
    processor. No reader waits, and the learner only for a reader that is still at the older row. A row whose writer
    died holds no weights, and is not the newest.

    On a GPU a copy is only queued, and what two processes queue there comes in no order. So a publication counts once
    the GPU has passed an event behind its copy, and a reader waits for its own copy. A learner that publishes with
    `wait=False`, within a dataset, does not wait for the event: it asks for it at the next publication (which waits if
    the GPU is a whole SGD step behind, and has enough to do) and after the dataset (`finish_publishing`).
    """

    WRITING = -2  # the version of a row that is not there yet, or is being replaced
    NEWEST_ROWS = 2
    NEWEST, TAKEN = range(-2, 0)  # the numbers behind the versions of the rows

    def __init__(self, model: nn.Module, device: torch.device, num_snapshots: int) -> None:
        """Publish the model's weights as version 0."""
        rows = self.NEWEST_ROWS + num_snapshots
        self._arena = Arena({name: Spec((rows, *tensor.shape), tensor.dtype)
                             for name, tensor in model.state_dict().items()}, device)
        self._tensors = self._arena.views()  # {name: [rows, ...]}
        # one tensor, since each takes a file descriptor in every process: the version of each row; then the newest row
        # and how many snapshots were taken
        self._numbers = torch.full((rows + 2,), self.WRITING).share_memory_()
        self._numbers[self.NEWEST :] = 0
        self._max_snapshots = num_snapshots
        with tempfile.TemporaryFile() as file:  # a row is one byte of it
            self._locks = Connection(os.dup(file.fileno()))  # which can be handed to a process
        self._unfinished: tuple[int, int, Any] | None = None  # a publication: its row, version and event
        self.publish(model, 0)

    @property
    def version(self) -> int:
        """Return the version of the newest weights, the number of SGD steps."""
        version = self.WRITING
        while version == self.WRITING:  # it was the newest row, a moment ago
            version = int(self._numbers[int(self._numbers[self.NEWEST])])
        return version

    def snapshot_version(self, snapshot: int) -> int:
        """Return the version of a snapshot, or `WRITING`."""
        return int(self._numbers[self.NEWEST_ROWS + snapshot])

    @property
    def num_snapshots(self) -> int:
        """Count the snapshots there are."""
        return min(int(self._numbers[self.TAKEN]), self._max_snapshots)

    def without_tensors(self) -> "SharedWeights":
        """Return the numbers alone, for a process that must not open the GPU on which the weights lie."""
        numbers = copy.copy(self)
        del numbers._arena, numbers._tensors, numbers._locks
        return numbers

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tensors"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "_arena" in state:
            self._tensors = self._arena.views()

    # the writer

    def publish(self, model: nn.Module, version: int, *, wait: bool = True) -> None:
        """Make the model's weights the newest ones.

        wait: only return when they are. Else, on a GPU, they are when `finish_publishing` finds them copied.
        """
        self.finish_publishing()
        row = 1 - int(self._numbers[self.NEWEST])
        self._write(row, model)
        self._unfinished = row, version, self._mark()
        self.finish_publishing(wait=wait)

    def finish_publishing(self, *, wait: bool = True) -> None:
        """Count the last publication, if its copy is finished, as the newest weights. The writer calls this.

        wait: wait for the copy. Else, while it is under way, the weights before it stay the newest.
        """
        if self._unfinished is None:
            return
        row, version, event = self._unfinished
        if event is not None and not event.query():
            if not wait:
                return
            event.synchronize()
        self._numbers[row] = version
        self._lock(row, fcntl.LOCK_UN)
        self._numbers[self.NEWEST] = row
        self._unfinished = None

    def add_snapshot(self, model: nn.Module, version: int) -> None:
        """Keep the model's weights as a snapshot, in the place of the oldest one."""
        taken = int(self._numbers[self.TAKEN])
        row = self.NEWEST_ROWS + taken % self._max_snapshots
        self._write(row, model)
        self._finish_copies()
        self._numbers[row] = version
        self._lock(row, fcntl.LOCK_UN)
        self._numbers[self.TAKEN] = taken + 1

    @torch.no_grad()
    def _write(self, row: int, model: nn.Module) -> None:
        """Begin to write a row, which holds no weights until it has a version."""
        self._lock(row, fcntl.LOCK_EX)
        self._numbers[row] = self.WRITING
        state = model.state_dict()
        torch._foreach_copy_([self._tensors[name][row] for name in state], list(state.values()))

    def _lock(self, row: int, kind: int) -> None:
        fcntl.lockf(self._locks.fileno(), kind, 1, row)

    # readers

    def refresh(self, model: nn.Module, snapshot: int = CURRENT) -> int:
        """Copy the newest weights, or a snapshot, into a model (of any dtype); return their version.

        Where the snapshot is just being replaced, the newest weights are taken instead.
        """
        return self._read(model.state_dict(), snapshot)

    def read(self, snapshot: int = CURRENT) -> tuple[dict[str, Tensor], int]:
        """Return a copy of the same, {name: tensor} on the CPU, and their version."""
        state = {name: torch.empty_like(rows[0], device="cpu") for name, rows in self._tensors.items()}
        return state, self._read(state, snapshot)

    @torch.no_grad()
    def _read(self, state: dict[str, Tensor], snapshot: int) -> int:
        """Copy a row that holds weights into these tensors; return their version."""
        while True:
            row = int(self._numbers[self.NEWEST]) if snapshot == CURRENT else self.NEWEST_ROWS + snapshot
            with contextlib.suppress(BlockingIOError):  # it is being replaced
                self._lock(row, fcntl.LOCK_SH | fcntl.LOCK_NB)
                try:
                    if (version := int(self._numbers[row])) != self.WRITING:
                        torch._foreach_copy_(list(state.values()), [self._tensors[name][row] for name in state])
                        self._finish_copies()
                        return version
                finally:
                    self._lock(row, fcntl.LOCK_UN)
            snapshot = CURRENT

    def _finish_copies(self) -> None:
        """Wait for what was queued on a GPU."""
        if event := self._mark():
            event.synchronize()

    def _mark(self) -> Any:
        """Return an event behind what was queued on a GPU; None on a CPU, where everything is finished."""
        device = self._arena.bytes.device
        return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()


# ---- all of it ---------------------------------------------------------------------------------------------------


class PolicyBuffers:
    """What belongs to one policy: its inboxes, its weights, and where in the storage of its kind its slots begin."""

    def __init__(self, cfg: Config, algorithm: Any, kind: int, first_slot: int, num_slots: int, model: nn.Module,
                 device: torch.device, pipes: Any) -> None:
        self.kind, self.first_slot = kind, first_slot
        self.weights = SharedWeights(model, device, cfg.self_play_snapshots if cfg.self_play_past_fraction else 0)
        self.shared_training: SharedTraining | None = None  # of several learners in this system
        if len(cfg.learners) > 1:
            self.shared_training = SharedTraining(model, algorithm.make_optimizer, len(cfg.learners), device)
        self.requests = Inbox(pipes, cfg.num_splits + cfg.policy_workers_per_policy)
        self.trajectories_done = Inbox(pipes, num_slots)
        self.commands = [Inbox(pipes, MAX_COMMANDS) for _ in cfg.learners]  # the first one obeys most
        self.passed_on = [Inbox(pipes, num_slots) for _ in cfg.roles[1:]]  # from role to role

    def seen_by(self, role: str) -> "PolicyBuffers":
        """Return what a process uses of this policy."""
        used = {"rollout_worker": ("weights", "requests", "trajectories_done"), "evaluator": ("weights",),
                "policy_worker": ("weights", "requests"),
                "learner": ("weights", "shared_training", "trajectories_done", "commands", "passed_on")}[role]
        seen = copy.copy(self)
        for name in vars(self).keys() - {"kind", "first_slot", *used}:
            setattr(seen, name, None)
        if role == "rollout_worker":
            seen.weights = self.weights.without_tensors()
            seen.requests, seen.trajectories_done = self.requests.to_write(), self.trajectories_done.to_write()
        return seen


class SharedBuffers:
    """All that the components share. Made by the supervisor, handed to every process at its start."""

    def __init__(self, cfg: Config, algorithm: Any, info: EnvInfo, kind_of_policy: list[int], models: list[nn.Module],
                 devices: list[torch.device], context: Any) -> None:
        """Allocate.

        Args:
            algorithm: an `Algorithm`, for its columns and its optimizer.
            kind_of_policy: which kind of agents (`EnvInfo.kinds`) each policy plays.
            models, devices: of each policy.
            context: a multiprocessing context, or None when everything runs in one process.
        """
        self.info, self.kind_of_policy = info, kind_of_policy
        self.store_prefix = ""  # where several ranks find each other (`runtime/ranks.py`); the supervisor sets it
        self.start = 0  # how often the run was started before (`runtime/seeding.py`); the supervisor sets it
        self.slots_per_worker = cfg.num_envs_per_worker * len(info.agents)  # of each policy: all agents may play it
        self.num_slots = cfg.num_workers * self.slots_per_worker  # of each policy
        state_sizes = {kind: model.state_size for kind, model in zip(kind_of_policy, models, strict=True)}
        self.specs = [trajectory_specs(cfg.rollout, *kind_spaces, state_sizes[kind], algorithm.columns(kind_spaces[1]))
                      for kind, kind_spaces in enumerate(info.kinds)]
        counts = [self.num_slots * kind_of_policy.count(kind) for kind in range(len(info.kinds))]
        # The slots of all policies of a kind lie in one tensor, so that a rollout worker writes them together; slots
        # are numbered through all kinds.
        self.storage = [allocate(specs, count, shared=context is not None)
                        for specs, count in zip(self.specs, counts, strict=True)]
        self.first_slot_of_kind = [sum(counts[:kind]) for kind in range(len(counts))]

        pipes = context or multiprocessing
        self.policies = []
        for policy, kind in enumerate(kind_of_policy):
            first = self.first_slot_of_kind[kind] + self.num_slots * kind_of_policy[:policy].count(kind)
            self.policies.append(
                PolicyBuffers(cfg, algorithm, kind, first, self.num_slots, models[policy], devices[policy], pipes))
        answers = cfg.num_policies * (self.slots_per_worker + cfg.worker_num_splits)
        self.worker_inboxes = [Inbox(pipes, answers + MAX_COMMANDS) for _ in range(cfg.num_workers)]
        self.evaluations = Inbox(pipes, MAX_COMMANDS)
        self.shaping_names = list(flatten_shaping(info.shaping)) if cfg.with_pbt and info.shaping is not None else []
        self.arena = Arena(small_tables(cfg, len(info.agents), sum(counts), len(self.shaping_names)))
        vars(self).update(self.arena.views())
        self.awaited_policy.fill_(IDLE)
        self.agent_snapshot.fill_(CURRENT)
        self.goal.fill_(2**63 - 1)
        self.best_score.fill_(-math.inf)
        self.settings[:] = torch.tensor([*tunable(cfg).values()], dtype=torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.arena.tables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | state["arena"].views())

    def spaces_of(self, policy: int) -> tuple[dict[str, spaces.Space], spaces.Space]:
        """Return the observation leaves and the action space of a policy."""
        return self.info.kinds[self.policies[policy].kind]

    def trajectories_of(self, policy: int) -> dict[str, Tensor]:
        """Return the trajectories of a policy, {name: [num_slots, T(+1), ...]}."""
        own = self.policies[policy]
        first = own.first_slot - self.first_slot_of_kind[own.kind]
        return {name: tensor[first : first + self.num_slots] for name, tensor in self.storage[own.kind].items()}

    def slots_of_worker(self, worker: int) -> list[range]:
        """Return the slots of each policy that a rollout worker owns."""
        firsts = [policy.first_slot + worker * self.slots_per_worker for policy in self.policies]
        return [range(first, first + self.slots_per_worker) for first in firsts]

    def worker_of_slot(self, slot: int) -> int:
        """Tell which rollout worker owns a slot."""
        return slot % self.num_slots // self.slots_per_worker

    def policy_of_slot(self, slot: int) -> int:
        """Tell to which policy a slot belongs."""
        first = slot - slot % self.num_slots
        return next(number for number, policy in enumerate(self.policies) if policy.first_slot == first)

    def worker_of_split(self, split: int) -> int:
        """Tell which rollout worker steps a split."""
        return split // (len(self.agent_slot) // len(self.worker_inboxes))

    def seen_by(self, role: str, number: int) -> "SharedBuffers":
        """Return the same buffers with the inboxes and weights that a process uses: it can be handed few descriptors.

        number: of the rollout worker, or of the policy. A rollout worker, which must not open the GPU that holds the
        weights, still counts the snapshots.
        """
        seen = copy.copy(self)
        seen.evaluations = self.evaluations if role == "evaluator" else None
        seen.policies = [policy.seen_by(role) if index == number or role in ("rollout_worker", "evaluator") else None
                         for index, policy in enumerate(self.policies)]
        answers, own = role in ("learner", "policy_worker"), number if role == "rollout_worker" else None
        seen.worker_inboxes = [inbox.to_write() if answers else inbox if worker == own else None
                               for worker, inbox in enumerate(self.worker_inboxes)]
        return seen
