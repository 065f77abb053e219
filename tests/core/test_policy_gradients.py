"""Tests of the losses of IMPALA and A3C against slow references in float64, written like the papers' equations.

The targets of V-trace have oracles of their own, in `test_vtrace.py`.
"""

from typing import Any, NamedTuple

import pytest
import torch
from gymnasium import spaces
from oracles import walk
from parts import make_config
from torch import Tensor

from algorithm import MaskedMean
from algorithms import algorithm_class
from distributions import ActionDistribution
from normalizers import ReturnNormalizer
from runtime.several import ALONE
from vtrace import vtrace

T, B, CHOICES = 7, 5, 4
GAMMA, VALUE_COEFF, ENTROPY_COEFF = 0.9, 0.7, 0.05


class Heads:
    """What `targets` and `loss` ask a model: its distribution, and the statistics of the returns."""

    def __init__(self) -> None:
        self.returns = ReturnNormalizer().double()

    def distribution(self, parameters: Tensor) -> ActionDistribution:
        return ActionDistribution(spaces.Discrete(CHOICES), parameters)


class Case(NamedTuple):
    """A minibatch, and what the network says of it."""

    logits: Tensor  # [T+1, B, CHOICES]
    values: Tensor  # [T+1, B]
    data: dict[str, Tensor]


def make_case(seed: int, lag: float = 0.5, end: float = 0.15) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    logits, values = normal(T + 1, B, CHOICES).requires_grad_(), normal(T + 1, B).requires_grad_()
    behavior = logits.detach()[:-1] + lag * normal(T, B, CHOICES)
    actions = torch.randint(CHOICES, (T, B), generator=rng)
    ends = torch.rand(T, B, generator=rng)
    log_probs = behavior.log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    return Case(logits, values, {
        "actions": actions[..., None].double(), "action_parameters": behavior, "log_probs": log_probs,
        "values": normal(T, B), "rewards": normal(T, B), "terminated": ends < end,
        "truncated": (ends >= end) & (ends < 2 * end), "valid": torch.rand(T, B, generator=rng) > 0.2})


def gradients(algo: str, case: Case, heads: Heads | None = None, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of an algorithm and its gradients with respect to logits and values."""
    given = {"env": "test", "algo": algo, "gamma": GAMMA, "value_loss_coeff": VALUE_COEFF,
             "exploration_loss_coeff": ENTROPY_COEFF, "normalize_returns": False}
    algorithm, heads = algorithm_class(algo)(make_config(given, settings)), heads or Heads()
    outputs = case.logits, case.values
    with torch.no_grad():
        data = case.data | algorithm.targets(heads, outputs, case.data)
    loss = algorithm.loss(heads, outputs, data, MaskedMean(data["valid"], ALONE)).total
    return loss, *torch.autograd.grad(loss, outputs, allow_unused=True)


def log_probs(case: Case) -> Tensor:
    return case.logits[:-1].log_softmax(-1).gather(-1, case.data["actions"].long())[..., 0]


def reference(case: Case, targets: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the three terms over the valid rows, and divide by their number."""
    rows, total, chosen = case.data["valid"].nonzero().tolist(), 0.0, log_probs(case)
    for t, b in rows:
        probabilities = case.logits[t, b].softmax(0)
        entropy = -(probabilities * probabilities.log()).sum()
        value_loss = (targets[t, b] - case.values[t, b]) ** 2
        total += -chosen[t, b] * advantages[t, b] + VALUE_COEFF * value_loss - ENTROPY_COEFF * entropy
    return total / len(rows), *torch.autograd.grad(total / len(rows), (case.logits, case.values))


def n_step_returns(case: Case) -> Tensor:
    """R_s = r_s + gamma r_{s+1} + ... + gamma^n V(x_{s+n}), to the end of the trajectory or of the episode."""
    data, returns = case.data, torch.empty(T, B, dtype=torch.float64)
    for b in range(B):
        for s in range(T):
            columns = (data[name][s:, b] for name in ("rewards", "terminated", "truncated"))
            total, discount, steps = walk(*columns, GAMMA)
            returns[s, b] = total + discount * case.values[s + steps, b].detach()
    return returns


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5)])
def test_impala_is_that_of_the_paper(seed: int, rho_bar: float, c_bar: float) -> None:
    case = make_case(seed)
    data = case.data
    log_ratios = log_probs(case).detach() - data["log_probs"]
    rho = log_ratios.exp().clamp(max=rho_bar)
    targets, advantages = vtrace(log_ratios, data["rewards"], case.values, data["terminated"], data["truncated"],
                                 GAMMA, 1.0, rho_bar, c_bar)
    actual = gradients("impala", case, vtrace_rho=rho_bar, vtrace_c=c_bar)
    torch.testing.assert_close(actual, reference(case, targets, rho * advantages), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a3c_is_that_of_the_paper(seed: int) -> None:
    case = make_case(seed)
    targets = n_step_returns(case)
    expected = reference(case, targets, targets - case.values.detach()[:-1])
    torch.testing.assert_close(gradients("a3c", case), expected, rtol=1e-10, atol=1e-12)


def test_without_lag_the_first_step_of_appo_is_a_policy_gradient_with_normalized_advantages() -> None:
    case = make_case(0, lag=0.0)
    valid = case.data["valid"]
    advantages = (n_step_returns(case) - case.values[:-1]).detach()
    advantages = (advantages - advantages[valid].mean()) / advantages[valid].std(unbiased=False)
    expected = torch.autograd.grad(-(log_probs(case) * advantages)[valid].mean(), case.logits)[0]
    actual = gradients("appo", case, gae_lambda=1.0, value_loss_coeff=0.0, exploration_loss_coeff=0.0)[1]
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("algo", ["impala", "a3c"])
def test_with_normalized_returns_the_gradient_is_that_of_rewards_and_values_in_those_units(algo: str) -> None:
    """Rewards and values that are d times as large give the same gradients when d is the unit of the value head."""
    case = make_case(3)
    larger = case._replace(data=case.data | {"rewards": 10 * case.data["rewards"]})
    heads = Heads()
    heads.returns.var.fill_(100.0)
    torch.testing.assert_close(gradients(algo, larger, heads), gradients(algo, case), rtol=1e-6, atol=1e-9)
