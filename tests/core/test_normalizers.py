"""Tests of `normalizers.py`: statistics of observations and returns against plain NumPy over all that was seen."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from oracles import walk
from parts import make_config, observe
from torch import Tensor
from torch.nn.functional import one_hot

from envs.flat_spaces import obs_leaves
from model import ActorCritic
from normalizers import FixedNormalizer, ReturnNormalizer, RunningNormalizer

IMAGE = spaces.Box(0, 255, (2, 4, 4), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,))
CONFIG = make_config({"env": "test"})


def draw(space: spaces.Box, count: int, seed: int) -> Tensor:
    """Draw observations whose elements differ in mean and deviation."""
    rng = np.random.default_rng(seed)
    if space.dtype == np.uint8:
        rows = rng.normal(rng.uniform(0, 255, space.shape), 30, (count, *space.shape)).clip(0, 255)
    else:
        rows = rng.normal(seed, 1, (count, *space.shape)) * np.arange(1, 1 + math.prod(space.shape))
    return torch.from_numpy(rows.astype(space.dtype))


# ---- observations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("space", "unit"), [(IMAGE, 255.0), (VECTOR, 1.0)])
def test_running_statistics_are_those_of_all_rows(space: spaces.Box, unit: float) -> None:
    normalizer, seen = RunningNormalizer(CONFIG, space), np.empty((0, *space.shape))
    normalizer.CHUNK = 40 * math.prod(space.shape)  # 40 rows at once
    for seed, count in enumerate((7, 50, 1, 0, 33, 100)):
        rows = draw(space, count, seed)
        seen = np.concatenate([seen, rows.numpy() / unit])
        observe(normalizer, rows)
        assert normalizer.count == len(seen)
        np.testing.assert_allclose(normalizer.mean, seen.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(normalizer.var, seen.var(0), rtol=1e-4, atol=1e-6)

    rows = draw(space, 100, 9)
    original = rows.clone()
    expected = (rows.numpy() / unit - seen.mean(0)) / np.sqrt(seen.var(0) + normalizer.epsilon)
    for size in (1, 31, 40, 41, 100):  # a row is normalized alike in a batch of any size
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            normalized = torch.cat([normalizer(part, dtype) for part in rows.split(size)])
            assert normalized.dtype == dtype
            np.testing.assert_allclose(normalized.float(), expected.clip(-5, 5), rtol=tolerance, atol=tolerance)
    assert normalizer(rows[:0], torch.float32).shape == (0, *space.shape)
    assert torch.equal(rows, original)


@pytest.mark.parametrize(("dtype", "far", "deviation"), [
    (np.float64, 0.0, 1e-4), (np.float64, 5.0, 1e-4), (np.float64, 1.7e9, 10.0), (np.float64, 1.7e9, 0.01),
    (np.float32, 100.1, 0.1), (np.float32, 1e6, 1.0)])
def test_numbers_of_any_size_and_place_are_normalized(dtype: type, far: float, deviation: float) -> None:
    """The statistics go on to move after many updates; an element that never changes gives 0."""
    leaf = obs_leaves(spaces.Box(-np.inf, np.inf, (3,), dtype))["obs"]
    noise = np.random.default_rng(0).normal(size=(600, 20, 3))
    noise[300:] += 2.0
    noise[..., 0] = 0.0
    rows = (far + deviation * noise).astype(leaf.dtype)
    normalizer = RunningNormalizer(CONFIG, leaf)
    for part in rows:
        observe(normalizer, torch.from_numpy(part))
    everything = rows.astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, everything.mean((0, 1)), rtol=0, atol=1e-3 * deviation)
    np.testing.assert_allclose(normalizer.var, everything.var((0, 1)), rtol=1e-3, atol=1e-6 * deviation**2)
    expected = (everything[-1] - everything.mean((0, 1))) / everything.std((0, 1)).clip(min=1e-6)
    np.testing.assert_allclose(normalizer(torch.from_numpy(rows[-1]), torch.float32), expected, rtol=0,
                               atol=1e-3 + far * 1e-7 * (dtype == np.float32))
    fixed = FixedNormalizer(make_config({"env": "test", "obs_subtract_mean": far, "obs_scale": deviation}), leaf)
    if dtype == np.float64:
        np.testing.assert_allclose(fixed(torch.from_numpy(rows), torch.float32), noise, rtol=0, atol=1e-4)


def test_a_pixel_that_never_changed_does_not_blow_up_when_it_does() -> None:
    normalizer = RunningNormalizer(CONFIG, IMAGE)
    observe(normalizer, torch.full((10, 2, 4, 4), 128, dtype=torch.uint8))
    brighter = normalizer(torch.full((1, 2, 4, 4), 129, dtype=torch.uint8), torch.float32)
    torch.testing.assert_close(brighter, torch.full((1, 2, 4, 4), 1 / 255 / math.sqrt(1e-5)), rtol=0.01, atol=0)


def test_before_the_first_update_vectors_pass_as_they_are_and_images_as_if_uniform() -> None:
    normalized = RunningNormalizer(CONFIG, VECTOR)(torch.tensor([[0.5, -2.0, 9.0]]), torch.float32)
    torch.testing.assert_close(normalized, torch.tensor([[0.5, -2.0, 5.0]]), rtol=1e-4, atol=0)
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 2, 4, 4)
    normalized = RunningNormalizer(CONFIG, IMAGE)(black_and_white, torch.float32)
    ends = torch.tensor([-math.sqrt(3), math.sqrt(3)]).view(2, 1, 1, 1)
    torch.testing.assert_close(normalized, ends.expand_as(normalized), rtol=1e-3, atol=0)


LEAVES = {"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8), "pose": spaces.Box(-np.inf, np.inf, (3,), np.float32),
          "gear": spaces.Discrete(3), "knobs": spaces.MultiDiscrete([2, 4]), "bits": spaces.MultiBinary(2)}


def standardized(x: Tensor) -> Tensor:
    epsilon = 1e-5 if x.dim() == 4 else 0.0  # of images
    return ((x - x.mean(0)) / (x.var(0, correction=0) + epsilon).sqrt()).clamp(-5, 5)


@pytest.mark.parametrize(("settings", "names"), [
    ({}, ("camera", "pose")), ({"normalize_input": False}, ()),
    ({"normalize_input": False, "obs_subtract_mean": 4.0}, ()), ({"obs_subtract_mean": 4.0, "obs_scale": 10.0}, (
        "camera", "pose")),
    *(({"normalize_input_keys": keys}, keys) for keys in (("camera",), ("pose", "gear", "knobs"), ("bits", "camera")))])
def test_settings_choose_what_is_normalized_indices_become_bits_images_and_vectors_are_shifted_and_scaled(
        settings: dict[str, Any], names: tuple[str, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    obs = {"camera": torch.randint(0, 256, (40, 4, 4, 1), generator=rng, dtype=torch.uint8),
           "pose": 5 + 2 * torch.randn(40, 3, generator=rng), "gear": torch.randint(0, 3, (40,), generator=rng),
           "knobs": torch.stack([torch.randint(0, n, (40,), generator=rng) for n in (2, 4)], 1),
           "bits": torch.randint(0, 2, (40, 2), generator=rng, dtype=torch.uint8)}
    shift, scale = settings.get("obs_subtract_mean", 0.0), settings.get("obs_scale", 0.0)
    expected = {"camera": (obs["camera"].float() - shift) / (scale or 255),
                "pose": (obs["pose"] - shift) / (scale or 1), "bits": obs["bits"].float(),
                "gear": one_hot(obs["gear"], 3).float(),
                "knobs": torch.cat([one_hot(obs["knobs"][:, i], n) for i, n in enumerate((2, 4))], 1).float()}
    model = ActorCritic(make_config({"env": "test"}, settings), LEAVES, spaces.Discrete(2))
    observe(model, obs)
    torch.testing.assert_close(model.normalize(obs), expected | {name: standardized(expected[name]) for name in names},
                               rtol=1e-4, atol=1e-4)


# ---- returns -----------------------------------------------------------------------------------------------------


def return_normalizer() -> ReturnNormalizer:
    """Return one that has not seen anything, not even the decisions without reward it begins with."""
    normalizer = ReturnNormalizer(running=True)
    normalizer.count.zero_()
    return normalizer


def see(normalizer: ReturnNormalizer, rewards: Tensor, gamma: float = 0.9, **flags: Any) -> None:
    """Show it trajectories [T, B]: without an end and valid, where flags say nothing else."""
    flags = {"terminated": False, "truncated": False, "valid": True} | flags
    columns = (torch.as_tensor(flag).expand(rewards.shape) for flag in flags.values())
    normalizer.update(normalizer.summarize(rewards, *columns, gamma)[None])


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
        see(normalizer, torch.tensor(rewards), gamma, terminated=kinds == 1, truncated=kinds == 2, valid=valid)
        for begin, column in zip(*valid.nonzero(), strict=True):
            kind = kinds[begin:, column]
            seen.append(walk(rewards[begin:, column], kind == 1, kind == 2, gamma)[:2])
        totals, rests = np.array(seen).T
        mean = totals.mean() / (1 - rests).mean()
        assert float(normalizer.mean) == pytest.approx(mean, rel=1e-5)
        assert float(normalizer.shown) == pytest.approx((1 - rests).mean(), rel=1e-5)
        assert normalizer.count == len(seen)
        if len(seen) == valid.sum():
            assert float(normalizer.var) == pytest.approx(np.var(totals + rests * mean), rel=1e-5)
    assert float(normalizer.var) == pytest.approx(np.var(totals + rests * mean), rel=0.05)  # older ones: of older means


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1e4, 3e3), (-1e-4, 1e-5), (1e6, 1.0)])
def test_returns_are_shifted_and_scaled_by_the_statistics_of_all_valid_ones(mean: float, deviation: float) -> None:
    normalizer, seen = return_normalizer(), []
    generator = torch.Generator().manual_seed(0)
    for count in (1, 50, 7, 200):
        returns = mean + deviation * torch.randn(1, 4 * count, generator=generator, dtype=torch.float64)
        valid = torch.rand(1, 4 * count, generator=generator) < 0.7
        seen.append(returns[valid])
        see(normalizer, torch.where(valid, returns, torch.nan), terminated=True, valid=valid)
        exact = torch.cat(seen)
        torch.testing.assert_close(normalizer.mean, exact.mean(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(normalizer.var, exact.var(correction=0), rtol=1e-6, atol=0)
        assert normalizer.count == len(exact)
    see(normalizer, torch.full((2, 3), torch.nan), valid=False)
    assert normalizer.count == len(exact)
    normalized = normalizer.normalize(exact)
    unit = max(deviation, 1e-3 * mean)  # differences below are rounding errors
    torch.testing.assert_close(normalized, (exact - exact.mean()) / unit, rtol=0.05, atol=1e-3)
    torch.testing.assert_close(normalizer.denormalize(normalized), exact, rtol=1e-6, atol=1e-9)


def test_returns_begin_as_if_decisions_without_reward_had_been_seen() -> None:
    normalizer = ReturnNormalizer(running=True)
    assert (float(normalizer.mean), float(normalizer.var)) == (0, 0)
    see(normalizer, torch.full((1, normalizer.PRIOR), 3.0), terminated=True)
    assert float(normalizer.mean) == pytest.approx(1.5)
    assert float(normalizer.var) == pytest.approx(1.5**2)


def test_returns_are_those_of_the_last_decisions() -> None:
    normalizer = return_normalizer()
    for reward in (0.0, 5.0):
        see(normalizer, torch.full((2, normalizer.WINDOW), reward), terminated=True)
        assert normalizer.count == normalizer.WINDOW
    assert float(normalizer.mean) == pytest.approx(5 * 2 / 3)


def test_an_endless_sum_without_a_discount_stays_bounded() -> None:
    normalizer = ReturnNormalizer(running=True)
    for _ in range(400):
        see(normalizer, torch.ones(32, 32), gamma=1.0)
    assert 1000 < float(normalizer.mean) <= 10_001
