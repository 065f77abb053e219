"""Several learners of one policy: how they become one, and how the systems find each other that they belong to.

What stands between the gradients and the optimizer is a reducer. `Reducer` is the simplest case, one learner, and costs
nothing.

`Hogwild`: learners in processes of their own change the same weights, and the same optimizer state, without a lock;
each computes its gradients with a copy, taken before every dataset and after every step. Two steps at the same moment
may lose a part of one of them, and a checkpoint may hold a part of one: a lock would cost more (Niu et al., 2011). What
a loss averages, and the units of the returns, are of one learner alone. The first learner publishes what all have
learned, after each of its own steps. Learners with roles (`algorithms/pql.py`) use it too: each has gradients of its
own part alone, so nothing is lost.

`AllReduce`: `torchrun --standalone --nproc-per-node 2 train.py ...` starts whole systems, called *ranks*, each with its
share of the cores and environments of its own. They agree on the settings at the start, through torchrun's store. From
then on only their learners meet: each has minibatches of its own; they add their gradients and everything that a loss
averages, and take the same steps, so that all have the same weights to the last bit. Rank 0 keeps the run's folder, the
others write little and into temporary ones.
"""

import ctypes
import functools
import itertools
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from runtime.guard import remove_at_end
from runtime.utils import UserError, this_rank

MAX_STARTS = 1_000_000
# what may differ: it follows from the cores of each rank, or is for rank 0 alone
OWN_SETTINGS = {"num_workers", "num_envs_per_worker", "worker_num_splits", "policy_workers_per_policy",
                "learner_threads", "train_dir", "eval_every_env_steps"}
CONNECT_SEC, POLL_SEC, MAX_SEC = 60, 0.1, 1e6
PR_SET_PDEATHSIG = 1
SGD_STEPS, DECISIONS = range(2)  # what learners count: steps, decisions that were trained on
systems = itertools.count(1)  # each rank has made equally many before: so they find each other

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Reducer:
    """One learner: there is nobody to agree with."""

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Make the optimizer of what `step` changes."""
        return make(model.parameters())

    def take_over(self) -> None:
        """Copy into the model what learners of the same weights have learned."""

    def hand_over(self) -> None:
        """Replace the weights of all learners by those of the model."""

    def count(self, kind: int, total: int, more: int) -> int:
        """Count more of what this learner has done; return that of all learners. total: the last answer."""
        return total + more

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return a tensor without gradient of every rank."""
        return [x]

    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor without gradient over all ranks."""
        return functools.reduce(torch.add, self.gather(x))

    def share(self, part: Tensor) -> Tensor:
        """Add over all ranks a part of a mean: the value is that of all, the gradient that of this part."""
        return part

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients to a norm and take a step; skip it where the norm is not finite. Return the norm before.

        On a GPU this is where an SGD step waits for its gradients.
        """
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if norm.isfinite():
            torch._foreach_div_(gradients, (norm / max_norm).clamp(min=1.0))
            optimizer.step()
        return norm


ALONE = Reducer()


class AllReduce(Reducer):
    """One of several learners, one in each rank, that take the same steps with the sum of their gradients.

    Small tensors are gathered and added in the order of the ranks, so that all have the same sum to the last bit.
    """

    def __init__(self, store_prefix: str, timeout_sec: float) -> None:
        """Find the learners in the other ranks; none waits longer than timeout_sec for another."""
        own, seconds = this_rank(), min(timeout_sec, MAX_SEC)
        distributed.init_process_group(
            "gloo", store=distributed.PrefixStore(store_prefix, open_store(seconds)), rank=own.rank,
            world_size=own.world_size, timeout=timedelta(seconds=seconds))

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        for tensor in model.state_dict().values():  # a model of one's own may be drawn by another generator
            distributed.broadcast(tensor, 0)
        return super().make_optimizer(model, make)

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, x.contiguous())
        return parts

    def share(self, part: Tensor) -> Tensor:
        return self.sum(part.detach()) + (part - part.detach())  # the same value everywhere, to the last bit

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        parameters = parameters_of(optimizer)
        flat = torch.cat([(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
                          for parameter in parameters])  # another rank may have a gradient where this one has none
        distributed.all_reduce(flat)
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter)
        return super().step(optimizer, max_norm)


