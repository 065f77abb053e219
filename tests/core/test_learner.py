"""Tests of `learner.py`: one learner in this process, fed with trajectories that a real `PolicyWorker` acted."""

import copy
import functools
import itertools
import math
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from one_policy import drain
from rig import CONTINUOUS, DISCRETE, TRAJECTORIES, Rig, clone
from torch import Tensor, nn

from algorithm import MaskedMean, clipped_value_error, describe, held_ratios, normalize_advantages, ppo_objective
from learner import Learner
from model import ActorCritic
from normalizers import ReturnNormalizer
from reducer import Reducer
from runtime import checkpoint
from runtime.user_error import UserError
from shared_buffers import CURRENT, HANDED_IN, SLOTS
from vtrace import gae, vtrace


def gradients(learner: Learner, data: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of every parameter that has one, and the statistics of a minibatch."""
    learner.state.optimizer.zero_grad(set_to_none=True)
    stats = learner.backward(clone(data))
    return {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}, stats


def see_returns(learner: Learner, data: dict[str, Tensor]) -> None:
    """Move the statistics of the returns by a minibatch, as `train` does by its dataset."""
    learner.model.returns.update(*(data[name].T for name in ("rewards", "terminated", "truncated", "valid")),
                                 learner.cfg.gamma)


def evaluate(learner: Learner, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return action parameters [T+1, B, D] and values [T+1, B] in units of the value head, with gradients."""
    rows = {name: data[name].clone().flatten(0, 1)[:, None] for name in ("obs/obs", "rnn_states", "new_episode")}
    parameters, values = learner.evaluate(rows)
    shape = data["rnn_states"].shape[:2]
    return parameters.unflatten(0, shape).transpose(0, 1), values.unflatten(0, shape).T


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two dicts bit by bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


# ---- zero lag ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS])
def test_ratio_is_1_at_zero_lag(action_space: spaces.Space) -> None:
    rig = Rig(action_space)
    for seed in range(3):  # with the first weights, and after SGD steps that also moved the normalizer
        data = rig.minibatch(seed)
        assert torch.all(data["policy_version"] == rig.state.sgd_steps)
        _, stats = gradients(rig.learner, data)
        assert abs(stats["ratio_min"] - 1) < 1e-5
        assert abs(stats["ratio_max"] - 1) < 1e-5
        assert abs(stats["kl"]) < 1e-6
        parameters, values = evaluate(rig.learner, data)
        torch.testing.assert_close(parameters[:-1].transpose(0, 1), data["action_parameters"], rtol=1e-5, atol=1e-5)
        values = rig.learner.model.returns.denormalize(values[:-1].T)
        torch.testing.assert_close(values, data["values"], rtol=1e-5, atol=1e-5)
        rig.learner.train(rig.batch(seed + 10))
    stats = rig.learner.backward(data)  # the same trajectories, now one dataset old
    assert stats["ratio_max"] - stats["ratio_min"] > 1e-3


# ---- masks -------------------------------------------------------------------------------------------------------


def shifted(rows: Tensor) -> Tensor:
    """Return what was one step earlier in the trajectory, False for the first step, [B, T] bool."""
    return torch.nn.functional.pad(rows[:, :-1], (1, 0))


def with_garbage(data: dict[str, Tensor], sign: float) -> dict[str, Tensor]:
    """Write huge numbers in everything that the masked rows must not be asked for.

    A reset row holds the final observation of an episode: after a truncation it is needed, with its value.
    """
    data, invalid = clone(data), ~data["valid"]
    no_bootstrap = invalid & ~shifted(data["truncated"])
    for name in ("rewards", "log_probs", "action_parameters", "targets", "advantages"):
        if name in data:
            data[name][invalid] = sign * 1e30
    data["values"][no_bootstrap] = sign * 1e30
    data["obs/obs"][:, :-1][no_bootstrap] = sign * 1e4
    if data["actions"].shape[-1] == 1:  # the discrete ones
        data["actions"][invalid] = 1 if sign > 0 else 2
    else:
        data["actions"][invalid] = sign * 1e9
    return data


@pytest.mark.parametrize("settings", [
    {}, {"with_vtrace": False}, {"ppo_clip_ratio": 0.0, "ppo_clip_value": 0.0}, {"vtrace_rho": 4.0, "vtrace_c": 4.0},
    {"exploration_loss": "symmetric_kl", "kl_loss_coeff": 0.1}, {"action_space": CONTINUOUS, "kl_loss_coeff": 0.1},
    {"algo": "impala"}, {"algo": "a3c", "action_space": CONTINUOUS}])
def test_masked_rows_change_neither_loss_nor_gradients_nor_statistics(settings: dict[str, Any]) -> None:
    rig = Rig(**settings)
    data = rig.minibatch(seed=5)
    data["log_probs"] += 0.3 * torch.randn(data["log_probs"].shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shifted(data["terminated"] | data["truncated"]), ~data["valid"])
    data["valid"][1, :3] = False  # as of a version too old: the beginning of a trajectory
    data["valid"][2, 0] = False  # the reset of an episode that ended in the trajectory before
    assert 5 < (~data["valid"]).sum() < 16
    grads, stats = gradients(rig.learner, data)
    for sign in (1.0, -1.0):
        other_grads, other_stats = gradients(rig.learner, with_garbage(data, sign))
        assert_same(stats, other_stats)
        assert_same(grads, other_grads)
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_garbage_in_masked_rows_leaves_no_trace_in_a_trained_learner(with_vtrace: bool) -> None:
    trained = []
    for sign in (1.0, -1.0):
        rig = Rig(with_vtrace=with_vtrace, reward_clip=math.inf, num_batches_per_epoch=2, num_epochs=2)
        batch = rig.batch()
        batch.tensors = with_garbage(batch.tensors, sign)
        rig.learner.train(batch)
        trained.append(rig)
    assert trained[0].learner.model.normalizers[0].count > 0
    assert trained[0].learner.model.returns.count > ReturnNormalizer.PRIOR
    assert_same(trained[0].learner.model.state_dict(), trained[1].learner.model.state_dict())
    assert_same(trained[0].trained(), trained[1].trained())
    assert all(math.isfinite(number) for number in trained[0].trained().values())


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_masked_trajectories_are_as_good_as_absent(with_vtrace: bool) -> None:
    rig = Rig(with_vtrace=with_vtrace)
    data = rig.minibatch()
    present = {name: tensor[:2] for name, tensor in data.items()}
    data["valid"][2:] = False
    grads, stats = gradients(rig.learner, with_garbage(data, 1.0))
    expected_grads, expected_stats = gradients(rig.learner, present)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stats, expected_stats, rtol=1e-4, atol=1e-6)


