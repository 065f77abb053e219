"""Tests of `model.py`: normalizers of observations and returns, initialization, masks and precision."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from appo import Settings
from config import Config
from envs.flat_spaces import obs_dtype, obs_leaves
from model import ActorCritic, make_model
from normalizers import FixedNormalizer, ReturnNormalizer, RunningNormalizer, expand, expanded_space

IMAGE = spaces.Box(0, 255, (2, 4, 4), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,))


def config(**settings: object) -> Config:
    return Settings(env="test", num_workers=1, **settings)


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
    return torch.from_numpy(exact.mean(0)), torch.from_numpy(exact.var(0))


@pytest.mark.parametrize(("space", "unit"), [(IMAGE, 255.0), (VECTOR, 1.0)])
def test_running_statistics_are_those_of_all_rows(space: spaces.Box, unit: float) -> None:
    normalizer = RunningNormalizer(config(), space)
    seen = []
    for seed, count in enumerate((7, 50, 1, 33, 100)):
        rows = draw(space, count, seed)
        seen.append(rows)
        normalizer.update(rows)
        mean, var = statistics(torch.cat(seen), unit)
        torch.testing.assert_close(normalizer.mean, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(normalizer.var, var, rtol=1e-4, atol=1e-5)
        assert normalizer.count == sum(map(len, seen))

    rows = draw(space, 40, 9)
    expected = ((rows / unit - mean) / (var + normalizer.epsilon).sqrt()).clip(-normalizer.CLIP, normalizer.CLIP)
    torch.testing.assert_close(normalizer(rows, torch.float32), expected.float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(normalizer(rows, torch.bfloat16), expected.bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("value", [0.1, 3.3, 33.3, 100.1, 1000.3])
def test_an_element_far_from_zero_that_hardly_moves_stays_finite(value: float) -> None:
    """The variance must survive float32: a constant element gives 0, a slightly noisy one its own variance."""
    normalizer = RunningNormalizer(config(), VECTOR)
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.1
    for part in noise.split(250):
        rows = torch.stack([torch.full_like(part, value), value + part, part], 1)
        normalizer.update(rows)
    assert torch.all(normalizer.var >= 0)
    assert torch.all(normalizer(rows, torch.float32).isfinite())
    assert normalizer.var[0] < 1e-6
    torch.testing.assert_close(normalizer.var[1], normalizer.var[2], rtol=0.02, atol=0)


@pytest.mark.parametrize("far", [1e5, 1e6, 3e6])
def test_the_mean_follows_far_from_zero(far: float) -> None:
    """It moves by 1/600 of a deviation at the end, a hundredth of what a float32 of this size can show."""
    normalizer, rng = RunningNormalizer(config(), VECTOR), torch.Generator().manual_seed(0)
    seen = []
    for update in range(600):
        center = far + 2.0 * (update >= 60)  # the data moves by two deviations
        rows = (center + torch.randn(20, 3, generator=rng, dtype=torch.float64)).float()
        normalizer.update(rows)
        seen.append(rows.double())
    mean, var = torch.cat(seen).mean(0), torch.cat(seen).var(0, correction=0)
    torch.testing.assert_close(normalizer.mean, mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(normalizer.var.double(), var, rtol=1e-3, atol=0)
    expected = ((rows.double() - mean) / var.sqrt()).clip(-5, 5)
    torch.testing.assert_close(normalizer(rows, torch.float32).double(), expected, rtol=0, atol=far * 1e-7)


@pytest.mark.parametrize("far", [1e4, 1e6])
def test_the_mean_of_returns_follows_far_from_zero(far: float) -> None:
    normalizer, rng = return_normalizer(), torch.Generator().manual_seed(0)
    normalizer.WINDOW = 10**9
    seen = []
    for update in range(600):
        returns = (far + 2.0 * (update >= 60) + torch.randn(20, generator=rng, dtype=torch.float64)).float()
        see(normalizer, returns[None], terminated=torch.ones(1, 20))
        seen.append(returns.double())
    torch.testing.assert_close(normalizer.mean, torch.cat(seen).mean(), rtol=0, atol=1e-3)
    torch.testing.assert_close(normalizer.var.double(), torch.cat(seen).var(correction=0), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("far", "deviation"), [(0.0, 1e-4), (5.0, 1e-4), (1.7e9, 10.0), (1.7e9, 0.01)])
def test_numbers_of_any_size_and_place_are_normalized(far: float, deviation: float) -> None:
    leaf = obs_leaves(spaces.Box(-np.inf, np.inf, (3,), np.float64))["obs"]
    noise = np.random.default_rng(0).normal(size=(4, 100, 3))
    rows = torch.from_numpy(far + deviation * noise).to(obs_dtype(leaf))
    normalizer = RunningNormalizer(config(), leaf)
    for part in rows:
        normalizer.update(part)
    expected = (noise - noise.mean((0, 1))) / noise.std((0, 1))
    for seen, wanted in zip(rows, expected, strict=True):
        np.testing.assert_allclose(normalizer(seen, torch.float32), wanted, rtol=0, atol=1e-3)
    fixed = FixedNormalizer(config(obs_subtract_mean=far, obs_scale=deviation), leaf)
    np.testing.assert_allclose(fixed(rows, torch.float32), noise, rtol=0, atol=1e-4)


def test_a_pixel_that_never_changed_does_not_blow_up_when_it_does() -> None:
    normalizer = RunningNormalizer(config(), IMAGE)
    normalizer.update(torch.full((10, 2, 4, 4), 128, dtype=torch.uint8))
    brighter = normalizer(torch.full((1, 2, 4, 4), 129, dtype=torch.uint8), torch.float32)
    expected = 1 / 255 / math.sqrt(normalizer.epsilon)
    torch.testing.assert_close(brighter, torch.full((1, 2, 4, 4), expected), rtol=0.01, atol=0)


@pytest.mark.parametrize("space", [IMAGE, VECTOR])
def test_a_row_is_normalized_alike_in_a_batch_of_any_size_and_stays_as_it_is(space: spaces.Box) -> None:
    normalizer = RunningNormalizer(config(), space)
    normalizer.CHUNK = 40 * math.prod(space.shape)  # 40 rows at once
    rows = draw(space, 100, 0)
    original = rows.clone()
    normalizer.update(rows)
    whole = normalizer(rows, torch.float32)
    for size in (1, 31, 32, 33, 64):
        parts = [normalizer(part, torch.float32) for part in rows.split(size)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-6)
    assert normalizer(rows[:0], torch.float32).shape == (0, *space.shape)
    assert torch.equal(rows, original)


def test_before_the_first_update_vectors_pass_as_they_are_and_images_as_if_uniform() -> None:
    vectors = torch.tensor([[0.5, -2.0, 9.0]])
    normalized = RunningNormalizer(config(), VECTOR)(vectors, torch.float32)
    torch.testing.assert_close(normalized, vectors.clamp(max=5.0), rtol=1e-4, atol=0)
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 2, 4, 4)
    normalized = RunningNormalizer(config(), IMAGE)(black_and_white, torch.float32)
    torch.testing.assert_close(normalized[0], torch.full((2, 4, 4), -math.sqrt(3)), rtol=1e-3, atol=0)
    torch.testing.assert_close(normalized[1], torch.full((2, 4, 4), math.sqrt(3)), rtol=1e-3, atol=0)


def test_indices_become_one_hot_vectors() -> None:
    assert expand(spaces.Discrete(3), torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    space = spaces.MultiDiscrete([2, 3])
    assert expand(space, torch.tensor([[1, 0], [0, 2]])).tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    bits = torch.tensor([[1, 0, 1]], dtype=torch.uint8)
    assert expand(spaces.MultiBinary(3), bits) is bits
    assert [expanded_space(s).shape for s in (spaces.Discrete(3), space, spaces.MultiBinary(3), IMAGE, VECTOR)] == [
        (3,), (5,), (3,), IMAGE.shape, VECTOR.shape]


# ---- returns -----------------------------------------------------------------------------------------------------


def return_normalizer() -> ReturnNormalizer:
    """Return one that has not seen anything, not even the decisions without reward it begins with."""
    normalizer = ReturnNormalizer(running=True)
    normalizer.count.zero_()
    return normalizer


def see(normalizer: ReturnNormalizer, rewards: Tensor, gamma: float = 0.9, **flags: Tensor) -> None:
    """Show it trajectories [T, B]: without an end and valid, where flags say nothing else."""
    kinds = {"terminated": 0, "truncated": 0, "valid": 1}
    normalizer.update(rewards, *(torch.as_tensor(flags.get(name, torch.full(rewards.shape, value))).bool()
                                 for name, value in kinds.items()), gamma)


def test_statistics_of_returns_follow_ends_and_ignore_what_is_not_valid() -> None:
    """The reference goes on from each valid row by hand: to the end of its episode, or of the trajectory."""
    rng = np.random.default_rng(0)
    normalizer, gamma, seen = return_normalizer(), 0.9, []
    for _ in range(3):
        rewards = rng.normal(1.0, 2.0, (6, 40)).astype(np.float32)
        kinds = rng.choice(3, size=rewards.shape, p=[0.8, 0.1, 0.1])
        valid = np.ones(rewards.shape, bool)
        valid[1:] = kinds[:-1] == 0  # what follows an end only resets
        valid[:2, :5] = False  # acted by too old a policy
        rewards[~valid] = np.nan
        kinds[~valid] = 0
        see(normalizer, torch.tensor(rewards), gamma, terminated=torch.tensor(kinds == 1),
            truncated=torch.tensor(kinds == 2), valid=torch.tensor(valid))
        for begin, column in zip(*valid.nonzero(), strict=True):
            total, discount = 0.0, 1.0
            for reward, end in zip(rewards[begin:, column].astype(float), kinds[begin:, column], strict=True):
                total += discount * reward
                discount *= 0.0 if end == 1 else gamma
                if end:
                    break
            seen.append((total, discount))
        totals, rests = np.array(seen).T
        mean = totals.mean() / (1 - rests).mean()
        assert float(normalizer.mean) == pytest.approx(mean, rel=1e-5)
        assert float(normalizer.shown) == pytest.approx((1 - rests).mean(), rel=1e-5)
        assert normalizer.count == len(seen)
        if len(seen) == valid.sum():
            assert float(normalizer.var) == pytest.approx(np.var(totals + rests * mean), rel=1e-5)
    assert float(normalizer.var) == pytest.approx(np.var(totals + rests * mean), rel=0.05)  # older ones: of older means


def test_returns_begin_as_if_decisions_without_reward_had_been_seen() -> None:
    normalizer = ReturnNormalizer(running=True)
    assert (float(normalizer.mean), float(normalizer.var)) == (0, 0)
    see(normalizer, torch.full((1, normalizer.PRIOR), 3.0), terminated=torch.ones(1, normalizer.PRIOR))
    assert float(normalizer.mean) == pytest.approx(1.5)
    assert float(normalizer.var) == pytest.approx(1.5**2)


def test_an_endless_sum_without_a_discount_stays_bounded() -> None:
    normalizer = ReturnNormalizer(running=True)
    for _ in range(1000):
        see(normalizer, torch.ones(32, 32), gamma=1.0)
    assert 1000 < float(normalizer.mean) <= 10_001


def test_returns_that_never_differ_have_a_deviation_above_rounding_errors() -> None:
    normalizer = return_normalizer()
    for _ in range(100):
        see(normalizer, torch.ones(10, 1000), gamma=0.99)
    assert float(normalizer.mean) == pytest.approx(100)
    assert float(normalizer.deviation) == pytest.approx(0.1)


def test_returns_are_those_of_the_last_decisions() -> None:
    normalizer = return_normalizer()
    for reward in (0.0, 5.0):
        see(normalizer, torch.full((2, normalizer.WINDOW), reward), terminated=torch.ones(2, normalizer.WINDOW))
        assert normalizer.count == normalizer.WINDOW
    assert float(normalizer.mean) == pytest.approx(5 * 2 / 3)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1e4, 3e3), (-1e-4, 1e-5)])
def test_statistics_of_returns_are_those_of_all_valid_ones(mean: float, deviation: float) -> None:
    normalizer, seen = return_normalizer(), []
    generator = torch.Generator().manual_seed(0)
    for count in (1, 50, 7, 200):
        returns = mean + deviation * torch.randn(1, 4 * count, generator=generator)
        valid = torch.rand(1, 4 * count, generator=generator) < 0.7
        seen.append(returns[valid])
        see(normalizer, torch.where(valid, returns, torch.nan), terminated=torch.ones(returns.shape), valid=valid)
        exact = torch.cat(seen).double()
        torch.testing.assert_close(normalizer.mean.double(), exact.mean(), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(normalizer.var.double(), exact.var(correction=0), rtol=1e-4, atol=0)
        assert normalizer.count == len(exact)
    see(normalizer, torch.full((2, 3), torch.nan), valid=torch.zeros(2, 3))
    assert normalizer.count == len(exact)
    normalized = normalizer.normalize(torch.cat(seen))
    assert abs(float(normalized.mean())) < 1e-3
    assert float(normalized.std()) == pytest.approx(1, abs=0.01)
    torch.testing.assert_close(normalizer.denormalize(normalized), torch.cat(seen), rtol=1e-4, atol=1e-9)


# ---- network -----------------------------------------------------------------------------------------------------


def forward(model: ActorCritic, obs: dict[str, Tensor], dtype: torch.dtype = torch.float32
            ) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate observations [B, ...] as B sequences of one step, without a memory."""
    count = len(next(iter(obs.values())))
    return model(model.normalize(obs), torch.zeros(count, model.state_size), torch.ones(count, 1).bool())


