"""Action distributions: one for each kind of choice, and `ActionDistribution`, which joins them for any action space.

Each is made from parameters [..., D] that the network gives, works on actions [..., columns] float32 as laid out in
`envs/flat_spaces.py`, and has the same methods. Log-probabilities, entropies and divergences are sums over the
columns: given the observation the parts of an action are independent.

A choice that an action mask forbids has the logit `FORBIDDEN`: its probability is 0 exactly, and it adds nothing to any
sum. Read next: `config.py`.
"""

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from config import Config
from envs.flat_spaces import action_leaves, is_bounded, num_action_parameters, num_options
from runtime.utils import UserError

FORBIDDEN = -1e9
LOG_STD_RANGE = (-8.0, 5.0)  # at its ends the gradient vanishes


def check_action_space(cfg: Config, space: spaces.Space) -> None:
    """Raise `UserError` when an action space has no distribution under these settings."""
    boxes = [leaf for leaf in action_leaves(space).values() if isinstance(leaf, spaces.Box)]
    for name in ("squash_actions", "adaptive_stddev"):
        if getattr(cfg, name) and not boxes:
            raise UserError(f"--{name} is for continuous actions, not for {space}; leave it off")
    if boxes and getattr(cfg, "exploration_loss", "") == "symmetric_kl":
        raise UserError(f"--exploration_loss=symmetric_kl is for choices, not for {space}; use entropy")
    if cfg.squash_actions and not all(is_bounded(leaf).all() for leaf in boxes):
        raise UserError(f"--squash_actions needs bounded actions, not {space}; leave it off")


def forbid(parameters: Tensor, mask: Tensor, maskable: Tensor) -> Tensor:
    """Set the logits of forbidden choices.

    Args:
        parameters: of the distribution, [..., D] float32.
        mask: [..., M] bool, one entry for each maskable parameter, False: forbidden.
        maskable: [M] int64, which of the D parameters are logits of choices.
    """
    allowed = torch.ones_like(parameters, dtype=torch.bool)
    allowed[..., maskable] = mask
    return torch.where(allowed, parameters, FORBIDDEN)


