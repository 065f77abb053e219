"""Tests of the encoders: images of any size, both orders of axes, how many parameters, what is said of them."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from config import Config
from model import LONGEST, FastELU, ImageEncoder, LeafEncoders, fitting_layers

SIZES = (1, 2, 3, 7, 10, 12, 13, 25, 48, 49, 64, 84, 97, 193, 320, 400)
ALLOWED = 10_000_000 / 3  # PQL has three of them


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---- any size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("height", SIZES)
def test_images_of_any_size_have_layers_that_fit_and_few_parameters(height: int) -> None:
    for width in SIZES:
        with torch.device("meta"):  # without memory
            encoder = ImageEncoder((3, height, width), Config(env="test"))
        assert num_parameters(encoder) < ALLOWED, (height, width)
        left = height, width
        for layer in fitting_layers(height, width):
            left = layer.cells(*left)
        for axis, cells in zip((height, width), left, strict=True):
            assert min(axis, LONGEST // 2) <= cells <= LONGEST


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 2), (6, 7, 2), (7, 7, 21), (8, 8, 111), (10, 10, 4), (32, 32, 3),
                                   (4, 64, 64), (84, 84, 1), (72, 128, 3), (240, 320, 3), (10, 300, 3)], ids=str)
def test_every_weight_has_a_gradient(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    encoder = LeafEncoders(Config(env="test", encoder_conv_mlp_layers=(8,)), {"obs": image(*shape)})
    features = encoder({"obs": torch.randn(4, *shape)})
    assert features.shape == (4, 8)
    assert not torch.allclose(features[0], features[1])
    features.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in encoder.parameters())


# ---- both orders of axes, activation -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_elu_is_elu(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e30, -0.0, 0.0, 200.0, 1e30])]).to(dtype)
    outputs, gradients = [], []
    for function in (FastELU(), torch.nn.ELU()):
        leaf = x.clone().requires_grad_()
        outputs.append(function(leaf))
        outputs[-1].sum().backward()
        gradients.append(leaf.grad)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8  # of numbers near 1, from which 1 is subtracted
    torch.testing.assert_close(*outputs, rtol=0, atol=tolerance)
    torch.testing.assert_close(*gradients, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sizes", [(32,), ()])
@pytest.mark.parametrize("architecture", ["auto", "convnet_simple", "convnet_atari", "convnet_a3c", "resnet_impala"])
def test_image_encoders_take_both_orders_of_axes(architecture: str, sizes: tuple[int, ...]) -> None:
    cfg = Config(env="test", encoder_conv_architecture=architecture, encoder_conv_mlp_layers=sizes)
    first, last = ImageEncoder((3, 44, 48), cfg), ImageEncoder((44, 48, 3), cfg)
    last.load_state_dict(first.state_dict())
    images = torch.randn(2, 3, 44, 48, generator=torch.Generator().manual_seed(0))
    features = first(images)
    assert features.shape == (2, first.out_size)
    assert last.out_size == first.out_size
    channels_last = first.convolutions(images).movedim(1, -1).flatten(1)  # the same numbers in the order of the memory
    torch.testing.assert_close(last(images.movedim(1, -1)), first.mlp(channels_last))
    assert not torch.allclose(features[0], features[1])
