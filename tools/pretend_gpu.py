"""A pretended GPU: a device of PyTorch written in Python, to see what would go wrong or cost time on a real one.

    with PretendGPU() as gpu:
        model.to("pretend")
        ...
        gpu.take_counts()  # Counts(launches=..., up=..., down=..., waits=...)

A tensor of this device is a wrapper around one of the CPU. What CUDA refuses is refused: an operator that mixes
devices, a tensor of the device handed to NumPy or written to a file, a wait while a graph is recorded. What costs time
on CUDA is counted:

    launches   operators that compute something on the device. Views and allocations cost none. A fused or foreach
               operator is one, as it mostly is on CUDA, and so is a whole GRU or LSTM
    up, down   copies from and to the memory of the CPU
    waits      synchronizations: the CPU waits until the device has done all that it was given. For values that Python
               reads (`item`, `bool`), for shapes that depend on values (`nonzero`), for copies that are not both
               `non_blocking` and of pinned memory

A `non_blocking` copy down arrives at the next wait and not before, and until then the source of one up must stay as it
is. Memory is counted too. What is not seen: whatever kernels do by themselves. Values are those of the CPU, and nothing
is faster.

Used by the tests.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tools.pretend_device import (
    DEVICE,
    RECURRENT,
    Current,
    OnDevice,
    on_cpu,
    recurrent,
    redo,
    register_device,
    tensors_in,
    unwrap,
)

aten = torch.ops.aten
FREE = {  # allocations, and views that are not marked as such
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default,
    aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset, aten.resize_.default, aten.record_stream.default}
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
            aten._unsafe_index_put.default}

READING = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.equal.default}  # numbers, as CUDA's kernels do


@dataclass
class Counts:
    """What would cost time on a GPU."""

    launches: int = 0
    up: int = 0
    down: int = 0
    waits: int = 0


class Making(TorchFunctionMode):
    """Tensors from numbers and arrays are made on the CPU and copied, as CUDA does it; PyTorch tells no mode of it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        device = torch.device(kwargs.get("device") or "cpu")
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and device.type == DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        return func(*args, **kwargs)


class Operators(TorchDispatchMode):
    """Every operator is asked of the pretended GPU."""

    def __init__(self, gpu: "PretendGPU") -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.gpu.operate(func, args, kwargs or {})


