"""How finished trajectories become datasets.

`Fifo` hands every trajectory out once, in the order of arrival: the feed of an on-policy algorithm. Two batches exist,
so that the next one is filled while the last SGD step of this one runs. It is not filled earlier: the trajectories wait
in their slots, the rollout workers wait for slots, and so memory and policy lag stay bounded when the learner is the
slowest part.

Another feed, for replay for example, has the same methods: `start`, `insert`, `next`, `allow_next` and `release`. Used
by `learner.py`. Read next: `reducer.py`.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from config import Config
from shared_buffers import SLOTS, SharedBuffers, Spec, allocate


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


class Fifo:
    """Hands out every trajectory once. The batcher, a thread, copies it from its slot, which is free again at once.

    In synchronous mode a slot is free only after training on it, so that nothing is sampled meanwhile.
    """

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, *, pinned: bool,
                 deliver: Callable[[Batch], None] | None = None) -> None:
        """Allocate both batches; deliver(dataset) trains at once (serial mode), None: `next` returns it."""
        self.cfg, self.buffers, self.inbox = cfg, buffers, buffers.policies[policy].trajectories_done
        self.first_slot = buffers.policies[policy].first_slot
        self.trajectories = buffers.trajectories_of(policy)
        specs = buffers.specs[buffers.policies[policy].kind]
        # the batcher fills one; the other is trained on, or waits in `spare` for `allow_next`
        self.filling, self.spare = (Batch(specs, cfg.trajectories_per_dataset, pinned=pinned) for _ in range(2))
        self.next_batch: queue.Queue[Batch] = queue.Queue()  # from training to the batcher
        self.datasets: queue.Queue[Batch | BaseException] = queue.Queue()  # from the batcher to training
        self.deliver = deliver or self.datasets.put

    def start(self) -> None:
        """Start the batcher."""
        threading.Thread(target=self._run, daemon=True, name="batcher").start()

    def _run(self) -> None:
        try:
            while self.inbox.serve(self.insert, self.filling.num_free):  # another learner may take the rest
                pass
        except BaseException as error:  # noqa: BLE001  raised again by the training thread
            self.datasets.put(error)

    def insert(self, kind: int, *slots: int) -> None:
        """Copy trajectories into the batch that is being filled; hand it over whenever it is complete, and wait."""
        assert kind == SLOTS, kind
        while slots and not self.buffers.stopping:
            fitting, slots = slots[: self.filling.num_free], slots[self.filling.num_free:]
            self.copy(fitting)
            if self.cfg.async_rl:
                self.free_slots(fitting)
            if not self.filling.num_free:
                self.deliver(self.filling)
                self.filling = self.next_batch.get()  # back-pressure

    def copy(self, slots: Sequence[int]) -> None:
        """Copy trajectories into the batch that is being filled."""
        begin = len(self.filling.slots)
        index = torch.tensor(slots) - self.first_slot
        for name, tensor in self.filling.tensors.items():
            torch.index_select(self.trajectories[name], 0, index, out=tensor[begin : begin + len(slots)])
        self.filling.slots += slots

    def next(self, timeout_sec: float) -> Batch | None:
        """Return the next dataset; None: there is none within so many seconds."""
        try:
            dataset = self.datasets.get(timeout=timeout_sec)
        except queue.Empty:
            return None
        if isinstance(dataset, BaseException):
            raise dataset
        return dataset

    def allow_next(self) -> None:
        """Let the batcher fill the other batch, since the last SGD step begins."""
        self.next_batch.put(self.spare)

    def release(self, dataset: Batch) -> None:
        """Take a dataset back that was trained on."""
        if not self.cfg.async_rl:
            self.free_slots(sorted(dataset.slots))
        dataset.slots.clear()
        self.spare = dataset

    def free_slots(self, slots: Sequence[int]) -> None:
        """Give slots back to their rollout workers."""
        for worker, own in itertools.groupby(slots, self.buffers.worker_of_slot):
            self.buffers.worker_inboxes[worker].put((SLOTS, *own))
