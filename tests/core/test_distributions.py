"""Tests of `distributions.py` against torch.distributions, for each kind of choice, any action space and masks."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from distributions import LOG_STD_RANGE, ActionDistribution, DiagonalGaussian, SquashedGaussian, forbid, log_tanh_slope
from envs.flat_spaces import num_action_parameters, num_columns, plain_parts

SPACES = {
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-1, 2, (3,)),
    "nested": spaces.Dict(
        arm=spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiBinary(3))), hand=spaces.MultiDiscrete([2, 4]),
        leg=spaces.Discrete(3), view=spaces.Dict(tilt=spaces.Box(-1, 1, (1, 2)))),
}
CASES = [(name, False) for name in SPACES] + [("box", True), ("nested", True)]


def torch_parts(space: spaces.Space, parameters: Tensor) -> list[Distribution]:
    """Make the parts of a distribution with torch, unsquashed, each of some columns."""
    parts: list[Distribution] = []
    begin = 0
    for leaf in plain_parts(space).values():
        count = math.prod(leaf.shape)
        if isinstance(leaf, spaces.Box):
            mean, log_std = parameters[..., begin : begin + 2 * count].split(count, -1)
            parts.append(Independent(Normal(mean, log_std.exp()), 1))
            begin += 2 * count
        elif isinstance(leaf, spaces.MultiBinary):
            parts.append(Independent(TorchBernoulli(logits=parameters[..., begin : begin + count]), 1))
            begin += count
        else:
            for n in [leaf.n] if isinstance(leaf, spaces.Discrete) else leaf.nvec.ravel():
                parts.append(Independent(TorchCategorical(logits=parameters[..., None, begin : begin + n]), 1))
                begin += n
    assert begin == parameters.shape[-1]
    return parts


def torch_log_prob(parts: list[Distribution], actions: Tensor, squash: bool) -> Tensor:
    total = torch.zeros(actions.shape[:-1], dtype=torch.float64)
    for part, action in zip(parts, actions.split([part.event_shape[0] for part in parts], -1), strict=True):
        if squash and isinstance(part.base_dist, Normal):
            total += TransformedDistribution(part, [TanhTransform()]).log_prob(action.tanh())
        else:
            total += part.log_prob(action)
    return total


def draw_parameters(space: spaces.Space, seed: int, dtype: torch.dtype) -> Tensor:
    """Draw parameters [4, 3, D] between -2 and 1, where a squashed sample can still be told from the bound."""
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(4, 3, num_action_parameters(space), generator=generator, dtype=torch.float64)
    return parameters.clamp(-2, 1).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("name", "squash"), CASES)
def test_distributions_agree_with_torch(name: str, squash: bool, dtype: torch.dtype, tolerance: float) -> None:
    space = SPACES[name]
    parameters, other_parameters = (draw_parameters(space, seed, dtype) for seed in (0, 1))
    ours, other = (ActionDistribution(space, p, squash=squash) for p in (parameters, other_parameters))
    theirs, other_theirs = (torch_parts(space, p.double()) for p in (parameters, other_parameters))
    torch.manual_seed(0)
    actions = ours.sample()
    assert actions.shape == (4, 3, num_columns(space))
    kl = sum(map(kl_divergence, theirs, other_theirs))
    compared = [(ours.log_prob(actions), torch_log_prob(theirs, actions.double(), squash)),
                (ours.kl(other), kl), (ours.kl(ours), torch.zeros(4, 3))]
    if not squash:
        compared.append((ours.entropy(), sum(part.entropy() for part in theirs)))
    if name in ("discrete", "multi_discrete", "multi_binary"):
        uniform = torch_parts(space, torch.zeros_like(parameters).double())
        symmetric = sum([*map(kl_divergence, theirs, uniform), *map(kl_divergence, uniform, theirs)]) / 2
        compared.append((ours.symmetric_kl_to_uniform(), symmetric))
    for actual, expected in compared:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected.to(dtype), rtol=tolerance, atol=tolerance)


# ---- squashed Gaussians ------------------------------------------------------------------------------------------


def squashed_entropy_oracle(mean: float, std: float) -> float:
    """-E log p(tanh(a)), summed over a fine grid of a."""
    z = np.linspace(-9, 9, 400_001)
    weights = np.exp(-0.5 * z**2)
    a = np.abs(mean + std * z)
    log_slope = 2 * (np.log(2) - a - np.log1p(np.exp(-2 * a)))
    log_density = -0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi) - log_slope
    return float(-(log_density * weights).sum() / weights.sum())


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.1), (-0.3, 1.0), (2.0, 0.7), (-8.0, 7.0), (30.0, 2.0)])
def test_the_squashed_entropy_and_its_gradient_are_on_average_those_of_a_fine_integral(mean: float, std: float) -> None:
    count = 400_000
    torch.manual_seed(0)
    parameters = torch.tensor([mean, math.log(std)], dtype=torch.float64).repeat(count, 1).requires_grad_()
    entropy = SquashedGaussian(parameters).entropy()
    (gradient,) = torch.autograd.grad(entropy.sum(), parameters)
    by_mean = (squashed_entropy_oracle(mean + 1e-4, std) - squashed_entropy_oracle(mean - 1e-4, std)) / 2e-4
    by_log_std = (squashed_entropy_oracle(mean, std * math.exp(1e-4))
                  - squashed_entropy_oracle(mean, std * math.exp(-1e-4))) / 2e-4
    for drawn, expected in ((entropy, squashed_entropy_oracle(mean, std)), (gradient[:, 0], by_mean),
                            (gradient[:, 1], by_log_std)):
        assert drawn.mean().item() == pytest.approx(expected, abs=5 * drawn.std().item() / math.sqrt(count) + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_tanh_slope_is_finite_far_from_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, -30.0, -2.0, 0.0, 1e-3, 2.0, 30.0, 1e4], dtype=dtype, requires_grad=True)
    slope = log_tanh_slope(x)
    near = x.detach().abs() <= 2
    torch.testing.assert_close(slope[near], (1 - x[near].tanh().square()).log(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope[~near], 2 * math.log(2) - 2 * x[~near].abs())
    slope.sum().backward()
    torch.testing.assert_close(x.grad, -2 * x.detach().tanh())


# ---- samples -----------------------------------------------------------------------------------------------------


def chi_square(column: Tensor, probabilities: Tensor) -> float:
    """Return the statistic of how often 0, 1, ... were drawn, in deviations above its mean."""
    expected = probabilities * len(column)
    counts = column.long().bincount(minlength=len(probabilities))
    freedom = len(probabilities) - 1
    return float((((counts - expected).square() / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_samples_are_as_frequent_as_their_probabilities() -> None:
    torch.manual_seed(0)
    space = spaces.Dict(a=spaces.Discrete(6, start=3), b=spaces.MultiDiscrete([2, 4]), c=spaces.MultiBinary(2),
                        d=spaces.Box(-1, 1, (2,)))
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -4.0, 0.5, 0.3, -0.2, 1.0, 0.0, -2.0, 0.1, -1.5, 0.4])
    mean, std = torch.tensor([1.0, -3.0]), torch.tensor([0.1, 2.0])
    count = 200_000
    distribution = ActionDistribution(space, torch.cat([logits, mean, std.log()]).expand(count, 18))
    actions = distribution.sample()
    assert actions.dtype == torch.float32
    assert actions.shape == (count, 7)
    for column, (begin, end) in zip(actions.T, [(0, 6), (6, 8), (8, 12)], strict=False):
        assert chi_square(column, logits[begin:end].softmax(0)) < 6
    for column, logit in zip(actions.T[3:5], logits[12:], strict=True):
        assert chi_square(column, torch.stack([-logit, logit]).sigmoid()) < 6
    samples = actions[:, 5:]
    assert torch.all((samples.mean(0) - mean).abs() < 6 * std / math.sqrt(count))
    assert torch.all((samples.std(0) / std - 1).abs() < 6 / math.sqrt(2 * count))
    correlations = torch.corrcoef(actions.T) - torch.eye(7)
    assert correlations.abs().max() < 6 / math.sqrt(count), "the parts are independent"
    assert distribution.mode()[0].tolist() == [3, 0, 0, 0, 1, 1, -3]


def test_log_stds_are_clamped() -> None:
    extreme, bound = (DiagonalGaussian(torch.tensor([0.5, -0.5, *log_stds]))
                      for log_stds in ((-1e30, 1e30), LOG_STD_RANGE))
    assert torch.equal(extreme.entropy(), bound.entropy())
    assert torch.equal(extreme.log_prob(torch.zeros(2)), bound.log_prob(torch.zeros(2)))


# ---- masks -------------------------------------------------------------------------------------------------------


MASKED = spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, (1,)),
                       spaces.Discrete(2)))
MASKABLE = torch.tensor([2, 3, 4, 5, 6, 7, 8, 11, 12])
MASK = torch.tensor([True, False, True, False, True, True, False, False, True])
REDUCED = spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 2]), spaces.Box(-1, 1, (1,)),
                        spaces.Discrete(1)))
KEPT = [0, 1, 2, 4, 6, 7, 9, 10, 12]  # the parameters that the mask leaves
OPTIONS = {2: [0, 2], 3: [1, 2], 5: [1]}  # column: its allowed options


def masked(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draw parameters [4, 3, 13], return them with the forbidden ones set, and the allowed ones alone."""
    parameters = draw_parameters(MASKED, seed, dtype)
    return forbid(parameters, MASK.expand(4, 3, -1), MASKABLE), parameters[..., KEPT]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("squash", [False, True])