class ActionDistribution:
    """The distribution over any action space: its independent parts side by side.

    Args:
        space: the action space.
        parameters: [..., num_action_parameters(space)] float32.
        squash: squash Box actions with tanh instead of clipping them.
    """

    def __init__(self, space: spaces.Space, parameters: Tensor, *, squash: bool = False) -> None:
        kinds, sizes, self.columns = zip(*kinds_of_parts(space, squash=squash), strict=True)
        self.parts = [kind(part) for kind, part in zip(kinds, parameters.split(sizes, -1), strict=True)]

    def sample(self) -> Tensor:
        """Draw actions [..., columns] float32."""
        return torch.cat([part.sample() for part in self.parts], -1)

    def mode(self) -> Tensor:
        """Return the most likely actions [..., columns] float32."""
        return torch.cat([part.mode() for part in self.parts], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the log-probability (density) of actions [..., columns], [...]."""
        columns = actions.split(self.columns, -1)
        return total(part.log_prob(action) for part, action in zip(self.parts, columns, strict=True))

    def entropy(self) -> Tensor:
        """Return the entropy, [...]."""
        return total(part.entropy() for part in self.parts)

    def kl(self, other: "ActionDistribution") -> Tensor:
        """Return KL(self || other), [...]."""
        return total(p.kl(q) for p, q in zip(self.parts, other.parts, strict=True))

    def symmetric_kl_to_uniform(self) -> Tensor:
        """Return the mean of both KL divergences between this and the uniform distribution, [...]; not of a Box."""
        return total(part.symmetric_kl_to_uniform() for part in self.parts)


def kinds_of_parts(space: spaces.Space, *, squash: bool) -> Iterator[tuple[type, int, int]]:
    """List the distribution of each part of an action space, how many parameters it has, and how many columns."""
    for leaf in action_leaves(space).values():
        size = num_action_parameters(leaf)
        if isinstance(leaf, spaces.Box):
            yield SquashedGaussian if squash else DiagonalGaussian, size, size // 2
        elif isinstance(leaf, spaces.MultiBinary):
            yield Bernoulli, size, size
        else:
            yield from ((Categorical, n, 1) for n in num_options(leaf))


def parameter_kinds(space: spaces.Space) -> tuple[Tensor, Tensor]:
    """Return which parameters of a distribution are log standard deviations and which logits of choices, [D] bool."""
    is_log_std, is_logit = [], []
    for kind, size, num_columns in kinds_of_parts(space, squash=False):
        is_log_std += [kind is DiagonalGaussian and i >= num_columns for i in range(size)]
        is_logit += [kind is Categorical] * size
    return torch.tensor(is_log_std), torch.tensor(is_logit)


def total(terms: Iterable[Tensor]) -> Tensor:
    """Add tensors of one shape."""
    return functools.reduce(torch.add, terms)


class Categorical:
    """One choice between n options, from logits [..., n]; the action is its index, [..., 1]."""

    def __init__(self, logits: Tensor) -> None:
        self.log_probs = logits.log_softmax(-1)

    def sample(self) -> Tensor:
        """Draw indices by the Gumbel trick: argmax of log p + Gumbel noise."""
        noise = torch.empty_like(self.log_probs).exponential_().clamp_min_(1e-30)  # 0 would win even when forbidden
        return (self.log_probs - noise.log_()).argmax(-1, keepdim=True).float()

    def mode(self) -> Tensor:
        return self.log_probs.argmax(-1, keepdim=True).float()

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_probs.gather(-1, actions.long()).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: "Categorical") -> Tensor:
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

    def symmetric_kl_to_uniform(self) -> Tensor:
        """Return (KL(self || u) + KL(u || self)) / 2 for the uniform u over all options that are allowed."""
        allowed = self.log_probs > FORBIDDEN / 2
        uniform = 1.0 / allowed.sum(-1, keepdim=True)
        terms = (self.log_probs.exp() - uniform) * (self.log_probs - uniform.log())
        return 0.5 * torch.where(allowed, terms, 0.0).sum(-1)


class Bernoulli:
    """n independent bits, from logits [..., n]; the action is [..., n] of 0 and 1."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self) -> Tensor:
        return torch.bernoulli(self.logits.sigmoid())

    def mode(self) -> Tensor:
        return (self.logits > 0).float()

    def log_prob(self, actions: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(self.logits, actions, reduction="none").sum(-1)

    def entropy(self) -> Tensor:
        return self.cross_entropy(self)

    def kl(self, other: "Bernoulli") -> Tensor:
        return self.cross_entropy(other) - self.entropy()

    def cross_entropy(self, other: "Bernoulli") -> Tensor:
        """Return E[-log p of `other`], of bits drawn from this."""
        p = self.logits.sigmoid()
        return (p * F.softplus(-other.logits) + (1 - p) * F.softplus(other.logits)).sum(-1)

    def symmetric_kl_to_uniform(self) -> Tensor:
        """Return (KL(self || u) + KL(u || self)) / 2 for fair coins u: (p - 1/2) * logit / 2 for each bit."""
        return 0.5 * ((self.logits.sigmoid() - 0.5) * self.logits).sum(-1)


class DiagonalGaussian:
    """n independent numbers, from their means and log standard deviations, [..., 2n]; the action is [..., n]."""

    def __init__(self, parameters: Tensor) -> None:
        self.mean, log_std = parameters.chunk(2, -1)
        self.log_std = F.hardtanh(log_std, *LOG_STD_RANGE)
        self.std = self.log_std.exp()

    def sample(self) -> Tensor:
        return torch.addcmul(self.mean, self.std, torch.randn_like(self.mean))

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        z = (actions - self.mean) / self.std
        return -(self.log_std + 0.5 * z.square()).sum(-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        return self.log_std.sum(-1) + 0.5 * self.mean.shape[-1] * math.log(2 * math.pi * math.e)

    def kl(self, other: "DiagonalGaussian") -> Tensor:
        shift, ratio = (self.mean - other.mean) / other.std, self.std / other.std
        squares = torch.addcmul(shift.square(), ratio, ratio)
        return (other.log_std - self.log_std + 0.5 * squares).sum(-1) - 0.5 * self.mean.shape[-1]


class SquashedGaussian(DiagonalGaussian):
    """A Gaussian squashed into (-1, 1) by tanh. Actions are kept unsquashed: atanh would lose them near the bounds.

    The environment gets tanh(action) (`flat_spaces.unflatten_actions`); the density is that of tanh(action). A KL
    divergence does not change under an invertible map, so it is the Gaussians'.
    """

    def log_prob(self, actions: Tensor) -> Tensor:
        return super().log_prob(actions) - log_tanh_slope(actions).sum(-1)

    def entropy(self) -> Tensor:
        """Estimate the entropy, that of the Gaussian + E log|d tanh(a) / da|, with one action drawn for the mean.

        The gradient goes through the action, so it is right on average, too.
        """
        return super().entropy() + log_tanh_slope(self.sample()).sum(-1)


def log_tanh_slope(x: Tensor) -> Tensor:
    """Return log(1 - tanh(x)^2), exact for any x."""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))
