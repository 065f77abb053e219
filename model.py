"""The policy network: normalizer, encoders, action distributions, and the actor-critic that joins them.

    observations -> running normalizer -> encoder (one per named observation) -> core -> policy head, value head

Policy workers hold a copy for acting, the learner the original; both are made by `ActorCritic(...)`. The running
statistics of the observations are buffers of the model, so they are published and saved with the weights, and the
policy that acted and the policy that learns always see observations through the same numbers.

The network body may run in bfloat16; the heads and everything after them is float32. Read next: `vtrace.py`.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config, UserError

NONLINEARITIES: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}


# ---- observation normalizer --------------------------------------------------------------------------------------


class RunningNormalizer(nn.Module):
    """Normalize one observation by its running mean and standard deviation, element by element, clipped to +-5.

    Images count in units of 1/255. The statistics move only in `update`, which the learner calls between two
    datasets: within one dataset, and for every sample acted with one set of weights, the normalization is fixed.
    """

    CLIP = 5.0
    EPSILON = 1e-5  # added to the variance: a pixel that never changed must not blow up when it does
    CHUNK = 32  # rows normalized at once, so that their float32 copy stays in the cache

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        shape = space.shape
        self.unit = 255.0 if space.dtype == np.uint8 else 1.0
        # Until the first update images are read as if uniform on [0, 1]; vectors as they are.
        mean, var = (0.5, 1 / 12) if space.dtype == np.uint8 else (0.0, 1.0)
        self.register_buffer("mean", torch.full(shape, mean))
        self.register_buffer("var", torch.full(shape, var))
        self.register_buffer("count", torch.zeros(()))

    @torch.no_grad()
    def forward(self, obs: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalize [B, ...] of any dtype into a new tensor of the given one."""
        scale = (self.var + self.EPSILON).rsqrt()
        shift = -self.mean * scale
        scale = scale / self.unit
        normalized = torch.empty(obs.shape, dtype=dtype, device=obs.device)
        chunk = self.CHUNK if obs.device.type == "cpu" else max(len(obs), 1)
        for rows, out in zip(obs.split(chunk), normalized.split(chunk), strict=True):
            exact = rows.to(torch.float32, copy=True)
            out.copy_(torch.addcmul(shift, exact, scale, out=exact).clamp_(-self.CLIP, self.CLIP))
        return normalized

    @torch.no_grad()
    def update(self, obs: Tensor, valid: Tensor) -> None:
        """Merge the statistics of the valid rows of [B, ...] into the running ones (Chan et al., 1979)."""
        obs = obs[valid]
        if not len(obs):
            return
        if not self.count:  # begin near the data: sums around a far point would lose the variance in float32
            self.mean.copy_(obs[0].float() / self.unit)
        # sums in chunks, around the running mean so that float32 keeps its precision
        center = self.mean * self.unit
        total, squares = torch.zeros_like(center), torch.zeros_like(center)
        for rows in obs.split(self.CHUNK if obs.device.type == "cpu" else len(obs)):
            difference = rows.float() - center
            total += difference.sum(0)
            squares += difference.square_().sum(0)
        shift = total / (len(obs) * self.unit)
        var = (squares / (len(obs) * self.unit**2) - shift.square()).clamp_(min=0)
        weight = len(obs) / (self.count + len(obs))
        self.var.copy_((1 - weight) * self.var + weight * var + weight * (1 - weight) * shift.square())
        self.mean += weight * shift
        self.count += len(obs)


class FixedNormalizer(nn.Module):
    """Scale images to [0, 1]; leave vectors as they are (`--normalize_input=False`)."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.unit = 255.0 if space.dtype == np.uint8 else 1.0

    def forward(self, obs: Tensor, dtype: torch.dtype) -> Tensor:
        return obs.to(dtype) / self.unit

    def update(self, obs: Tensor, valid: Tensor) -> None:
        pass


# ---- encoders ----------------------------------------------------------------------------------------------------


def mlp(sizes: Iterable[int], nonlinearity: type[nn.Module]) -> nn.Sequential:
    """Make linear layers of the given sizes, the input's first, each followed by the nonlinearity."""
    sizes = list(sizes)
    layers = [[nn.Linear(n_in, n_out), nonlinearity()] for n_in, n_out in itertools.pairwise(sizes)]
    return nn.Sequential(*(module for layer in layers for module in layer))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added (IMPALA, figure 3)."""

    def __init__(self, channels: int, nonlinearity: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nonlinearity(), nn.Conv2d(channels, channels, 3, padding=1),
                                  nonlinearity(), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def convolutions(architecture: str, channels: int, nonlinearity: type[nn.Module]) -> nn.Sequential:
    """Make the convolutional part of an image encoder, [B, C, H, W] -> [B, C', H', W']."""
    layers: list[nn.Module] = []
    if architecture == "resnet_impala":
        for out in (16, 32, 32):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1),
                       ResidualBlock(out, nonlinearity), ResidualBlock(out, nonlinearity)]
            channels = out
        return nn.Sequential(*layers, nonlinearity())
    # (filters, size, stride): convnet_atari is the Nature CNN (doi:10.1038/nature14236), the other Sample Factory's
    plans = {"convnet_atari": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
             "convnet_simple": ((32, 8, 4), (64, 4, 2), (128, 3, 2))}
    for out, size, stride in plans[architecture]:
        layers += [nn.Conv2d(channels, out, size, stride), nonlinearity()]
        channels = out
    return nn.Sequential(*layers)


