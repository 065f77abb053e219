"""Tests of `model.py`: encoders of images of any size, initialization, heads, masks and precision."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from parts import make_config, observe
from torch import Tensor, nn

from config import Config
from envs.flat_spaces import Data
from model import LONGEST, ActorCritic, ImageEncoder, LeafEncoders, convolutions, fitting_layers, make_model
from normalizers import hold_units

IMAGE = spaces.Box(0, 255, (36, 44, 1), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,))


def config(**settings: object) -> Config:
    return make_config({"env": "test"}, settings)


# ---- encoders ----------------------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 7, 10, 12, 13, 25, 48, 49, 64, 84, 97, 193, 320, 400)


@pytest.mark.parametrize("height", SIZES)
def test_images_of_any_size_have_layers_that_fit_and_few_parameters(height: int) -> None:
    for width in SIZES:
        with torch.device("meta"):  # without memory
            encoder = ImageEncoder((3, height, width), config())
            layers = fitting_layers(height, width)
            _, _, *left = convolutions(layers, 3, nn.ReLU)(torch.empty(1, 3, height, width)).shape
        assert sum(parameter.numel() for parameter in encoder.parameters()) < 10_000_000 / 3, "PQL has three of them"
        assert len(layers) >= 2
        for axis, cells in zip((height, width), left, strict=True):
            assert min(axis, LONGEST // 2) <= cells <= LONGEST


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 2), (7, 7, 21), (8, 8, 111), (10, 10, 4), (4, 64, 64), (84, 84, 1),
                                   (72, 128, 3), (240, 320, 3), (10, 300, 3)], ids=str)
def test_every_weight_has_a_gradient(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    encoder = LeafEncoders(config(encoder_conv_mlp_layers=(8,)), {"obs": spaces.Box(0, 255, shape, np.uint8)})
    features = encoder({"obs": torch.randn(4, *shape)})
    assert features.shape == (4, 8)
    assert not torch.allclose(features[0], features[1])
    features.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in encoder.parameters())


@pytest.mark.parametrize("sizes", [(32,), ()])
@pytest.mark.parametrize("architecture", ["auto", "convnet_simple", "convnet_atari", "convnet_a3c", "resnet_impala"])
def test_image_encoders_take_both_orders_of_axes(architecture: str, sizes: tuple[int, ...]) -> None:
    cfg = config(encoder_conv_architecture=architecture, encoder_conv_mlp_layers=sizes)
    first, last = ImageEncoder((3, 44, 48), cfg), ImageEncoder((44, 48, 3), cfg)
    last.load_state_dict(first.state_dict())
    images = torch.randn(2, 3, 44, 48, generator=torch.Generator().manual_seed(0))
    features = first(images)
    assert features.shape == (2, first.out_size) == (2, last.out_size)
    channels_last = first.convolutions(images).movedim(1, -1).flatten(1)  # the same numbers in the order of the memory
    torch.testing.assert_close(last(images.movedim(1, -1)), first.mlp(channels_last))
    assert not torch.allclose(features[0], features[1])


@pytest.mark.parametrize(("layer", "channels", "width"), [
    ((5, 8, 4), 4, 20), ((5, 8, 4), 4, 21), ((5, 8, 4, 2), 4, 20), ((5, 4, 2), 16, 20), ((5, 3, 1), 3, 20),
    ((5, (4, 8), (3, 2)), 1, 20)], ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
def test_convolutions_are_those_of_pytorch(layer: tuple, channels: int, width: int, *, channels_last: bool) -> None:
    shape = (2, 16, width, channels) if channels_last else (2, channels, 16, width)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    own = convolutions([layer], channels, nn.Identity).double()
    oracle = nn.Sequential(nn.Conv2d(channels, *layer, dtype=torch.float64))
    oracle.load_state_dict(own.state_dict())
    results = []
    for network in (own, oracle):
        output = network(images.movedim(-1, 1) if channels_last else images)
        results.append((output, *torch.autograd.grad(output.square().sum(), [images, *network.parameters()])))
    torch.testing.assert_close(*results)


# ---- actor-critic ------------------------------------------------------------------------------------------------


def draw(space: spaces.Box, count: int) -> Tensor:
    rows = torch.randn(count, *space.shape, generator=torch.Generator().manual_seed(0))
    return (128 + 40 * rows).clamp(0, 255).to(torch.uint8) if space.dtype == np.uint8 else rows


def forward(model: ActorCritic, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate observations [B, ...] as B sequences of one step, without a memory."""
    count = len(next(iter(obs.values())))
    return model(model.normalize(obs), torch.zeros(count, model.state_size), torch.ones(count, 1).bool())


