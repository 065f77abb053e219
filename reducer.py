"""What stands between the gradients and the optimizer: how several learners of one policy become one.

`Reducer` is the simplest case, one learner, and costs nothing. `Hogwild`: learners in processes of their own change the
same weights, and the same optimizer state, without a lock; each computes its gradients with a copy, taken anew before
every dataset and after every step. Two steps at the same moment may lose a part of one of them: a lock would cost more
(Niu et al., 2011). What a loss averages, and the units of the returns, are of one learner alone. The first learner
publishes what all have learned, after each of its own steps. Learners with roles (`algorithms/pql.py`) use it too:
each has gradients of its own part alone, so nothing is lost.

`AllReduce`: learners in systems of their own (`runtime/ranks.py`), each with its own minibatches, add their gradients
and everything that a loss averages, and take the same steps: all have the same weights, to the last bit.

Made by `learner.py`; used wherever something is averaged, and by `shared_buffers.py`. Read next: `config.py`.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.ranks import join_learners, this_rank

FINISHED, DECISIONS, BEGUN = range(3)  # SGD steps, decisions that were trained on, SGD steps
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Reducer:
    """One learner: nothing to agree upon."""

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Make the optimizer of what `step` changes."""
        return make(model.parameters())

    def begin(self, model: nn.Module) -> bool:
        """Let all ranks begin with the weights of the first one; return whether there are several."""
        return False

    def take_over(self, model: nn.Module, counts: tuple[int, int]) -> tuple[int, int]:
        """Take over what learners of the same weights have learned; return the SGD steps and decisions of all."""
        return counts

    def replace_shared(self, model: nn.Module) -> None:
        """Let learners of the same weights go on with those of a model."""

    def add_sgd_step(self, total: int) -> int:
        """Count one more SGD step; return those of all learners. total: the last answer."""
        return total + 1

    def add_decisions(self, total: int, more: int) -> int:
        """Count more decisions that this learner trains on; return those of all learners. total: the last answer."""
        return total + int(self.sum(torch.tensor(more)))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return a tensor without gradient of every rank."""
        return [x]

    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor without gradient over all ranks."""
        return x

    def share(self, part: Tensor) -> Tensor:
        """Add over all ranks a part of a mean: the value is that of all, the gradient that of this part."""
        return part

    def any(self, flag: bool) -> bool:
        """Tell whether a flag is set on any rank."""
        return flag

    def read_between_steps(self, read: Callable[[], Any]) -> Any:
        """Return what read() returns; no learner of the same weights takes a step meanwhile."""
        return read()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients to a norm, take a step, return the norm before; where that is not finite, skip the step.

        Nothing is read, so a GPU is not waited for. A fused optimizer scales and skips by itself. For others gradients
        that are not finite become zeros: the averages that they keep decay by one step, and a momentum moves on.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]
                      if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = (norm / max_norm).clamp(min=1.0)
        diverges = (norm * 0).nan_to_num(nan=1.0)  # 1 for inf and nan, else 0
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # as for `torch.amp.GradScaler`
            optimizer.grad_scale = scale.float()
            optimizer.found_inf = diverges.float()
        else:
            flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(scale).masked_fill_(diverges > 0, 0.0)
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
        optimizer.step()
        return norm


ALONE = Reducer()


class AllReduce(Reducer):
    """One of several learners, one in each rank, that take the same steps with the sum of their gradients.

    Small tensors are gathered and added in the order of the ranks, so that all have the same sum to the last bit.
    """

    def __init__(self, store_prefix: str, timeout_sec: float) -> None:
        """Find the learners in the other ranks; none waits longer than timeout_sec for another."""
        join_learners(store_prefix, timeout_sec)

    def begin(self, model: nn.Module) -> bool:
        for tensor in model.state_dict().values():  # a model of one's own may be drawn by another generator
            torch.distributed.broadcast(tensor, 0)
        return True

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x.contiguous())
        return parts

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def share(self, part: Tensor) -> Tensor:
        return self.sum(part.detach()) + (part - part.detach())  # the same value everywhere, to the last bit

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(int(flag))))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        flat = torch.cat([(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
                          for parameter in parameters])  # another rank may have a gradient where this one has none
        torch.distributed.all_reduce(flat)
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter)
        return super().step(model, optimizer, max_norm)