def test_several_named_observations_and_continuous_actions() -> None:
    obs_space = {"image": spaces.Box(0, 255, (36, 44, 1), np.uint8), "vector": VECTOR}
    model = make_model(config(initial_stddev=0.5), obs_space, spaces.Box(-1, 1, (2,)))
    obs = {"image": draw(obs_space["image"], 6, 0), "vector": draw(VECTOR, 6, 0)}
    parameters, values, rnn_states = forward(model, obs)
    assert parameters.shape == (6, 4)
    assert values.shape == (6,)
    assert rnn_states.shape == (6, 0)
    torch.testing.assert_close(parameters[:, 2:], torch.full((6, 2), math.log(0.5)))


def small_model(**settings: object) -> tuple[ActorCritic, dict[str, Tensor]]:
    """Make a network for small images and 6 actions, and 64 observations for it that it has seen."""
    torch.manual_seed(0)
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    model = make_model(config(encoder_conv_mlp_layers=(64,), **settings), {"obs": space}, spaces.Discrete(6))
    obs = {"obs": draw(space, 64, 0)}
    model.update_normalizers(obs)
    return model, obs


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_deviation_depends_on_the_observation_only_when_adaptive(adaptive: bool) -> None:
    model = make_model(config(adaptive_stddev=adaptive), {"obs": VECTOR}, spaces.Tuple((
        spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(1))))
    with torch.no_grad():
        model.policy_head.weight.mul_(100)
    obs = {"obs": draw(VECTOR, 6, 0)}
    parameters, _, _ = forward(model, obs)
    depends = [bool(column.unique().numel() > 1) for column in parameters.T]
    assert depends == [True] * 4 + [adaptive] * 2 + [True]
    parameters.sum().backward()
    assert model.policy_head.bias.grad.all(), "they are learned all the same"