def test_forbidden_options_are_as_good_as_absent(squash: bool, dtype: torch.dtype) -> None:
    """Everything is what it would be if the space had the allowed options only."""
    (parameters, reduced), (other_parameters, other_reduced) = masked(0, dtype), masked(1, dtype)
    ours, other = (ActionDistribution(MASKED, p, squash=squash) for p in (parameters, other_parameters))
    theirs, other_theirs = (ActionDistribution(REDUCED, p, squash=squash) for p in (reduced, other_reduced))
    torch.manual_seed(0)
    actions = theirs.sample()
    renamed = actions.clone()
    for column, options in OPTIONS.items():
        renamed[..., column] = torch.tensor(options, dtype=dtype)[actions[..., column].long()]
    torch.testing.assert_close(ours.log_prob(renamed), theirs.log_prob(actions))
    if not squash:  # which would draw
        torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.kl(other), theirs.kl(other_theirs))
    torch.testing.assert_close(other.kl(ours), other_theirs.kl(theirs))
    for part, reduced_part in zip(ours.parts, theirs.parts, strict=True):
        if not isinstance(part, DiagonalGaussian):
            torch.testing.assert_close(part.symmetric_kl_to_uniform(), reduced_part.symmetric_kl_to_uniform())


def test_forbidden_options_are_never_drawn() -> None:
    parameters, reduced = masked(0, torch.float32)
    torch.manual_seed(0)
    distribution = ActionDistribution(MASKED, parameters[0, 0].expand(100_000, 13))
    for actions in (distribution.sample(), distribution.mode()):
        for column, options in OPTIONS.items():
            assert set(actions[:, column].tolist()) <= set(map(float, options))
    assert chi_square(distribution.sample()[:, 2] / 2, reduced[0, 0, 2:4].softmax(0)) < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_through_masks_are_finite_and_0_for_what_is_forbidden(dtype: torch.dtype) -> None:
    raw, other_raw = (draw_parameters(MASKED, seed, dtype).requires_grad_() for seed in (0, 1))
    ours, other = (ActionDistribution(MASKED, forbid(p, MASK.expand(4, 3, -1), MASKABLE)) for p in (raw, other_raw))
    torch.manual_seed(0)
    actions = ours.sample()
    uniform = sum(part.symmetric_kl_to_uniform() for part in ours.parts if not isinstance(part, DiagonalGaussian))
    for value in (ours.log_prob(actions), ours.entropy(), ours.kl(other), other.kl(ours), uniform):
        assert value.isfinite().all()
        (gradient,) = torch.autograd.grad(value.sum(), raw, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient.any()
        assert not gradient[..., MASKABLE[~MASK]].any()
