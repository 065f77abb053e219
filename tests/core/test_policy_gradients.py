"""Tests of IMPALA and A3C against slow references in float64, written like the papers' equations."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from gymnasium import spaces
from parts import make_config
from torch import Tensor

from algorithm import MaskedMean
from algorithms.a3c import NStepGradient
from algorithms.impala import VTraceGradient
from appo import AsyncPPO
from distributions import ActionDistribution
from normalizers import ReturnNormalizer
from reducer import Reducer

T, B, CHOICES = 7, 5, 4
GAMMA, VALUE_COEFF, ENTROPY_COEFF = 0.9, 0.7, 0.05
SPACE = spaces.Discrete(CHOICES)


class Heads:
    """What `targets` and `loss` ask a model: its distribution, and the statistics of the returns."""

    def __init__(self) -> None:
        self.returns = ReturnNormalizer().double()

    def distribution(self, parameters: Tensor) -> ActionDistribution:
        return ActionDistribution(SPACE, parameters)


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


def gradients(algo: Any, case: Case, heads: Heads | None = None, env_steps: int = 0,
              **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of an algorithm and its gradients with respect to logits and values."""
    name = {VTraceGradient: "impala", NStepGradient: "a3c", AsyncPPO: "appo"}[algo]
    cfg = make_config({"env": "test", "algo": name, "gamma": GAMMA, "value_loss_coeff": VALUE_COEFF,
                       "exploration_loss_coeff": ENTROPY_COEFF, "normalize_returns": False}, settings)
    algorithm, heads, outputs = algo(cfg), heads or Heads(), (case.logits, case.values)
    algorithm.env_steps = env_steps
    with torch.no_grad():
        data = case.data | algorithm.targets(heads, outputs, case.data)
    loss = algorithm.loss(heads, outputs, data, MaskedMean(data["valid"], Reducer())).total
    return loss, *torch.autograd.grad(loss, outputs, allow_unused=True)


# ---- references: one trajectory b and one step t at a time -------------------------------------------------------


def v_trace_target(case: Case, b: int, s: int, rho_bar: float, c_bar: float) -> float:
    """v_s = V(x_s) + sum over t >= s of gamma^(t-s) * c_s ... c_{t-1} * delta_t, until the episode ends."""
    data, values = case.data, case.values.detach()
    total, weight = float(values[s, b]), 1.0
    for t in range(s, T):
        ratio = math.exp(float(log_prob(case, b, t).detach() - data["log_probs"][t, b]))
        following = 0.0 if data["terminated"][t, b] else GAMMA * float(values[t + 1, b])
        total += weight * min(rho_bar, ratio) * (float(data["rewards"][t, b]) + following - float(values[t, b]))
        if data["terminated"][t, b] or data["truncated"][t, b]:
            break
        weight *= GAMMA * min(c_bar, ratio)
    return total


def n_step_return(case: Case, b: int, s: int) -> float:
    """R_s = r_s + gamma r_{s+1} + ... + gamma^n V(x_{s+n}), to the end of the trajectory or of the episode."""
    data, total, discount = case.data, 0.0, 1.0
    for t in range(s, T):
        total += discount * float(data["rewards"][t, b])
        discount *= GAMMA
        if data["terminated"][t, b]:
            return total
        if data["truncated"][t, b]:
            break
    return total + discount * float(case.values.detach()[t + 1, b])


def log_prob(case: Case, b: int, t: int) -> Tensor:
    return case.logits[t, b].log_softmax(0)[int(case.data["actions"][t, b, 0])]


def entropy(case: Case, b: int, t: int) -> Tensor:
    probabilities = case.logits[t, b].softmax(0)
    return -(probabilities * probabilities.log()).sum()


