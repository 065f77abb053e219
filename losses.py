"""The terms of the losses, as pure functions of [T, B] tensors. Masked rows change no loss and no gradient.

Every average is taken by a `MaskedMean`: over the valid rows of a minibatch, of all ranks. Read next:
`algorithm.py`.
"""

import math

import torch
from torch import Tensor

from reducer import Reducer

ADVANTAGE_FLOOR = 0.01  # the least deviation of advantages, in units of the value targets


class MaskedMean:
    """Averages [T, B] tensors over the valid rows of a minibatch; 0 when there are none.

    Invalid rows may hold anything, also nan.
    """

    def __init__(self, valid: Tensor, reducer: Reducer) -> None:
        """Average over valid [T, B] bool."""
        self.valid, self.reducer = valid, reducer
        self.count = reducer.sum(valid.sum()).clamp(min=1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.reducer.share(self.masked(x).sum() / self.count)

    def masked(self, x: Tensor, fill: Tensor | float = 0.0) -> Tensor:
        """Replace the invalid entries of x."""
        return torch.where(self.valid, x, fill)

    def std(self, x: Tensor) -> Tensor:
        """Return the standard deviation of x."""
        return self((x - self(x)).square()).sqrt()


def decayed(coeff: float, env_steps: int, decay_env_steps: int) -> float:
    """Return a coefficient that falls linearly to 0 over the first decay_env_steps of a run; 0: it stays."""
    return coeff * (max(0.0, 1 - env_steps / decay_env_steps) if decay_env_steps else 1.0)


def normalize_advantages(advantages: Tensor, targets: Tensor, mean: MaskedMean) -> Tensor:
    """Shift and scale advantages to mean 0 and deviation 1, without amplifying noise.

    A deviation below 1 % of the root mean square of targets and advantages counts as that. Once a task is solved, all
    advantages are errors of the value estimates: scaled to 1 they would let the policy walk at random until it fails
    (CartPole: values of 100, a deviation of 0.001, returns of 500 that fell to 160; `docs/performance.md`). The price:
    where the same large reward comes in every step whatever is done, all else counts as noise; subtract it.
    """
    size = mean(targets.square() + advantages.square()).sqrt()
    deviation = torch.maximum(mean.std(advantages), ADVANTAGE_FLOOR * size).clamp(min=1e-30)  # of zeros: 0
    return (advantages - mean(advantages)) / deviation


def ppo_policy_loss(log_ratios: Tensor, advantages: Tensor, clip_ratio: float, mean: MaskedMean) -> Tensor:
    """Compute -mean(min(ratio * A, clip(ratio, 1/(1+eps), 1+eps) * A)).

    The ratio itself is held within [0.05, 20] against overflow, as in Sample Factory. clip_ratio = 0: no clipping.
    """
    ratios = mean.masked(log_ratios).clamp(math.log(0.05), math.log(20.0)).exp()
    objective = ratios * advantages
    if clip_ratio:
        objective = torch.minimum(objective, ratios.clamp(1 / (1 + clip_ratio), 1 + clip_ratio) * advantages)
    return -mean(objective)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float, mean: MaskedMean) -> Tensor:
    """Compute mean(max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2)); clip = 0: no clipping."""
    targets = mean.masked(targets)  # 0 x nan would be nan in the gradient
    error = (values - targets).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return mean(error)


def explained_variance(values: Tensor, targets: Tensor, mean: MaskedMean) -> Tensor:
    """Return 1 - Var(R - V) / Var(R): 1 for perfect values, 0 for useless ones."""
    return 1 - mean.std(targets - values).square() / (mean.std(targets).square() + 1e-8)
