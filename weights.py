"""The shared weights of one policy: one writer, any number of readers, no lock.

The newest weights lie twice in shared memory (in GPU memory on a GPU), each time as one flat float32 vector. The
learner fills the older copy and then counts one publication more, which makes it the newest. A reader copies the
newest one and looks at the count again: only if the learner has begun to write into that copy meanwhile, it reads once
more. So whoever dies or freezes, at whatever moment, holds nothing that another waits for.

On a GPU a copy is only queued, and what two processes queue there comes in no order. So a publication counts once the
GPU has passed an event behind its copy, and a reader waits for its own copy before it looks at the count. A learner
that publishes with `wait=False`, within a dataset, does not wait for the event: it asks for it at the next publication
(which waits if the GPU is a whole SGD step behind, and has enough to do) and after the dataset (`finish_publishing`).

Beside them lie the frozen snapshots for self-play. Used by the learner (`runtime/training_state.py` and `reducer.py`,
write), `policy_worker.py` and `runtime/evaluator.py` (read). Read next: `rollout_worker.py`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CURRENT = -1  # the "snapshot" of an agent that plays the newest weights
WRITING = -2  # the version of a snapshot that is not there yet, or is being replaced
NEWEST_ROWS = 2
BEGUN, FINISHED, TAKEN, FIRST_VERSION = range(-4, 0)  # the numbers behind the versions of the rows


class SharedWeights:
    """All parameters and buffers of a model, their version, and snapshots of earlier ones.

    What makes this safe is the order of the operations: x86 processors show stores in the order in which they were
    made. Others may not; none was tried.
    """

    def __init__(self, model: nn.Module, device: torch.device, num_snapshots: int) -> None:
        """Publish the model's weights as version 0."""
        state = model.state_dict()
        size = sum(tensor.numel() for tensor in state.values())
        self._flat = torch.empty(NEWEST_ROWS + num_snapshots, size, device=device)  # one row for each copy
        if device.type == "cpu":
            self._flat.share_memory_()
        # one tensor, since each takes a file descriptor in every process: the version of each row; then how many
        # publications have begun, how many are finished, how many snapshots were taken, and `first_version`
        self._numbers = torch.zeros(NEWEST_ROWS + num_snapshots + 4, dtype=torch.int64).share_memory_()
        self._numbers[NEWEST_ROWS : NEWEST_ROWS + num_snapshots] = WRITING  # there is none yet
        self._max_snapshots = num_snapshots
        self._unfinished: tuple[int, int, Any] | None = None  # a publication: its number, version and event
        self.publish(model, 0)

    # ---- numbers -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the version of the newest weights, the number of SGD steps."""
        return int(self._numbers[int(self._numbers[FINISHED]) % NEWEST_ROWS])

    def snapshot_version(self, snapshot: int) -> int:
        """Return the version of a snapshot, or `WRITING`."""
        return int(self._numbers[NEWEST_ROWS + snapshot])

    @property
    def num_snapshots(self) -> int:
        """Count the snapshots there are."""
        return min(int(self._numbers[TAKEN]), self._max_snapshots)

    @property
    def first_version(self) -> int:
        """Return the version from which on the weights are this policy's (population-based training).

        What older ones have acted is of another policy, whose place this one has taken.
        """
        return int(self._numbers[FIRST_VERSION])

    @first_version.setter
    def first_version(self, version: int) -> None:
        self._numbers[FIRST_VERSION] = version

    def without_tensors(self) -> "SharedWeights":
        """Return the numbers alone, for a process that must not open the GPU on which the weights lie."""
        numbers = copy.copy(self)
        del numbers._flat
        return numbers

    def __getstate__(self) -> dict[str, Any]:  # for another process, which cannot ask for the event
        self.finish_publishing()
        return self.__dict__

    # ---- the writer ----------------------------------------------------------------------------------------------

    def publish(self, model: nn.Module, version: int, *, wait: bool = True) -> None:
        """Make the model's weights the newest ones.

        wait: only return when they are. Else, on a GPU, they are when `finish_publishing` finds them copied.
        """
        self.finish_publishing()  # else both rows would be written to, and readers would find none
        number = int(self._numbers[FINISHED]) + 1
        self._numbers[BEGUN] = number
        self._write(number % NEWEST_ROWS, model)
        self._unfinished = number, version, self._mark()
        self.finish_publishing(wait=wait)

    def finish_publishing(self, *, wait: bool = True) -> None:
        """Count the last publication, if its copy is finished, as the newest weights. The writer calls this.

        wait: wait for the copy. Else, while it is under way, the weights before it stay the newest.
        """
        if self._unfinished is None:
            return
        number, version, event = self._unfinished
        if event is not None and not event.query():
            if not wait:
                return
            event.synchronize()
        self._numbers[number % NEWEST_ROWS] = version
        self._numbers[FINISHED] = number
        self._unfinished = None

    def add_snapshot(self, model: nn.Module, version: int) -> None:
        """Keep the model's weights as a snapshot, in the place of the oldest one."""
        taken = int(self._numbers[TAKEN])
        row = NEWEST_ROWS + taken % self._max_snapshots
        self._numbers[row] = WRITING
        self._write(row, model)
        self._finish_copies()
        self._numbers[row] = version
        self._numbers[TAKEN] = taken + 1

    @torch.no_grad()
    def _write(self, row: int, model: nn.Module) -> None:
        tensors = [tensor.flatten() for tensor in model.state_dict().values()]
        if tensors[0].device == self._flat.device:
            torch.cat(tensors, out=self._flat[row])
        else:
            self._flat[row].copy_(torch.cat(tensors))

    # ---- readers -------------------------------------------------------------------------------------------------

    def refresh(self, model: nn.Module, snapshot: int = CURRENT) -> int:
        """Copy the newest weights, or a snapshot, into a model (of any dtype); return their version.

        Where the snapshot is just being replaced, the newest weights are taken instead.
        """
        state = model.state_dict()
        device = next(iter(state.values())).device  # that of the weights, or the CPU

        def copy_into(row: Tensor) -> None:
            groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # on a GPU one launch for each
            for tensor, part in zip(state.values(), unflatten(row.to(device), state).values(), strict=True):
                to, source = groups.setdefault(tensor.dtype, ([], []))
                to.append(tensor)
                source.append(part)
            for to, source in groups.values():
                torch._foreach_copy_(to, source)

        return self._read(copy_into, snapshot)

    def read(self, model: nn.Module, snapshot: int = CURRENT) -> tuple[dict[str, Tensor], int]:
        """Return a copy of the same, {name: float32} on the CPU, and their version.

        model: one with the same parameters, of any dtype; it stays as it is.
        """
        flat = torch.empty(self._flat.shape[1])
        version = self._read(flat.copy_, snapshot)
        return unflatten(flat, model.state_dict()), version

    @torch.no_grad()
    def _read(self, copy_row: Callable[[Tensor], Any], snapshot: int) -> int:
        """Copy a row; do it again if it was overwritten meanwhile."""
        while True:
            number = int(self._numbers[FINISHED])
            row = number % NEWEST_ROWS if snapshot == CURRENT else NEWEST_ROWS + snapshot
            version = int(self._numbers[row])
            copy_row(self._flat[row])
            self._finish_copies()
            if snapshot == CURRENT and self._numbers[BEGUN] < number + NEWEST_ROWS:  # nobody has written to it since
                return version
            if snapshot != CURRENT and WRITING != version == int(self._numbers[row]):
                return version
            snapshot = CURRENT

    def _finish_copies(self) -> None:
        """Wait for what was queued on a GPU."""
        if event := self._mark():
            event.synchronize()

    def _mark(self) -> Any:
        """Return an event behind what was queued on a GPU; None on a CPU, where everything is finished."""
        device = self._flat.device
        if device.type == "cpu":
            return None
        return torch.get_device_module(device).current_stream(device).record_event()


def unflatten(flat: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of a vector that holds all tensors of a state dict, in their shapes, as views."""
    parts = flat.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), parts, strict=True)}