def test_a_minibatch_without_valid_rows_has_a_finite_loss_and_no_gradient() -> None:
    rig = Rig()
    data = rig.minibatch()
    data["valid"][:] = False
    grads, stats = gradients(rig.learner, data)
    assert all(not grad.any() for grad in grads.values())
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("length", range(1, 41))
@pytest.mark.parametrize("images", [False, True])
def test_the_normalizer_sees_every_step_of_an_episode_alike_whatever_its_length(length: int, images: bool) -> None:
    """The oracle: the statistics of all decisions. One hot step of the episode is a mean of 1 / length."""
    rig = Rig(rollout=32, batch_size=32 * 64, num_envs_per_worker=64)
    rig.learner.steps_per_pass = 1 if images else 10**6  # as small images: a sample of 512 rows of up to 2,048
    steps = torch.stack([(torch.arange(33) + 32 * b) % (length + 1) for b in range(64)])  # one episode after another
    valid = steps[:, :-1] < length  # the others reset
    marked = sorted({0, length // 3, length // 2, length - 1})  # steps of an episode, one element for each
    obs = torch.zeros(64, 33, 4)
    for element, step in enumerate(marked):
        obs[..., element] = (steps == step).float()
    for _ in range(8):
        rig.learner.update_normalizers({"obs/obs": obs, "valid": valid})
    normalizer = rig.learner.model.normalizers[0]
    mean = obs[:, :-1][valid].mean(0)
    assert normalizer.count == 8 * (min(512, int(valid.sum())) if images else int(valid.sum()))
    spread = (mean * (1 - mean) / normalizer.count).sqrt()
    assert ((normalizer.mean - mean).abs() <= (5 * spread if images else 1e-6)).all(), (normalizer.mean, mean)
    exact = mean[: len(marked)]
    assert torch.allclose(exact, torch.full_like(exact, 1 / length), atol=0.03), "what the oracle itself should say"
    torch.testing.assert_close(normalizer.var.float(), mean * (1 - mean), rtol=0.5 if images else 1e-4, atol=2e-3)


# ---- policy lag --------------------------------------------------------------------------------------------------


def test_samples_older_than_max_policy_lag_are_masked() -> None:
    trained = []
    for sign in (1.0, -1.0):
        rig = Rig(max_policy_lag=3)
        rig.state.sgd_steps = 10
        batch = rig.batch()
        batch.tensors["valid"][:] = True
        batch.tensors["terminated"][:] = batch.tensors["truncated"][:] = False
        batch.tensors["policy_version"][:] = torch.tensor([5, 5, 6, 7, 7, 8, 9, 10])
        too_old = batch.tensors["valid"].clone()
        too_old[:, 3:] = False
        batch.tensors["valid"] &= ~too_old
        batch.tensors = with_garbage(batch.tensors, sign)
        batch.tensors["valid"] |= too_old  # it is the learner's task to mask them
        rig.learner.train(batch)
        summary = rig.trained()
        assert summary["valid_fraction"] == 5 / 8
        assert summary["policy_lag_mean"] == pytest.approx((3 + 3 + 2 + 1 + 0) / 5)
        assert summary["policy_lag_max"] == 3
        assert summary["sgd_steps"] == 11
        assert summary["env_steps_trained"] == 5 * TRAJECTORIES
        assert rig.learner.model.normalizers[0].count == 5 * TRAJECTORIES
        trained.append(rig)
    assert_same(trained[0].learner.model.state_dict(), trained[1].learner.model.state_dict())
    assert_same(trained[0].trained(), trained[1].trained())


def test_policy_lag_ignores_masked_rows_and_counts_from_before_the_dataset() -> None:
    rig = Rig(num_epochs=3)
    rig.state.sgd_steps = 20
    batch = rig.batch()
    valid = batch.tensors["valid"]
    batch.tensors["policy_version"][:] = torch.where(valid, 18, 0)
    rig.learner.train(batch)
    assert rig.trained()["policy_lag_mean"] == rig.trained()["policy_lag_max"] == 2
    assert rig.trained()["valid_fraction"] == pytest.approx(float(valid.float().mean()))
    assert rig.trained()["env_steps_trained"] == valid.sum()
    assert rig.trained()["sgd_steps"] == 23


# ---- pure functions ----------------------------------------------------------------------------------------------


def random_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw three [T, B] tensors and a mask; where the mask is False they are nan."""
    rng = torch.Generator().manual_seed(seed)
    valid = torch.rand(6, 5, generator=rng) < 0.7
    numbers = torch.randn(3, 6, 5, generator=rng, dtype=torch.float64)
    return *torch.where(valid, numbers, torch.nan), valid


def over(valid: Tensor) -> MaskedMean:
    return MaskedMean(valid, Reducer())


def masked_moments(valid: Tensor, *rows: Tensor) -> Tensor:
    mean = over(valid)
    return mean.moments(mean.masked(torch.stack(rows)))


@pytest.mark.parametrize("clip_ratio", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_objective_of_ppo_against_a_loop(seed: int, clip_ratio: float) -> None:
    """Gains are capped at the clip range, losses are not."""
    log_ratios, advantages, _, valid = random_rows(seed)
    log_ratios = 2 * log_ratios  # some beyond the bounds of 0.05 and 20
    terms = []
    for log_ratio, advantage in zip(log_ratios[valid].tolist(), advantages[valid].tolist(), strict=True):
        ratio = min(max(math.exp(log_ratio), 0.05), 20.0)
        clipped = min(max(ratio, 1 / (1 + clip_ratio)), 1 + clip_ratio) if clip_ratio else ratio
        terms.append(min(ratio * advantage, clipped * advantage))
    objective = over(valid)(ppo_objective(held_ratios(log_ratios), advantages, clip_ratio))
    assert float(objective) == pytest.approx(sum(terms) / len(terms))


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_clipped_value_error_against_a_loop(seed: int, clip: float) -> None:
    values, old_values, targets, valid = random_rows(seed)
    terms = []
    for value, old, target in zip(*(x[valid].tolist() for x in (values, old_values, targets)), strict=True):
        moved = min(max(value, old - clip), old + clip) if clip else value
        terms.append(max((value - target) ** 2, (moved - target) ** 2))
    loss = over(valid)(clipped_value_error(values, old_values, targets, clip))
    assert float(loss) == pytest.approx(sum(terms) / len(terms))


@pytest.mark.parametrize("seed", range(5))
def test_masked_statistics_against_numpy(seed: int) -> None:
    values, targets, _, valid = random_rows(seed)
    v, r = values[valid].numpy(), targets[valid].numpy()
    assert float(over(valid)(values)) == pytest.approx(v.mean())
    assert float(over(valid).std(values)) == pytest.approx(v.std())
    moments = masked_moments(valid, values - targets, targets, values, targets - values)
    described = describe(moments)
    assert {name: float(value) for name, value in described.items()} == pytest.approx({
        "advantage_mean": (v - r).mean(), "advantage_std": (v - r).std(), "value_mean": v.mean(),
        "explained_variance": 1 - (r - v).var() / r.var()}, rel=1e-6)
    normalized = normalize_advantages(values, masked_moments(valid, values, targets))[valid].numpy()
    np.testing.assert_allclose(normalized, (v - v.mean()) / v.std(), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("deviation", "expected"), [(0.001, 0.01), (0.05, 0.5), (0.2, 1.0), (50.0, 1.0)])
def test_the_noise_of_a_solved_task_is_not_blown_up(deviation: float, expected: float, scale: float) -> None:
    """Values of 100: what deviates by less than 0.1 counts in units of 0.1. The unit of the rewards does not matter."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(32, 40, generator=rng)
    noise = (noise - noise.mean()) / noise.std(correction=0)
    valid = torch.rand(32, 40, generator=rng) < 0.9
    noise[valid] = (noise[valid] - noise[valid].mean()) / noise[valid].std(correction=0)
    noise[~valid] = torch.nan
    targets = torch.full((32, 40), 100.0)
    advantages = scale * (deviation * noise + 3.0)
    moments = masked_moments(valid, advantages, scale * targets)
    normalized = normalize_advantages(advantages, moments)[valid]
    torch.testing.assert_close(normalized, expected * noise[valid], rtol=0.01, atol=1e-3 * expected)


@pytest.mark.parametrize("constant", [0.0, 0.3, -7.0])
def test_equal_advantages_are_normalized_to_nothing(constant: float) -> None:
    everything = over(torch.ones(8, 8, dtype=torch.bool))
    advantages = torch.full((8, 8), constant)
    normalized = normalize_advantages(advantages, everything.moments(torch.stack([advantages, torch.zeros(8, 8)])))
    assert (normalized.abs() < 1e-3).all()


# ---- loss and targets --------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_of_its_terms() -> None:
    rig = Rig(value_loss_coeff=0.7, exploration_loss_coeff=0.2, kl_loss_coeff=0.4)
    rig.learner.train(rig.batch(1))
    data = rig.minibatch(2)
    rig.learner.train(rig.batch(3))  # now the KL is not 0
    stats = rig.learner.backward(data)
    assert stats["kl"] > 1e-6
    expected = stats["policy_loss"] + 0.7 * stats["value_loss"] - 0.2 * stats["entropy"] + 0.4 * stats["kl"]
    torch.testing.assert_close(stats["loss"], expected)


@pytest.mark.parametrize(("env_steps", "share"), [(0, 1.0), (250, 0.75), (999, 0.001), (1000, 0.0), (5000, 0.0)])
def test_the_exploration_loss_fades(env_steps: int, share: float) -> None:
    rig = Rig(exploration_loss_coeff=0.2, exploration_loss_decay_env_steps=1000)
    rig.learner.algorithm.env_steps = env_steps
    stats = rig.learner.backward(rig.minibatch())
    expected = stats["policy_loss"] + 0.5 * stats["value_loss"] - 0.2 * share * stats["entropy"]
    torch.testing.assert_close(stats["loss"], expected)


@pytest.mark.parametrize("normalize_returns", [True, False])
def test_gae_bootstraps_from_the_current_network_and_otherwise_from_the_values_predicted_when_acting(
        normalize_returns: bool) -> None:
    rig = Rig(with_vtrace=False, normalize_returns=normalize_returns)
    rig.learner.train(rig.batch(1))  # moves the statistics of the returns
    data, model = rig.minibatch(), rig.learner.model
    with torch.no_grad():
        model.value_head.bias += 3.0  # the network has moved on since
        for name in ("targets", "advantages"):
            del data[name]
        last = model(model.normalize({"obs": data["obs/obs"][:, -1].clone()}), data["rnn_states"][:, -1],
                     data["new_episode"][:, -1:])[1]
    mean, std = float(model.returns.mean), float(model.returns.deviation)
    assert ((mean, std) != (0, 1)) == normalize_returns
    values = torch.cat([data["values"], (last * std + mean)[:, None]], 1)
    expected = gae(data["rewards"].T, values.T, data["terminated"].T, data["truncated"].T, 0.99, 0.95)
    untouched = clone(data)
    prepared = rig.prepared(data)
    torch.testing.assert_close(prepared["targets"].T, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(prepared["advantages"].T, expected[1], rtol=1e-5, atol=1e-5)
    assert_same(data, untouched)


def test_vtrace_corrects_for_the_lag_and_ratios_are_those_of_valid_rows_or_1() -> None:
    rig = Rig()
    data = rig.minibatch()
    assert not data["valid"].all()
    _, on_policy = gradients(rig.learner, data)
    for shift in (-1.0, 1.0):  # 1: the current policy finds these actions less likely than the acting one did
        _, off_policy = gradients(rig.learner, data | {"log_probs": data["log_probs"] + shift})
        of_valid = math.exp(-shift)  # that of an invalid row counts as 1
        assert off_policy["ratio_min"] == pytest.approx(min(of_valid, 1.0), rel=1e-4)
        assert off_policy["ratio_max"] == pytest.approx(max(of_valid, 1.0), rel=1e-4)
    assert abs(off_policy["value_loss"] - on_policy["value_loss"]) > 1e-3


@pytest.mark.parametrize("normalize_returns", [True, False])
def test_values_are_clipped_around_those_predicted_when_acting(normalize_returns: bool) -> None:
    """V-trace works in units of the rewards, the value loss (and its clipping) in those of the value head."""
    rig = Rig(ppo_clip_value=0.1, normalize_returns=normalize_returns)
    rig.learner.model.returns.count.zero_()
    rig.learner.train(rig.batch(1))  # moves the statistics of the returns
    data = rig.minibatch()
    data["values"] += 0.5
    lag = 0.3 * torch.randn(data["log_probs"].shape, generator=torch.Generator().manual_seed(0))
    data["log_probs"] += lag
    values, valid = evaluate(rig.learner, data)[1].detach(), data["valid"].T
    mean, std = (float(x) for x in (rig.learner.model.returns.mean, rig.learner.model.returns.deviation))
    assert ((mean, std) != (0, 1)) == normalize_returns
    targets, advantages = vtrace(-lag.T, data["rewards"].T, values * std + mean, data["terminated"].T,
                                 data["truncated"].T, 0.99, 0.95, 1, 1)
    stats = rig.learner.backward(data)
    torch.testing.assert_close(stats["advantage_mean"], over(valid)(advantages), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats["advantage_std"], over(valid).std(advantages), rtol=1e-4, atol=1e-4)
    old_values, targets = ((x - mean) / std for x in (data["values"].T, targets))
    expected = over(valid)(clipped_value_error(values[:-1], old_values, targets, 0.1))
    torch.testing.assert_close(stats["value_loss"], expected, rtol=1e-4, atol=1e-4)
    assert expected > 1.01 * over(valid)((values[:-1] - targets).square())


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_the_statistics_of_the_returns_are_those_of_the_rewards_whatever_the_values_are(with_vtrace: bool) -> None:
    """With a share of the values in them, units and values would move each other, and could grow without end."""
    rig = Rig(with_vtrace=with_vtrace, num_batches_per_epoch=2, num_epochs=2, reward_scale=0.5)
    returns, expected = rig.learner.model.returns, ReturnNormalizer(running=True)
    for seed in range(3):
        with torch.no_grad():
            rig.learner.model.value_head.bias += 1e3
        batch = rig.batch(seed)
        expected.update(0.5 * batch.tensors["rewards"].T, *(
            batch.tensors[name].T for name in ("terminated", "truncated", "valid")), rig.cfg.gamma)
        rig.learner.train(batch)
        assert_same(returns.state_dict(), expected.state_dict())


def test_targets_are_held_within_a_hundred_deviations_of_whole_returns() -> None:
    """Of independent rewards, the half of a return that is shown deviates by sqrt(1 - 0.5^2) of the whole."""
    rig = Rig(with_vtrace=False, ppo_clip_value=0.0)
    returns, data = rig.learner.model.returns, rig.minibatch()
    returns.mean.fill_(3.0)
    returns.var.fill_(4.0)
    returns.shown.fill_(0.5)
    values, valid = evaluate(rig.learner, data)[1].detach()[:-1], data["valid"].T
    for sign in (1.0, -1.0):
        data["targets"] = torch.full_like(data["targets"], sign * 1e6)
        expected = over(valid)((values - sign * 100 / math.sqrt(1 - 0.5**2)).square())
        torch.testing.assert_close(rig.learner.backward(clone(data))["value_loss"], expected, rtol=1e-4, atol=1e-4)


def test_the_size_of_the_rewards_does_not_change_what_is_learned() -> None:
    """With values in units of the returns and normalized advantages all gradients are the same."""
    losses = []
    for scale in (1.0, 1000.0):
        rig = Rig(with_vtrace=False)
        data = rig.minibatch()
        for name in ("targets", "advantages", "values", "rewards"):
            data[name] *= scale
        see_returns(rig.learner, data)
        grads, stats = gradients(rig.learner, data)
        losses.append((grads, {name: stats[name] for name in ("loss", "policy_loss", "value_loss")}))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("learner_threads", [1, 2])
def test_the_gradient_in_parts_is_the_gradient_at_once(learner_threads: int) -> None:
    rig = Rig(learner_threads=learner_threads, serial_mode=False)
    data = rig.minibatch()
    loss, _ = rig.learner.loss(evaluate(rig.learner, data), {name: x.transpose(0, 1) for name, x in data.items()})
    names, parameters = zip(*rig.learner.model.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    for size in (260, 7):
        rig.learner.steps_per_pass = size
        grads, stats = gradients(rig.learner, data)
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stats["loss"], loss.detach())


# ---- SGD ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_grad_norm", "clipped"), [(0.01, True), (1000.0, False), (0.0, False)])
def test_max_grad_norm_clips_the_gradient_and_0_does_not(max_grad_norm: float, clipped: bool) -> None:
    rig = Rig(max_grad_norm=max_grad_norm)
    data = rig.minibatch()
    see_returns(rig.learner, data)
    before, _ = gradients(rig.learner, data)
    stats = rig.learner.sgd_step(data)
    norm = torch.stack([grad.norm() for grad in before.values()]).norm()
    after = torch.stack([p.grad.norm() for p in rig.learner.model.parameters() if p.grad is not None]).norm()
    assert norm > 0.02
    torch.testing.assert_close(stats["grad_norm"], norm)  # as it was before clipping
    torch.testing.assert_close(after, torch.tensor(0.01) if clipped else norm, rtol=1e-3, atol=0)


def test_minibatches_of_an_epoch_are_a_partition_of_the_dataset() -> None:
    rig = Rig(num_batches_per_epoch=3)
    epochs = [rig.learner.feed.split(rig.learner.shuffle) for _ in range(2)]
    for epoch in epochs:
        assert [len(indices) for indices in epoch] == [TRAJECTORIES] * 3
        assert sorted(torch.cat(epoch).tolist()) == list(range(3 * TRAJECTORIES))
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


def test_rewards_are_scaled_then_clipped() -> None:
    rig = Rig(reward_scale=0.5, reward_clip=1.0)
    batch = rig.batch()
    batch.tensors["rewards"][:] = torch.tensor([0.0, 1.0, -1.0, 1.9, 2.0, 2.1, -30.0, 30.0])
    seen: list[Tensor] = []
    rig.before_each_sgd_step(lambda data: seen.append(data["rewards"]))
    rig.learner.train(batch)
    torch.testing.assert_close(seen[0], torch.tensor([[0.0, 0.5, -0.5, 0.95, 1.0, 1.0, -1.0, 1.0]]).expand(4, 8))


# ---- learning rate -----------------------------------------------------------------------------------------------


def test_linear_decay_reaches_0_exactly_at_the_last_env_step_and_stops_learning_there() -> None:
    rig = Rig(lr_schedule="linear_decay", train_for_env_steps=1000, learning_rate=0.008, num_workers=2,
              num_envs_per_worker=2)
    for sampled, expected in [(0, 0.008), (250, 0.006), (500, 0.004), (1000, 0.0), (1010, 0.0)]:
        rig.buffers.env_steps[:-1] = torch.tensor([sampled - sampled // 5, sampled // 5])  # of both workers
        rig.state.agree(rig.learner.reducer)
        rig.state.update_learning_rate([])
        assert rig.state.learning_rate == pytest.approx(expected, abs=1e-12)
        assert sampled < 1000 or rig.state.learning_rate == 0.0
    before = copy.deepcopy(dict(rig.learner.model.named_parameters()))
    rig.learner.sgd_step(rig.minibatch())
    assert_same(before, dict(rig.learner.model.named_parameters()))


@pytest.mark.parametrize(("kls", "before", "after"), [
    ([0.0, 0.042], 1e-3, 1e-3 / 1.5), ([0.0, 0.0098], 1e-3, 1.5e-3), ([0.0, 0.0102], 1e-3, 1e-3),
    ([0.0, 0.038], 1e-3, 1e-3), ([1.0], 1.2e-5, 1e-5), ([0.0], 9e-3, 1e-2)])
def test_kl_adaptive_holds_the_kl_of_the_last_epoch_near_its_threshold(kls: list[float], before: float,
                                                                       after: float) -> None:
    rig = Rig(lr_schedule="kl_adaptive", lr_schedule_kl_threshold=0.01, lr_adaptive_min=1e-5, lr_adaptive_max=1e-2)
    rig.state.learning_rate = before
    rig.state.update_learning_rate([{"kl": torch.tensor(kl)} for kl in kls])
    assert rig.state.learning_rate == pytest.approx(after)


# ---- state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr_schedule", ["constant", "linear_decay", "kl_adaptive"])
def test_a_restored_learner_takes_the_identical_next_step(lr_schedule: str, tmp_path: Path) -> None:
    settings = {"lr_schedule": lr_schedule, "train_for_env_steps": 200, "num_epochs": 2}
    rig = Rig(**settings)
    for seed in range(2):
        rig.buffers.env_steps[0] += 30
        rig.learner.train(rig.batch(seed))
    rig.buffers.env_steps[0] = 77
    path = tmp_path / "checkpoint.pt"
    checkpoint.save_checkpoint(rig.state.state_dict(), path)
    restored = Rig(resume_from=path, **settings | {"seed": 5})
    assert restored.buffers.env_steps.sum() == 77
    assert restored.shared.weights.version == restored.state.sgd_steps == 4
    assert restored.state.decisions_trained == rig.state.decisions_trained > 0
    assert restored.state.learning_rate == rig.state.learning_rate
    assert (rig.state.learning_rate != 1e-3) == (lr_schedule != "constant")

    data = rig.minibatch(7)
    stats = [learner.sgd_step(clone(data)) for learner in (rig.learner, restored.learner)]
    assert_same(*stats)
    assert_same(rig.learner.model.state_dict(), restored.learner.model.state_dict())
    assert restored.state.sgd_steps == 5


def test_settings_of_the_optimizer_may_change_on_resume(tmp_path: Path) -> None:
    """The oracle is Adam made anew with the new settings and the old moments."""
    rig, path = Rig(), tmp_path / "checkpoint.pt"
    rig.learner.train(rig.batch())
    checkpoint.save_checkpoint(rig.state.state_dict(), path)
    restored = Rig(resume_from=path, adam_eps=0.01, adam_beta1=0.5, adam_beta2=0.7, learning_rate=0.02)
    expected = copy.deepcopy(restored.learner.model)
    optimizer = torch.optim.Adam(expected.parameters(), 0.02, (0.5, 0.7), 0.01)
    moments = {key: dict(value) for key, value in rig.state.optimizer.state_dict()["state"].items()}
    optimizer.state.update({parameter: moments[i] for i, parameter in enumerate(expected.parameters())})
    data = rig.minibatch(3)
    restored.learner.sgd_step(clone(data))
    for ours, theirs in zip(restored.learner.model.parameters(), expected.parameters(), strict=True):
        theirs.grad = ours.grad
    optimizer.step()
    for ours, theirs in zip(restored.learner.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("lr_schedule", "expected"), [
    ("constant", 0.02), ("linear_decay", 0.015), ("kl_adaptive", 0.02)])
def test_the_learning_rate_may_change_on_resume(tmp_path: Path, lr_schedule: str, expected: float) -> None:
    settings = {"lr_schedule": lr_schedule, "train_for_env_steps": 200}
    rig, path = Rig(**settings), tmp_path / "checkpoint.pt"
    rig.learner.train(rig.batch())
    rig.buffers.env_steps[0] = 50  # a quarter of the run
    checkpoint.save_checkpoint(rig.state.state_dict(), path)
    assert Rig(resume_from=path, learning_rate=0.02, **settings).state.learning_rate == expected


# ---- publishing and slots ----------------------------------------------------------------------------------------


def test_weights_are_published_after_every_sgd_step() -> None:
    rig = Rig(num_batches_per_epoch=2, num_epochs=3)
    published = []
    weights, learner = rig.shared.weights, rig.learner
    publish = weights.publish

    def record(model: ActorCritic, version: int, **more: bool) -> None:
        publish(model, version, **more)
        published.append((version, copy.deepcopy(model.state_dict())))

    weights.publish = record
    learner.train(rig.batch())
    learner.train(rig.batch(5))
    assert [version for version, _ in published] == list(range(1, 13))
    assert weights.version == learner.state.sgd_steps == 12
    for (_, before), (_, after) in itertools.pairwise(published):
        assert not torch.equal(before["value_head.weight"], after["value_head.weight"])
    # the normalizer moves once a dataset, with its last step: within one all samples are seen alike
    counts = [float(state["normalizers.0.count"]) for _, state in published]
    assert counts[:5] == [0.0] * 5
    assert 0 < counts[5] == counts[10] < counts[11]

    assert rig.policy_worker.models[CURRENT][1] == 6  # it served the second dataset after the first was trained on
    rig.minibatch()
    model, version = rig.policy_worker.models[CURRENT]
    assert version == 12
    assert_same(model.state_dict(), learner.model.state_dict())


@pytest.mark.parametrize("stopping_step", [0, 2])
def test_training_leaves_its_dataset_when_asked(stopping_step: int) -> None:
    rig = Rig(num_epochs=6)
    rig.before_each_sgd_step(lambda data: rig.buffers.stopping.fill_(rig.state.sgd_steps + 1 >= stopping_step))
    rig.buffers.stopping.fill_(stopping_step == 0)
    rig.learner.train(rig.batch())
    assert stopping_step <= rig.shared.weights.version <= stopping_step + 1
    assert rig.trained()["sgd_steps"] == rig.shared.weights.version


def test_asynchronous_mode_frees_each_slot_as_soon_as_it_is_copied() -> None:
    rig = Rig(num_workers=2, num_envs_per_worker=2)
    inboxes = rig.buffers.worker_inboxes
    rig.act([0, 1, rig.buffers.slots_per_worker, rig.buffers.slots_per_worker + 1])
    for slot, worker in ((1, 0), (rig.buffers.slots_per_worker, 1), (0, 0)):
        rig.feed.insert(SLOTS, slot)
        assert drain(inboxes[worker]) == [(SLOTS, slot)]
        assert all(inbox.empty() for inbox in inboxes)
    copied = {name: tensor[0].clone() for name, tensor in rig.feed.filling.tensors.items()}
    assert_same(copied, {name: tensor[1] for name, tensor in rig.trajectories.items()})
    rig.act([0, 1, rig.buffers.slots_per_worker, rig.buffers.slots_per_worker + 1], seed=9)  # the slot is used again
    assert_same(copied, {name: tensor[0] for name, tensor in rig.feed.filling.tensors.items()})
    assert not rig.reports
    rig.feed.insert(SLOTS, 1)
    assert rig.trained()["sgd_steps"] == 1
    assert drain(inboxes[0]) == [(SLOTS, 1)]  # once, not again after training


def test_synchronous_mode_gives_each_rollout_worker_its_own_slots_back_but_only_after_training() -> None:
    rig = Rig(async_rl=False, num_workers=2, num_envs_per_worker=2)
    own = rig.buffers.slots_per_worker
    for step in range(2):
        rig.act([0, 1, own, own + 1])
        rig.feed.insert(SLOTS, own + 1, 0, own)
        assert all(inbox.empty() for inbox in rig.buffers.worker_inboxes)
        assert rig.state.sgd_steps == step
        rig.feed.insert(SLOTS, 1)
        assert rig.state.sgd_steps == step + 1
        assert [drain(inbox) for inbox in rig.buffers.worker_inboxes] == [[(SLOTS, 0, 1)], [(SLOTS, own, own + 1)]]


@pytest.mark.parametrize("num_envs", [1, 2, 3, 8], ids="{} environments".format)
def test_in_turns_all_slots_are_given_back_together_and_never_while_a_dataset_is_trained_on(num_envs: int) -> None:
    """A dataset has 4 trajectories: of each environment several, one, or those of some."""
    rig = Rig(async_rl=False, num_envs_per_worker=num_envs)
    everybody, inbox = list(range(num_envs)), rig.buffers.worker_inboxes[0]
    rig.before_each_sgd_step(lambda data: held_back.append(inbox.empty()))
    held_back: list[bool] = []
    for turn in range(1, 9):
        rig.act(everybody)
        for slot in everybody[:-1]:
            rig.feed.insert(SLOTS, slot)
            assert inbox.empty(), "not all have been handed in"
        rig.feed.insert(SLOTS, everybody[-1])
        assert drain(inbox) == [(SLOTS, *everybody)]
        assert held_back == [True] * (turn * num_envs // TRAJECTORIES)


def test_slots_that_come_together_may_fill_one_dataset_and_begin_the_next() -> None:
    rig = Rig()
    rig.act([0, 1, 2, 3])
    rig.feed.insert(SLOTS, 0, 1, 2)
    rig.feed.insert(SLOTS, 3, 0, 1)
    assert rig.trained()["sgd_steps"] == 1
    assert rig.feed.filling.slots == [0, 1]
    assert drain(rig.buffers.worker_inboxes[0]) == [(SLOTS, 0, 1, 2, 3, 0, 1)]


def test_a_trajectory_is_taken_once_though_its_message_comes_twice() -> None:
    rig = Rig()
    rig.act([0, 1, 2, 3])
    rig.buffers.slot_place[:] = HANDED_IN
    for message in ((SLOTS, 0, 1), (SLOTS, 2), (SLOTS, 0, 1)):
        rig.shared.trajectories_done.put(message)
    rig.feed.turn()
    assert rig.feed.filling.slots == [0, 1, 2]


def test_the_batcher_waits_with_a_full_batch_until_training_gives_it_the_next() -> None:
    """The bound on memory and lag: what is not collected stays in its slots."""
    rig = Rig(serial_mode=False)
    rig.feed.next_batch.get = functools.partial(rig.feed.next_batch.get, block=False)  # raises where it would wait
    rig.act([0, 1, 2, 3])
    with pytest.raises(queue.Empty):
        rig.feed.insert(SLOTS, 0, 1, 2, 3, 0, 1)
    assert rig.feed.next(0) is rig.feed.filling
    assert drain(rig.buffers.worker_inboxes[0]) == [(SLOTS, 0, 1, 2, 3)]


def test_what_breaks_the_batcher_is_raised_where_it_trains() -> None:
    rig = Rig(serial_mode=False)
    rig.shared.trajectories_done.put((SLOTS, 10**6))  # there is no such slot
    rig.feed.start()
    with pytest.raises(IndexError):
        rig.feed.next(5)


def test_the_next_batch_is_filled_during_the_last_sgd_step_not_earlier() -> None:
    rig = Rig(num_epochs=3)
    waiting: list[int] = []
    rig.before_each_sgd_step(lambda data: waiting.append(rig.feed.next_batch.qsize()))
    first = rig.batch()
    rig.learner.train(first)
    second = rig.feed.next_batch.get_nowait()
    assert second is not first
    for name, tensor in rig.batch(1).tensors.items():
        second.tensors[name].copy_(tensor)
    rig.learner.train(second)
    assert rig.feed.next_batch.get_nowait() is first
    assert waiting == [0, 0, 1] * 2


# ---- other algorithms --------------------------------------------------------------------------------------------


def test_a_dataset_without_a_valid_row_changes_nothing() -> None:
    """All of it was acted by weights that were replaced since: neither Adam's moments nor the rate move the weights."""
    rig = Rig(num_epochs=4, lr_schedule="kl_adaptive")
    rig.learner.train(rig.batch())
    before, rate = copy.deepcopy(rig.learner.model.state_dict()), rig.state.learning_rate
    batch = rig.batch(1)
    rig.feed.next_batch.get_nowait()
    rig.buffers.first_version[0] = 100
    rig.learner.train(batch)
    assert_same(before, rig.learner.model.state_dict())
    assert (rig.state.learning_rate, rig.state.sgd_steps) == (rate, 4)
    assert rig.feed.next_batch.qsize() == 1, "the next batch may be filled"


def test_a_loss_may_ignore_what_the_network_says() -> None:
    rig = Rig(algo="rig:PolicyGradient")
    before = copy.deepcopy(rig.learner.model.state_dict())
    rig.learner.train(rig.batch())
    after = rig.learner.model.state_dict()
    assert torch.equal(before["value_head.weight"], after["value_head.weight"])
    assert not torch.equal(before["policy_head.weight"], after["policy_head.weight"])


def test_an_update_of_its_own_takes_the_steps_that_its_loss_would_take() -> None:
    rigs = [Rig(algo=f"rig:{name}", num_epochs=2, num_batches_per_epoch=2) for name in ("PolicyGradient", "ByUpdate")]
    for rig in rigs:
        rig.learner.train(rig.batch())
    torch.testing.assert_close(*(dict(rig.learner.model.named_parameters()) for rig in rigs))
    for name in ("loss", "grad_norm", "sgd_steps"):
        assert rigs[0].trained()[name] == pytest.approx(rigs[1].trained()[name], rel=1e-4)


def test_a_column_that_is_missing_is_not_learned_from_as_zeros() -> None:
    rig = Rig(algo="rig:LeavesOut")
    with pytest.raises(ValueError, match=r"act\(\) must return action_parameters, actions, log_probs, values, not"):
        rig.act([0, 1, 2, 3])


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def test_statistics_may_differ_from_one_sgd_step_to_the_next() -> None:
    steps = [{"actor_loss": 1.0, "q_max": 4.0, "grad_norm": 1.0}, {"q_max": 7.0, "grad_norm": 2.0},
             {"grad_norm": 3.0, "q_max": 5.0, "actor_loss": 3.0}, {"actor_loss": 9.0, "grad_norm": math.inf}]
    stats = [{name: torch.tensor(value) for name, value in step.items()} for step in steps]
    summary, _ = Rig().state.read_statistics(stats, [])
    expected = {"skipped_sgd_steps": 1, "actor_loss": 2.0, "q_max": 7.0, "grad_norm": 2.0}
    assert {name: summary[name] for name in expected} == expected


@pytest.mark.parametrize(("algo", "factor"), [("appo", math.nan), ("appo", math.inf), ("impala", math.nan)])
def test_a_step_whose_gradient_is_not_finite_is_skipped_alone_and_counted(algo: str, factor: float) -> None:
    rig, weights = Rig(algo=algo, num_epochs=2, num_batches_per_epoch=2), []
    model, step = rig.learner.model, rig.learner.sgd_step

    def spoiled(data: dict[str, Tensor]) -> dict[str, Tensor]:
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        hooks = [parameter.register_hook(lambda gradient: gradient * factor) for parameter in model.parameters()
                 if len(weights) == 3]
        stats = step(data)
        for hook in hooks:
            hook.remove()
        return stats

    rig.learner.sgd_step = spoiled
    rig.learner.run_sgd(rig.batch())
    weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert [not torch.equal(*two) for two in itertools.pairwise(weights)] == [True, True, False, True]
    assert weights[-1].isfinite().all()
    summary = rig.trained()
    assert (summary["skipped_sgd_steps"], summary["sgd_steps"]) == (1, 4)
    assert all(math.isfinite(value) for value in summary.values())
    steps = {float(state["step"]) for state in rig.state.optimizer.state.values()}
    assert steps == {3.0 if algo == "appo" else 4.0}  # RMSProp takes one with a gradient of zeros


def test_a_dataset_of_nothing_but_nan_ends_the_run() -> None:
    rig = Rig(num_epochs=2, num_batches_per_epoch=2)
    batch = rig.batch()
    batch.tensors["rewards"].fill_(math.nan)
    with pytest.raises(UserError, match="learning has diverged: gradients are non-finite"):
        rig.learner.run_sgd(batch)


def test_clipping_in_the_kernel_is_clipping_before_it() -> None:
    """The oracle: PyTorch's own function for clipping, and an Adam that is not fused."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = copy.deepcopy(model)
    expected, fused = (torch.optim.Adam(module.parameters(), 0.01, fused=module is model) for module in (plain, model))
    for step in range(5):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = torch.randn_like(theirs) * 10 ** (step - 2)
            ours.grad = theirs.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        expected.step()
        torch.testing.assert_close(Reducer().step(model, fused, 1.0), norm)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