class SharedTraining:
    """What the learners of one policy change together: weights, optimizer state, counters.

    All floats lie in one tensor, since each tensor takes a file descriptor in every process; on a GPU in its memory.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, num_learners: int,
                 device: torch.device | str = "cpu") -> None:
        """Begin with the weights of a model."""
        weights = [parameter.detach().to(device, copy=True) for parameter in model.parameters()]
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = make_optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # an optimizer makes its state in its first step
        self.names = list(optimizer.state[parameters[0]])  # of each parameter's state
        state = [torch.zeros_like(tensor) for tensor in state_tensors(optimizer)]
        self.num_weights = len(weights)
        self.shapes = [tensor.shape for tensor in (*weights, *state)]
        self.flat = torch.cat([tensor.flatten() for tensor in (*weights, *state)])
        if self.flat.device.type == "cpu":
            self.flat.share_memory_()
        # of each learner: FINISHED, DECISIONS, BEGUN; the first one's go on with those of a checkpoint
        self.counts = torch.zeros(3, num_learners, dtype=torch.int64).share_memory_()

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and the optimizer state, as views."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return views[: self.num_weights], views[self.num_weights :]


class Hogwild(Reducer):
    """One of several learners, in processes of their own, that change the same weights."""

    def __init__(self, shared: SharedTraining, learner: int) -> None:
        self.shared, self.learner = shared, learner
        weights, self.optimizer_state = shared.tensors()
        self.parameters = [nn.Parameter(weight) for weight in weights]

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        self.own = list(model.parameters())
        optimizer = make(self.parameters)
        self.bind(optimizer)
        optimizer.register_load_state_dict_post_hook(self.share_loaded)
        return optimizer

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer change the shared state."""
        tensors = iter(self.optimizer_state)
        for parameter in self.parameters:
            optimizer.state[parameter] = {name: next(tensors) for name in self.shared.names}

    def share_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Share the state that was loaded from a checkpoint, which has none of what has had no gradient yet."""
        places = itertools.product(self.parameters, self.shared.names)
        for tensor, (parameter, name) in zip(self.optimizer_state, places, strict=True):
            tensor.copy_(optimizer.state[parameter].get(name, tensor))
        self.bind(optimizer)

    @torch.no_grad()
    def take_over(self, model: nn.Module, counts: tuple[int, int]) -> tuple[int, int]:
        self.copy_weights()
        return tuple(self.shared.counts[[FINISHED, DECISIONS]].sum(1).tolist())

    @torch.no_grad()
    def replace_shared(self, model: nn.Module) -> None:
        torch._foreach_copy_(self.parameters, self.own)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the shared weights into this learner's own."""
        torch._foreach_copy_(self.own, self.parameters)

    def add_sgd_step(self, total: int) -> int:
        counts = self.shared.counts
        counts[FINISHED, self.learner] += 1
        counts[BEGUN, self.learner] = counts[FINISHED, self.learner]
        return int(counts[FINISHED].sum())

    def add_decisions(self, total: int, more: int) -> int:
        self.shared.counts[DECISIONS, self.learner] += more
        return int(self.shared.counts[DECISIONS].sum())

    def read_between_steps(self, read: Callable[[], Any]) -> Any:
        steps = [FINISHED, BEGUN]
        while True:  # once more when another learner has stepped meanwhile
            before = self.shared.counts[steps]
            found = copy.deepcopy(read())
            if torch.equal(*before) and torch.equal(before, self.shared.counts[steps]):
                return found

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        self.shared.counts[BEGUN, self.learner] += 1
        for own, shared in zip(self.own, self.parameters, strict=True):
            shared.grad = own.grad
        norm = super().step(model, optimizer, max_norm)
        self.copy_weights()
        return norm


def make_reducer(shared: SharedTraining | None, learner: int, store_prefix: str, timeout_sec: float) -> Reducer:
    """Choose how this learner works together with the others of its policy."""
    if shared is not None:
        return Hogwild(shared, learner)
    return AllReduce(store_prefix, timeout_sec) if this_rank().world_size > 1 else Reducer()


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the tensors of an optimizer's state, parameter by parameter."""
    return [tensor for group in optimizer.param_groups for parameter in group["params"]
            for tensor in optimizer.state[parameter].values()]
