"""How finished trajectories become datasets.

`Fifo` hands every trajectory out once, in the order of arrival: the feed of an on-policy algorithm. Two batches exist,
so that the next one is filled while the last SGD step of this one runs. It is not filled earlier: the trajectories wait
in their slots, the rollout workers wait for slots, and so memory and policy lag stay bounded when the learner is the
slowest part.

Below are the ways from a dataset to a minibatch, and from what a network gives back to trajectories. Another `Feed` is
in `algorithms/replay_feed.py`. Read next: `learner.py`.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from config import Config
from shared_buffers import HANDED_IN, SLOTS, TAKEN, WITH_WORKER, SharedBuffers, Spec, allocate

Data = dict[str, Tensor]


class Batch:
    """The trajectories of one dataset, [B, T(+1), ...], while it is filled and while it is trained on."""

    def __init__(self, specs: dict[str, Spec], size: int, *, pinned: bool = False) -> None:
        """Allocate it; pinned: in memory that a GPU can read by itself."""
        tensors = allocate(specs, size, shared=False)
        self.tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()} if pinned else tensors
        self.slots: list[int] = []  # where its trajectories came from

    @property
    def num_free(self) -> int:
        """Count the trajectories that still fit."""
        return len(self.tensors["rewards"]) - len(self.slots)


def scale_rewards(cfg: Config, rewards: Tensor) -> Tensor:
    """Scale and clip the rewards of the environment."""
    return (rewards * cfg.reward_scale).clamp(-cfg.reward_clip, cfg.reward_clip)


class Feed:
    """Takes finished trajectories of one policy, in a thread of its own, the batcher; hands out datasets."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int,
                 deliver: Callable[[Any], None] | None = None) -> None:
        """Make it; deliver(dataset) trains at once (serial mode), None: `next` returns it."""
        self.cfg, self.buffers, self.policy = cfg, buffers, policy
        self.inbox = buffers.policies[policy].trajectories_done
        self.first_slot = buffers.policies[policy].first_slot
        self.specs = buffers.specs[buffers.policies[policy].kind]
        self.trajectories = buffers.trajectories_of(policy)
        self.slot_place = buffers.slot_place.numpy()
        self.next_batch: queue.Queue = queue.Queue()  # from training to the batcher
        self.datasets: queue.Queue = queue.Queue()  # from the batcher to training; also an exception
        self.deliver = deliver or self.datasets.put
        self.is_inserting = False

    def turn(self) -> None:
        """Do all there is to do (serial mode)."""
        while not self.inbox.empty():
            self.inbox.serve(self.take)

    def start(self) -> None:
        """Start the batcher."""
        threading.Thread(target=self._run, daemon=True, name="batcher").start()

    def _run(self) -> None:
        try:
            while True:
                self.serve()
        except BaseException as error:  # noqa: BLE001  raised again by the training thread
            self.datasets.put(error)

    def serve(self) -> None:
        """Wait for trajectories and take them."""
        self.inbox.serve(self.take, self.num_wanted)

    def take(self, kind: int, *slots: int) -> None:
        """Take the trajectories that were not taken yet: a message may come twice."""
        place = self.slot_place
        fresh = [slot for slot in dict.fromkeys(slots) if place[slot] == HANDED_IN]
        self.is_inserting = True  # first, see `is_idle`
        place[fresh] = TAKEN
        if fresh:
            self.insert(kind, *fresh)
        self.is_inserting = False

    @property
    def num_wanted(self) -> int:
        """Count the trajectories that may be taken at once; another learner may take the rest."""
        return self.cfg.trajectories_per_dataset

    def insert(self, kind: int, *slots: int) -> None:
        """Take the trajectories in these slots; wait while there is more than training can take."""
        raise NotImplementedError

    def next(self, timeout_sec: float) -> Any:
        """Return the next dataset; None: there is none within so many seconds."""
        try:
            dataset = self.datasets.get(timeout=timeout_sec)
        except queue.Empty:
            return None
        if isinstance(dataset, BaseException):
            raise dataset
        return dataset

    def is_idle(self) -> bool:
        """Tell, in the training thread, whether there is nothing to train on until more trajectories are handed in."""
        own = self.slot_place[self.first_slot : self.first_slot + self.buffers.num_slots]
        # in this order: the batcher writes them in the opposite one
        return not ((own == HANDED_IN).any() or self.is_inserting or not self.datasets.empty())

    def allow_next(self) -> None:
        """Let the batcher make the next dataset, since the last SGD step begins."""
        raise NotImplementedError

    def release(self, dataset: Any) -> None:
        """Take a dataset back that was trained on."""
        raise NotImplementedError

    def admit(self, data: Data, sgd_steps: int) -> Tensor:
        """Decide which rows of a dataset are trained on, after so many SGD steps; return how old they are, in these.

        The dataset is on the CPU, and is changed in place.
        """
        raise NotImplementedError

    def split(self, generator: torch.Generator) -> list[Tensor] | list[slice]:
        """Divide a dataset into minibatches; return the places of their trajectories, [B] int64 or slices."""
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """Describe what is kept, for the records."""
        return {}

    @contextlib.contextmanager
    def saving(self) -> Iterator[dict[str, Any]]:
        """Hold what a periodic checkpoint should keep, and do not change it meanwhile."""
        yield {}

    def resume(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint has kept."""

    def free_slots(self, slots: Sequence[int]) -> None:
        """Give slots back to their rollout workers."""
        self.slot_place[list(slots)] = WITH_WORKER
        for worker, own in itertools.groupby(slots, self.buffers.worker_of_slot):
            self.buffers.worker_inboxes[worker].put((SLOTS, *own))


class Fifo(Feed):
    """Hands out every trajectory once. The batcher copies it from its slot, which is free again at once.

    In turns (--async_rl=False) all slots are free again at once, when every one is copied and nothing is being trained
    on: nothing is sampled meanwhile. A dataset of a whole number of trajectories of every agent has no policy lag.
    """

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, *, pinned: bool,
                 deliver: Callable[[Batch], None] | None = None) -> None:
        """Allocate both batches."""
        super().__init__(cfg, buffers, policy, deliver)
        # the batcher fills one; the other is trained on, or waits in `spare` for `allow_next`
        self.filling, self.spare = (Batch(self.specs, cfg.trajectories_per_dataset, pinned=pinned) for _ in range(2))
        # in turns: the slots that are copied, but not free yet, and how many datasets wait or are trained on
        self.held = []
        self.num_training = 0
        self.lock = threading.Lock()

    @property
    def num_wanted(self) -> int:
        return self.filling.num_free

    def insert(self, kind: int, *slots: int) -> None:
        """Copy trajectories into the batch that is being filled; hand it over whenever it is complete, and wait."""
        assert kind == SLOTS, kind
        while slots and not self.buffers.stopping:
            fitting = slots[: self.filling.num_free]
            slots = slots[self.filling.num_free:]
            self.copy(fitting)
            is_full = not self.filling.num_free
            if self.cfg.async_rl:
                self.free_slots(fitting)
            else:
                self.take_turns(fitting, int(is_full))
            if is_full:
                self.deliver(self.filling)
                self.filling = self.next_batch.get()  # back-pressure

    def copy(self, slots: Sequence[int]) -> None:
        """Copy trajectories into the batch that is being filled."""
        begin = len(self.filling.slots)
        index = torch.tensor(slots) - self.first_slot
        for name, tensor in self.filling.tensors.items():
            torch.index_select(self.trajectories[name], 0, index, out=tensor[begin : begin + len(slots)])
        self.filling.slots += slots

    def allow_next(self) -> None:
        self.next_batch.put(self.spare)

    def admit(self, data: Data, sgd_steps: int) -> Tensor:
        """Scale the rewards, and leave out what too old a policy acted, or one that was replaced."""
        cfg, first_version = self.cfg, self.buffers.first_version[self.policy]
        lag = sgd_steps - data["policy_version"]
        fresh = (lag <= cfg.max_policy_lag) & (data["policy_version"] >= first_version)
        data["valid"] &= fresh  # in place: from where it lies a GPU copies it without a wait
        data["rewards"].copy_(scale_rewards(cfg, data["rewards"]))
        return lag

    def split(self, generator: torch.Generator) -> list[Tensor]:
        """Draw the minibatches of an epoch at random."""
        order = torch.randperm(self.cfg.trajectories_per_dataset, generator=generator)
        return list(order.split(self.cfg.trajectories_per_minibatch))

    def take_turns(self, copied: Sequence[int], begun: int) -> None:
        """Note copied slots, and a dataset that is complete (1) or trained on (-1); free all when all is done."""
        with self.lock:
            self.held += copied
            self.num_training += begun
            if not self.num_training and len(self.held) == self.buffers.num_slots:
                self.free_slots(sorted(self.held))
                self.held.clear()

    def release(self, dataset: Batch) -> None:
        dataset.slots.clear()
        self.spare = dataset
        if not self.cfg.async_rl:
            self.take_turns((), -1)


def select(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    """Return rows of a tensor; a slice of them is not copied."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def upload(minibatches: list[Tensor] | list[slice], device: torch.device) -> list[Tensor] | list[slice]:
    """Copy the places of minibatches to a device, in one piece, without waiting for it."""
    if device.type == "cpu" or isinstance(minibatches[0], slice):
        return minibatches
    places = torch.cat(minibatches).pin_memory().to(device, non_blocking=True)
    return list(places.split([len(minibatch) for minibatch in minibatches]))


def join_groups(rows: Tensor, steps: list[int], num_trajectories: int) -> Tensor:
    """Join the outputs of groups of sequences, [sum of steps, ...], group by group, into trajectories [B, T+1, ...]."""
    groups = rows.split(steps) if len(steps) > 1 else [rows]
    return join([group.unflatten(0, (num_trajectories, -1)) for group in groups], 1)


def join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; `torch.cat` copies a single one."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
