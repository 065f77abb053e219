"""Everything the processes share: the inboxes for tiny messages, the tables, the trajectories, the weights.

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
    worker_inboxes[w]     trainer           -> (PAUSE, number)     hold all requests back, report when none is under way
    worker_inboxes[w]     trainer           -> (RESUME, number)    go on
    commands[p][0]        trainer           -> (SAVE, reason)      write a checkpoint
    commands[p][0]        trainer           -> (LOAD, donor)       take over what policy `donor` saved; p: in given.pt
    commands[p][:]        trainer           -> (FINISH, 0)         answer when all that was handed in is trained on
    commands[p][:]        trainer           -> (CONFIGURE, 0)      read the policy's new settings
    evaluations           trainer           -> (EVALUATE, p)       score the newest weights of p
    all but a feed's      trainer           -> (STOP, 0)           leave run(); one for each reader

Free slots are a message in their owner's inbox like any other: the worker never blocks on one thing while it could do
another, and no split can starve a split of another worker. The slots of agents that step together travel together.
Commands travel apart from trajectories, and the learner obeys them between two datasets.

A message only says where to look; what is true stands in tables: `slot_place` says who has each slot. A request names
its split and the `generation` of the rollout worker, which is another one when the worker was replaced: nobody answers
one that is gone, and no answer to it reaches its successor. When anything else has died, all processes begin again with
empty inboxes (`services/recovery.py`). Read next: `rollout_worker.py`.
"""

import contextlib
import copy
import fcntl
import functools
import math
import os
import select
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config, Values, tunable
from envs.flat_spaces import Data, dtype_of, num_columns
from envs.vector_env import EnvInfo
from pbt import flatten_shaping
from runtime.guard import SHM
from runtime.processes import ANYTHING, COUNT, WAITS, make_pipe
from runtime.several import SharedTraining
from runtime.utils import UserError

SPLIT, SLOTS, PAUSE, RESUME, SAVE, LOAD, FINISH, CONFIGURE, EVALUATE, STOP = range(10)
Message = Sequence[int]  # (kind, index, ...)
SAVE_PERIODIC, SAVE_BEST, SAVE_MILESTONE = range(3)  # reasons
MAX_COMMANDS = 100  # of the trainer, in an inbox at once

# values in tables
IDLE = -1  # the policy of an agent that awaits no action
CURRENT = -1  # the "snapshot" of an agent that plays the newest weights
WITH_WORKER = 0  # a slot is free, or an agent fills it
HANDED_IN = 1  # it waits for the learner
TAKEN = 2  # the learner copies it, or trains on it


# ---- messages ----------------------------------------------------------------------------------------------------


class Inbox:
    """A queue of messages: a pipe of 8-byte records (kind, index), with any number of writers and readers, and no lock.

    The kernel makes a write of up to PIPE_BUF bytes whole or not at all, and a read takes whole records. So a process
    that dies inside either blocks nobody; the locks of multiprocessing's own queues stay locked when their holder dies.
    The pipe has a name, by which each process opens the inboxes that it uses. What is in it stays while the process
    that has made it lives.
    """

    RECORD = struct.Struct("ii")
    PER_READ = select.PIPE_BUF // RECORD.size  # records of one read
    AT_ONCE = 64  # records of one write; the kernel begins a new page where one does not fit: small ones waste little
    heartbeat = np.zeros(3, np.int64)  # of the component whose main thread waits here: set in its process

    def __init__(self, num_records: int) -> None:
        """Make it so large that no writer waits while at most num_records are there."""
        size = num_records * self.RECORD.size * 8 // 7 + select.PIPE_BUF  # an eighth of a page is wasted at most
        self.name, self.pipe = make_pipe(size)

    def __getstate__(self) -> dict:
        return {"name": self.name}

    @functools.cached_property
    def pipe(self) -> Connection:
        """Open the pipe, for reading and writing."""
        return Connection(os.open(self.name, os.O_RDWR))

    def put(self, message: Message) -> None:
        """Write (kind, index, ...), one record for each index."""
        kind, *indices = message
        for start in range(0, len(indices), self.AT_ONCE):
            records = (self.RECORD.pack(kind, index) for index in indices[start : start + self.AT_ONCE])
            os.write(self.pipe.fileno(), b"".join(records))

    def get(self, max_records: int = PER_READ) -> list[Message]:
        """Wait for messages; return all that are there, those of slots joined: (SLOTS, slot, ...)."""
        messages: list[Message] = []
        self.heartbeat[WAITS] = True
        records = os.read(self.pipe.fileno(), self.RECORD.size * min(max_records, self.PER_READ))
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

    def empty(self, timeout_sec: float = 0) -> bool:
        """Return whether nothing is there, or comes within so many seconds."""
        return not self.pipe.poll(timeout_sec)

    def drain(self) -> None:
        """Throw away all that is there."""
        while not self.empty():
            self.get()