class ImageEncoder(nn.Module):
    """Encode images, CxHxW or HxWxC (told apart by the smaller axis): convolutions, then a small MLP."""

    def __init__(self, shape: tuple[int, ...], cfg: Config) -> None:
        super().__init__()
        nonlinearity = NONLINEARITIES[cfg.nonlinearity]
        self.channels_last = shape[2] < shape[0]
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else shape
        self.convolutions = convolutions(cfg.encoder_conv_architecture, channels, nonlinearity)
        try:
            with torch.no_grad():
                num_features = self.convolutions(torch.zeros(1, channels, height, width)).numel()
        except RuntimeError as error:
            raise UserError(f"images of {height}x{width} are too small for --encoder_conv_architecture="
                            f"{cfg.encoder_conv_architecture}; use resnet_impala") from error
        self.mlp = mlp((num_features, *cfg.encoder_conv_mlp_layers), nonlinearity)
        self.out_size = cfg.encoder_conv_mlp_layers[-1] if cfg.encoder_conv_mlp_layers else num_features

    def forward(self, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.movedim(-1, 1)
        return self.mlp(self.convolutions(images).flatten(1))


class VectorEncoder(nn.Module):
    """Encode vectors with an MLP."""

    def __init__(self, shape: tuple[int, ...], cfg: Config) -> None:
        super().__init__()
        sizes = (shape[0], *cfg.encoder_mlp_layers)
        self.mlp = mlp(sizes, NONLINEARITIES[cfg.nonlinearity])
        self.out_size = sizes[-1]

    def forward(self, vectors: Tensor) -> Tensor:
        return self.mlp(vectors)


class FeedForwardCore(nn.Module):
    """The core of a feed-forward policy: features pass through, the hidden state has size 0."""

    state_size = 0

    def forward(self, features: Tensor, rnn_states: Tensor) -> tuple[Tensor, Tensor]:
        return features, rnn_states


# ---- action distributions ----------------------------------------------------------------------------------------


class Categorical:
    """Distribution over the n actions of a Discrete space, from logits [B, n]."""

    def __init__(self, logits: Tensor) -> None:
        self.log_probs = logits.log_softmax(-1)

    def sample(self) -> Tensor:
        """Draw actions, [B] int64, by the Gumbel trick: argmax of log p + Gumbel noise."""
        return (self.log_probs - torch.empty_like(self.log_probs).exponential_().log_()).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_probs.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log p(a), [B]."""
        return self.log_probs.gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: "Categorical") -> Tensor:
        """Return KL(self || other), [B]."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

    def symmetric_kl_to_uniform(self) -> Tensor:
        """Return KL(self || u) + KL(u || self), halved, [B]."""
        log_uniform = -math.log(self.log_probs.shape[-1])
        difference = self.log_probs - log_uniform
        return 0.5 * ((self.log_probs.exp() - math.exp(log_uniform)) * difference).sum(-1)


class DiagonalGaussian:
    """Distribution over the A actions of a Box space, from their means and log standard deviations, [B, 2A]."""

    def __init__(self, parameters: Tensor) -> None:
        self.mean, log_std = parameters.chunk(2, -1)
        self.log_std = log_std.clamp(-10, 2)

    def sample(self) -> Tensor:
        """Draw actions, [B, A] float32."""
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the log density of [B, A] actions, [B]."""
        z = (actions - self.mean) * (-self.log_std).exp()
        return (-0.5 * (z.square() + math.log(2 * math.pi)) - self.log_std).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, other: "DiagonalGaussian") -> Tensor:
        """Return KL(self || other), [B]."""
        scaled = (self.mean - other.mean) * (-other.log_std).exp()
        ratio = (2 * (self.log_std - other.log_std)).exp()
        return (0.5 * (ratio + scaled.square() - 1) + other.log_std - self.log_std).sum(-1)


Distribution = Categorical | DiagonalGaussian


def num_action_parameters(space: spaces.Space) -> int:
    """Count the numbers that describe a distribution over a space: logits, or means and log deviations."""
    return int(space.n) if isinstance(space, spaces.Discrete) else 2 * space.shape[0]


def action_distribution(space: spaces.Space, parameters: Tensor) -> Distribution:
    """Make the distribution that belongs to an action space from its parameters [B, D] float32."""
    return Categorical(parameters) if isinstance(space, spaces.Discrete) else DiagonalGaussian(parameters)


# ---- actor-critic ------------------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """Policy and value of one observation space and one action space, with shared encoders.

    `obs_space` maps names to spaces; `rnn_states` [B, state_size] is the core's hidden state.
    """

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> None:
        super().__init__()
        if cfg.exploration_loss == "symmetric_kl" and isinstance(action_space, spaces.Box):
            raise UserError("--exploration_loss=symmetric_kl needs discrete actions; use entropy")
        self.action_space = action_space
        self.normalizers, self.encoders = nn.ModuleDict(), nn.ModuleDict()
        for name, space in obs_space.items():
            normalizer = RunningNormalizer if cfg.normalize_input else FixedNormalizer
            self.normalizers[name] = normalizer(space)
            self.encoders[name] = (ImageEncoder if len(space.shape) == 3 else VectorEncoder)(space.shape, cfg)
        self.core = FeedForwardCore()
        out_size = sum(encoder.out_size for encoder in self.encoders.values())
        self.policy_head = nn.Linear(out_size, num_action_parameters(action_space))
        self.value_head = nn.Linear(out_size, 1)
        self._initialize(cfg)
        self.log_std = None
        if isinstance(action_space, spaces.Box) and not cfg.adaptive_stddev:
            self.log_std = nn.Parameter(torch.full(action_space.shape, math.log(cfg.initial_stddev)))

    def _initialize(self, cfg: Config) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.orthogonal_(module.weight, cfg.policy_init_gain)
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.policy_head.weight, 0.01)  # an almost uniform first policy
        if isinstance(self.action_space, spaces.Box):
            with torch.no_grad():
                self.policy_head.bias.chunk(2)[1].fill_(math.log(cfg.initial_stddev))

    def normalize(self, obs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Normalize raw observations [B, ...] into the arithmetic of the network body."""
        return {name: self.normalizers[name](value, dtype) for name, value in obs.items()}

    def forward(self, normalized: dict[str, Tensor], rnn_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate normalized observations [B, ...].

        Returns:
            Parameters of the action distribution [B, D], values [B], next hidden states [B, state_size]; float32.
        """
        features = [encoder(normalized[name]) for name, encoder in self.encoders.items()]
        features, rnn_states = self.core(torch.cat(features, -1) if len(features) > 1 else features[0], rnn_states)
        with torch.autocast(features.device.type, enabled=False):
            features = features.float()
            parameters = self.policy_head(features)
            if self.log_std is not None:
                means = parameters.chunk(2, -1)[0]
                parameters = torch.cat([means, self.log_std.expand_as(means)], -1)
            return parameters, self.value_head(features).squeeze(-1), rnn_states

    def update_normalizers(self, obs: dict[str, Tensor], valid: Tensor) -> None:
        """Move the running statistics by the valid rows of raw observations [B, ...]; valid: [B] bool."""
        for name, normalizer in self.normalizers.items():
            normalizer.update(obs[name], valid)

    def body_to(self, dtype: torch.dtype) -> "ActorCritic":
        """Convert the weights of the body, for acting: casting weights at every step would cost more than it saves."""
        self.encoders.to(dtype)
        self.core.to(dtype)
        return self


def body_dtype(cfg: Config, device: torch.device, obs_space: dict[str, spaces.Space]) -> torch.dtype:
    """Choose the arithmetic of the network body: bfloat16 for images where the hardware multiplies matrices in it.

    A small MLP spends more on the casts than it saves, so vectors stay in float32.
    """
    if cfg.precision != "auto":
        return getattr(torch, cfg.precision)
    if not any(len(space.shape) == 3 for space in obs_space.values()):
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32


def choose_device(name: str) -> torch.device:
    """Resolve `--device`: auto is a GPU where there is one. Raises `UserError` for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={name} cannot be used: {str(error).splitlines()[0]}") from error
    return device
