"""The policy network: normalizers, an encoder, a core, and the actor-critic that joins them.

    observations -> normalizers -> encoder (one per leaf, concatenated) -> core -> policy head, value head

Policy workers hold a copy for acting, the learner the original; both come from `Algorithm.make_model`. The running
statistics of observations and returns are buffers of the model, so they are published and saved with the weights.

The encoder may run in bfloat16. The core (whose state would gather rounding errors), the heads and everything after
them are float32. Encoder, core or the whole model can be your own: see `examples/`. Read next: `normalizers.py`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from config import Config
from distributions import ActionDistribution, check_action_space, forbid, parameter_kinds
from envs.flat_spaces import ACTION_MASK, Data, Leaves, is_channels_last, num_action_parameters
from normalizers import ReturnNormalizer, RunningNormalizer, expanded_space, make_normalizers
from runtime.utils import find_function


def make_model(cfg: Config, obs_space: Leaves, action_space: spaces.Space) -> nn.Module:
    """Make the model of a configuration: the user's own, or `ActorCritic`."""
    return (find_function("model", cfg.model) if cfg.model else ActorCritic)(cfg, obs_space, action_space)


class ActorCritic(nn.Module):
    """Policy and value for one observation space and one action space, with a shared encoder and core.

    `obs_space` maps the names of leaves to spaces (`envs/flat_spaces.py`). A model of your own is best a subclass: it
    takes the same arguments, and everything that is public here is used by the other components.
    """

    def __init__(self, cfg: Config, obs_space: Leaves, action_space: spaces.Space) -> None:
        super().__init__()
        check_action_space(cfg, action_space)
        self.arithmetic = torch.float32  # of the encoder
        self.action_space, self.squash = action_space, cfg.squash_actions
        self.leaves = {name: space for name, space in obs_space.items() if name != ACTION_MASK}
        self.normalizers = make_normalizers(cfg, self.leaves)
        self.running = [(name, normalizer) for name, normalizer in zip(self.leaves, self.normalizers, strict=True)
                        if isinstance(normalizer, RunningNormalizer)]
        self.returns = ReturnNormalizer(running=cfg.normalize_returns)
        self.make_body(cfg, {name: expanded_space(space) for name, space in self.leaves.items()})
        self.state_size: int = self.core.state_size
        self.policy_head = nn.Linear(self.core.out_size, num_action_parameters(action_space))
        self.value_head = nn.Linear(self.core.out_size, 1)
        initialize(self.value_head, cfg.policy_init_gain)
        initialize(self.policy_head, 0.01)  # an almost uniform first policy
        is_log_std, is_logit = parameter_kinds(action_space)
        self.policy_head.bias.data[is_log_std] = math.log(cfg.initial_stddev)
        # parameters that do not depend on the observation: their bias is what is learned
        self.has_constants = bool(is_log_std.any()) and not cfg.adaptive_stddev
        self.register_buffer("constant", is_log_std, persistent=False)
        self.register_buffer("maskable", is_logit.nonzero()[:, 0], persistent=False)

    def make_body(self, cfg: Config, obs_space: Leaves) -> None:
        """Make `encoder` and `core`, the parts between the normalizers and the heads."""
        make_encoder = find_function("encoder", cfg.encoder) if cfg.encoder else LeafEncoders
        self.encoder = make_encoder(cfg, obs_space)
        default_core = RecurrentCore if cfg.use_rnn else FeedForwardCore
        make_core = find_function("core", cfg.core) if cfg.core else default_core
        self.core = make_core(cfg, self.encoder.out_size)

    def normalize(self, obs: Data) -> Data:
        """Normalize raw observations [B, ...] into the arithmetic of the encoder; an action mask stays as it is."""
        normalized = {name: normalizer(obs[name], self.arithmetic)
                      for name, normalizer in zip(self.leaves, self.normalizers, strict=True)}
        return normalized | {name: mask for name, mask in obs.items() if name == ACTION_MASK}

    def normalize_images(self, data: Data, kept: Data, run: Callable) -> Data:
        """Normalize the images of a dataset [B, T+1, ...] once for all its epochs; `normalize` leaves them as they are.

        On a GPU, which normalizes at once, there are none.

        kept: those of the dataset before, {name: tensor}, whose memory is used again. run: `map`, or that of threads.
        """
        if type(self).normalize is not ActorCritic.normalize:  # that may want raw ones
            return {}
        for leaf, normalizer in self.running:
            raw = data[f"obs/{leaf}"]
            if normalizer.is_bytes and raw.device.type == "cpu":
                images = kept.setdefault(f"obs/{leaf}", torch.empty_like(raw, dtype=self.arithmetic))
                list(run(lambda rows, out, normalizer=normalizer: out.copy_(normalizer(rows, out.dtype)), raw, images))
        return kept

    def forward(self, normalized: Data, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate B sequences of L steps.

        Args:
            normalized: observations {name: [B * L, ...]}, the steps of one sequence one after another.
            rnn_states: the hidden states before the first steps, [B, state_size] float32.
            new_episode: [B, L] bool, True where an episode begins and the hidden state counts as 0.

        Returns:
            Parameters of the action distribution [B * L, D] (masked logits: forbidden), normalized values [B * L],
            hidden states after the last step [B, state_size]; float32.
        """
        features = self.encoder(normalized)
        with torch.autocast(features.device.type, enabled=False):  # in float32, whatever the encoder does
            features, rnn_states = self.core(features.float().unflatten(0, new_episode.shape), rnn_states, new_episode)
            features = features.flatten(0, 1)
            parameters = self.policy_head(features)
            if self.has_constants:
                parameters = torch.where(self.constant, self.policy_head.bias, parameters)
            if ACTION_MASK in normalized:
                parameters = forbid(parameters, normalized[ACTION_MASK].bool(), self.maskable)
            return parameters, self.values(features, normalized), rnn_states

    def values(self, features: Tensor, normalized: Data) -> Tensor:
        """Compute the normalized values [B] of the core's outputs [B, out_size] (for the observations [B, ...])."""
        return self.value_head(features).squeeze(-1)

    def distribution(self, parameters: Tensor) -> ActionDistribution:
        """Make the action distribution of parameters [..., D]."""
        return ActionDistribution(self.action_space, parameters, squash=self.squash)

    def summarize(self, obs: Data) -> list[Tensor]:
        """Sum up raw observations [B, ...] for the running statistics."""
        return [part for name, normalizer in self.running for part in normalizer.summarize(obs[name])]

    def update_normalizers(self, summaries: Sequence[Tensor]) -> None:
        """Move the running statistics by what `summarize` returned in each rank, [ranks, ...] each."""
        for number, (_, normalizer) in enumerate(self.running):
            normalizer.update(*summaries[3 * number : 3 * number + 3])


def initialize(module: nn.Module, gain: float) -> None:
    """Make weight matrices orthogonal and biases 0; an LSTM's forget gates begin at 1: it begins by remembering.

    Modules of users keep their own initialization.
    """
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(part.weight, gain)
            nn.init.zeros_(part.bias)
        elif isinstance(part, (nn.GRU, nn.LSTM)):
            for name, parameter in part.named_parameters():
                gates = parameter.data.split(part.hidden_size)
                for gate in gates:
                    nn.init.orthogonal_(gate, gain) if gate.dim() == 2 else nn.init.zeros_(gate)
                if isinstance(part, nn.LSTM) and name.startswith("bias_ih"):
                    nn.init.ones_(gates[1])  # input, forget, cell, output


# ---- encoders ----------------------------------------------------------------------------------------------------


class LeafEncoders(nn.Module):
    """The default encoder: one for each leaf, their outputs concatenated."""

    def __init__(self, cfg: Config, obs_space: Leaves) -> None:
        super().__init__()
        self.names = list(obs_space)
        shapes = [space.shape for space in obs_space.values()]
        num_images = sum(len(shape) == 3 for shape in shapes)
        self.encoders = nn.ModuleList(
            ImageEncoder(shape, cfg, num_images) if len(shape) == 3 else VectorEncoder(shape, cfg) for shape in shapes)
        self.out_size = sum(encoder.out_size for encoder in self.encoders)
        initialize(self, cfg.policy_init_gain)

    def forward(self, obs: Data) -> Tensor:
        features = [encoder(obs[name]) for name, encoder in zip(self.names, self.encoders, strict=True)]
        return torch.cat(features, -1) if len(features) > 1 else features[0]


class VectorEncoder(nn.Module):
    """Encode vectors with an MLP."""

    def __init__(self, shape: tuple[int, ...], cfg: Config) -> None:
        super().__init__()
        sizes = (shape[0], *cfg.encoder_mlp_layers)
        self.mlp = mlp(sizes, NONLINEARITIES[cfg.nonlinearity])
        self.out_size = sizes[-1]

    def forward(self, vectors: Tensor) -> Tensor:
        return self.mlp(vectors)


class ImageEncoder(nn.Module):
    """Encode images, CxHxW or HxWxC (`is_channels_last`): convolutions, then a small MLP."""

    def __init__(self, shape: tuple[int, ...], cfg: Config, num_images: int = 1) -> None:
        super().__init__()
        self.channel_axis = -1 if is_channels_last(shape) else 1
        channels, height, width = (shape[2], *shape[:2]) if self.channel_axis == -1 else shape
        nonlinearity = NONLINEARITIES[cfg.nonlinearity]
        architecture = cfg.encoder_conv_architecture
        layers = ARCHITECTURES.get(architecture) or fitting_layers(height, width, num_images)
        self.convolutions = convolutions(layers, channels, nonlinearity, residual=architecture == "resnet_impala")
        num_features = self.convolutions(torch.zeros(1, channels, height, width)).numel()
        sizes = (num_features, *cfg.encoder_conv_mlp_layers)
        self.mlp = mlp(sizes, nonlinearity)
        self.out_size = sizes[-1]

    def forward(self, images: Tensor) -> Tensor:
        # the memory stays as it is throughout, so that nothing is copied
        features = self.convolutions(images.movedim(self.channel_axis, 1)).movedim(1, self.channel_axis)
        return self.mlp(features.flatten(1))


Axes = int | tuple[int, int]  # height and width, or one number for both
Layer = tuple[Axes, ...]  # filters, size, stride, and padding if there is some

# The Nature CNN (doi:10.1038/nature14236); the smaller one of A3C (arXiv 1602.01783), a third of the arithmetic; Sample
# Factory's; a small one; and the pooling of IMPALA's residual network (arXiv 1802.01561).
ARCHITECTURES: dict[str, list[Layer]] = {
    "convnet_atari": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],
    "convnet_a3c": [(16, 8, 4), (32, 4, 2)],
    "convnet_simple": [(32, 8, 4), (64, 4, 2), (128, 3, 2)],
    "convnet_small": [(16, 2, 1), (32, 2, 1), (64, 2, 1)],
    "resnet_impala": [(16, 3, 2, 1), (32, 3, 2, 1), (32, 3, 2, 1)]}
