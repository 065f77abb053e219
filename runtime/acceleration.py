"""What may make a GPU faster, one flag each, off until it is measured there.

`--cuda_graphs`: the operators of a batch of acting, and of an SGD step, are recorded once and then replayed, each by
one launch (`Recorded`). `--half_precision_copies`: all weights are cast together, not one by one in each pass
(`HalfCopy`). `--tf32`, `--torch_compile`: PyTorch's own. `check_options` says in one line why one cannot be used.

Used by `learner.py`, `policy_worker.py` and `plan.py`. What is known of them: `docs/gpu.md`.
"""

import contextlib
import copy
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, algorithm_class
from runtime.ranks import this_rank
from runtime.user_error import UserError

Data = dict[str, Tensor]


def check_options(cfg: Config, device: torch.device, dtype: torch.dtype, *, has_memory: bool) -> None:
    """Raise `UserError` when an option cannot be used on a device, by a network of this arithmetic."""
    compiles = {"cpu": shutil.which("g++") or shutil.which("clang++"), "cuda": importlib.util.find_spec("triton")}
    refused = {
        "tf32": {"is arithmetic of a GPU, not of a CPU": device.type == "cpu"},
        "cuda_graphs": {
            "needs a GPU": device.type == "cpu",
            "would keep the weight of the exploration loss as it is recorded; use "
            "--exploration_loss_decay_env_steps=0": getattr(cfg, "exploration_loss_decay_env_steps", 0) > 0,
            "cannot record the SGD step of a policy with a memory: it reads where episodes begin": has_memory,
            "records the steps of a policy's only learner": len(cfg.learners) > 1 or this_rank().world_size > 1},
        "half_precision_copies": {
            # target networks stay in float32, and nothing casts what comes to them
            "is for the networks of appo, impala and a3c": hasattr(algorithm_class(cfg.algo), "row_specs"),
            "needs a GPU: on a CPU the gradients of many parts would be added in bfloat16": device.type == "cpu",
            "needs --precision=bfloat16": dtype == torch.float32},
        "torch_compile": {
            f"cannot compile for the device {device.type}": device.type not in compiles,
            "needs a compiler: install g++ (for a CPU) or triton (for a GPU)": not compiles.get(device.type, True),
            "needs --learner_threads=1": device.type == "cpu" and cfg.learner_threads > 1 and not cfg.serial_mode,
            "and --cuda_graphs exclude each other": cfg.cuda_graphs}}
    for name, reasons in refused.items():
        why = [reason for reason, holds in reasons.items() if holds]
        if getattr(cfg, name) and why:
            raise UserError(f"--{name} {why[0]}; leave it off")


def prepare(cfg: Config, model: nn.Module) -> None:
    """Set the arithmetic of float32 matrices in this process, and compile a model when it is called."""
    if cfg.tf32:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    if cfg.torch_compile:
        model.compile()


class Recorded:
    """A function that is called as it is a few times, then recorded as a CUDA graph and replayed.

    It takes no arguments: it reads tensors that stay where they are while their values change, and so do the tensors
    that it returns. It must not wait for the device. Source: "Whole-network capture" in PyTorch's notes on CUDA.
    """

    WARM_UPS = 3  # so that libraries have chosen their kernels, and optimizers made their state

    def __init__(self, function: Callable[[], Any], device: torch.device, beside: "Recorded | None" = None) -> None:
        """Record a function on a device.

        beside: whose memory it uses too. Then each overwrites what the other has returned.
        """
        self.function, self.device, self.backend = function, device, torch.get_device_module(device)
        # of this device: PyTorch's own stream for recording is one for all, on the device that was first. Memory that
        # was given back on one stream is only taken again on the same one
        self.stream = beside.stream if beside else self.backend.Stream(device)
        self.pool = beside.pool if beside else self.backend.graph_pool_handle()
        self.calls, self.graph, self.outputs = 0, None, None

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls <= self.WARM_UPS:
            current = self.backend.current_stream(self.device)
            self.stream.wait_stream(current)
            with self.backend.stream(self.stream):
                outputs = self.function()
            current.wait_stream(self.stream)
            return outputs
        if self.graph is None:
            self.graph = self.backend.CUDAGraph()
            with self.backend.graph(self.graph, pool=self.pool, stream=self.stream):  # nothing is computed yet
                self.outputs = self.function()
        self.graph.replay()
        return self.outputs


