"""Check of exercise 3: the term as it is defined, one pair of steps at a time, and its gradient."""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from algorithm import Algorithm, Data, MaskedMean
from appo import AsyncPPO
from config import make_config
from distributions import ActionDistribution
from docs.exercises.expect import expect, expect_close, part
from normalizers import ReturnNormalizer
from reducer import ALONE
from runtime.by_name import reference

T, B, CHOICES, COEFF = 5, 3, 4, 0.7
HEADS = SimpleNamespace(returns=ReturnNormalizer(),
                        distribution=lambda parameters: ActionDistribution(spaces.Discrete(CHOICES), parameters))


def algorithm(student: ModuleType, coeff: float) -> Algorithm:
    """Make the student's algorithm with its coefficient."""
    kind = part(student, "SmoothPPO")
    return kind(make_config(kind.Settings, {"env": "none", "algo": reference(kind), "smooth_coeff": coeff}))


def minibatch(end: bool) -> tuple[Tensor, Data]:
    """Make what a network says, logits [T+1, B, CHOICES], and a minibatch, all at random; with ends of episodes or not.

    As in a run, the row after an end only resets and is not valid.
    """
    logits, behavior = torch.randn(T + 1, B, CHOICES), torch.randn(T, B, CHOICES)
    actions = torch.randint(CHOICES, (T, B, 1))
    terminated, truncated = torch.zeros(2, T, B, dtype=torch.bool)
    valid = torch.ones(T, B, dtype=torch.bool)
    if end:
        terminated[1, 0] = truncated[2, 1] = terminated[4, 1] = True
        valid[2, 0] = valid[3, 1] = valid[0, 2] = False
    log_probs = behavior.log_softmax(-1).gather(-1, actions)[..., 0]
    return logits, {"actions": actions.float(), "action_parameters": behavior, "log_probs": log_probs,
                    "values": torch.randn(T, B), "rewards": torch.randn(T, B), "terminated": terminated,
                    "truncated": truncated, "valid": valid}


def loss_of(algo: Algorithm, logits: Tensor, data: Data) -> tuple[Any, Tensor]:
    """Return the loss and its gradient with respect to the logits."""
    logits = logits.clone().requires_grad_()
    outputs = logits, torch.zeros(T + 1, B, requires_grad=True)
    data = data | torch.no_grad()(algo.targets)(HEADS, outputs, data)
    loss = algo.loss(HEADS, outputs, data, MaskedMean(data["valid"], ALONE))
    return loss, torch.autograd.grad(loss.total, logits)[0]


def defined(logits: Tensor, data: Data) -> Tensor:
    """Add up KL(pi_t || pi_{t+1}) one pair of an episode at a time, and divide by the number of valid rows."""
    total = torch.zeros(())
    for t, b in data["valid"].nonzero().tolist():
        if not (data["terminated"][t, b] or data["truncated"][t, b]):
            p, q = logits[t, b].softmax(0), logits[t + 1, b].softmax(0)
            total = total + (p * (p / q).log()).sum()
    return total / data["valid"].sum()


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    plain = AsyncPPO(make_config(AsyncPPO.Settings, {"env": "none"}))
    off, on = algorithm(student, 0.0), algorithm(student, COEFF)
    logits, data = minibatch(end=False)
    expect_close(loss_of(off, logits, data)[0].total, loss_of(plain, logits, data)[0].total,
                 "smooth_coeff = 0: loss", "It must be that of APPO: multiply the term by the coefficient (loss)")
    shifted = logits[:1] + torch.arange(T + 1.0)[:, None, None]
    term = loss_of(on, shifted, data)[0].total.detach() - loss_of(plain, shifted, data)[0].total.detach()
    expect(abs(term) < 1e-4, "logits that all grow by 1 a step are the same policy all the time (softmax): expected a "
           f"term of 0, got {float(term):.4f}. Compare distributions, not their parameters: "
           "model.distribution(parameters).kl(other) (loss)")
    for end in (False, True):
        logits, data = minibatch(end)
        what = "episodes that end on the way" if end else "no end of an episode on the way"
        look = ("Where the episode ends no decision follows, so the pair counts 0; and `mean` divides by the valid rows"
                if end else "KL(pi_t || pi_{t+1}) for t = 0 ... T-1, in this order; row T counts as a second one")
        loss, gradient = loss_of(on, logits, data)
        free = logits.clone().requires_grad_()
        wanted = COEFF * defined(free, data)
        base, base_gradient = loss_of(plain, logits, data)
        expect_close(loss.total - base.total, wanted.detach(), f"{what}: the term times {COEFF}", f"{look} (loss)")
        expect_close(gradient - base_gradient, torch.autograd.grad(wanted, free)[0],
                     f"{what}: the gradient of the term with respect to the logits",
                     "It flows into both policies of a pair: no detach() and no no_grad() (loss)")
    expect("smoothness" in loss.statistics, "loss.statistics has no 'smoothness'; add the term to it, so that "
           "TensorBoard shows it (loss)")
    expect_close(loss.statistics["smoothness"], defined(logits, data), "loss.statistics['smoothness']",
                 "TensorBoard shows what stands there: the term itself (loss)")
    return "neighbors are held together within an episode, not across its end, and APPO is what it was at 0."
