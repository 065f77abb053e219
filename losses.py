"""The terms of the losses, as pure functions of [T, B] tensors. Masked rows change no loss and no gradient.

Every average is taken by a `MaskedMean`: over the valid rows of a minibatch, of all ranks. Read next:
`algorithm.py`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from reducer import Reducer

ADVANTAGE_FLOOR = 0.001  # the least deviation of advantages, in units of the value targets


class MaskedMean:
    """Averages [..., T, B] tensors over the valid rows of a minibatch; 0 when there are none.

    Invalid rows may hold anything, also nan. Several tensors are cheaper as a stack of them.
    """

    def __init__(self, valid: Tensor, reducer: Reducer) -> None:
        """Average over valid [T, B] bool."""
        self.invalid, self.reducer = ~valid, reducer
        self.count = reducer.sum(valid.sum()).clamp(min=1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.reducer.share(self.masked(x).sum((-2, -1)) / self.count)

    def masked(self, x: Tensor) -> Tensor:
        """Replace the invalid entries of x by 0."""
        return x.masked_fill(self.invalid, 0.0)

    def moments(self, x: Tensor) -> Tensor:
        """Return the means and the standard deviations of x [..., T, B], as [2, ...]."""
        mean = self(x)
        return torch.stack([mean, self((x - mean[..., None, None]).square()).sqrt()])

    def std(self, x: Tensor) -> Tensor:
        """Return the standard deviation of x."""
        return self.moments(x)[1]


def decayed(coeff: float, env_steps: int, decay_env_steps: int) -> float:
    """Return a coefficient that falls linearly to 0 over the first decay_env_steps of a run; 0: it stays."""
    return coeff * (max(0.0, 1 - env_steps / decay_env_steps) if decay_env_steps else 1.0)


def normalize_advantages(advantages: Tensor, moments: Tensor) -> Tensor:
    """Shift and scale advantages to mean 0 and deviation 1, without amplifying noise.

    A deviation below 0.1 % of the root mean square of targets and advantages counts as that. Once a task is solved, all
    advantages are errors of the value estimates: scaled to 1 they would let the policy walk at random until it fails
    (CartPole: values of 100, a deviation of 0.001, returns of 500 that fell to 160; `docs/tried.md`). The price:
    where the same reward, a hundred times what is to be learned, comes in every step whatever is done, all else counts
    as noise; subtract it.

    moments: what `moments_of` returns.
    """
    center, deviation = moments[:, 0]
    size = torch.linalg.vector_norm(moments[:, :2])  # a mean square is mean^2 + deviation^2
    return (advantages - center) / torch.maximum(deviation, ADVANTAGE_FLOOR * size).clamp(min=1e-30)  # of zeros: 0


def held_ratios(log_ratios: Tensor) -> Tensor:
    """Return pi/mu, held within [0.05, 20] against overflow, as in Sample Factory."""
    return F.hardtanh(log_ratios, math.log(0.05), math.log(20.0)).exp()


def ppo_objective(ratios: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """Compute min(ratio * A, clip(ratio, 1/(1+eps), 1+eps) * A), whose mean PPO raises; clip_ratio = 0: no clipping."""
    objective = ratios * advantages
    if clip_ratio:  # a detached bound has the same gradient, at half the price
        bound = ratios.detach().clamp(1 / (1 + clip_ratio), 1 + clip_ratio) * advantages
        objective = torch.where(objective <= bound, objective, bound)
    return objective


def clipped_value_error(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> Tensor:
    """Compute max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2); clip = 0: no clipping."""
    error = F.mse_loss(values, targets, reduction="none")
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return error


@torch.no_grad()
def moments_of(mean: MaskedMean, advantages: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    """Return the means and deviations of advantages, targets R, values V and R - V, [2, 4].

    All [T, B], in units of the rewards.
    """
    return mean.moments(torch.stack([advantages, targets, values, targets - values]))


def describe(moments: Tensor) -> dict[str, Tensor]:
    """Return the statistics that every actor-critic reports.

    The explained variance, 1 - Var(R - V) / Var(R), is 1 for perfect values, 0 for useless ones.
    """
    means, deviations = moments
    unexplained = deviations[3] / deviations[1].clamp(min=1e-12)
    return {"advantage_mean": means[0], "advantage_std": deviations[0], "value_mean": means[2],
            "explained_variance": 1 - unexplained.square()}