class RecordedStep:
    """The SGD steps of a learner as one CUDA graph, for minibatches of one size of one dataset after another."""

    def __init__(self, learner: Any, device: torch.device) -> None:
        """Record `learner.gradient_step`."""
        optimizer = learner.state.optimizer
        if not (optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")):
            raise UserError(f"--cuda_graphs cannot record {type(optimizer).__name__}; make it with fused=True or "
                            "capturable=True, or leave it off")
        for group in optimizer.param_groups:
            group["capturable"] = True
        self.learner, self.recorded = learner, Recorded(self.step, device)
        self.data: Data = {}  # a copy of the dataset: the graph reads it where it lies
        self.rows = torch.empty(0, dtype=torch.int64, device=device)
        self.rate = torch.zeros((), device=device)
        self.names: list[str] = []

    def step(self) -> tuple[Tensor, Tensor | None]:
        """Return the statistics of a step as one tensor, and its priorities."""
        minibatch = {name: tensor.index_select(0, self.rows) for name, tensor in self.data.items()}
        statistics = self.learner.gradient_step(minibatch, self.rate)
        self.names = list(statistics)
        return torch.stack(list(statistics.values())), self.learner.priorities

    def load(self, data: Data) -> None:
        """Copy a dataset in, for the steps that follow."""
        if not self.data:
            self.data = {name: torch.empty_like(tensor) for name, tensor in data.items()}
        for name, tensor in data.items():
            self.data[name].copy_(tensor)

    def __call__(self, rows: Tensor | slice, rate: float | Tensor) -> tuple[Data, Tensor | None]:
        """Take a step on trajectories `rows` of the dataset; return statistics {name: scalar}, perhaps priorities."""
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.rate.device)
        if not len(self.rows):
            self.rows = torch.empty_like(rows)
        self.rows.copy_(rows)
        self.rate.copy_(rate) if isinstance(rate, Tensor) else self.rate.fill_(rate)
        statistics, priorities = self.recorded()
        values = statistics.clone().unbind()  # the next step overwrites them
        return dict(zip(self.names, values, strict=True)), None if priorities is None else priorities.clone()


class HalfCopy:
    """A copy of a model with its encoder in half precision, through which the learner evaluates and differentiates.

    Autocast casts each weight in each pass and each gradient back, a launch each. Here one launch casts all weights
    after a step, and one all gradients before the next.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.original = model
        device = next(model.parameters()).device
        # `to` lays the weights of a GRU or LSTM into one piece again, which a copy of them is not: cuDNN would do it in
        # each pass
        self.model = copy.deepcopy(model).body_to(dtype).to(device)
        if hasattr(model, "normalizers"):
            self.model.normalizers = model.normalizers  # with the units that are held
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weights and buffers of the original."""
        torch._foreach_copy_(list(self.model.state_dict().values()), list(self.original.state_dict().values()))

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """Give the original the gradients that were computed here, for a step; then take over its new weights."""
        pairs = [(weight, other) for weight, other in zip(self.original.parameters(), self.model.parameters(),
                                                          strict=True) if other.grad is not None]
        gradients: list[Tensor] = [torch.empty_like(weight) for weight, _ in pairs]
        torch._foreach_copy_(gradients, [other.grad for _, other in pairs])
        for (weight, other), gradient in zip(pairs, gradients, strict=True):
            weight.grad, other.grad = gradient, None
        yield
        self.refresh()