# ---- tables ------------------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """Shape and dtype of a table; of a trajectory's tensor those of one slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def num_bytes(specs: Mapping[str, Spec]) -> int:
    """Compute the bytes of a table of specs."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())


def allocate(specs: Mapping[str, Spec], count: int) -> Data:
    """Allocate [count, *shape] tensors of zeros for a table of specs."""
    return {name: torch.zeros(count, *spec.shape, dtype=spec.dtype) for name, spec in specs.items()}


def views(memory: Tensor, specs: Mapping[str, Spec]) -> Data:
    """Return tensors of these shapes and dtypes, one after another in a buffer of bytes, as views of it.

    Those of larger words come first, so that each begins at a whole one.
    """
    by_word = sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize)
    parts = memory.split([num_bytes({name: spec}) for name, spec in by_word])
    return {name: part.view(spec.dtype).view(spec.shape) for (name, spec), part in zip(by_word, parts, strict=True)}


class Arena(Data):
    """Tables of many shapes and dtypes in one tensor of bytes.

    A shared tensor takes a file descriptor in every process, and only some 250 can be handed to one at its start. So
    the bytes are handed over, and the tables are found again there.
    """

    def __init__(self, specs: Mapping[str, Spec], memory: Tensor | None = None) -> None:
        """Allocate zeros in shared memory, unless there is memory already.

        Raises `UserError` when they do not fit there.
        """
        needed = num_bytes(specs)
        if memory is None and SHM.is_dir() and needed > (free := shutil.disk_usage(SHM).free):
            raise UserError(f"{needed:,} bytes of shared memory are needed, {SHM} has {free:,}; enlarge it "
                            "(docker run --shm-size=2g), or lower --num_envs_per_worker, --num_workers or --rollout")
        self.specs = specs
        self.memory = torch.zeros(needed, dtype=torch.uint8).share_memory_() if memory is None else memory
        super().__init__(views(self.memory, specs))

    def __reduce__(self) -> tuple[Any, ...]:
        return Arena, (self.specs, self.memory)


def small_tables(cfg: Config, num_agents: int, num_shapings: int) -> dict[str, Spec]:
    """List what is shared beside trajectories and weights. num_agents: of an environment."""
    agents = (cfg.num_splits, cfg.num_envs_per_worker // cfg.worker_num_splits * num_agents)
    workers, policies, num_slots = cfg.num_workers, cfg.num_policies, math.prod(agents) * cfg.num_policies
    num_components = workers + policies * (len(cfg.learners) + cfg.policy_workers_per_policy)
    return {
        # of each agent
        "awaited_policy": Spec(agents, torch.int64),  # the policy that must act for it; IDLE: none
        "agent_snapshot": Spec(agents, torch.int64),  # the snapshot that it plays, or CURRENT
        "agent_slot": Spec(agents, torch.int64),  # its trajectory
        "agent_t": Spec(agents, torch.int64),  # its row there
        "agent_return": Spec(agents, torch.float64),  # that of its episode so far
        "slot_place": Spec((num_slots,), torch.int8),  # WITH_WORKER, HANDED_IN or TAKEN
        "heartbeats": Spec((num_components + 1, 3), torch.int64),  # the table of `runtime/processes.py`
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
        # set once: learners leave their datasets after at most one more SGD step, the evaluator its episodes
        "stopping": Spec((), torch.bool),
        "training_over": Spec((), torch.bool),  # set once: no learner of any rank begins another dataset
    }


# ---- trajectories ------------------------------------------------------------------------------------------------


def trajectory_specs(T: int, obs_space: dict[str, spaces.Space], action_space: spaces.Space, state_size: int,
                     columns: dict[str, Spec]) -> dict[str, Spec]:
    """List the tensors of a trajectory. Rows align as obs[t] -> actions[t] -> rewards[t] -> obs[t+1].

    columns: of each row, those of the algorithm, with names of their own.
    """
    specs = {
        # written by the rollout worker
        **{f"obs/{name}": Spec((T + 1, *space.shape), dtype_of(space)) for name, space in obs_space.items()},
        "rewards": Spec((T,), torch.float32),
        "terminated": Spec((T,), torch.bool),  # also where a life is lost and the episode goes on
        "truncated": Spec((T,), torch.bool),
        "valid": Spec((T,), torch.bool),  # False: a step that only reset the environment, or was never taken
        "new_episode": Spec((T + 1,), torch.bool),  # obs[t] is an episode's first: the hidden state before it is 0
        # written by the policy worker
        "rnn_states": Spec((T + 1, state_size), torch.float32),  # row t: the hidden state before obs[t] is seen
        "actions": Spec((T, num_columns(action_space)), torch.float32),
        "policy_version": Spec((T,), torch.int64),
    }
    return specs | {name: Spec((T, *spec.shape), spec.dtype) for name, spec in columns.items()}


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
    `wait=False`, within a dataset, waits for the event at the next publication (when the GPU is a whole SGD step behind
    it has enough to do) or after the dataset (`finish_publishing`).
    """

    WRITING = -2  # the version of a row that is not there yet, or is being replaced
    NEWEST_ROWS = 2
    NEWEST, NEWEST_VERSION = range(-2, 0)  # the numbers behind the versions of the rows

    def __init__(self, model: nn.Module, device: torch.device, num_snapshots: int) -> None:
        """Publish the model's weights as version 0."""
        rows = self.NEWEST_ROWS + num_snapshots
        specs = {name: Spec((rows, *tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
        self._rows = Arena(specs, None if device.type == "cpu" else
                           torch.zeros(num_bytes(specs), dtype=torch.uint8, device=device))
        # the version of each row; then the newest row, and its version
        self._numbers = torch.full((rows + 2,), self.WRITING).share_memory_()
        self._numbers[self.NEWEST :] = 0
        with tempfile.TemporaryFile() as file:  # a row is one byte of it
            self._locks = Connection(os.dup(file.fileno()))  # which can be handed to a process
        self._unfinished: tuple[int, int, Any] | None = None  # a publication: row, version, the event behind its copy
        self.publish(model, 0)

    @property
    def version(self) -> int:
        """Return the version of the newest weights, the number of SGD steps."""
        return int(self._numbers[self.NEWEST_VERSION])

    def version_of(self, snapshot: int) -> int:
        """Return the version of the newest weights (CURRENT), or of a snapshot, or `WRITING`."""
        return self.version if snapshot == CURRENT else int(self._numbers[self.NEWEST_ROWS + snapshot])

    @property
    def num_snapshots(self) -> int:
        """Count the snapshots there are."""
        return int((self._numbers[self.NEWEST_ROWS : self.NEWEST] != self.WRITING).sum())

    # the writer

    def publish(self, model: nn.Module, version: int, *, wait: bool = True) -> None:
        """Make the model's weights the newest ones.

        wait: only return when they are. Else, on a GPU, they are after the next `finish_publishing`.
        """
        self.finish_publishing()
        self._write(1 - int(self._numbers[self.NEWEST]), model, version)
        if wait or self._unfinished[-1] is None:
            self.finish_publishing()

    def add_snapshot(self, model: nn.Module, version: int) -> None:
        """Keep the model's weights as a snapshot, in the place of the oldest one."""
        self.finish_publishing()
        oldest = self._numbers[self.NEWEST_ROWS : self.NEWEST].argmin()  # or one that holds none
        self._write(self.NEWEST_ROWS + int(oldest), model, version)
        self.finish_publishing()

    def finish_publishing(self) -> None:
        """Wait until what was written last is copied; it counts as weights now. The writer calls this."""
        if self._unfinished is None:
            return
        row, version, written = self._unfinished
        if written:
            written.synchronize()
        self._numbers[row] = version
        self._lock(row, fcntl.LOCK_UN)
        if row < self.NEWEST_ROWS:
            self._numbers[self.NEWEST], self._numbers[self.NEWEST_VERSION] = row, version
        self._unfinished = None

    @torch.no_grad()
    def _write(self, row: int, model: nn.Module, version: int) -> None:
        """Begin to write a row, which holds no weights until `finish_publishing`."""
        self._lock(row, fcntl.LOCK_EX)
        self._numbers[row] = self.WRITING
        state = model.state_dict()
        torch._foreach_copy_([self._rows[name][row] for name in state], list(state.values()))
        self._unfinished = row, version, self._mark()

    def _lock(self, row: int, kind: int) -> None:
        fcntl.lockf(self._locks.fileno(), kind, 1, row)

    # readers

    def refresh(self, model: nn.Module, snapshot: int = CURRENT) -> int:
        """Copy the newest weights, or a snapshot, into a model (of any dtype); return their version.

        Where the snapshot is just being replaced, the newest weights are taken instead.
        """
        return self._read(model.state_dict(), snapshot)

    def read(self, snapshot: int = CURRENT) -> tuple[Data, int]:
        """Return a copy of the same, {name: tensor} on the CPU, and their version."""
        state = {name: torch.empty(spec.shape[1:], dtype=spec.dtype) for name, spec in self._rows.specs.items()}
        return state, self._read(state, snapshot)

    @torch.no_grad()
    def _read(self, state: Data, snapshot: int) -> int:
        """Copy a row that holds weights into these tensors; return their version."""
        while True:
            row = int(self._numbers[self.NEWEST]) if snapshot == CURRENT else self.NEWEST_ROWS + snapshot
            with contextlib.suppress(BlockingIOError):  # it is being replaced
                self._lock(row, fcntl.LOCK_SH | fcntl.LOCK_NB)
                try:
                    if (version := int(self._numbers[row])) != self.WRITING:
                        torch._foreach_copy_(list(state.values()), [self._rows[name][row] for name in state])
                        if event := self._mark():
                            event.synchronize()
                        return version
                finally:
                    self._lock(row, fcntl.LOCK_UN)
            snapshot = CURRENT

    def _mark(self) -> Any:
        """Return an event behind what was queued on a GPU; None on a CPU, where everything is finished."""
        device = self._rows.memory.device
        return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()


# ---- all of it ---------------------------------------------------------------------------------------------------


class PolicyBuffers:
    """What belongs to one policy: the kind of agents that it plays, its device, its weights, its inboxes."""

    def __init__(self, cfg: Config, algorithm: Any, kind: int, num_slots: int, model: nn.Module,
                 device: torch.device) -> None:
        self.kind, self.device = kind, device
        self.weights = SharedWeights(model, device, cfg.self_play_snapshots if cfg.self_play_past_fraction else 0)
        self.shared_training: SharedTraining | None = None  # of several learners in this system
        if len(cfg.learners) > 1:
            self.shared_training = SharedTraining(model, algorithm.make_optimizer, len(cfg.learners), device)
        self.requests = Inbox(cfg.num_splits + cfg.policy_workers_per_policy)
        self.trajectories_done = Inbox(num_slots)
        self.commands = [Inbox(MAX_COMMANDS) for _ in cfg.learners]  # the first one obeys most
        self.passed_on = [Inbox(num_slots) for _ in cfg.roles[1:]]  # from role to role


class SharedBuffers:
    """All that the components share. Made by the trainer, handed to every process at its start."""

    def __init__(self, cfg: Config, algorithm: Any, info: EnvInfo, kind_of_policy: list[int], models: list[nn.Module],
                 devices: list[torch.device]) -> None:
        """Allocate.

        Args:
            algorithm: an `Algorithm`, for its columns and its optimizer.
            kind_of_policy: which kind of agents (`EnvInfo.kinds`) each policy plays.
            models, devices: of each policy.
        """
        self.info, self.kind_of_policy = info, kind_of_policy
        self.store_prefix = ""  # where several ranks find each other (`runtime/several.py`); the trainer sets it
        self.start = 0  # how often the run was started before (`runtime/utils.py`); the trainer sets it
        self.slots_per_worker = cfg.num_envs_per_worker * len(info.agents)  # of each policy: all agents may play it
        self.num_slots = cfg.num_workers * self.slots_per_worker  # of each policy
        self.policies = [PolicyBuffers(cfg, algorithm, kind, self.num_slots, model, device)
                         for kind, model, device in zip(kind_of_policy, models, devices, strict=True)]
        answers = cfg.num_policies * (self.slots_per_worker + cfg.worker_num_splits)
        self.worker_inboxes = [Inbox(answers + MAX_COMMANDS) for _ in range(cfg.num_workers)]
        self.evaluations = Inbox(MAX_COMMANDS + cfg.num_policies)

        self.shaping_names = list(flatten_shaping(info.shaping)) if cfg.with_pbt and info.shaping is not None else []
        self.tables = Arena(small_tables(cfg, len(info.agents), len(self.shaping_names)))
        vars(self).update(self.tables)
        state_sizes = dict(zip(kind_of_policy, (model.state_size for model in models), strict=True))
        self.specs = [trajectory_specs(cfg.rollout, kind.obs_space, kind.action_space, state_sizes[number],
                                       algorithm.columns(kind.action_space))
                      for number, kind in enumerate(info.kinds)]
        # Slots are numbered through all policies. For each kind there is a tensor of all, {name: [slots, T(+1), ...]}:
        # a rollout worker writes those of several policies together. Slots of policies of other kinds stay empty.
        total = cfg.num_policies * self.num_slots
        self.storage = [Arena({name: Spec((total, *spec.shape), spec.dtype) for name, spec in specs.items()})
                        for specs in self.specs]
        self.best_score.fill_(-math.inf)
        self.settings[:] = torch.tensor([*tunable(cfg).values()], dtype=torch.float64)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in self.tables}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state | state["tables"])

    def spaces_of(self, policy: int) -> tuple[dict[str, spaces.Space], spaces.Space]:
        """Return the observation leaves and the action space of a policy."""
        kind = self.info.kinds[self.policies[policy].kind]
        return kind.obs_space, kind.action_space

    def trajectories_of(self, policy: int) -> Data:
        """Return all trajectories of the kind of a policy, {name: [slots, T(+1), ...]}."""
        return self.storage[self.policies[policy].kind]

    def slots_of(self, policy: int) -> range:
        """Return the slots of a policy."""
        return range(policy * self.num_slots, (policy + 1) * self.num_slots)

    def worker_of_slot(self, slot: int) -> int:
        """Return the rollout worker that owns a slot."""
        return slot % self.num_slots // self.slots_per_worker

    def count_sampled(self, policy: int, rows: slice = slice(None)) -> Tensor:
        """Count env_steps, and decisions of a policy, sampled so far; in the last row are those sampled elsewhere."""
        return torch.stack([self.env_steps[rows].sum(), self.policy_steps[rows, policy].sum()])

    def origin(self, cfg: Config, policy: int) -> Values:
        """Return what every checkpoint says of the policy that it is of, and of what was sampled so far."""
        return {"algo": str(cfg.algo), "config": cfg.as_dict(),
                "spaces": self.info.kinds[self.policies[policy].kind].describe(),
                "env_steps": int(self.env_steps.sum()), "policy_steps": int(self.policy_steps[:, policy].sum())}

    def counts(self, policy: int) -> dict[str, int]:
        """Return how much the published weights of a policy have learned."""
        return {"sgd_steps": self.policies[policy].weights.version,
                "env_steps_trained": int(self.decisions_trained[policy])}

    def place_in_population(self, cfg: Config, policy: int) -> Values:
        """Return the settings and the reward shaping that a population gives a policy, and when they were updated."""
        if not cfg.with_pbt:
            return {}
        return {"settings": dict(zip(tunable(cfg), self.settings[policy].tolist(), strict=True)),
                "shaping": dict(zip(self.shaping_names, self.shaping[policy].tolist(), strict=True)),
                "last_update": int(self.last_update[policy])}

    def seen_by(self, role: str, policy: int) -> "SharedBuffers":
        """Return the same buffers without the weights that a process does not use: it must not open their GPU."""
        seen = copy.copy(self)
        seen.policies = [copy.copy(own) for own in self.policies]
        for number, own in enumerate(seen.policies):
            if role == "rollout_worker" or (role != "evaluator" and number != policy):
                own.weights, own.shared_training = copy.copy(own.weights), None
                del own.weights._rows, own.weights._locks  # its numbers are left
        return seen


# ---- what the trainer says ---------------------------------------------------------------------------------------


class Commands:
    """What rollout workers and learners were told, and who has not answered yet."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.buffers = buffers
        self.told: Message = (PAUSE, 0)  # the rollout workers
        self.paused: set[int] = set()  # the workers that have confirmed the last pause
        self.open: list[tuple[int, int, int, int]] = []  # (policy, learner, kind, index), in the order of sending

    def tell(self, kind: int) -> None:
        """Let all workers PAUSE or RESUME; each time with another number."""
        self.told = kind, self.told[1] + 1
        self.paused.clear()
        for inbox in self.buffers.worker_inboxes:
            inbox.put(self.told)

    def send(self, policy: int, kind: int, index: int, learner: int = 0) -> None:
        """Send a command (kind, index) to a learner of a policy."""
        self.open.append((policy, learner, kind, index))
        self.buffers.policies[policy].commands[learner].put((kind, index))

    def hear(self, report: tuple) -> None:
        """Note an answer; that to an earlier pause is ignored."""
        match report:
            case ("paused", worker, number) if self.told == (PAUSE, number):
                self.paused.add(worker)
            case ("answered", command) if command in self.open:
                self.open.remove(command)

    def repeat(self) -> None:
        """Say all of it once more: everybody has begun again, the workers paused."""
        if self.are_told_to_sample():
            self.tell(RESUME)
        else:
            self.paused.update(range(len(self.buffers.worker_inboxes)))
        again, self.open = dict.fromkeys(self.open), []
        for policy, learner, kind, index in again:
            self.send(policy, kind, index, learner)

    def are_told_to_sample(self) -> bool:
        """Return whether the workers are to sample: from the beginning of a call of `Trainer.train` to its pause."""
        return self.told[0] == RESUME

    def are_paused(self) -> bool:
        """Return whether no action is under way anywhere."""
        return len(self.paused) == len(self.buffers.worker_inboxes)

    def not_answered(self, kind: int) -> str:
        """Name the policies with a learner that has not answered a command of a kind; "" when all have."""
        return ", ".join(f"policy {policy}" for policy in sorted({each[0] for each in self.open if each[2] == kind}))