class PretendGPU:
    """While it is entered there is a device "pretend", and what happens there is counted."""

    def __init__(self) -> None:
        register_device()
        self.modes = contextlib.ExitStack()
        self.counts, self.total = Counts(), Counts()  # since they were taken last; since the beginning
        self.pinned: dict[int, Any] = {}  # storages, by their addresses
        self.arriving: list[tuple[Tensor, Tensor]] = []  # copies down that have not arrived: to, from
        self.leaving: list[tuple[Tensor, Tensor]] = []  # sources of copies up, and what they held
        self.bytes, self.peak_bytes, self.total_bytes = 0, 0, 16 << 30
        self.storages: set[int] = set()  # that count in them
        self.tape: list[Callable[[], None]] | None = None  # of the graph that is recorded
        self.pool: Any = None  # its memory

    def __enter__(self) -> "PretendGPU":
        Current.gpu = self
        self.modes.enter_context(Making())
        self.modes.enter_context(Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self.modes.close()
        Current.gpu = None

    def count(self, what: str, func: Any, number: int = 1) -> None:
        """Count something; in a graph that is recorded nothing may wait."""
        if self.tape is not None:
            if what == "waits":
                raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
            return
        if what == "waits":
            self.finish_copies()
        for counts in (self.counts, self.total):
            setattr(counts, what, getattr(counts, what) + number)

    def take_counts(self) -> Counts:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def finish_copies(self) -> None:
        """Let all copies arrive. Raises RuntimeError when the source of one has changed since it was queued."""
        for to, source in self.arriving:
            to.copy_(source)
        changed = [source.shape for source, held in self.leaving if not same_bytes(source, held)]
        self.arriving, self.leaving = [], []
        if changed:
            raise RuntimeError(f"pinned memory of shape {tuple(changed[0])} was written to while a copy of it was under"
                               " way")

    # ---- operators -----------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator of any device."""
        leaves = list(tensors_in((*args, *kwargs.values())))
        num_ours = sum(isinstance(leaf, OnDevice) for leaf in leaves)
        target = next((x.type for x in (*args, *kwargs.values()) if isinstance(x, torch.device)), None)
        if func in (aten.is_pinned.default, aten._pin_memory.default, aten.pin_memory.default):
            return self.is_pinned(args[0]) if func is aten.is_pinned.default else self.pin(args[0])
        if not num_ours and target != DEVICE:
            return func(*args, **kwargs)
        # without autograd composite operators arrive as they are
        if func in RECURRENT:
            return recurrent(RECURRENT[func], *args)
        if is_composite(func):
            with Operators(self), torch._C.DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        if func in COPIES and (num_ours != len(leaves) or target == "cpu" or not num_ours):
            return self.copy_across(func, args, kwargs)
        self.check_devices(func, args, leaves)
        return self.compute(func, args, kwargs)

    def check_devices(self, func: Any, args: tuple, leaves: list[Tensor]) -> None:
        """Raise what CUDA raises when an operator mixes devices; a tensor of the CPU may be an index, or a number."""
        others = [leaf for leaf in leaves if not isinstance(leaf, OnDevice)]
        if func in INDEXING and isinstance(args[0], OnDevice):
            indices = [index for index in args[1] if index is not None]
            moved = [index for index in indices if not isinstance(index, OnDevice)]
            if moved:
                self.count("up", func, len(moved))
            if moved or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.count("waits", func)
            others = [leaf for leaf in others if all(leaf is not index for index in moved)]
        mixed = [leaf for leaf in others if leaf.dim()]
        is_into_cpu = others and isinstance(args[0], Tensor) and not isinstance(args[0], OnDevice)
        if mixed or (is_into_cpu and func._schema.is_mutable):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found at least two devices,"
                               f" {DEVICE}:0 and cpu, shape {tuple((mixed or others)[0].shape)}")

    def compute(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator of the device, and note it for the graph that is recorded."""
        kind = kind_of(func)
        if not kind.is_free:
            self.count("down" if func is aten._local_scalar_dense.default else "launches", func)
        if kind.waits:
            self.count("waits", func)
        if self.tape is not None and not kind.is_free and kind.changes:  # it takes effect when it is replayed
            self.tape.append(functools.partial(redo, func, unwrap(args), on_cpu(kwargs), None))
            return kind.changed(args, kwargs)
        inner = func(*unwrap(args), **on_cpu(kwargs))
        if kind.changes:
            return kind.changed(args, kwargs)
        if func.is_view and args[0].is_inference() != torch.is_inference_mode_enabled():
            with torch.inference_mode(args[0].is_inference()):  # a view belongs to autograd if what it shows does
                return self.wrap(inner, is_new=False)
        out = self.wrap(inner, is_new=not func.is_view)
        if self.tape is not None and not kind.is_free:
            self.tape.append(functools.partial(redo, func, unwrap(args), on_cpu(kwargs), unwrap(out)))
        changes_shape = torch.Tag.inplace_view in func.tags
        return return_and_correct_aliasing(func, args, kwargs, out) if changes_shape else out

    def wrap(self, inner: Any, *, is_new: bool = True) -> Any:
        """Wrap what was computed; what is no tensor stays as it is."""
        if isinstance(inner, (list, tuple)):
            return type(inner)(self.wrap(part, is_new=is_new) for part in inner)
        if not isinstance(inner, Tensor):
            return inner
        storage = inner.untyped_storage()
        is_new = is_new and storage._cdata not in self.storages  # else an operator has written into what was there
        tensor = OnDevice(inner)
        if self.pool is not None:
            self.pool.add(tensor, is_new=is_new)
        elif is_new:
            self.storages.add(storage._cdata)
            weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
            self.take_memory(storage.nbytes())
        return tensor

    def take_memory(self, size: int) -> None:
        """Count memory that is taken."""
        self.bytes += size
        if self.bytes > self.total_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has a total capacity of "
                f"{self.total_bytes} bytes. Including non-PyTorch memory, this process has more in use.")
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def free(self, storage: int, size: int) -> None:
        self.storages.remove(storage)
        self.bytes -= size

    # ---- copies --------------------------------------------------------------------------------------------------

    def copy_across(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Copy between the device and the CPU."""
        if func is aten._foreach_copy_.default:
            for to, source in zip(*args[:2], strict=True):
                to.copy_(source, *args[2:])
            return None
        if func is aten.copy_.default:
            (to, source), is_blocking = args[:2], not (args[2:] or [False])[0]
        else:
            source, is_blocking = args[0], not kwargs.get("non_blocking", False)
            to = torch.empty_like(unwrap(source), dtype=kwargs.get("dtype") or source.dtype)
            to = to if isinstance(source, OnDevice) else self.wrap(to)
        is_down = isinstance(source, OnDevice)
        if func is aten.copy_.default and not is_down and not source.dim():
            self.count("launches", func)  # a number of the CPU is an argument of the kernel
        else:
            self.count("down" if is_down else "up", func)
            if is_blocking or not self.is_pinned(to if is_down else source):
                self.count("waits", func)
        if is_down and not is_blocking:
            self.arriving.append((to, source.inner.clone()))
        else:
            unwrap(to).copy_(unwrap(source))
            if not is_blocking and self.is_pinned(source):
                self.leaving.append((source, source.clone()))
        return to

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned memory."""
        pinned = tensor.clone()
        self.pinned[pinned.untyped_storage().data_ptr()] = pinned.untyped_storage()
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in pinned memory."""
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self.pinned


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Compare two tensors, also where they hold nan."""
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (x, y)))


@functools.cache
def is_composite(func: Any) -> bool:
    """Tell whether an operator is nothing but others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class Kind(NamedTuple):
    """What an operator does."""

    is_free: bool  # allocates, or shows a part
    waits: bool  # gives Python numbers, or a tensor whose size depends on values
    changes: bool  # its arguments
    outs: tuple[str, ...]  # names of the arguments that it writes its results to
    gives: bool  # anything

    def changed(self, args: tuple, kwargs: dict) -> Any:
        """Return what an operator gives that changes its arguments."""
        outs = tuple(kwargs[name] for name in self.outs)
        return None if not self.gives else outs if len(outs) > 1 else (outs or args)[0]


@functools.cache
def kind_of(func: Any) -> Kind:
    """Look at an operator."""
    schema, tags = func._schema, func.tags
    gives_numbers = any(str(result.type) in ("bool", "int", "float", "number") for result in schema.returns)
    is_free = func.is_view or func in FREE
    return Kind(is_free, not is_free and (gives_numbers or func in READING or (torch.Tag.dynamic_output_shape in tags
                                                            and func not in INDEXING)),
                schema.is_mutable and torch.Tag.inplace_view not in tags,
                tuple(argument.name for argument in schema.arguments if argument.is_out), bool(schema.returns))