def small_model(**settings: object) -> tuple[ActorCritic, dict[str, Tensor]]:
    """Make a network for small images and 6 actions, and 64 observations for it that it has seen."""
    torch.manual_seed(0)
    model = make_model(config(encoder_conv_mlp_layers=(64,), **settings), {"obs": IMAGE}, spaces.Discrete(6))
    obs = {"obs": draw(IMAGE, 64)}
    observe(model, obs)
    return model, obs


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_deviation_depends_on_the_observation_only_when_adaptive(adaptive: bool) -> None:
    model = make_model(config(adaptive_stddev=adaptive, initial_stddev=0.5), {"image": IMAGE, "vector": VECTOR},
                       spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(1))))
    obs = {"image": draw(IMAGE, 6), "vector": draw(VECTOR, 6)}
    parameters, values, rnn_states = forward(model, obs)
    assert (values.shape, rnn_states.shape) == ((6,), (6, 0))
    torch.testing.assert_close(parameters[:, 4:6], torch.full((6, 2), math.log(0.5)), rtol=0, atol=0.1)
    with torch.no_grad():
        model.policy_head.weight.mul_(100)
    parameters, _, _ = forward(model, obs)
    depends = [bool(column.unique().numel() > 1) for column in parameters.T]
    assert depends == [True] * 4 + [adaptive] * 2 + [True]
    parameters.sum().backward()
    assert model.policy_head.bias.grad.all(), "they are learned all the same"


def test_images_are_normalized_once_for_all_epochs() -> None:
    model, obs = small_model()
    trajectories, kept = {"obs/obs": obs["obs"].unflatten(0, (8, 8)), "rewards": torch.zeros(8, 7)}, {}
    assert torch.equal(model.normalize({"obs": obs["obs"].float()})["obs"], model.normalize(obs)["obs"]), "as ever"
    hold_units(model, hold=True)
    for _ in range(2):
        images = model.normalize_images(trajectories, kept, map)
        assert list(images) == ["obs/obs"]
        assert torch.equal(images["obs/obs"].flatten(0, 1), model.normalize(obs)["obs"])
        assert images is kept
        assert torch.equal(forward(model, {"obs": images["obs/obs"].flatten(0, 1)})[0], forward(model, obs)[0])
        trajectories["obs/obs"] = obs["obs"].flip(0).unflatten(0, (8, 8))
        obs = {"obs": obs["obs"].flip(0)}

    class OfOnesOwn(ActorCritic):
        def normalize(self, obs: Data) -> Data:
            return {name: images / 255 for name, images in obs.items()}

    own = OfOnesOwn(config(encoder_conv_mlp_layers=(64,)), {"obs": IMAGE}, spaces.Discrete(6))
    assert own.normalize_images(trajectories, {}, map) == {}, "it is handed the raw ones"


def test_an_action_mask_forbids_choices_and_nothing_else() -> None:
    action_space = spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Discrete(2)))
    model = make_model(config(), {"obs": VECTOR, "action_mask": spaces.MultiBinary(7)}, action_space)
    obs = {"obs": draw(VECTOR, 4), "action_mask": torch.ones(4, 7, dtype=torch.uint8)}
    free, values, _ = forward(model, obs)
    obs["action_mask"][:] = torch.tensor([0, 1, 1, 0, 1, 1, 0])
    masked, masked_values, _ = forward(model, obs)
    assert torch.equal(values, masked_values), "the mask is no observation"
    is_forbidden = torch.tensor([True, False, False, True, False, False, False, False, True])
    assert torch.equal(masked[:, ~is_forbidden], free[:, ~is_forbidden])
    actions = torch.stack([model.distribution(masked).sample() for _ in range(50)]).flatten(0, 1)
    assert [set(column.tolist()) for column in actions.T] == [{1}, {0, 2}, {0, 1}, {0, 1}, {0}]


@pytest.mark.parametrize("gain", [1.0, 1.5])
def test_initialization_is_orthogonal_and_the_first_policy_almost_uniform(gain: float) -> None:
    model, obs = small_model(policy_init_gain=gain)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert len(layers) == 2 + 1 + 2
    for name, layer in layers:
        weight = layer.weight.detach().flatten(1)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        scale = 0.01 if name == "policy_head" else gain
        torch.testing.assert_close(weight @ weight.T / scale**2, torch.eye(len(weight)), rtol=1e-4, atol=1e-4)
        assert not layer.bias.any()
    parameters, values, _ = forward(model, obs)
    probabilities = parameters.softmax(-1)
    assert 0.95 / 6 < probabilities.min() <= probabilities.max() < 1.05 / 6
    assert values.std() > 0.01, "while values do tell observations apart"


def test_a_bfloat16_body_gives_nearly_the_same_output() -> None:
    model, obs = small_model()
    with torch.no_grad():
        model.policy_head.weight.mul_(100)
        exact = forward(model, obs)[:2]
        model.encoder.to(torch.bfloat16)
        model.arithmetic = torch.bfloat16
        rounded = forward(model, obs)[:2]
    body = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert all((dtype == torch.bfloat16) == name.startswith("encoder.") for name, dtype in body.items())
    for actual, expected in zip(rounded, exact, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).abs().mean() < 0.02 * expected.abs().mean()
        assert not torch.equal(actual, expected)
