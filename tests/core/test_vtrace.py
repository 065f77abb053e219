"""Tests of `vtrace.py` against slow oracles that are written like the papers' equations, all in float64."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from vtrace import backward_scan, backward_sum, gae, vtrace

SEEDS = range(30)
inf = math.inf


class Case(NamedTuple):
    """The arguments of `vtrace`, in its order."""

    log_ratios: Tensor
    rewards: Tensor
    values: Tensor
    terminated: Tensor
    truncated: Tensor
    gamma: float
    lambda_: float
    rho_bar: float
    c_bar: float

    def without_ratios(self) -> tuple:
        """Return the arguments of `gae`."""
        return self[1:7]


def random_case(seed: int, num_steps: int | None = None, batch: int | None = None, end: float = 0.15) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: float) -> float:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    shape = (num_steps or int(draw(1, 2, 3, 7, 12)), batch or int(draw(1, 2, 5)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Case(
        log_ratios=normal(*shape), rewards=normal(*shape), values=normal(shape[0] + 1, shape[1]),
        terminated=torch.rand(shape, generator=generator) < end, truncated=torch.rand(shape, generator=generator) < end,
        gamma=draw(0.5, 0.9, 0.99, 1.0), lambda_=draw(0.0, 0.5, 0.95, 1.0),
        rho_bar=draw(0.5, 1.0, 2.0, inf), c_bar=draw(0.5, 1.0, 2.0, inf))


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# ---- oracles: one trajectory b, one start s at a time ------------------------------------------------------------


def last_step(case: Case, s: int, b: int) -> int:
    """Return the last step of the episode that step s belongs to, or of the trajectory."""
    num_steps = len(case.rewards)
    ends = [t for t in range(s, num_steps) if case.terminated[t, b] or case.truncated[t, b]]
    return min([*ends, num_steps - 1])


def paper_td_error(case: Case, t: int, b: int) -> float:
    """Return r_t + gamma V(x_{t+1}) - V(x_t), where nothing follows a termination."""
    next_value = 0.0 if case.terminated[t, b] else float(case.values[t + 1, b])
    return float(case.rewards[t, b]) + case.gamma * next_value - float(case.values[t, b])


def one_by_one(case: Case, entry: Callable[[int, int], float]) -> Tensor:
    """Compute a [T, B] tensor, entry by entry."""
    num_steps, batch = case.rewards.shape
    return torch.tensor([[entry(t, b) for b in range(batch)] for t in range(num_steps)], dtype=torch.float64)


def paper_vtrace(case: Case) -> Tensor:
    """IMPALA, equation 1: v_s = V(x_s) + sum_{t=s}^{s+n-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t V."""
    ratio = [[math.exp(x) for x in row] for row in case.log_ratios.tolist()]

    def target(s: int, b: int) -> float:
        total = float(case.values[s, b])
        for t in range(s, last_step(case, s, b) + 1):
            c = [case.lambda_ * min(case.c_bar, ratio[i][b]) for i in range(s, t)]
            delta = min(case.rho_bar, ratio[t][b]) * paper_td_error(case, t, b)
            total += case.gamma ** (t - s) * math.prod(c) * delta
        return total

    return one_by_one(case, target)


def paper_gae(case: Case) -> Tensor:
    """GAE, equation 16: A_s = sum_l (gamma lambda)^l delta_{s+l}."""
    return one_by_one(case, lambda s, b: sum((case.gamma * case.lambda_) ** (t - s) * paper_td_error(case, t, b)
                                             for t in range(s, last_step(case, s, b) + 1)))


def paper_advantages(case: Case, vs: Tensor) -> Tensor:
    """r_t + gamma vs_{t+1} - V(x_t), with V(x_{t+1}) for vs_{t+1} at the end of a trajectory and in a truncation."""
    def advantage(t: int, b: int) -> float:
        bootstraps = case.truncated[t, b] or t == len(case.rewards) - 1
        following = 0.0 if case.terminated[t, b] else float((case.values if bootstraps else vs)[t + 1, b])
        return float(case.rewards[t, b]) + case.gamma * following - float(case.values[t, b])

    return one_by_one(case, advantage)


# ---- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_vtrace_is_the_sum_of_the_paper(seed: int) -> None:
    case = random_case(seed)
    vs, advantages = vtrace(*case)
    assert_equal(vs, paper_vtrace(case))
    assert_equal(advantages, paper_advantages(case, paper_vtrace(case)))


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_the_sum_of_the_paper_and_vtrace_on_policy(seed: int) -> None:
    case = random_case(seed)
    targets, advantages = gae(*case.without_ratios())
    assert_equal(advantages, paper_gae(case))
    assert_equal(targets, case.values[:-1] + paper_gae(case))
    for truncation in (1.0, inf):
        on_policy = case._replace(log_ratios=torch.zeros_like(case.log_ratios), rho_bar=truncation, c_bar=truncation)
        assert_equal(vtrace(*on_policy)[0], targets)


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_after_the_end_of_an_episode_matters(seed: int, kind: str) -> None:
    """Row end + 1 is the masked reset; only its value counts, and only after a truncation."""
    case = random_case(seed, num_steps=10, batch=3)
    end = 4
    case.terminated[end], case.truncated[end] = kind == "terminated", kind == "truncated"
    other = random_case(seed + 100, num_steps=10, batch=3)
    first_value = end + 1 if kind == "terminated" else end + 2

    def spliced(mine: Tensor, others: Tensor, first: int = end + 1) -> Tensor:
        return torch.cat([mine[:first], others[first:]])

    changed = case._replace(
        log_ratios=spliced(case.log_ratios, 5 * other.log_ratios),
        rewards=spliced(case.rewards, 1e6 * other.rewards),
        values=spliced(case.values, 1e6 * other.values, first_value),
        terminated=spliced(case.terminated, other.terminated),
        truncated=spliced(case.truncated, other.truncated))
    for before, after in zip((*vtrace(*case), *gae(*case.without_ratios())),
                             (*vtrace(*changed), *gae(*changed.without_ratios())), strict=True):
        assert torch.equal(before[: end + 1], after[: end + 1])
        assert not torch.equal(before[end + 1 :], after[end + 1 :])


def test_results_are_detached_and_arguments_untouched() -> None:
    case, same = (random_case(2, num_steps=12, batch=5) for _ in range(2))
    case.values.requires_grad_()
    assert not any(result.requires_grad for result in (*vtrace(*case), *gae(*case.without_ratios())))
    torch.testing.assert_close(case, same, rtol=0, atol=0)


# ---- the sum over time -------------------------------------------------------------------------------------------


def plain_sum(deltas: list[float], traces: list[float]) -> list[float]:
    """x_t = d_t + a_t x_{t+1} for t = 0 ... T, in Python's numbers."""
    sums = [0.0]
    for delta, trace in zip(reversed(deltas), reversed(traces), strict=True):
        sums.append(delta + trace * sums[-1])
    return sums[::-1]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 100, 257])
def test_the_scan_is_the_sum_of_a_plain_loop(length: int) -> None:
    rng = torch.Generator().manual_seed(length)
    deltas, traces = torch.randn(2, length, 7, generator=rng, dtype=torch.float64)
    traces = (0.9 + 0.1 * traces.abs()).clamp(max=1.0) * (torch.rand(length, 7, generator=rng) > 0.05)
    expected = [plain_sum(*pair) for pair in zip(deltas.T.tolist(), traces.T.tolist(), strict=True)]
    for function in (backward_scan, backward_sum):
        torch.testing.assert_close(function(deltas, traces), torch.tensor(expected, dtype=torch.float64).T,
                                   rtol=1e-12, atol=1e-12)
