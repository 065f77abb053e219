"""What PyTorch asks of the pretended GPU: its tensors, its module, autocast, recurrent layers, graphs.

Read `pretend_gpu.py` first, which is the device itself and uses this.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
DEVICE = "pretend"
RECURRENT = {aten.lstm.input: "lstm", aten.gru.input: "gru"}
CASTS = ("linear", "conv1d", "conv2d", "matmul", "mm", "addmm", "bmm", "baddbmm")  # of autocast, those used here


class Current:
    """The pretended GPU that is there now, a `pretend_gpu.PretendGPU`."""

    gpu: Any = None


# ---- tensors ---------------------------------------------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A tensor of the device; `inner` has its values."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(DEVICE, 0))

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of the device, where there is no device any more")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:  # `Module.to` of a model that lies on the device already
        torch.Tensor.data.__set__(self, other)
        self.inner = other.inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return memo.setdefault(id(self), torch.nn.Parameter(copied, self.requires_grad)
                               if isinstance(self, torch.nn.Parameter) else copied.requires_grad_(self.requires_grad))

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of the device is written to a file, or sent to a process; copy it to the CPU")

    def __repr__(self, **more: Any) -> str:
        return f"OnDevice({self.inner!r})"


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """List the tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def unwrap(x: Any) -> Any:
    """Return the tensors of the CPU in wrappers; anything else as it is."""
    if isinstance(x, OnDevice):
        return x.inner
    return type(x)(map(unwrap, x)) if type(x) in (list, tuple) else x


def on_cpu(kwargs: dict) -> dict:
    """Unwrap keyword arguments, and let what is made lie on the CPU."""
    return {name: "cpu" if isinstance(value, torch.device) else unwrap(value) for name, value in kwargs.items()}


# ---- graphs --------------------------------------------------------------------------------------------------------


class Pool:
    """The memory of graphs: what an operator no longer needs, a later one takes, but nothing outside of them.

    The tape keeps the values of all tensors, so here they count as long as something shows them.
    """

    def __init__(self) -> None:
        self.gpu = Current.gpu
        self.used = self.size = 0
        self.shown: dict[int, int] = {}  # storages, and how many tensors show each

    def add(self, tensor: OnDevice, *, is_new: bool) -> None:
        """Count a tensor that was made while a graph is recorded."""
        storage = tensor.inner.untyped_storage()
        if is_new and storage._cdata not in self.shown:
            self.shown[storage._cdata] = 0
            self.used += storage.nbytes()
            self.gpu.take_memory(max(0, self.used - self.size))
            self.size = max(self.size, self.used)
        if storage._cdata in self.shown:  # else it lies elsewhere
            self.shown[storage._cdata] += 1
            weakref.finalize(tensor, self.drop, storage._cdata, storage.nbytes())

    def __del__(self) -> None:  # with its graphs
        self.gpu.bytes -= self.size

    def drop(self, storage: int, size: int) -> None:
        self.shown[storage] -= 1
        if not self.shown[storage]:
            del self.shown[storage]
            self.used -= size


class Graph:
    """A CUDA graph: while it is recorded nothing takes effect; `replay` does it all, by one launch."""

    def __init__(self) -> None:
        self.tape: list[Callable[[], None]] = []
        self.device: torch.device | None = None  # on which it was recorded

    @contextlib.contextmanager
    def record(self, *, pool: "Pool", stream: "Stream") -> Iterator[None]:
        self.device = stream.device
        Current.gpu.tape, Current.gpu.pool, drawn = self.tape, pool, torch.get_rng_state()
        try:
            yield
        finally:
            Current.gpu.tape = Current.gpu.pool = None
            torch.set_rng_state(drawn)

    def replay(self) -> None:
        Current.gpu.count("launches", "graph")
        for operator in self.tape:
            operator()


@torch.no_grad()
def redo(func: Callable[..., Any], args: tuple, kwargs: dict, out: Any) -> None:
    """Run an operator once more, unwrapped, into the tensors that it gave before; None: it changes its arguments."""
    again = func(*args, **kwargs)
    for to, source in zip(tensors_in([out]), tensors_in([again]), strict=True) if out is not None else ():
        to.copy_(source)


# ---- what PyTorch asks of a device -----------------------------------------------------------------------------------


