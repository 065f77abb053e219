"""Normalizers: observations and returns in units of their running statistics, and one-hot vectors of indices.

They are parts of the model, so their statistics are published and saved with the weights: the policy that acted and the
policy that learns see observations through the same numbers. Read next: `distributions.py`.
"""

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config
from envs.flat_spaces import Leaves, num_options
from runtime.several import merge
from runtime.utils import UserError
from vtrace import backward_sum, discounts_of


def make_normalizers(cfg: Config, leaves: Leaves) -> nn.ModuleList:
    """Make the normalizer of each leaf; those of `--normalize_input_keys`, or else of all images and vectors, run.

    Raises `UserError` for a name that does not exist.
    """
    keys = set(map(str, cfg.normalize_input_keys))
    if unknown := keys - leaves.keys():
        raise UserError(f"--normalize_input_keys: no observation is called '{min(unknown)}', only {', '.join(leaves)}")
    keys = keys or {name for name, space in leaves.items() if isinstance(space, spaces.Box)}
    return nn.ModuleList((RunningNormalizer if cfg.normalize_input and name in keys else FixedNormalizer)(cfg, space)
                         for name, space in leaves.items())


@torch.no_grad()
def hold_units(model: nn.Module, *, hold: bool) -> None:
    """Compute the units of all normalizers once for a dataset, whose SGD steps all ask for the same; or no longer."""
    for part in model.modules():
        if isinstance(part, RunningNormalizer | ReturnNormalizer):
            part.held = part.units() if hold else None


# ---- observations ------------------------------------------------------------------------------------------------


def expand(space: spaces.Space, obs: Tensor) -> Tensor:
    """Turn indices of a Discrete [B] or MultiDiscrete [B, n] leaf into one-hot vectors; leave other leaves alone."""
    sizes = num_options(space)
    if not sizes:
        return obs
    columns = obs.reshape(obs.shape[0], len(sizes), 1).unbind(1)
    bits = [column == torch.arange(n, device=obs.device) for column, n in zip(columns, sizes, strict=True)]
    return torch.cat(bits, 1).to(torch.uint8)


def expanded_space(space: spaces.Space) -> spaces.Box:
    """Return the space of what `expand` makes of a leaf."""
    if isinstance(space, spaces.Box):
        return space
    size = sum(num_options(space)) or int(np.prod(space.shape))
    return spaces.Box(0.0, 1.0, (size,), np.float32)


