"""How finished trajectories become datasets.

`Feed` hands every trajectory out once, in the order of arrival: the feed of an on-policy algorithm. Two datasets exist,
so that side by side the next one is filled while the last SGD step of this one runs. It is not filled earlier: the
trajectories wait in their slots, the rollout workers wait for slots, and so memory and policy lag stay bounded when the
learner is the slowest part. Another one is in `algorithms/replay.py`. Read next: `learner.py`.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from config import Config, Values
from envs.flat_spaces import Data
from shared_buffers import HANDED_IN, SLOTS, TAKEN, WITH_WORKER, SharedBuffers, Spec, allocate


class Dataset:
    """Trajectories [B, T(+1), ...], while they are collected and while they are trained on."""

    def __init__(self, specs: dict[str, Spec], size: int, *, pinned: bool = False) -> None:
        """Allocate it; pinned: in memory that a GPU can read by itself."""
        tensors = allocate(specs, size)
        self.tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()} if pinned else tensors


def scale_rewards(cfg: Config, rewards: Tensor) -> Tensor:
    """Scale and clip the rewards of the environment."""
    return (rewards * cfg.reward_scale).clamp(-cfg.reward_clip, cfg.reward_clip)


class Feed:
    """Takes finished trajectories of one policy, in a thread of its own, the batcher; hands out datasets.

    This one hands out every trajectory once. The batcher copies it from its slot, which is free again at once. In turns
    (--async_rl=False) all slots are free again together, when every one is copied and nothing is being trained on:
    nothing is sampled meanwhile. A dataset of a whole number of trajectories of every agent has no policy lag.

    Another one replaces some of `make_dataset` (which `__init__` calls), `insert` (perhaps of no slots), `allow_next`,
    `release`, `admit` and `split`.
    """

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int) -> None:
        """Allocate two datasets, one to be filled and `spare`, which waits for `allow_next` (in turns: for ever)."""
        self.cfg = cfg
        self.buffers = buffers
        self.policy = policy
        own = buffers.policies[policy]
        self.inbox = own.trajectories_done
        self.own = buffers.slots_of(policy)
        self.specs = buffers.specs[own.kind]
        self.trajectories = buffers.trajectories_of(policy)
        self.slot_place = buffers.slot_place.numpy()
        self.returned = queue.Queue()  # datasets to be filled, from training to the batcher
        self.datasets = queue.Queue()  # from the batcher to training; also an exception
        self.deliver: Callable[[Any], None] = self.datasets.put  # in serial mode: what trains at once
        self.is_inserting = False
        self.pinned = own.device.type != "cpu"
        self.filling, self.spare = self.make_dataset(), self.make_dataset()
        self.num_filled = 0  # trajectories
        self.held: list[int] = []  # in turns: slots that are copied, but not free yet

    def make_dataset(self) -> Any:
        return Dataset(self.specs, self.cfg.trajectories_per_dataset, pinned=self.pinned)

    # ---- the batcher ---------------------------------------------------------------------------------------------

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
        """Wait for trajectories and take them, as many as fit: another learner may take the rest."""
        self.inbox.serve(self.take, self.num_wanted)

    def take(self, kind: int, *slots: int) -> None:
        """Take the trajectories that were not taken yet: a message may come twice."""
        place = self.slot_place
        fresh = [slot for slot in dict.fromkeys(slots) if place[slot] == HANDED_IN]
        self.is_inserting = True  # first, see `is_idle`
        place[fresh] = TAKEN
        self.insert(fresh)
        self.is_inserting = False

    @property
    def num_wanted(self) -> int:
        """Count the trajectories that are missing in the dataset that is being filled."""
        return self.cfg.trajectories_per_dataset - self.num_filled

    def insert(self, slots: Sequence[int]) -> None:
        """Copy trajectories into the dataset that is being filled; hand it over whenever it is complete, and wait."""
        while slots and not self.buffers.stopping:
            fitting, slots = slots[: self.num_wanted], slots[self.num_wanted :]
            self.copy(fitting)
            if self.cfg.async_rl:
                self.free_slots(fitting)
            else:
                self.held += fitting
            if not self.num_wanted:
                self.deliver(self.filling)
                self.filling, self.num_filled = self.returned.get(), 0  # back-pressure
            if len(self.held) == self.buffers.num_slots:
                self.free_slots(sorted(self.held))
                self.held.clear()

    def copy(self, slots: Sequence[int]) -> None:
        """Copy trajectories into the dataset that is being filled."""
        begin = self.num_filled
        index = torch.tensor(slots)
        for name, tensor in self.filling.tensors.items():
            torch.index_select(self.trajectories[name], 0, index, out=tensor[begin : begin + len(slots)])
        self.num_filled += len(slots)

    def free_slots(self, slots: Sequence[int]) -> None:
        """Give slots back to their rollout workers."""
        self.slot_place[list(slots)] = WITH_WORKER
        for worker, own in itertools.groupby(slots, self.buffers.worker_of_slot):
            self.buffers.worker_inboxes[worker].put((SLOTS, *own))

    # ---- training ------------------------------------------------------------------------------------------------

    def next(self, timeout_sec: float) -> Any:
        """Return the next dataset; None: there is none within so many seconds."""
        try:
            dataset = self.datasets.get(timeout=timeout_sec)
        except queue.Empty:
            return None
        if isinstance(dataset, BaseException):
            raise dataset
        return dataset

    def has_next(self) -> bool:
        """Return whether the next dataset waits, or no slot is left to sample into."""
        return (self.slot_place[self.own] == HANDED_IN).sum() >= min(self.cfg.trajectories_per_dataset, len(self.own))

    def is_idle(self) -> bool:
        """Return whether there is nothing to train on until more is handed in; for the training thread."""
        # in this order: the batcher writes them in the opposite one
        return not ((self.slot_place[self.own] == HANDED_IN).any() or self.is_inserting or not self.datasets.empty())

    def allow_next(self) -> None:
        """Allow the batcher to fill the next dataset, since the last SGD step begins; in turns it must have ended."""
        if self.cfg.async_rl:
            self.returned.put(self.spare)

    def release(self, dataset: Any) -> None:
        """Take a dataset back that was trained on."""
        self.spare = dataset
        if not self.cfg.async_rl:
            self.returned.put(dataset)

    def admit(self, data: Data, sgd_steps: int) -> Tensor:
        """Decide which rows of a dataset are trained on, after so many SGD steps; return how old they are, in these.

        Those are left out that too old a policy acted, or one that was replaced. The rewards are scaled. The dataset is
        on the CPU, and is changed in place.
        """
        lag = sgd_steps - data["policy_version"]
        data["valid"] &= lag <= self.cfg.max_policy_lag  # in place: from where it lies a GPU copies it without a wait
        data["valid"] &= data["policy_version"] >= self.buffers.first_version[self.policy]
        data["rewards"].copy_(scale_rewards(self.cfg, data["rewards"]))
        return lag

    def split(self, generator: torch.Generator) -> list[Tensor] | list[slice]:
        """Divide a dataset into the minibatches of an epoch, at random; return the places of their trajectories.

        Each is [B] int64, or a slice.
        """
        order = torch.randperm(self.cfg.trajectories_per_dataset, generator=generator)
        return list(order.split(self.cfg.batch_size // self.cfg.rollout))

    def statistics(self) -> Values:
        """Describe what is kept, for the records."""
        return {}


def cut(trajectories: Data, length: int) -> list[Data]:
    """Cut trajectories [B, T+1, ...] into the sequences [N, L, ...] that the core is unrolled over.

    Every sequence begins with the hidden state stored when acting. A feed-forward policy has sequences of one step;
    backpropagation through the whole rollout has the trajectories themselves; through R < T steps there are two groups
    of sequences, of R steps, and of one step each for the bootstrap observations.
    """
    if length == 1:
        return [{name: tensor.flatten(0, 1)[:, None] for name, tensor in trajectories.items()}]
    if length == trajectories["new_episode"].shape[1] - 1:
        return [trajectories]
    return [{name: tensor[:, :-1].unflatten(1, (-1, length)).flatten(0, 1) for name, tensor in trajectories.items()},
            {name: tensor[:, -1:] for name, tensor in trajectories.items()}]


def select(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    """Return rows of a tensor; a slice of them is not copied."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
