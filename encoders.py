"""Encoders: what turns the normalized observations of one leaf into features, an image or a vector.

`LeafEncoders` has one for each leaf and joins what they give; it is the default `--encoder` of `model.py`. The
convolutions of `--encoder_conv_architecture=auto` follow from the size of the image (`fitting_layers`), the others are
named after the papers they come from. Read next: `normalizers.py`.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from config import Config
from envs.flat_spaces import is_channels_last
from runtime.user_error import UserError

# ---- activation functions ----------------------------------------------------------------------------------------


class FastELU(nn.Module):
    """ELU, as max(x, min(exp(x) - 1, 0)): PyTorch's own calls expm1, which is slower on a CPU.

    With it a training pass of the Nature CNN takes 7 of 198 us an image less on one core of an EPYC (Zen 5), and acting
    4 of 75, in bfloat16 (`python -m docs.encoder`).
    """

    def forward(self, x: Tensor) -> Tensor:
        return _FastELU.apply(x) if x.device.type == "cpu" else F.elu(x)


class _FastELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp().sub_(1).clamp_(max=0)
        torch.maximum(x, y, out=y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.elu_backward(gradient, 1.0, 1.0, 1.0, True, y)  # exp(x) = y + 1 below 0, 1 above


NONLINEARITIES: dict[str, type[nn.Module]] = {"elu": FastELU, "relu": nn.ReLU, "tanh": nn.Tanh}


def in_float32(device: torch.device) -> contextlib.AbstractContextManager:
    """Let what follows compute in float32, whatever the body does; the meta device has no autocast."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else contextlib.nullcontext()


# ---- encoders ----------------------------------------------------------------------------------------------------


def mlp(sizes: Iterable[int], nonlinearity: type[nn.Module]) -> nn.Sequential:
    """Make linear layers of the given sizes, the input's first, each followed by the nonlinearity."""
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


class Layer(NamedTuple):
    """One convolution with its activation; sizes are (height, width)."""

    filters: int
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def cells(self, height: int, width: int) -> tuple[int, ...]:
        """Return the height and width of what comes out for an image of this height and width; below 1: nothing."""
        axes = zip((height, width), self.size, self.stride, self.padding, strict=True)
        return tuple((axis + 2 * padding - size) // stride + 1 for axis, size, stride, padding in axes)

    def __str__(self) -> str:
        stride = "" if self.stride == (1, 1) else "/{}x{}".format(*self.stride)
        return "{} of {}x{}".format(self.filters, *self.size) + stride


# (filters, size, stride, padding): the Nature CNN (doi:10.1038/nature14236); the smaller one of A3C (arXiv 1602.01783),
# a third of the arithmetic; Sample Factory's; a small one; and the pooling of IMPALA's residual network
NAMED = {"convnet_atari": ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)),
         "convnet_a3c": ((16, 8, 4, 0), (32, 4, 2, 0)),
         "convnet_simple": ((32, 8, 4, 0), (64, 4, 2, 0), (128, 3, 2, 0)),
         "convnet_small": ((16, 2, 1, 0), (32, 2, 1, 0), (64, 2, 1, 0)),
         "resnet_impala": ((16, 3, 2, 1), (32, 3, 2, 1), (32, 3, 2, 1))}
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
        stride = tuple(4 if axis > 4 * longest else 2 if axis > longest else 1 for axis in (height, width))
        size, padding = zip(*(WINDOWS[step] for step in stride), strict=True)
        layers.append(Layer(FILTERS, size, stride, padding))
        height, width = layers[-1].cells(height, width)
    return layers


def convolutions(layers: Iterable[Layer], channels: int, nonlinearity: type[nn.Module]) -> nn.Sequential:
    """Make the convolutional part of an image encoder, [B, C, H, W] -> [B, C', H', W']."""
    modules: list[nn.Module] = []
    for layer in layers:
        modules += [nn.Conv2d(channels, *layer), nonlinearity()]
        channels = layer.filters
    return nn.Sequential(*modules)


