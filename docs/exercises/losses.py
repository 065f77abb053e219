"""What the checks of losses share: a minibatch at random, an algorithm of a file, its loss and gradients."""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from algorithm import Algorithm, Data, Loss, MaskedMean
from config import make_config
from distributions import ActionDistribution
from docs.exercises.expect import part
from normalizers import ReturnNormalizer
from runtime.several import ALONE
from runtime.utils import reference

T, B = 6, 4
RETURNS = ReturnNormalizer(running=True)  # as if returns of mean 0.5 and deviation 2 had been seen
RETURNS.mean.fill_(0.5), RETURNS.var.fill_(4.0), RETURNS.shown.fill_(1.0)
HEADS = SimpleNamespace(returns=RETURNS,
                        distribution=lambda parameters: ActionDistribution(spaces.Discrete(2), parameters))


def make_algorithm(module: ModuleType, name: str, **settings: Any) -> Algorithm:
    """Make the algorithm of a file with these settings."""
    kind = part(module, name)
    return kind(make_config({"env": "none", "algo": reference(kind)}, settings))


def minibatch(ends: bool) -> tuple[tuple[Tensor, Tensor], Data]:
    """Make what a network says, logits [T+1, B, 2] and values [T+1, B], and a minibatch, with ends of episodes or not.

    As in a run, the row after an end only resets and is not valid.
    """
    chance = torch.rand(T, B) if ends else torch.full((T, B), 0.5)
    terminated, truncated = chance < 0.15, chance > 0.85
    valid = torch.cat([torch.ones(1, B, dtype=torch.bool), ~(terminated | truncated)[:-1]])
    behavior, actions = torch.randn(T, B, 2), torch.randint(2, (T, B, 1))
    data = {"actions": actions.float(), "action_parameters": behavior, "values": torch.randn(T, B),
            "log_probs": behavior.log_softmax(-1).gather(-1, actions)[..., 0], "rewards": torch.randn(T, B),
            "terminated": terminated, "truncated": truncated, "valid": valid}
    return (torch.randn(T + 1, B, 2), torch.randn(T + 1, B)), data


def loss_of(algo: Algorithm, outputs: tuple[Tensor, Tensor], data: Data) -> tuple[Loss, tuple[Tensor | None, ...]]:
    """Return the loss, and its gradients with respect to logits and values; None: it does not depend on these."""
    free = tuple(output.clone().requires_grad_() for output in outputs)
    loss = algo.loss(HEADS, free, data, MaskedMean(data["valid"], ALONE))
    return loss, torch.autograd.grad(loss.total, free, allow_unused=True)
