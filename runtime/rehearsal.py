"""Rehearses acting and learning on the meta device, to see what memory they take for a while on a GPU.

A tensor there has a shape and no memory, and an operator computes no values. `Meter` adds up what would be alive at
once: activations that wait for the backward pass, gradients, and what each operator makes. So a model of one's own is
measured as any other. What values decide (`if`, `nonzero`) goes on as if they were 0, and as if all rows were valid.
Used by `device_memory.py`.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algorithm import Algorithm, Data
from feed import Batch
from learner import MIN_NORMALIZER_ROWS, steps_per_pass
from losses import MaskedMean
from reducer import ALONE
from replay_feed import Dataset
from runtime.ranks import this_rank
from shared_buffers import Spec, obs_dtype

META = torch.device("meta")
aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Counts the bytes of the meta device that are alive while it is entered, `bytes`, and the most, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and args[0].is_meta and torch.device(kwargs.get("device") or META) != META:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.nonzero.default and args[0].is_meta:
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=META)
        elif func._can_decompose():  # without autograd composite operators arrive as they are
            with self:
                return func.decompose(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())

    def take_peak(self) -> int:
        """Return the most, and begin anew."""
        peak, self.peak = self.peak, self.bytes
        return peak

    def release(self, storage: int, size: int) -> None:
        self.storages.remove(storage)
        self.bytes -= size


def meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model to the meta device; dtype: of its body."""
    return copy.deepcopy(model).to(META).body_to(dtype)


def acting_bytes(algorithm: Algorithm, model: nn.Module, obs_space: dict[str, spaces.Space], count: int) -> int:
    """Measure what acting takes for so many agents in one batch, beside the model; model: a `meta_copy`."""
    with torch.inference_mode(), Meter() as meter:
        obs = {name: torch.empty(count, *space.shape, dtype=obs_dtype(space), device=META)
               for name, space in obs_space.items()}
        states, rank = (torch.empty(shape, device=META) for shape in ((count, model.state_size), (count,)))
        result = algorithm.act(model, obs, states, rank > 0, agent_rank=rank)
        del result
    return meter.peak


def learning_bytes(algorithm: Algorithm, model: nn.Module, specs: dict[str, Spec],
                   obs_space: dict[str, spaces.Space]) -> tuple[int, int]:
    """Measure what training on a dataset takes, beside weights, their gradients and the state of the optimizer.

    model: a `meta_copy`; specs: of its trajectories. Returns what a graph keeps (0: there is none), and what passes.
    """
    weights = list(model.parameters())
    model.zero_grad()
    with Meter() as meter:
        data = make_dataset(algorithm, specs)
        with torch.no_grad():
            data |= algorithm.prepare(model, data, lambda rows, function=None: ask(algorithm, model, rows, function))
        before_steps = meter.take_peak()
        batch = first_minibatch(algorithm, data)
        backward(algorithm, model, batch)
        # the optimizer has one more number for each weight meanwhile; several ranks gather their gradients twice
        step = [torch.empty_like(weight) for weight in weights for _ in range(1 + 2 * (this_rank().world_size > 1))]
        del step, batch
        in_step = meter.take_peak()  # a graph has a copy of the dataset
        size = max(MIN_NORMALIZER_ROWS, steps_per_pass(obs_space)) // algorithm.datasets_at_once
        rows = torch.empty(min(size, data["valid"].numel()), dtype=torch.int64, device=META)
        model.update_normalizers({name: data[f"obs/{name}"].flatten(0, 1).index_select(0, rows) for name in obs_space})
    gradients = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
    beside_steps = max(before_steps, meter.peak - gradients)
    # autocast keeps a copy of the weights in its own arithmetic
    in_step += sum(weight.nbytes for weight in weights if weight.dtype != torch.float32) - gradients
    return (in_step, beside_steps) if algorithm.cfg.cuda_graphs else (0, max(in_step, beside_steps))


def make_dataset(algorithm: Algorithm, specs: dict[str, Spec]) -> Data:
    """Make a dataset of trajectories, or of transitions where the algorithm has a replay."""
    cfg = algorithm.cfg
    with META:
        if not hasattr(algorithm, "row_specs"):
            return Batch(specs, cfg.trajectories_per_dataset).tensors
        return Dataset(algorithm.row_specs(specs), cfg.samples_per_dataset, pinned=False).tensors


def first_minibatch(algorithm: Algorithm, data: Data) -> Data:
    """Select a minibatch as the feed divides the dataset: a replay's are slices; others, and a graph's, are copied."""
    cfg, count = algorithm.cfg, algorithm.cfg.trajectories_per_minibatch
    if hasattr(algorithm, "row_specs"):
        count = cfg.batch_size
        if not cfg.cuda_graphs:
            return {name: tensor[:count] for name, tensor in data.items()}
    rows = torch.empty(count, dtype=torch.int64, device=META)
    return {name: tensor.index_select(0, rows) for name, tensor in data.items()}


def evaluate(algorithm: Algorithm, model: nn.Module, rows: Data, function: Callable[..., tuple] | None = None,
             ) -> tuple[Tensor, ...]:
    """Ask the network about sequences [N, L, ...], as `Learner.evaluate`."""
    obs = {name.removeprefix("obs/"): tensor.flatten(0, 1) for name, tensor in rows.items() if name.startswith("obs/")}
    more = (rows[name].flatten(0, 1) for name in algorithm.inputs if name in rows)
    return (function or algorithm.evaluate)(model, obs, rows["rnn_states"][:, 0], rows["new_episode"], *more)


def ask(algorithm: Algorithm, model: nn.Module, rows: Data, function: Callable[..., tuple] | None) -> Any:
    """Answer as `Learner.ask`."""
    return tuple(out.unflatten(0, rows["new_episode"].shape)
                 for out in evaluate(algorithm, model, rows, function))


def backward(algorithm: Algorithm, model: nn.Module, batch: Data) -> None:
    """Compute the gradient of the loss of a minibatch, as `Learner.backward` does on a GPU."""
    cfg, shape = algorithm.cfg, batch["new_episode"].shape
    rows = {name: batch[name] for name in batch if batch[name].shape[:2] == shape or name in algorithm.inputs}
    if not model.state_size:
        rows = {name: tensor.flatten(0, 1)[:, None] for name, tensor in rows.items()}
    elif cfg.bptt_steps < cfg.rollout:
        rows = {name: tensor.clone() for name, tensor in rows.items()}  # cut into shorter sequences
    outputs = evaluate(algorithm, model, rows)
    leaves = [output.detach().requires_grad_() for output in outputs]
    joined = tuple(leaf.unflatten(0, shape).transpose(0, 1) for leaf in leaves)
    columns = {name: tensor.transpose(0, 1) for name, tensor in batch.items()}
    with torch.no_grad():
        columns |= algorithm.targets(model, joined, columns)
    algorithm.loss(model, joined, columns, MaskedMean(columns["valid"], ALONE)).total.backward()
    used = [(output, leaf.grad) for output, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
    torch.autograd.backward(*zip(*used, strict=True))
