"""Tests of `learner.py`: one learner in this process, fed with trajectories that a real `PolicyWorker` acted."""

import copy
import functools
import itertools
import math
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from one_policy import drain
from rig import CONTINUOUS, DISCRETE, TRAJECTORIES, Rig, clone
from torch import Tensor, nn

from algorithm import MaskedMean, describe, moments_of, summarize
from appo import clipped_value_error, held_ratios, normalize_advantages, ppo_objective
from feed import scale_rewards
from learner import next_learning_rate, scheduled_rate, summarize_data, training_state
from normalizers import ReturnNormalizer
from runtime import checkpoint
from runtime.several import Reducer
from runtime.utils import UserError
from shared_buffers import HANDED_IN, SLOTS, TAKEN
from vtrace import gae, vtrace

assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


# ---- zero lag ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS])
def test_ratio_is_1_at_zero_lag(action_space: spaces.Space) -> None:
    rig = Rig(action_space)
    for seed in range(3):  # with the first weights, and after SGD steps that also moved the normalizer
        data = rig.minibatch(seed)
        assert torch.all(data["policy_version"] == rig.learner.sgd_steps)
        stats = rig.loss(data).statistics
        assert [float(stats[name]) for name in ("ratio_min", "ratio_max", "kl")] == pytest.approx([1, 1, 0], abs=1e-5)
        parameters, values = rig.learner.unroll(data)
        torch.testing.assert_close(parameters[:-1].transpose(0, 1), data["action_parameters"], rtol=1e-5, atol=1e-5)
        values = rig.learner.model.returns.denormalize(values[:-1].T)
        torch.testing.assert_close(values, data["values"], rtol=1e-5, atol=1e-5)
        rig.train(seed + 10)
    stats = rig.loss(data).statistics  # the same trajectories, now one dataset old
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
    for name in {"rewards", "log_probs", "action_parameters", "targets", "advantages"} & data.keys():
        data[name][invalid] = sign * 1e30
    data["values"][no_bootstrap] = sign * 1e30
    data["obs/obs"][:, :-1][no_bootstrap] = sign * 1e4
    is_discrete = data["actions"].shape[-1] == 1
    data["actions"][invalid] = 1.5 + sign / 2 if is_discrete else sign * 1e9
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
    expected = rig.gradients(data)
    for sign in (1.0, -1.0):
        assert_same(rig.gradients(with_garbage(data, sign)), expected)
    assert all(grad.isfinite().all() for grad in expected[0].values())
    data["valid"][:] = False
    grads, stats = rig.gradients(data)
    assert not any(grad.any() for grad in grads.values()), "of no row at all"
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 31, 32, 33, 40])
@pytest.mark.parametrize("images", [False, True])
def test_the_normalizer_sees_every_step_of_an_episode_alike_whatever_its_length(length: int, images: bool) -> None:
    """The oracle: the statistics of all decisions. One hot step of the episode is a mean of 1 / length."""
    learner = Rig(normalize_returns=False).learner
    learner.steps_per_pass = 1 if images else 10**6  # as small images: a sample of 512 rows of up to 2,048
    steps = torch.stack([(torch.arange(33) + 32 * b) % (length + 1) for b in range(64)])  # one episode after another
    valid = steps[:, :-1] < length  # the others reset
    marked = sorted({0, length // 3, length // 2, length - 1})  # steps of an episode, one element for each
    obs = torch.zeros(64, 33, 4)
    for element, step in enumerate(marked):
        obs[..., element] = (steps == step).float()
    for _ in range(8):
        summaries = summarize_data(learner, {"obs/obs": obs}, valid)
        learner.model.update_normalizers([each[None] for each in summaries])
    normalizer = learner.model.normalizers[0]
    mean = obs[:, :-1][valid].mean(0)
    assert normalizer.count == 8 * (min(512, int(valid.sum())) if images else int(valid.sum()))
    spread = (mean * (1 - mean) / normalizer.count).sqrt()
    assert ((normalizer.mean - mean).abs() <= (5 * spread if images else 1e-6)).all(), (normalizer.mean, mean)
    exact = mean[: len(marked)]
    assert torch.allclose(exact, torch.full_like(exact, 1 / length), atol=0.03), "what the oracle itself should say"
    torch.testing.assert_close(normalizer.var.float(), mean * (1 - mean), rtol=0.5 if images else 1e-4, atol=2e-3)


# ---- policy lag --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_samples_older_than_max_policy_lag_are_masked_and_lag_counts_from_before_the_dataset(with_vtrace: bool) -> None:
    trained = []
    for sign in (1.0, -1.0):
        rig = Rig(max_policy_lag=3, num_epochs=2, with_vtrace=with_vtrace, reward_clip=math.inf)
        rig.learner.sgd_steps = 10
        dataset = rig.dataset()
        for name in ("terminated", "truncated"):
            dataset.tensors[name][:] = False
        dataset.tensors["policy_version"][:] = torch.tensor([5, 5, 6, 7, 7, 8, 9, 10])
        dataset.tensors["valid"][:] = torch.arange(8) >= 3
        dataset.tensors = with_garbage(dataset.tensors, sign)
        dataset.tensors["valid"][:] = True  # it is the learner's task to mask the others
        trained.append((rig.train(dataset), rig.learner.model.state_dict()))
        assert rig.learner.model.normalizers[0].count == 5 * TRAJECTORIES
    assert_same(*trained)
    expected = {"valid_fraction": 5 / 8, "policy_lag_mean": (3 + 3 + 2 + 1 + 0) / 5, "policy_lag_max": 3,
                "sgd_steps": 12, "env_steps_trained": 5 * TRAJECTORIES}
    assert {name: trained[0][0][name] for name in expected} == pytest.approx(expected)


def test_a_dataset_without_a_valid_row_changes_nothing() -> None:
    """All of it was acted by weights that were replaced since: neither Adam's moments nor the rate move the weights."""
    rig = Rig(num_epochs=4, lr_schedule="kl_adaptive")
    rig.train()
    before, rate = copy.deepcopy(rig.learner.model.state_dict()), rig.learner.learning_rate
    dataset = rig.dataset(1)
    rig.feed.returned.get_nowait()
    rig.buffers.first_version[0] = 100
    rig.train(dataset)
    assert_same(before, rig.learner.model.state_dict())
    assert (rig.learner.learning_rate, rig.learner.sgd_steps) == (rate, 4)
    assert rig.feed.returned.qsize() == 1, "the next dataset may be filled"


# ---- pure functions ----------------------------------------------------------------------------------------------


def random_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw three [T, B] tensors and a mask; where the mask is False they are nan."""
    rng = torch.Generator().manual_seed(seed)
    valid = torch.rand(6, 5, generator=rng) < 0.7
    numbers = torch.randn(3, 6, 5, generator=rng, dtype=torch.float64)
    return *torch.where(valid, numbers, torch.nan), valid


def over(valid: Tensor) -> MaskedMean:
    return MaskedMean(valid, Reducer())


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
    moments = moments_of(over(valid), values - targets, targets, values)
    described = describe(moments)
    assert {name: float(value) for name, value in described.items()} == pytest.approx({
        "advantage_mean": (v - r).mean(), "advantage_std": (v - r).std(), "value_mean": v.mean(),
        "explained_variance": 1 - (r - v).var() / r.var()}, rel=1e-6)
    normalized = normalize_advantages(values - targets, moments)[valid].numpy()
    np.testing.assert_allclose(normalized, ((v - r) - (v - r).mean()) / (v - r).std(), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("deviation", "expected"), [(0.0, 0.0), (0.001, 0.01), (0.05, 0.5), (0.2, 1.0), (50.0, 1.0)])
def test_the_noise_of_a_solved_task_is_not_blown_up(deviation: float, expected: float, scale: float) -> None:
    """Values of 100: what deviates by less than 0.1 counts in units of 0.1. The unit of the rewards does not matter."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(32, 40, generator=rng)
    valid = torch.rand(32, 40, generator=rng) < 0.9
    noise = (noise - noise[valid].mean()) / noise[valid].std(correction=0)
    noise[~valid] = torch.nan
    advantages = scale * (deviation * noise + 3.0)
    targets = torch.full((32, 40), 100.0 * scale)
    normalized = normalize_advantages(advantages, moments_of(over(valid), advantages, targets, targets))[valid]
    torch.testing.assert_close(normalized, expected * noise[valid], rtol=0.01, atol=1e-3 * expected + 1e-5)


def test_statistics_may_differ_from_one_sgd_step_to_the_next_and_one_at_least_was_taken() -> None:
    steps = [{"actor_loss": 1.0, "q_max": 4.0, "grad_norm": 1.0}, {"q_max": 7.0, "grad_norm": 2.0},
             {"grad_norm": 3.0, "q_max": 5.0, "actor_loss": 3.0}, {"actor_loss": 9.0, "grad_norm": math.inf}]
    summary = summarize(steps, nn.Linear(1, 1))
    assert summary == {"skipped_sgd_steps": 1, "actor_loss": 2.0, "q_max": 7.0, "grad_norm": 2.0}
    diverged = nn.Linear(1, 1)
    nn.init.constant_(diverged.bias, math.nan)
    for stats, model in ((steps[:3], diverged), (steps[3:], nn.Linear(1, 1))):
        with pytest.raises(UserError, match="learning has diverged"):
            summarize(stats, model)


def test_rewards_are_scaled_then_clipped() -> None:
    cfg = SimpleNamespace(reward_scale=0.5, reward_clip=1.0)
    scaled = scale_rewards(cfg, torch.tensor([0.0, 1.0, -1.0, 1.9, 2.0, 2.1, -30.0, 30.0]))
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.5, -0.5, 0.95, 1.0, 1.0, -1.0, 1.0]))