class FixedNormalizer(nn.Module):
    """Shift and scale images and vectors by constants, images to [0, 1] by default; leave bits as they are."""

    def __init__(self, cfg: Config, space: spaces.Space) -> None:
        super().__init__()
        self.space, self.is_bytes = space, space.dtype == np.uint8
        self.shift, self.unit = 0.0, 1.0
        if isinstance(space, spaces.Box):
            self.shift = cfg.obs_subtract_mean
            self.unit = cfg.obs_scale or (255.0 if self.is_bytes else 1.0)

    def forward(self, obs: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalize the observations [B, ...] of a leaf, of any dtype, into the given one."""
        return ((expand(self.space, obs) - self.shift) / self.unit).to(dtype)


class RunningNormalizer(FixedNormalizer):
    """Normalize one leaf by its running mean and standard deviation, element by element, clipped to +-5.

    The statistics are those of what `FixedNormalizer` would return, in float64: a clock shows 1.7e9. They move only in
    `update`, which the learner calls between two datasets: within one, and for every sample acted with one set of
    weights, the normalization is fixed.
    """

    CLIP = 5.0
    CHUNK = 230_000  # numbers normalized at once, 8 rows of Atari: their float32 copy stays in the cache
    held: tuple[Tensor, ...] | None = None  # the units, see `hold_units`

    def __init__(self, cfg: Config, space: spaces.Space) -> None:
        super().__init__(cfg, space)
        shape = expanded_space(space).shape
        # added to the variance: a pixel that never changed must not blow up when it does; vectors may be of any size
        self.epsilon = 1e-5 if len(shape) == 3 else 1e-12
        # Until the first update images are read as if uniform on [0, 1]; vectors as they are.
        mean, var = (0.5, 1 / 12) if self.is_bytes else (0.0, 1.0)
        self.register_buffer("mean", torch.full(shape, mean, dtype=torch.float64))
        self.register_buffer("var", torch.full(shape, var, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def forward(self, obs: Tensor, dtype: torch.dtype) -> Tensor:
        if self.held and self.is_bytes and obs.is_floating_point():
            return obs  # normalized already, with these units
        obs = expand(self.space, obs)
        units = self.held or self.units()
        size = self.rows_at_once(obs)
        if obs.shape[0] <= size:  # len() would fix the batch of an exported policy
            return self.normalize(obs, *units).to(dtype)
        normalized = torch.empty_like(obs, dtype=dtype)
        for rows, out in zip(obs.split(size), normalized.split(size), strict=True):
            out.copy_(self.normalize(rows, *units))
        return normalized

    def units(self) -> tuple[Tensor, Tensor]:
        """Compute what `normalize` needs: the scale of raw values, and their mean, of bytes its product with that."""
        scale, mean = (self.var + self.epsilon).rsqrt() / self.unit, self.mean * self.unit + self.shift
        return (scale.float(), (-mean * scale).float()) if self.is_bytes else (scale, mean)

    def normalize(self, rows: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
        """Return (rows - mean) * scale, clipped."""
        if self.is_bytes:  # one operation less: 1 of 10 us an image of Atari
            exact = rows.float()
            torch.addcmul(mean, exact, scale, out=exact)
        else:  # the difference first: far from 0 the products would be rounded too much
            exact = (rows - mean).mul_(scale)
        return exact.clamp_(-self.CLIP, self.CLIP)

    def rows_at_once(self, obs: Tensor) -> int:
        """Return how many rows of [B, ...] are worked on together; on a GPU all."""
        return max(1, self.CHUNK // self.mean.numel() if obs.device.type == "cpu" else len(obs))

    @torch.no_grad()
    def summarize(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Sum up [B, ...]: count [], means and sums of squared differences from these [...], float64."""
        chunks = expand(self.space, obs).split(self.rows_at_once(obs))
        dtype = torch.float32 if self.is_bytes else torch.float64  # exact enough for a chunk
        mean = sum(rows.to(dtype).sum(0).double() for rows in chunks) / max(1, len(obs))
        squares = sum((rows - mean.to(dtype)).square_().sum(0).double() for rows in chunks)
        return torch.full_like(self.count, len(obs)), mean, squares

    @torch.no_grad()
    def update(self, *summaries: Tensor) -> None:
        """Move the running statistics by what `summarize` returned in each rank, [ranks, ...].

        On a GPU nothing here waits: what depends on a count is computed either way.
        """
        number, mean, squares = merge(*summaries)
        var = squares / number.clamp(min=1) / self.unit**2
        self.count += number
        weight = number / self.count.clamp(min=1)
        change = (mean - self.shift) / self.unit - self.mean
        self.var.lerp_(var + (1 - weight) * change.square(), weight)
        self.mean += weight * change


# ---- returns -----------------------------------------------------------------------------------------------------


class ReturnNormalizer(nn.Module):
    """The running mean and deviation of the returns: the value head learns in these units.

    So the size of the rewards changes neither the learning rate of the values nor their weight in the loss. Without
    `--normalize_returns` mean and deviation stay 0 and 1. The statistics follow the last `WINDOW` decisions, roughly,
    since returns grow while the policy learns.

    The return of a decision is the discounted rewards until its trajectory ends, and the mean itself for what follows.
    No value takes part: values are read in these units, and with a share in them they could grow without end
    (`docs/tried.md`).
    """

    WINDOW = 125_000
    # As if so many decisions without a reward had been seen: values set out from 0, and where every step costs, what
    # is unknown looks better than what is known. Without it Acrobot explores less.
    PRIOR = 15_000
    MAX_GAMMA = 0.9999  # without a discount and an end the mean would be infinite
    MAX_TARGET = 100.0  # deviations of whole returns, as if the rewards of different decisions were independent
    FLOOR = 1e-3  # the least deviation, in units of the mean: differences below it are rounding errors
    held: tuple[Tensor, ...] | None = None  # the units, see `hold_units`

    def __init__(self, *, running: bool = False) -> None:
        super().__init__()
        # "var" 0: values count as 0 at first; "shown": the mean share of a return that a trajectory shows
        for name, value in {"mean": 0.0, "var": float(not running), "shown": 0.0, "count": self.PRIOR}.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    def units(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the mean, the deviation and the largest normalized target, float32.

        The less of a return a trajectory shows, the less that varies, and the larger its targets may be.
        """
        deviation = torch.maximum(self.var.sqrt(), self.FLOOR * self.mean.abs()).clamp(min=1e-8)
        limit = self.MAX_TARGET / (1 - (1 - self.shown).square()).sqrt()
        return self.mean.float(), deviation.float(), limit.float()

    @property
    def deviation(self) -> Tensor:
        return (self.held or self.units())[1]

    def normalize(self, returns: Tensor) -> Tensor:
        """Convert returns (or values) of any shape into the units of the value head."""
        mean, deviation, _ = self.held or self.units()
        return (returns - mean) / deviation

    def normalize_targets(self, targets: Tensor) -> Tensor:
        """Convert value targets of any shape; outlying ones, which would dominate the loss, are held within a limit."""
        limit = (self.held or self.units())[2]
        return self.normalize(targets).clamp(-limit, limit)

    def denormalize(self, values: Tensor) -> Tensor:
        """Convert outputs of the value head of any shape into returns."""
        mean, deviation, _ = self.held or self.units()
        return values * deviation + mean

    @torch.no_grad()
    def summarize(self, rewards: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, gamma: float) -> Tensor:
        """Sum up the returns of the valid rows of trajectories, as `update` takes it, [7] float64.

        With S the discounted rewards until the trajectory ends, or its episode, and c the discount of what follows (0
        after a termination), the mean of the returns is taken as E[S] / E[1 - c], and a return is S + c * mean. Squares
        are taken from that mean of these rows: far from 0 they would be rounded too much.

        Args:
            rewards: [T, B] float. terminated, truncated, valid: [T, B] bool.
            gamma: discount per step.
        """
        discounts, traces = discounts_of(terminated, truncated, min(gamma, self.MAX_GAMMA), torch.float64)
        ends = discounts - traces  # where a trajectory stops to show an episode, the discount of what follows
        ends[-1] = discounts[-1]
        # on a GPU nothing waits for a value: invalid rows count as 0
        sums = backward_sum(rewards.double().masked_fill(~valid, 0.0), traces)[:-1] * valid
        shown = (1 - backward_sum(ends, traces)[:-1]) * valid
        center = sums.sum() / shown.sum().clamp(min=1e-12)
        apart = sums - shown * center
        columns = torch.stack([valid.double(), sums, shown, apart * apart, apart * shown, shown * shown])
        return torch.cat([columns.sum((1, 2)), center[None]])

    @torch.no_grad()
    def update(self, summaries: Tensor) -> None:
        """Move the running statistics by what `summarize` returned in each rank, [ranks, 7]."""
        number, mean_sum, mean_shown = summaries[:, :3].sum(0)
        divisor = number.clamp(min=1)
        mean_sum, mean_shown = mean_sum / divisor, mean_shown / divisor
        weight = number / (self.count + divisor)
        self.shown.copy_(torch.where(self.shown > 0, (1 - weight) * self.shown + weight * mean_shown, mean_shown))
        change = weight * (mean_sum - mean_shown * self.mean) / torch.where(number > 0, self.shown, 1.0)
        self.mean += change
        squares, products, squares_shown, centers = summaries[:, 3:].unbind(1)
        apart = self.mean - centers  # the squares are now taken from the running mean; rounded, they may be below 0
        var = (squares - 2 * apart * products + apart.square() * squares_shown).sum().clamp(min=0) / divisor
        self.var.copy_((1 - weight) * (self.var + change.square()) + weight * var)
        self.count.add_(number).clamp_(max=self.WINDOW)