def residual_convolutions(layers: Iterable[Layer], channels: int, nonlinearity: type[nn.Module]) -> nn.Sequential:
    """Make the residual network of IMPALA (arXiv 1802.01561), which pools with its layers."""
    modules: list[nn.Module] = []
    for out, size, stride, padding in layers:
        modules += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(size, stride, padding),
                    ResidualBlock(out, nonlinearity), ResidualBlock(out, nonlinearity)]
        channels = out
    return nn.Sequential(*modules, nonlinearity())


class ImageEncoder(nn.Module):
    """Encode images, CxHxW or HxWxC (`is_channels_last`): convolutions, then a small MLP.

    `description` tells the size of the images, the convolutions and the number of features after each part.
    """

    def __init__(self, shape: tuple[int, ...], cfg: Config, num_images: int = 1) -> None:
        super().__init__()
        nonlinearity, architecture = NONLINEARITIES[cfg.nonlinearity], cfg.encoder_conv_architecture
        self.channels_last = is_channels_last(shape)
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else shape
        layers = (fitting_layers(height, width, num_images) if architecture == "auto" else
                  [Layer(out, (size, size), (stride, stride), (padding, padding))
                   for out, size, stride, padding in NAMED[architecture]])
        is_residual = architecture == "resnet_impala"
        self.convolutions = (residual_convolutions if is_residual else convolutions)(layers, channels, nonlinearity)
        left = functools.reduce(lambda axes, layer: layer.cells(*axes), layers, (height, width))
        if min(left) < 1:
            raise UserError(f"images of {height}x{width} are too small for --encoder_conv_architecture={architecture}; "
                            "use auto, which fits images of any size")
        sizes = (layers[-1].filters * left[0] * left[1], *cfg.encoder_conv_mlp_layers)
        self.mlp = mlp(sizes, nonlinearity)
        self.out_size = sizes[-1]
        steps = architecture if is_residual else ", ".join(map(str, layers))
        self.description = " -> ".join((f"{height}x{width}x{channels}", steps, *(f"{size:,}" for size in sizes)))

    def forward(self, images: Tensor) -> Tensor:
        if not self.channels_last:
            return self.mlp(self.convolutions(images).flatten(1))
        # the memory stays as it is throughout, so that nothing is copied
        return self.mlp(self.convolutions(images.movedim(-1, 1)).movedim(1, -1).flatten(1))


class VectorEncoder(nn.Module):
    """Encode vectors with an MLP."""

    def __init__(self, shape: tuple[int, ...], cfg: Config) -> None:
        super().__init__()
        sizes = (shape[0], *cfg.encoder_mlp_layers)
        self.mlp = mlp(sizes, NONLINEARITIES[cfg.nonlinearity])
        self.out_size = sizes[-1]
        self.description = " -> ".join(f"{size:,}" for size in sizes)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.mlp(vectors)


class LeafEncoders(nn.Module):
    """The default encoder: one for each leaf, their outputs concatenated."""

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Box]) -> None:
        super().__init__()
        self.names = list(obs_space)
        num_images = sum(len(space.shape) == 3 for space in obs_space.values())
        self.encoders = nn.ModuleList(ImageEncoder(space.shape, cfg, num_images) if len(space.shape) == 3 else
                                      VectorEncoder(space.shape, cfg) for space in obs_space.values())
        self.out_size = sum(encoder.out_size for encoder in self.encoders)
        initialize(self, cfg.policy_init_gain)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        features = [encoder(obs[name]) for name, encoder in zip(self.names, self.encoders, strict=True)]
        return torch.cat(features, -1) if len(features) > 1 else features[0]

    def describe(self) -> dict[str, str]:
        """Describe the encoder of each leaf, for example "10x10x4 -> 32 of 3x3, 32 of 3x3 -> 3,200 -> 512"."""
        return {name: encoder.description for name, encoder in zip(self.names, self.encoders, strict=True)}


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