# of the architecture auto: the most cells along an axis at the end; of each layer; size and padding for each stride
LONGEST, FILTERS, WINDOWS = 12, 32, {1: (3, 1), 2: (4, 1), 4: (8, 2)}


def fitting_layers(height: int, width: int, num_images: int = 1) -> list[Layer]:
    """Choose the layers for images of any size, of which each observation has so many.

    Each layer divides an axis by 4 where it is longer than 48, by 2 where it is longer than 12, and else keeps it.
    There are as many layers as it takes until neither axis is longer than 12, and at least two. Several images are
    divided further, so that all together end as no more cells than one may.
    """
    longest = max(1, int(LONGEST / num_images**0.5))
    layers: list[Layer] = []
    while len(layers) < 2 or max(height, width) > longest:
        strides = [4 if axis > 4 * longest else 2 if axis > longest else 1 for axis in (height, width)]
        sizes, paddings = zip(*(WINDOWS[stride] for stride in strides), strict=True)
        layers.append((FILTERS, sizes, strides, paddings))
        height, width = height // strides[0], width // strides[1]
    return layers


def convolutions(layers: Iterable[Layer], channels: int, nonlinearity: type[nn.Module],
                 *, residual: bool = False) -> nn.Sequential:
    """Make the convolutional part of an image encoder, [B, C, H, W] -> [B, C', H', W'].

    residual: the network of IMPALA, which pools with its layers.
    """
    modules: list[nn.Module] = []
    for filters, *window in layers:
        if residual:
            modules += [nn.Conv2d(channels, filters, 3, padding=1), nn.MaxPool2d(*window),
                        ResidualBlock(filters, nonlinearity), ResidualBlock(filters, nonlinearity)]
        else:
            modules += [Convolution(channels, filters, *window), nonlinearity()]
        channels = filters
    return nn.Sequential(*modules, nonlinearity()) if residual else nn.Sequential(*modules)