class SharedTraining:
    """What the learners of one policy change together: weights, optimizer state, counters.

    All floats lie in one tensor, since each tensor takes a file descriptor in every process; on a GPU in its memory.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, num_learners: int,
                 device: torch.device | str = "cpu") -> None:
        """Begin with the weights of a model."""
        weights = [parameter.detach().to(device) for parameter in model.parameters()]
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = make_optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # an optimizer makes its state in its first step
        states = tree_map(torch.zeros_like, [dict(optimizer.state[parameter]) for parameter in parameters])
        tensors, self.tree = tree_flatten((weights, states))
        self.shapes = [tensor.shape for tensor in tensors]
        self.flat = torch.cat([tensor.flatten() for tensor in tensors]).share_memory_()  # as it is on a GPU
        # SGD_STEPS and DECISIONS of each learner; the first one's go on with those of a checkpoint
        self.counts = torch.zeros(2, num_learners, dtype=torch.int64).share_memory_()

    def tensors(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return the weights, and what the optimizer keeps of each of them, as views."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return tree_unflatten([part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)], self.tree)


class Hogwild(Reducer):
    """One of several learners, in processes of their own, that change the same weights."""

    def __init__(self, shared: SharedTraining, learner: int) -> None:
        self.shared, self.learner = shared, learner
        weights, self.states = shared.tensors()
        self.parameters = [nn.Parameter(weight) for weight in weights]

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        self.own = list(model.parameters())
        optimizer = make(self.parameters)
        self.bind(optimizer)
        optimizer.register_load_state_dict_post_hook(self.bind)
        return optimizer

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer change the shared state, which takes over what that has loaded."""
        for parameter, shared in zip(self.parameters, self.states, strict=True):
            for name, tensor in shared.items():
                tensor.copy_(optimizer.state[parameter].get(name, tensor))
            optimizer.state[parameter].update(shared)

    @torch.no_grad()
    def take_over(self) -> None:
        torch._foreach_copy_(self.own, self.parameters)

    @torch.no_grad()
    def hand_over(self) -> None:
        torch._foreach_copy_(self.parameters, self.own)

    def count(self, kind: int, total: int, more: int) -> int:
        counts = self.shared.counts[kind]
        counts[self.learner] += more
        return int(counts.sum())

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        for own, shared in zip(self.own, self.parameters, strict=True):
            shared.grad = own.grad
        norm = super().step(optimizer, max_norm)
        self.take_over()
        return norm


def make_reducer(shared: SharedTraining | None, learner: int, store_prefix: str, timeout_sec: float) -> Reducer:
    """Choose how this learner works together with the others of its policy."""
    if shared is not None:
        return Hogwild(shared, learner)
    return AllReduce(store_prefix, timeout_sec) if this_rank().world_size > 1 else Reducer()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """List what an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


# ---- ranks -------------------------------------------------------------------------------------------------------


def join_ranks(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Agree with the other ranks on the settings, and end when torchrun ends.

    Returns the prefix of this system's part of torchrun's store, and the settings that differ here: all but rank 0
    write little, into temporary folders, which the guard removes when this process ends, also by SIGKILL, and judge
    nothing. Raises `UserError` for what several ranks cannot do, or when rank 0 has other settings.
    """
    own, prefix = this_rank(), f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(systems)}"
    if own.world_size == 1:
        return prefix, {}
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # elsewhere torchrun ends this process
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for name, value in {"num_policies": 1, "num_learners": 1, "async_rl": True, "serial_mode": False}.items():
        if settings[name] != value:
            raise UserError(f"--{name}={settings[name]} cannot be used with several ranks; set it to {value}")
    agreed = {name: str(value) for name, value in settings.items() if name not in OWN_SETTINGS}
    of_rank_0 = json.loads(from_rank_0(f"{prefix}/settings", json.dumps(agreed)))
    for name, value in agreed.items():
        if value != of_rank_0[name]:
            raise UserError(f"rank {own.rank} has --{name}={value}, rank 0 has {of_rank_0[name]}; set it by a flag")
    if own.rank == 0:
        return prefix, {}
    folder = tempfile.mkdtemp(prefix=f"rank_{own.rank}_of_{os.getppid()}_")
    remove_at_end(folder)
    return prefix, {"train_dir": folder, "eval_every_env_steps": 0, "stop_at_return": math.inf,
                    "save_every_sec": math.inf, "save_milestones_sec": math.inf, "trace_sec": 0.0}


@functools.cache
def open_store(timeout_sec: float) -> Any:
    """Connect to the store of torchrun, through which the ranks find each other."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(address, port, timeout=timedelta(seconds=timeout_sec))


def from_rank_0(key: str, value: Any) -> str:
    """Return the value that rank 0 has given, as text; each key once."""
    own = this_rank()
    if own.world_size == 1:
        return str(value)
    store = open_store(CONNECT_SEC)
    if own.rank == 0:
        store.set(key, str(value))
    deadline = time.monotonic() + CONNECT_SEC
    while not store.check([key]) and time.monotonic() < deadline:
        time.sleep(POLL_SEC)  # `get` would wait where no signal ends it
    return store.get(key).decode()


def arrive(key: str) -> Callable[[], bool]:
    """Tell the other ranks that this one has come so far; return a function that says whether all have."""
    size = this_rank().world_size
    if size == 1:
        return lambda: True
    store = open_store(CONNECT_SEC)
    store.add(key, 1)
    return lambda: store.add(key, 0) == size
