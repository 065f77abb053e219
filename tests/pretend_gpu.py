"""A pretended GPU: a device of PyTorch written in Python, "pretend", to see that nothing mixes devices.

A tensor of it is a wrapper around one of the CPU, and computes what that does. What CUDA refuses is refused: an
operator that mixes devices, a tensor of the device handed to NumPy or written to a file. Nothing is faster and nothing
overlaps: a copy has arrived when it was asked for. Arithmetic is float32; autocast is not there.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
DEVICE, GENERATOR = "pretend", torch.Generator()
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
RECURRENT = {aten.lstm.input: "lstm", aten.gru.input: "gru"}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
            aten._unsafe_index_put.default}


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
        return operate(func, *args, **kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return memo.setdefault(id(self), torch.nn.Parameter(copied, self.requires_grad)
                               if isinstance(self, torch.nn.Parameter) else copied)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of the device is written to a file, or sent to a process; copy it to the CPU")


def wrap(results: Any) -> Any:
    """Put the tensors among results on the device."""
    return tree_map_only(Tensor, OnDevice, results)


def unwrap(arguments: Any) -> Any:
    """Replace tensors of the device among arguments by those that have their values."""
    return tree_map_only(OnDevice, lambda tensor: tensor.inner, arguments)


def operate(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of the device."""
    if func in RECURRENT:
        return recurrent(RECURRENT[func], *args)
    if is_composite(func):  # without autograd they arrive as they are
        return func.decompose(*args, **kwargs)
    if func not in COPIES:
        check_devices(func, args, kwargs)
    on_cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
    result = func(*unwrap(args), **unwrap(kwargs) | on_cpu)
    if kwargs.get("device") == torch.device("cpu"):
        return result
    if func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
        outs = tuple(kwargs[argument.name] for argument in func._schema.arguments if argument.is_out)
        return None if not func._schema.returns else outs if len(outs) > 1 else (outs or args)[0]
    if func.is_view and args[0].is_inference() != torch.is_inference_mode_enabled():
        with torch.inference_mode(args[0].is_inference()):  # a view belongs to autograd if what it shows does
            return wrap(result)
    result = wrap(result)
    return return_and_correct_aliasing(func, args, kwargs, result) if torch.Tag.inplace_view in func.tags else result


def check_devices(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise what CUDA raises when an operator mixes devices; a tensor of the CPU may be an index, or a number."""
    others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
              and not isinstance(leaf, OnDevice)]
    if func in INDEXING and isinstance(args[0], OnDevice):
        others = [other for other in others if all(other is not index for index in args[1])]
    if any(other.dim() or (func._schema.is_mutable and other is args[0]) for other in others):
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found at least two devices, "
                           f"{DEVICE}:0 and cpu, shapes {[tuple(other.shape) for other in others]}")


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operator is nothing but others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def recurrent(name: str, x: Tensor, states: Any, weights: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Run a whole GRU or LSTM as one operator, as cuDNN does."""
    states = list(states) if name == "lstm" else [states]
    return Recurrent.apply(name, settings, len(states), x, *states, *weights)


class Recurrent(torch.autograd.Function):
    """A GRU or LSTM: the CPU's, forward and backward."""

    @staticmethod
    def forward(ctx: Any, name: str, settings: tuple, num_states: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            ctx.inner = [tensor.inner.detach().requires_grad_() for tensor in tensors]
            x, states, weights = ctx.inner[0], ctx.inner[1 : 1 + num_states], ctx.inner[1 + num_states :]
            ctx.outputs = getattr(aten, name).input(x, states if name == "lstm" else states[0], weights, *settings)
        return wrap(tuple(output.detach() for output in ctx.outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.autograd.grad(ctx.outputs, ctx.inner, unwrap(list(gradients)), allow_unused=True)
        return None, None, None, *wrap(found)


# a point in a stream, which has passed when it is there
EVENT = SimpleNamespace(query=lambda: True, synchronize=lambda: None)


class Module:
    """The module `torch.pretend`, as `torch.cuda` is one.

    What is drawn on the device is drawn with the generator of the CPU, so that it is the same on both.
    """

    default_generators = (GENERATOR,)
    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    current_stream = staticmethod(lambda device: SimpleNamespace(record_event=lambda: EVENT))
    manual_seed_all = GENERATOR.manual_seed


@functools.cache
def register_device() -> tuple[torch.library.Library, ...]:
    """Make the device known, for good; a process can have one. The libraries must be kept."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(DEVICE, Module())
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(operate, "PrivateUse1")
    some.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    for name in RECURRENT.values():
        some.impl(f"{name}.input", functools.partial(recurrent, name), "AutogradPrivateUse1")
    return everything, some
