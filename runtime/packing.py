"""Packing: what a batch of acting needs goes to a GPU as one copy, and what comes of it returns as one copy.

A copy takes about the same time for ten bytes as for ten thousand, and the CPU waits for each one that returns: here
that is the only wait of a batch. Tensors lie one after another in a buffer of bytes, those with the largest items
first, so that each begins at a multiple of its item's size and can be read where it lies.

Used by `policy_worker.py` on a GPU; on a CPU nothing is packed.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from runtime.acceleration import Recorded

Data = dict[str, Tensor]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of each tensor, in order
MAX_GRAPHS = 100  # each keeps its list of kernels; a worker's splits together make few sizes of a batch


class Packing:
    """The buffers of one process, in pinned memory and on the device, with room for the largest batch."""

    def __init__(self, device: torch.device, sources: Mapping[str, Tensor], max_rows: int, *, graphs: bool) -> None:
        """Allocate them.

        Args:
            sources: tensors on the CPU, {name: [R, ...]}, of which a batch takes rows.
            max_rows: of a batch.
            graphs: record what is computed of a batch as a CUDA graph, one for each size.
        """
        size = num_bytes(layout_of(sources, max_rows))
        self.staging = torch.empty(size, dtype=torch.uint8).pin_memory()
        self.on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self.arrived = torch.empty(0, dtype=torch.uint8).pin_memory()  # it grows
        self.device, self.graphs = device, {} if graphs else None

    def up(self, sources: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Data:
        """Gather a batch: rows [B] int64 of each source; return it on the device, {name: [B, ...]}.

        `run` must come before the next call: it waits, so that what a copy reads is not overwritten.
        """
        layout = layout_of(sources, len(next(iter(rows.values()))))
        for name, part in cut(self.staging, layout).items():
            torch.index_select(sources[name], 0, rows[name], out=part)
        size = num_bytes(layout)
        self.on_device[:size].copy_(self.staging[:size], non_blocking=True)
        return cut(self.on_device, layout)

    def run(self, function: Callable[[Data], Data], batch: Data, key: Hashable) -> Data:
        """Compute something of a batch that `up` has given; return it on the CPU, as views that the next call changes.

        key: of the function; one that was called before may be replayed, for a batch of the same size.
        """
        computed = functools.partial(self.pack, function, batch)
        if self.graphs is not None:
            graph = key, len(next(iter(batch.values())))
            if graph not in self.graphs and len(self.graphs) < MAX_GRAPHS:
                # they share one memory: what one returns is copied down before the next one is replayed
                self.graphs[graph] = Recorded(computed, self.device, next(iter(self.graphs.values()), None))
            computed = self.graphs.get(graph, computed)
        return self.down(*computed())

    def pack(self, function: Callable[[Data], Data], batch: Data) -> tuple[Tensor, Layout]:
        """Return what is computed of a batch in one tensor of bytes, and how it lies there."""
        output = function(batch)
        layout = largest_items_first({name: (tuple(value.shape), value.dtype) for name, value in output.items()})
        return torch.cat([output[name].to(self.device).contiguous().view(torch.uint8).flatten()
                          for name in layout]), layout

    def down(self, packed: Tensor, layout: Layout) -> Data:
        """Return packed tensors on the CPU, after the one wait."""
        if len(packed) > len(self.arrived):
            self.arrived = torch.empty(2 * len(packed), dtype=torch.uint8).pin_memory()
        self.arrived[: len(packed)].copy_(packed)
        return cut(self.arrived, layout)


def layout_of(sources: Mapping[str, Tensor], num_rows: int) -> Layout:
    """Return how so many rows of each tensor lie in a buffer."""
    return largest_items_first({name: ((num_rows, *tensor.shape[1:]), tensor.dtype)
                                for name, tensor in sources.items()})


def largest_items_first(layout: Layout) -> Layout:
    """Sort tensors by the size of their items, which is a power of two."""
    return dict(sorted(layout.items(), key=lambda item: -item[1][1].itemsize))


def num_bytes(layout: Layout) -> int:
    """Count the bytes that all tensors take."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())


def cut(memory: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors that lie one after another in a buffer of bytes, as views."""
    views, begin = {}, 0
    for name, (shape, dtype) in layout.items():
        end = begin + math.prod(shape) * dtype.itemsize
        views[name] = memory[begin:end].view(dtype).view(shape)
        begin = end
    return views