class Convolution(nn.Conv2d):
    """A convolution that reads neighbors of a row, as many as its stride, as one pixel with more channels.

    Of channels-last images that is a view, and on a CPU the gradient of its weights is cheaper (`docs/tried.md`).
    """

    def forward(self, x: Tensor) -> Tensor:
        (_, width), (rows, stride) = self.kernel_size, self.stride
        if any(self.padding) or width % stride or x.shape[3] % stride or x.stride(1) != 1:
            return super().forward(x)
        blocks = x.movedim(1, -1).unflatten(2, (-1, stride)).flatten(3).movedim(-1, 1)
        weight = self.weight.unflatten(3, (-1, stride)).movedim(-1, 1).flatten(1, 2)
        return F.conv2d(blocks, weight, self.bias, (rows, 1))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added (IMPALA, figure 3)."""

    def __init__(self, channels: int, nonlinearity: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nonlinearity(), nn.Conv2d(channels, channels, 3, padding=1),
                                  nonlinearity(), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def mlp(sizes: Iterable[int], nonlinearity: type[nn.Module]) -> nn.Sequential:
    """Make linear layers of the given sizes, the input's first, each followed by the nonlinearity."""
    layers = [[nn.Linear(n_in, n_out), nonlinearity()] for n_in, n_out in itertools.pairwise(sizes)]
    return nn.Sequential(*(module for layer in layers for module in layer))