class Event:
    """A point in the stream. It counts as passed when the device was waited for since, and not before.

    To wait for it is to wait for all only if nothing was launched behind it.
    """

    def __init__(self) -> None:
        self.gpu = Current.gpu
        self.launches, self.waits = self.gpu.total.launches, self.gpu.total.waits

    def query(self) -> bool:
        return self.gpu.total.waits > self.waits

    def synchronize(self) -> None:
        if not self.query() and self.gpu.total.launches == self.launches:
            self.gpu.count("waits", "synchronize")


class Stream:
    """A stream; what is given to the device is done at once.

    Whoever asks for one must name the device: CUDA would take the current one, which is that of another policy perhaps.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        if device is None:
            raise RuntimeError("a stream of which device?")
        self.device = device

    def record_event(self) -> Event:
        return Event()

    def wait_stream(self, other: "Stream") -> None:
        if other.device != self.device:
            raise RuntimeError(f"a stream of {self.device} waits for one of {other.device}")

    def synchronize(self) -> None:
        Current.gpu.count("waits", "synchronize")


class Module:
    """The module `torch.pretend`, as `torch.cuda` is one.

    Its generators, of two devices, are those of `torch.cuda`. Nothing draws with them: what is drawn on the device is
    drawn with the generator of the CPU, so that it is the same on both.
    """

    default_generators = torch.Generator(), torch.Generator()
    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    is_bf16_supported = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda device=None: "pretended GPU")
    synchronize = staticmethod(lambda device=None: Current.gpu.count("waits", "synchronize"))
    max_memory_allocated = staticmethod(lambda device=None: Current.gpu.peak_bytes)
    Stream = current_stream = Stream
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    CUDAGraph, graph, graph_pool_handle = Graph, staticmethod(Graph.record), Pool

    def generator(self, device: torch.device) -> torch.Generator:
        return self.default_generators[device.index or 0]

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.generator(device).get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.generator(device).set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        gpu = Current.gpu
        return gpu.total_bytes - gpu.bytes, gpu.total_bytes


@functools.cache
def register_device() -> tuple[torch.library.Library, ...]:
    """Make the device known, for good; a process can have one. The libraries must be kept."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(DEVICE, Module())
    others, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in CASTS:
        some.impl(name, functools.partial(in_low_precision, getattr(aten, name).default), "AutocastPrivateUse1")
    for name in RECURRENT.values():
        some.impl(f"{name}.input", functools.partial(recurrent, name), "AutogradPrivateUse1")
    return others, some


def in_low_precision(func: Any, *args: Any) -> Any:
    """Cast float32 arguments to the dtype of autocast, as CUDA does for this operator."""
    dtype = torch.get_autocast_dtype(DEVICE)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return func(*(x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args))


def recurrent(name: str, x: Tensor, states: Any, weights: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Run a whole GRU or LSTM as one operator, as cuDNN does."""
    states = list(states) if name == "lstm" else [states]
    return Recurrent.apply(name, settings, len(states), x, *states, *weights)


class Recurrent(torch.autograd.Function):
    """A GRU or LSTM, forward and backward one launch each."""

    @staticmethod
    def forward(ctx: Any, name: str, settings: tuple, num_states: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        gpu, func = Current.gpu, getattr(aten, name).input
        gpu.count("launches", func)

        def arguments(x: Tensor, *rest: Tensor) -> tuple:
            return x, list(rest[:num_states]) if name == "lstm" else rest[0], list(rest[num_states:]), *settings

        with torch.enable_grad():
            ctx.inner = [tensor.inner.detach().requires_grad_() for tensor in tensors]
            ctx.outputs = func(*arguments(*ctx.inner))
        out = tuple(gpu.wrap(output.detach()) for output in ctx.outputs)
        if gpu.tape is not None:
            gpu.tape.append(functools.partial(redo, func, arguments(*ctx.inner), {}, unwrap(out)))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gpu = Current.gpu
        gpu.count("launches", "backward of a GRU or LSTM")
        found = torch.autograd.grad(ctx.outputs, ctx.inner, [gradient.inner for gradient in gradients],
                                    allow_unused=True)
        return None, None, None, *(None if gradient is None else gpu.wrap(gradient) for gradient in found)