# ---- loss and targets --------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_of_its_terms() -> None:
    rig = Rig(value_loss_coeff=0.7, exploration_loss_coeff=0.2, kl_loss_coeff=0.4)
    data = rig.minibatch(2)
    rig.train()  # now the KL is not 0
    _, stats = rig.gradients(data)
    assert stats["kl"] > 1e-6
    expected = (stats["policy_loss"] + 0.7 * stats["value_loss"] - 0.2 * stats["entropy"] + 0.4 * stats["kl"])
    torch.testing.assert_close(stats["loss"], expected)


@pytest.mark.parametrize("normalize_returns", [True, False])
def test_gae_bootstraps_from_the_current_network_and_otherwise_from_the_values_predicted_when_acting(
        normalize_returns: bool) -> None:
    rig = Rig(with_vtrace=False, normalize_returns=normalize_returns)
    rig.train(1)  # moves the statistics of the returns
    data, returns = rig.minibatch(), rig.learner.model.returns
    rig.learner.model.value_head.bias.data += 3.0  # the network has moved on since
    mean, std = float(returns.mean), float(returns.deviation)
    assert ((mean, std) != (0, 1)) == normalize_returns
    last = rig.learner.unroll(data)[1][-1].detach() * std + mean
    values = torch.cat([data["values"], last[:, None]], 1)
    expected = gae(data["rewards"].T, values.T, data["terminated"].T, data["truncated"].T, 0.99, 0.95)
    prepared = rig.prepared(data)
    torch.testing.assert_close((prepared["targets"].T, prepared["advantages"].T), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize_returns", [True, False])
def test_values_are_clipped_around_those_predicted_when_acting(normalize_returns: bool) -> None:
    """V-trace works in units of the rewards, the value loss (and its clipping) in those of the value head."""
    rig = Rig(ppo_clip_value=0.1, normalize_returns=normalize_returns)
    returns = rig.learner.model.returns
    returns.count.zero_()
    rig.train(1)  # moves the statistics of the returns
    data = rig.minibatch()
    data["values"] += 0.5
    lag = 0.3 * torch.randn(data["log_probs"].shape, generator=torch.Generator().manual_seed(0))
    data["log_probs"] += lag
    values, mean = rig.learner.unroll(data)[1].detach(), over(data["valid"].T)
    center, std = float(returns.mean), float(returns.deviation)
    assert ((center, std) != (0, 1)) == normalize_returns
    targets, advantages = vtrace(-lag.T, data["rewards"].T, values * std + center, data["terminated"].T,
                                 data["truncated"].T, 0.99, 0.95, 1, 1)
    old_values, targets = ((x - center) / std for x in (data["values"].T, targets))
    expected = {"advantage_mean": mean(advantages), "advantage_std": mean.std(advantages),
                "value_loss": mean(clipped_value_error(values[:-1], old_values, targets, 0.1))}
    stats = rig.gradients(data)[1]
    torch.testing.assert_close({name: stats[name] for name in expected}, expected, rtol=1e-4, atol=1e-4)
    assert expected["value_loss"] > 1.01 * mean((values[:-1] - targets).square())


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_the_statistics_of_the_returns_are_those_of_the_rewards_whatever_the_values_are(with_vtrace: bool) -> None:
    """With a share of the values in them, units and values would move each other, and could grow without end."""
    rig = Rig(with_vtrace=with_vtrace, num_batches_per_epoch=2, num_epochs=2, reward_scale=0.5)
    returns, expected = rig.learner.model.returns, ReturnNormalizer(running=True)
    for seed in range(3):
        rig.learner.model.value_head.bias.data += 1e3
        dataset = rig.dataset(seed)
        expected.update(expected.summarize(0.5 * dataset.tensors["rewards"].T, *(
            dataset.tensors[name].T for name in ("terminated", "truncated", "valid")), rig.cfg.gamma)[None])
        rig.train(dataset)
        assert_same(returns.state_dict(), expected.state_dict())


def test_targets_are_held_within_a_hundred_deviations_of_whole_returns() -> None:
    """Of independent rewards, the half of a return that is shown deviates by sqrt(1 - 0.5^2) of the whole."""
    rig = Rig(with_vtrace=False, ppo_clip_value=0.0)
    returns, data = rig.learner.model.returns, rig.minibatch()
    returns.mean.fill_(3.0)
    returns.var.fill_(4.0)
    returns.shown.fill_(0.5)
    values, valid = rig.learner.unroll(data)[1].detach()[:-1], data["valid"].T
    for sign in (1.0, -1.0):
        data["targets"] = torch.full_like(data["targets"], sign * 1e6)
        expected = over(valid)((values - sign * 100 / math.sqrt(1 - 0.5**2)).square())
        torch.testing.assert_close(rig.gradients(data)[1]["value_loss"], expected, rtol=1e-4, atol=1e-4)


# ---- SGD ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_the_steps_are_those_of_pytorchs_own_clipping_and_adam(max_norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = copy.deepcopy(model)
    expected, fused = (torch.optim.Adam(module.parameters(), 0.01, fused=module is model) for module in (plain, model))
    for step in range(5):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = torch.randn_like(theirs) * 10 ** (step - 2)
            ours.grad = theirs.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        expected.step()
        torch.testing.assert_close(Reducer().step(fused, max_norm, {}), norm)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_minibatches_of_an_epoch_are_a_partition_of_the_dataset() -> None:
    rig = Rig(num_batches_per_epoch=3)
    epochs = [rig.feed.split(rig.learner.shuffle) for _ in range(2)]
    for epoch in epochs:
        assert [len(indices) for indices in epoch] == [TRAJECTORIES] * 3
        assert sorted(torch.cat(epoch).tolist()) == list(range(3 * TRAJECTORIES))
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


@pytest.mark.parametrize("algo", ["appo", "impala"])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_step_whose_gradient_is_not_finite_is_skipped_alone_and_counted(algo: str, reward: float) -> None:
    rig, weights = Rig(algo=algo, num_epochs=2, num_batches_per_epoch=2), []

    def look(data: dict[str, Tensor]) -> None:
        weights.append(nn.utils.parameters_to_vector(rig.learner.model.parameters()).detach())
        if len(weights) == 3:
            data["rewards"].fill_(reward)

    rig.before_each_sgd_step(look)
    summary = rig.train()
    look({})
    assert [not torch.equal(*two) for two in itertools.pairwise(weights)] == [True, True, False, True]
    assert weights[-1].isfinite().all()
    assert (summary["skipped_sgd_steps"], summary["sgd_steps"]) == (1, 4)
    assert all(math.isfinite(value) for value in summary.values())
    assert {float(state["step"]) for state in rig.learner.optimizer.state.values()} == {3.0}


# ---- learning rate -----------------------------------------------------------------------------------------------


def test_linear_decay_reaches_0_exactly_at_the_last_env_step_and_stops_learning_there() -> None:
    rig = Rig(lr_schedule="linear_decay", train_for_env_steps=1000, learning_rate=0.008)
    rates = [scheduled_rate(rig.cfg, env_steps) for env_steps in (0, 250, 500, 1000, 1010)]
    assert rates == pytest.approx([0.008, 0.006, 0.004, 0.0, 0.0], abs=1e-12)
    rig.buffers.env_steps[0] = 1000
    rig.train()
    before = copy.deepcopy(dict(rig.learner.model.named_parameters()))
    rig.train()
    assert_same(before, dict(rig.learner.model.named_parameters()))


@pytest.mark.parametrize(("kls", "before", "after"), [
    ([0.0, 0.042], 1e-3, 1e-3 / 1.5), ([0.0, 0.0098], 1e-3, 1.5e-3), ([0.0, 0.0102], 1e-3, 1e-3),
    ([0.0, 0.038], 1e-3, 1e-3), ([1.0], 1.2e-5, 1e-5), ([0.0], 9e-3, 1e-2), ([math.nan], 1e-3, 1e-3)])
def test_kl_adaptive_holds_the_kl_of_the_last_epoch_near_its_threshold(kls: list[float], before: float,
                                                                       after: float) -> None:
    cfg = SimpleNamespace(lr_schedule="kl_adaptive", lr_schedule_kl_threshold=0.01, lr_adaptive_min=1e-5,
                          lr_adaptive_max=1e-2)
    assert next_learning_rate(cfg, before, 0, [{"kl": torch.tensor(kl)} for kl in kls]) == pytest.approx(after)


# ---- state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr_schedule", ["constant", "linear_decay", "kl_adaptive"])
def test_a_restored_learner_takes_the_identical_next_step_unless_settings_have_changed(lr_schedule: str,
                                                                                       tmp_path: Path) -> None:
    settings = {"lr_schedule": lr_schedule, "train_for_env_steps": 200, "num_epochs": 2}
    rig, path = Rig(**settings), tmp_path / "checkpoint.pt"
    for seed in range(2):
        rig.buffers.env_steps[0] += 30
        rig.train(seed)
    rig.buffers.env_steps[0] = 77
    checkpoint.save_checkpoint(training_state(rig.learner), path)
    restored = Rig(resume_from=path, **settings | {"seed": 5})
    assert restored.learner.sgd_steps == 4
    assert restored.learner.decisions_trained == rig.learner.decisions_trained > 0
    assert restored.learner.learning_rate == rig.learner.learning_rate
    assert (rig.learner.learning_rate != 1e-3) == (lr_schedule != "constant")

    data = rig.minibatch(7)
    assert_same(*(learner.sgd_step(clone(data)) for learner in (rig.learner, restored.learner)))
    assert_same(rig.learner.model.state_dict(), restored.learner.model.state_dict())
    assert restored.learner.sgd_steps == 5

    changed = Rig(resume_from=path, learning_rate=0.02, adam_eps=0.01, adam_beta1=0.5, **settings).learner
    assert changed.learning_rate == pytest.approx(0.02 * (1 - 77 / 200) if lr_schedule == "linear_decay" else 0.02)
    assert (changed.optimizer.param_groups[0]["eps"], changed.optimizer.param_groups[0]["betas"][0]) == (0.01, 0.5)


# ---- publishing and slots ----------------------------------------------------------------------------------------


def test_weights_are_published_after_every_sgd_step() -> None:
    rig = Rig(num_batches_per_epoch=2, num_epochs=3)
    published, weights = [], rig.shared.weights
    rig.before_each_sgd_step(lambda data: published.append(weights.read()))
    rig.train()
    rig.train(5)
    assert [version for _, version in published] == list(range(12))
    assert weights.version == rig.learner.sgd_steps == 12
    for (before, _), (after, _) in itertools.pairwise(published):
        assert not torch.equal(before["value_head.weight"], after["value_head.weight"])
    # the normalizer moves once a dataset, with its last step: within one all samples are seen alike
    counts = [float(state["normalizers.0.count"]) for state, _ in published]
    assert counts[:6] == [0.0] * 6
    assert 0 < counts[6] == counts[11]


@pytest.mark.parametrize(("stops", "waits", "sgd_steps"), [(1, 9, 1), (2, 9, 2), (9, 0, 2), (9, 3, 5), (9, 9, 6)])
def test_a_dataset_is_left_when_asked_or_when_the_next_one_waits(stops: int, waits: int, sgd_steps: int) -> None:
    rig = Rig(num_epochs=2, max_epochs=6, serial_mode=False)

    def look(data: dict[str, Tensor]) -> None:
        rig.buffers.stopping.fill_(rig.learner.sgd_steps + 1 >= stops)
        rig.buffers.slot_place.fill_(HANDED_IN if rig.learner.sgd_steps >= waits else TAKEN)

    rig.before_each_sgd_step(look)
    assert rig.train()["sgd_steps"] == rig.shared.weights.version == sgd_steps


def test_asynchronous_mode_frees_each_slot_as_soon_as_it_is_copied() -> None:
    rig = Rig(num_workers=2, num_envs_per_worker=2)
    inboxes, own = rig.buffers.worker_inboxes, rig.buffers.slots_per_worker
    rig.act()
    first = {name: tensor[1].clone() for name, tensor in rig.trajectories.items()}
    for slot, worker in ((1, 0), (own, 1), (0, 0)):
        rig.feed.insert([slot])
        assert drain(inboxes[worker]) == [(SLOTS, slot)]
        assert all(inbox.empty() for inbox in inboxes)
    rig.act(seed=9)  # the slots are used again
    assert_same(first, {name: tensor[0] for name, tensor in rig.feed.filling.tensors.items()})
    assert not rig.reports
    rig.feed.insert([1, 0, own])  # the first of them fills the dataset
    assert rig.reports[-1][2]["sgd_steps"] == 1
    assert rig.feed.num_filled == 2
    assert [drain(inbox) for inbox in inboxes] == [[(SLOTS, 1, 0)], [(SLOTS, own)]]


@pytest.mark.parametrize(("num_workers", "num_envs"), [(1, 1), (1, 2), (1, 3), (2, 2), (1, 8)])
def test_in_turns_all_slots_are_given_back_together_and_never_while_a_dataset_is_trained_on(
        num_workers: int, num_envs: int) -> None:
    """A dataset has 4 trajectories: of each environment several, one, or those of some."""
    rig, held_back = Rig(async_rl=False, num_workers=num_workers, num_envs_per_worker=num_envs), []
    everybody, inboxes = list(range(rig.buffers.num_slots)), rig.buffers.worker_inboxes
    rig.before_each_sgd_step(lambda data: held_back.append(all(inbox.empty() for inbox in inboxes)))
    for turn in range(1, 9):
        rig.act()
        for slot in everybody[:0:-1]:
            rig.feed.insert([slot])
            assert all(inbox.empty() for inbox in inboxes), "not all have been handed in"
        rig.feed.insert([0])
        assert [drain(inbox) for inbox in inboxes] == [
            [(SLOTS, *everybody[num_envs * worker : num_envs * (worker + 1)])] for worker in range(num_workers)]
        assert held_back == [True] * (turn * len(everybody) // TRAJECTORIES)


def test_a_trajectory_is_taken_once_though_its_message_comes_twice() -> None:
    rig = Rig()
    rig.act()
    rig.buffers.slot_place[:] = HANDED_IN
    for message in ((SLOTS, 0, 1), (SLOTS, 2), (SLOTS, 0, 1)):
        rig.shared.trajectories_done.put(message)
    rig.feed.turn()
    assert rig.feed.num_filled == 3


def test_the_batcher_waits_with_a_full_dataset_until_training_gives_it_the_next() -> None:
    """The bound on memory and lag: what is not collected stays in its slots."""
    rig = Rig(serial_mode=False)
    rig.feed.returned.get = functools.partial(rig.feed.returned.get, block=False)  # raises where it would wait
    rig.act()
    with pytest.raises(queue.Empty):
        rig.feed.insert([0, 1, 2, 3, 0, 1])
    assert rig.feed.next(0) is rig.feed.filling
    assert drain(rig.buffers.worker_inboxes[0]) == [(SLOTS, 0, 1, 2, 3)]


def test_what_breaks_the_batcher_is_raised_where_it_trains() -> None:
    rig = Rig(serial_mode=False)
    rig.shared.trajectories_done.put((SLOTS, 10**6))  # there is no such slot
    rig.feed.start()
    with pytest.raises(IndexError):
        rig.feed.next(5)


def test_the_next_dataset_is_filled_during_the_last_sgd_step_not_earlier() -> None:
    rig, waiting = Rig(num_epochs=3), []
    rig.before_each_sgd_step(lambda data: waiting.append(rig.feed.returned.qsize()))
    rig.train(first := rig.dataset())
    second = rig.feed.returned.get_nowait()
    assert second is not first
    second.tensors.update(rig.dataset(1).tensors)
    rig.train(second)
    assert rig.feed.returned.get_nowait() is first
    assert waiting == [0, 0, 1] * 2


# ---- other algorithms --------------------------------------------------------------------------------------------


def test_an_update_of_its_own_takes_the_steps_that_its_loss_would_take() -> None:
    rigs = [Rig(algo=algo, num_epochs=2, num_batches_per_epoch=2) for algo in ("appo", "rig:ByUpdate")]
    ours, theirs = (rig.train() for rig in rigs)
    assert ours == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(*(dict(rig.learner.model.named_parameters()) for rig in rigs))
    Rig(algo="rig:ByUpdate", precision="bfloat16").train()  # it has no autocast, and computes in float32