NONLINEARITIES = {"elu": nn.ELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


# ---- cores -------------------------------------------------------------------------------------------------------


class FeedForwardCore(nn.Module):
    """The core of a feed-forward policy: features pass through, the hidden state has size 0."""

    def __init__(self, cfg: Config, in_size: int) -> None:
        super().__init__()
        self.out_size, self.state_size = in_size, 0

    def forward(self, features: Tensor, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor]:
        return features, rnn_states


class RecurrentCore(nn.Module):
    """A GRU or LSTM whose state is 0 at the beginning of every episode, wherever in a sequence that is.

    A sequence is cut wherever an episode of any of its rows begins, and each piece is one call of the fused kernel.
    Forward and backward of 32 rows x 33 steps, 512 units, 1 % of the steps beginning an episode, on one core of an
    EPYC (Zen 5): 100 ms; a loop over time takes 125, packed sequences 134. With small networks and episodes of 10 steps
    (8 rows x 65 steps, 64 units) packed sequences win, 3.4 ms against 9 and 7: they are no longer than the longest
    episode.
    """

    def __init__(self, cfg: Config, in_size: int) -> None:
        super().__init__()
        self.is_lstm = cfg.rnn_type == "lstm"
        kind = nn.LSTM if self.is_lstm else nn.GRU
        self.rnn = kind(in_size, cfg.rnn_size, cfg.rnn_num_layers, batch_first=True)
        self.out_size = cfg.rnn_size
        self.state_size = cfg.rnn_num_layers * cfg.rnn_size * (2 if self.is_lstm else 1)
        initialize(self, cfg.policy_init_gain)

    def forward(self, features: Tensor, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor]:
        """Run over sequences.

        Args:
            features: [B, L, in_size] float32.
            rnn_states: the hidden states before the first step, [B, state_size] float32.
            new_episode: [B, L] bool; the state before such a step counts as 0.

        Returns:
            Outputs [B, L, out_size] and the hidden states after the last step [B, state_size].
        """
        length = features.shape[1]
        begins = new_episode[:, 1:].any(0).tolist() if length > 1 else []  # on a GPU a synchronization
        cuts = [0, *(t for t, begin in enumerate(begins, 1) if begin), length]
        outputs = []
        for begin, end in itertools.pairwise(cuts):
            rnn_states = rnn_states.masked_fill(new_episode[:, begin, None], 0.0)
            state = rnn_states.unflatten(1, (self.rnn.num_layers, -1)).transpose(0, 1).contiguous()  # [layers, B, ...]
            state = tuple(half.contiguous() for half in state.chunk(2, -1)) if self.is_lstm else state
            output, state = self.rnn(features[:, begin:end], state)
            state = torch.cat(state, -1) if self.is_lstm else state
            rnn_states = state.transpose(0, 1).flatten(1)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), rnn_states


# ---- in parts, on a CPU ------------------------------------------------------------------------------------------


class Joined(torch.autograd.Function):
    """Joins the outputs of parts; going back, carries the gradient through each part as it was computed.

    On a CPU a large batch is faster in pieces that fit the cache, one thread for each, which waits for no other within
    its piece. The operators' own threads meet in spinning barriers several times in each layer, and stall there
    whenever another process takes the core of one of them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Callable, outputs: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Concatenate. The outputs are no arguments of their own, or PyTorch would go back through them one by one.

        anchor: any tensor with gradient; without one nothing would go back.
        """
        ctx.run, ctx.outputs = run, outputs
        ctx.set_materialize_grads(False)
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        sizes = [len(part[0]) for part in ctx.outputs]
        columns = [gradients[number].contiguous().split(sizes) for number in used]
        outputs = [[part[number] for number in used] for part in ctx.outputs]
        list(ctx.run(torch.autograd.backward, outputs, zip(*columns, strict=True)))
        return None, None, None