def reference(case: Case, targets: dict[tuple[int, int], float], advantages: dict[tuple[int, int], float]
              ) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the three terms over the valid rows, and divide by their number."""
    rows = [(t, b) for t in range(T) for b in range(B) if case.data["valid"][t, b]]
    loss = sum(-log_prob(case, b, t) * advantages[t, b] + VALUE_COEFF * (targets[t, b] - case.values[t, b]) ** 2
               - ENTROPY_COEFF * entropy(case, b, t) for t, b in rows) / len(rows)
    return loss, *torch.autograd.grad(loss, (case.logits, case.values))


def rows() -> list[tuple[int, int]]:
    return [(t, b) for t in range(T) for b in range(B)]


def next_target(case: Case, targets: dict[tuple[int, int], float], t: int, b: int) -> float:
    """Return gamma * v_{t+1}; V(x_{t+1}) stands for it where the trajectory or, by a time limit, the episode ends."""
    if case.data["terminated"][t, b]:
        return 0.0
    if case.data["truncated"][t, b] or t == T - 1:
        return GAMMA * float(case.values.detach()[t + 1, b])
    return GAMMA * targets[t + 1, b]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5)])
def test_impala_is_that_of_the_paper(seed: int, rho_bar: float, c_bar: float) -> None:
    case = make_case(seed)
    targets = {(t, b): v_trace_target(case, b, t, rho_bar, c_bar) for t, b in rows()}
    advantages = {}
    for t, b in rows():
        rho = min(rho_bar, math.exp(float(log_prob(case, b, t).detach() - case.data["log_probs"][t, b])))
        advantages[t, b] = rho * (float(case.data["rewards"][t, b]) + next_target(case, targets, t, b)
                                  - float(case.values.detach()[t, b]))
    expected = reference(case, targets, advantages)
    actual = gradients(VTraceGradient, case, vtrace_rho=rho_bar, vtrace_c=c_bar)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a3c_is_that_of_the_paper(seed: int) -> None:
    case = make_case(seed)
    targets = {(t, b): n_step_return(case, b, t) for t, b in rows()}
    advantages = {(t, b): targets[t, b] - float(case.values.detach()[t, b]) for t, b in rows()}
    expected = reference(case, targets, advantages)
    for ours, theirs in zip(gradients(NStepGradient, case), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_without_lag_the_first_step_of_appo_is_a_policy_gradient_with_normalized_advantages() -> None:
    case = make_case(0, lag=0.0)
    settings = {"value_loss_coeff": 0.0, "exploration_loss_coeff": 0.0}
    valid = case.data["valid"]
    returns = torch.tensor([[n_step_return(case, b, t) for b in range(B)] for t in range(T)], dtype=torch.float64)
    advantages = returns - case.values[:-1]
    advantages = ((advantages - advantages[valid].mean()) / advantages[valid].std(unbiased=False)).detach()
    policy = case.logits[:-1].log_softmax(-1).gather(-1, case.data["actions"].long())[..., 0]
    expected = torch.autograd.grad(-(policy * advantages)[valid].mean(), case.logits)[0]
    actual = gradients(AsyncPPO, case, gae_lambda=1.0, **settings)[1]
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("algo", [VTraceGradient, NStepGradient])
def test_with_normalized_returns_the_gradient_is_that_of_rewards_and_values_in_those_units(algo: Any) -> None:
    """Rewards and values that are d times as large give the same gradients when d is the unit of the value head."""
    case = make_case(3)
    larger = case._replace(data=case.data | {"rewards": 10 * case.data["rewards"]})
    heads = Heads()
    heads.returns.var.fill_(100.0)
    for ours, theirs in zip(gradients(algo, larger, heads), gradients(algo, case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_the_weight_of_the_entropy_falls_to_0() -> None:
    case, settings = make_case(4), {"exploration_loss_decay_env_steps": 1000}
    whole, none = (gradients(VTraceGradient, case, exploration_loss_coeff=coeff)[1] for coeff in (0.4, 0.0))
    for env_steps, share in ((0, 1.0), (250, 0.75), (1000, 0.0), (5000, 0.0)):
        actual = gradients(VTraceGradient, case, env_steps=env_steps, exploration_loss_coeff=0.4, **settings)[1]
        torch.testing.assert_close(actual, none + share * (whole - none), rtol=1e-9, atol=1e-12)
