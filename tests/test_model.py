"""Tests of `model.py`: action distributions, the running normalizer, encoders, initialization and precision."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution as TorchDistribution
from torch.distributions import Independent, Normal, kl_divergence

from config import Config
from model import ActorCritic, Categorical, DiagonalGaussian, Distribution, ImageEncoder, RunningNormalizer

IMAGE = spaces.Box(0, 255, (2, 4, 4), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,))


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Use one thread: on tiny tensors a second one only waits, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(**settings: object) -> Config:
    return Config(env="test", num_workers=1, **settings)


# ---- distributions -----------------------------------------------------------------------------------------------


def distributions(kind: str, dtype: torch.dtype, seed: int) -> tuple[Distribution, TorchDistribution]:
    """Make one of ours and the same of torch, [4, 3] of them, over 5 actions."""
    generator = torch.Generator().manual_seed(seed)
    parameters = 2 * torch.randn(4, 3, 5 if kind == "categorical" else 10, generator=generator, dtype=dtype)
    if kind == "categorical":
        return Categorical(parameters), TorchCategorical(logits=parameters)
    mean, log_std = parameters.clamp(-4, 1.9).chunk(2, -1)
    return DiagonalGaussian(parameters.clamp(-4, 1.9)), Independent(Normal(mean, log_std.exp()), 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_distributions_agree_with_torch(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = distributions(kind, dtype, 0)
    other_ours, other_theirs = distributions(kind, dtype, 1)
    torch.manual_seed(0)
    actions = theirs.sample()
    for actual, expected in [
        (ours.log_prob(actions), theirs.log_prob(actions)),
        (ours.entropy(), theirs.entropy()),
        (ours.kl(other_ours), kl_divergence(theirs, other_theirs)),
        (ours.kl(ours), torch.zeros(4, 3, dtype=dtype)),
    ]:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_symmetric_kl_to_uniform_agrees_with_torch() -> None:
    ours, theirs = distributions("categorical", torch.float64, 0)
    uniform = TorchCategorical(logits=torch.zeros_like(theirs.logits))
    expected = 0.5 * (kl_divergence(theirs, uniform) + kl_divergence(uniform, theirs))
    torch.testing.assert_close(ours.symmetric_kl_to_uniform(), expected)


def test_categorical_samples_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -4.0, 0.5])
    actions = Categorical(logits.expand(200_000, 6)).sample()
    assert actions.dtype == torch.int64
    expected = logits.softmax(0) * len(actions)
    chi_square = ((actions.bincount(minlength=6) - expected).square() / expected).sum()
    assert chi_square < 5 + 6 * math.sqrt(2 * 5)  # 5 degrees of freedom, 6 sigma
    assert Categorical(logits).mode() == 3


def test_gaussian_samples_have_its_mean_and_deviation() -> None:
    torch.manual_seed(0)
    mean, std = torch.tensor([1.0, -3.0]), torch.tensor([0.1, 2.0])
    gaussian = DiagonalGaussian(torch.cat([mean, std.log()]).expand(100_000, 4))
    samples = gaussian.sample()
    assert samples.dtype == torch.float32
    assert torch.all((samples.mean(0) - mean).abs() < 6 * std / math.sqrt(len(samples)))
    assert torch.all((samples.std(0) / std - 1).abs() < 6 / math.sqrt(2 * len(samples)))
    assert abs(float(torch.corrcoef(samples.T)[0, 1])) < 6 / math.sqrt(len(samples))
    assert torch.equal(gaussian.mode()[0], mean)


# ---- normalizer --------------------------------------------------------------------------------------------------


def draw(space: spaces.Box, count: int, seed: int) -> Tensor:
    """Draw observations whose elements differ in mean and deviation."""
    rng = np.random.default_rng(seed)
    if space.dtype == np.uint8:
        rows = rng.normal(rng.uniform(0, 255, space.shape), 30, (count, *space.shape)).clip(0, 255)
    else:
        scale = np.arange(1, 1 + math.prod(space.shape)).reshape(space.shape)
        rows = rng.normal(seed, 1, (count, *space.shape)) * scale
    return torch.from_numpy(rows.astype(space.dtype))


def statistics(rows: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    exact = rows.numpy().astype(np.float64) / unit
    return torch.from_numpy(exact.mean(0)).float(), torch.from_numpy(exact.var(0)).float()


@pytest.mark.parametrize(("space", "unit"), [(IMAGE, 255.0), (VECTOR, 1.0)])
def test_running_statistics_are_those_of_all_valid_rows(space: spaces.Box, unit: float) -> None:
    normalizer = RunningNormalizer(space)
    seen = []
    for seed, count in enumerate((7, 50, 1, 33, 100)):
        rows = draw(space, count, seed)
        valid = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.7
        valid[0] = True
        seen.append(rows[valid])
        if space.dtype != np.uint8:
            rows[~valid] = torch.nan
        normalizer.update(rows, valid)
        mean, var = statistics(torch.cat(seen), unit)
        torch.testing.assert_close(normalizer.mean, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(normalizer.var, var, rtol=1e-4, atol=1e-5)
        assert normalizer.count == sum(map(len, seen))

    rows = draw(space, 40, 9)
    expected = ((rows / unit - mean) / (var + normalizer.EPSILON).sqrt()).clip(-normalizer.CLIP, normalizer.CLIP)
    torch.testing.assert_close(normalizer(rows, torch.float32), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(normalizer(rows, torch.bfloat16), expected.bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("space", [IMAGE, VECTOR])
def test_invalid_rows_change_no_statistic(space: spaces.Box) -> None:
    clean, dirty = RunningNormalizer(space), RunningNormalizer(space)
    rows = draw(space, 60, 0)
    valid = torch.arange(60) % 3 != 0
    garbage = rows.clone()
    garbage[~valid] = 255 if space.dtype == np.uint8 else torch.nan
    for _ in range(2):
        clean.update(rows[valid], torch.ones(40, dtype=torch.bool))
        dirty.update(garbage, valid)
    dirty.update(garbage, torch.zeros(60, dtype=torch.bool))
    for name, value in clean.state_dict().items():
        assert torch.equal(value, dirty.state_dict()[name]), name


@pytest.mark.parametrize("value", [0.1, 3.3, 33.3, 100.1, 1000.3])
def test_an_element_far_from_zero_that_hardly_moves_stays_finite(value: float) -> None:
    """The variance must survive float32: a constant element gives 0, a slightly noisy one its own variance."""
    normalizer = RunningNormalizer(VECTOR)
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.1
    for part in noise.split(250):
        rows = torch.stack([torch.full_like(part, value), value + part, part], 1)
        normalizer.update(rows, torch.ones(250, dtype=torch.bool))
    assert torch.all(normalizer.var >= 0)
    assert torch.all(normalizer(rows, torch.float32).isfinite())
    assert normalizer.var[0] < 1e-6
    torch.testing.assert_close(normalizer.var[1], normalizer.var[2], rtol=0.02, atol=0)


def test_a_pixel_that_never_changed_does_not_blow_up_when_it_does() -> None:
    normalizer = RunningNormalizer(IMAGE)
    normalizer.update(torch.full((10, 2, 4, 4), 128, dtype=torch.uint8), torch.ones(10, dtype=torch.bool))
    brighter = normalizer(torch.full((1, 2, 4, 4), 129, dtype=torch.uint8), torch.float32)
    expected = 1 / 255 / math.sqrt(normalizer.EPSILON)
    torch.testing.assert_close(brighter, torch.full((1, 2, 4, 4), expected), rtol=0.01, atol=0)


@pytest.mark.parametrize("space", [IMAGE, VECTOR])
def test_a_row_is_normalized_alike_in_a_batch_of_any_size(space: spaces.Box) -> None:
    normalizer = RunningNormalizer(space)
    rows = draw(space, 100, 0)
    normalizer.update(rows, torch.ones(100, dtype=torch.bool))
    whole = normalizer(rows, torch.float32)
    for size in (1, 31, 32, 33, 64):
        parts = [normalizer(part, torch.float32) for part in rows.split(size)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-6)
    assert normalizer(rows[:0], torch.float32).shape == (0, *space.shape)


@pytest.mark.parametrize("space", [IMAGE, VECTOR])
def test_normalizing_leaves_the_observations_as_they_are(space: spaces.Box) -> None:
    normalizer = RunningNormalizer(space)
    rows = draw(space, 40, 3)
    original = rows.clone()
    normalizer.update(rows, torch.ones(40, dtype=torch.bool))
    normalizer(rows, torch.float32)
    assert torch.equal(rows, original)


def test_before_the_first_update_vectors_pass_as_they_are_and_images_as_if_uniform() -> None:
    vectors = torch.tensor([[0.5, -2.0, 9.0]])
    torch.testing.assert_close(RunningNormalizer(VECTOR)(vectors, torch.float32), vectors.clamp(max=5.0), rtol=1e-4,
                               atol=0)
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 2, 4, 4)
    normalized = RunningNormalizer(IMAGE)(black_and_white, torch.float32)
    torch.testing.assert_close(normalized[0], torch.full((2, 4, 4), -math.sqrt(3)), rtol=1e-3, atol=0)
    torch.testing.assert_close(normalized[1], torch.full((2, 4, 4), math.sqrt(3)), rtol=1e-3, atol=0)


# ---- network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(32,), ()])
@pytest.mark.parametrize("architecture", ["convnet_simple", "convnet_atari", "resnet_impala"])
def test_image_encoders_take_both_orders_of_axes(architecture: str, sizes: tuple[int, ...]) -> None:
    cfg = config(encoder_conv_architecture=architecture, encoder_conv_mlp_layers=sizes)
    first, last = ImageEncoder((3, 44, 48), cfg), ImageEncoder((44, 48, 3), cfg)
    last.load_state_dict(first.state_dict())
    images = torch.randn(2, 3, 44, 48, generator=torch.Generator().manual_seed(0))
    features = first(images)
    assert features.shape == (2, first.out_size)
    assert last.out_size == first.out_size
    torch.testing.assert_close(last(images.movedim(1, -1)), features)
    assert not torch.allclose(features[0], features[1])


def test_several_named_observations_and_continuous_actions() -> None:
    obs_space = {"image": spaces.Box(0, 255, (36, 44, 1), np.uint8), "vector": VECTOR}
    model = ActorCritic(config(initial_stddev=0.5), obs_space, spaces.Box(-1, 1, (2,)))
    obs = {"image": draw(obs_space["image"], 6, 0), "vector": draw(VECTOR, 6, 0)}
    parameters, values, rnn_states = model(model.normalize(obs, torch.float32), torch.zeros(6, 0))
    assert parameters.shape == (6, 4)
    assert values.shape == (6,)
    assert rnn_states.shape == (6, 0)
    torch.testing.assert_close(parameters[:, 2:], torch.full((6, 2), math.log(0.5)))


def small_model(**settings: object) -> tuple[ActorCritic, dict[str, Tensor]]:
    """Make a network for small images and 6 actions, and 64 observations for it that it has seen."""
    torch.manual_seed(0)
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    model = ActorCritic(config(encoder_conv_mlp_layers=(64,), **settings), {"obs": space}, spaces.Discrete(6))
    obs = {"obs": draw(space, 64, 0)}
    model.update_normalizers(obs, torch.ones(64, dtype=torch.bool))
    return model, obs


@pytest.mark.parametrize("gain", [1.0, 1.5])
def test_initialization_is_orthogonal(gain: float) -> None:
    model, _ = small_model(policy_init_gain=gain)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert len(layers) == 3 + 1 + 2
    for name, layer in layers:
        weight = layer.weight.detach().flatten(1)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        scale = 0.01 if name == "policy_head" else gain
        torch.testing.assert_close(weight @ weight.T / scale**2, torch.eye(len(weight)), rtol=1e-4, atol=1e-4)
        assert not layer.bias.any()


def test_the_first_policy_is_almost_uniform() -> None:
    model, obs = small_model()
    parameters, values, _ = model(model.normalize(obs, torch.float32), torch.zeros(64, 0))
    probabilities = parameters.softmax(-1)
    assert probabilities.min() > 0.95 / 6
    assert probabilities.max() < 1.05 / 6
    assert values.std() > 0.01  # while values do tell observations apart


def test_a_bfloat16_body_gives_nearly_the_same_output() -> None:
    model, obs = small_model()
    with torch.no_grad():
        model.policy_head.weight.mul_(100)
        exact, exact_values, _ = model(model.normalize(obs, torch.float32), torch.zeros(64, 0))
        model.body_to(torch.bfloat16)
        parameters, values, _ = model(model.normalize(obs, torch.bfloat16), torch.zeros(64, 0))
    body = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert all((dtype == torch.bfloat16) == name.startswith("encoders") for name, dtype in body.items())
    assert parameters.dtype == values.dtype == torch.float32
    for actual, expected in ((parameters, exact), (values, exact_values)):
        assert (actual - expected).abs().mean() < 0.02 * expected.abs().mean()
        assert not torch.equal(actual, expected)