def test_an_action_mask_forbids_choices_and_nothing_else() -> None:
    action_space = spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Discrete(2)))
    leaves = {"obs": VECTOR, "action_mask": spaces.MultiBinary(7)}
    model = make_model(config(), leaves, action_space)
    obs = {"obs": draw(VECTOR, 4, 0), "action_mask": torch.ones(4, 7, dtype=torch.uint8)}
    free, values, _ = forward(model, obs)
    obs["action_mask"][:] = torch.tensor([0, 1, 1, 0, 1, 1, 0])
    masked, masked_values, _ = forward(model, obs)
    assert torch.equal(values, masked_values), "the mask is no observation"
    is_forbidden = torch.tensor([True, False, False, True, False, False, False, False, True])
    assert torch.equal(masked[:, ~is_forbidden], free[:, ~is_forbidden])
    actions = torch.stack([model.distribution(masked).sample() for _ in range(50)]).flatten(0, 1)
    assert actions.shape == (200, 5)
    assert [set(column.tolist()) for column in actions.T] == [{1}, {0, 2}, {0, 1}, {0, 1}, {0}]


@pytest.mark.parametrize("gain", [1.0, 1.5])
def test_initialization_is_orthogonal(gain: float) -> None:
    model, _ = small_model(policy_init_gain=gain)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert len(layers) == 2 + 1 + 2
    for name, layer in layers:
        weight = layer.weight.detach().flatten(1)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        scale = 0.01 if name == "policy_head" else gain
        torch.testing.assert_close(weight @ weight.T / scale**2, torch.eye(len(weight)), rtol=1e-4, atol=1e-4)
        assert not layer.bias.any()


def test_the_first_policy_is_almost_uniform() -> None:
    model, obs = small_model()
    parameters, values, _ = forward(model, obs)
    probabilities = parameters.softmax(-1)
    assert probabilities.min() > 0.95 / 6
    assert probabilities.max() < 1.05 / 6
    assert values.std() > 0.01  # while values do tell observations apart


def test_a_bfloat16_body_gives_nearly_the_same_output() -> None:
    model, obs = small_model()
    with torch.no_grad():
        model.policy_head.weight.mul_(100)
        exact, exact_values, _ = forward(model, obs)
        model.body_to(torch.bfloat16)
        parameters, values, _ = forward(model, obs)
    body = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert all((dtype == torch.bfloat16) == name.startswith("encoder.") for name, dtype in body.items())
    assert parameters.dtype == values.dtype == torch.float32
    for actual, expected in ((parameters, exact), (values, exact_values)):
        assert (actual - expected).abs().mean() < 0.02 * expected.abs().mean()
        assert not torch.equal(actual, expected)
