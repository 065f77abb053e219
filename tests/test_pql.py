"""Tests of PQL: its targets and losses against slow references, its two learners, that it learns."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from parts import SMALL, learners
from rig import Rig, clone
from torch import Tensor

from runtime.checkpoint import find_checkpoint, load_checkpoint, read_lines
from trainer import PQL

V, P = range(2)  # the learners


def make(learner: int, **settings: Any) -> Rig:
    """Make a learner whose target networks differ from the newest ones."""
    rig = Rig(spaces.Box(-2, 2, (3,), np.float32), number=learner, algo="pql", normalize_input=False,
              nonlinearity="relu", replay_size=1000, **settings)
    with torch.no_grad():
        for parameter in rig.learner.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return rig


def numpy_mlp(layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> np.ndarray:
    for number, (weight, bias) in enumerate(layers, 1):
        x = weight @ x + bias
        x = np.maximum(x, 0) if number < len(layers) else x
    return x


def layers_of(module: torch.nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the weights and biases of all linear layers, in order."""
    return [(part.weight.detach().double().numpy(), part.bias.detach().double().numpy()) for part in module.modules()
            if isinstance(part, torch.nn.Linear)]


def slow_q(network: torch.nn.Module, obs: Tensor, action: np.ndarray) -> float:
    return float(numpy_mlp(layers_of(network), np.concatenate([obs.double().numpy(), action]))[0])


def slow_action(policy: torch.nn.Module, obs: Tensor) -> np.ndarray:
    return np.tanh(numpy_mlp(layers_of(policy), obs.double().numpy()))


def minibatch(size: int) -> dict[str, Tensor]:
    data = {"obs/obs": torch.randn(size, 4), "following_obs/obs": torch.randn(size, 4), "rewards": torch.randn(size),
            "discounts": torch.where(torch.rand(size) < 0.2, 0.0, 0.97), "weights": torch.rand(size),
            "actions": torch.rand(size, 3) * 2 - 1, "rnn_states": torch.zeros(size, 0)}
    data |= dict.fromkeys(("new_episode", "valid"), torch.ones(size, dtype=torch.bool))
    return {name: value[:, None] for name, value in data.items()}


def with_gradient(model: torch.nn.Module) -> set[str]:
    """Name the parts that a backward pass has reached."""
    return {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_clipped_double_q_targets_and_the_loss_of_the_v_learner_equal_a_slow_reference(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algorithms.pql.TARGET_NOISE", 0.0)
    rig, size = make(V, replay_alpha=0.5), 20
    model, data = rig.learner.model, minibatch(size)
    data |= rig.prepared(data)
    loss = rig.loss(data)
    total = 0.0
    for row in range(size):
        later = data["following_obs/obs"][row, 0]
        action = slow_action(model.target_policy, later)
        y = float(data["rewards"][row]) + float(data["discounts"][row]) * min(
            slow_q(network, later, action) for network in model.target_q)
        assert float(data["targets"][row]) == pytest.approx(y, abs=1e-4)
        errors = [slow_q(network, data["obs/obs"][row, 0], data["actions"][row, 0].double().numpy()) - y
                  for network in model.q]
        total += float(data["weights"][row]) * sum(error**2 for error in errors) / size
        assert float(loss.priorities[0, row]) == pytest.approx(np.mean(np.abs(errors)), abs=1e-4)
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-4)
    loss.total.backward()
    assert with_gradient(model) == {"q"}


def test_the_p_learner_raises_the_smaller_q_value_and_changes_the_policy_alone() -> None:
    rig, data = make(P), minibatch(20)
    model, loss = rig.learner.model, rig.loss(data)
    expected = np.mean([min(slow_q(q, row, slow_action(model.policy, row)) for q in model.q)
                        for row in data["obs/obs"][:, 0]])
    assert float(loss.total.detach()) == pytest.approx(-expected, rel=1e-4)
    loss.total.backward()
    assert with_gradient(model) == {"encoder", "policy_head"}


def test_v_updates_move_the_targets_by_tau() -> None:
    learner = make(V, target_tau=0.25).learner
    before = clone(learner.model.state_dict())
    learner.algorithm.after_sgd_step(learner.model, 1)
    after = learner.model.state_dict()
    for part, target in (("q.", "target_q."), ("encoder.", "target_policy.0."), ("policy_head.", "target_policy.1.")):
        names = [name for name in before if name.startswith(part)]
        assert names
        for name in names:
            copy = name.replace(part, target, 1)
            torch.testing.assert_close(after[copy], 0.75 * before[copy] + 0.25 * before[name])
            assert torch.equal(after[name], before[name])


def test_each_agent_has_its_own_noise_and_whoever_is_evaluated_has_none() -> None:
    learner, count = make(V, noise_max=0.25).learner, 3000
    act = functools.partial(learner.algorithm.act, learner.model, {"obs": torch.zeros(count, 4)},
                            torch.zeros(count, 0), torch.ones(count).bool())
    with torch.no_grad():
        quiet = act()[0]["actions"]
        assert torch.equal(quiet, quiet[:1].expand(count, -1))
        for agent_rank, deviation in ((0.0, 0.05), (0.5, 0.15), (1.0, 0.25)):
            actions = act(agent_rank=torch.full((count,), agent_rank))[0]["actions"]
            assert actions.abs().max() <= 1
            assert float((actions - quiet)[:, 0].std()) == pytest.approx(deviation, rel=0.1)


# ---- the system --------------------------------------------------------------------------------------------------

REPLAY: dict[str, Any] = SMALL | {"num_batches_per_epoch": 2, "replay_size": 4000, "replay_warmup": 128,
                                  "replay_ratio": 32.0}


def in_serial_mode(tmp_path: Path, **settings: Any) -> PQL:
    return PQL("Pendulum-v1", train_dir=str(tmp_path), serial_mode=True, **REPLAY | settings)


def test_the_ratios_are_held_between_processes(tmp_path: Path) -> None:
    with PQL("Pendulum-v1", train_dir=str(tmp_path), policy_ratio=0.25, **REPLAY) as system:
        system.train(800)
        system.save()
        of_v, of_p = system.buffers.policies[0].shared_training.counts[0].tolist()
    assert of_v <= system.env_steps - 128
    # one message of slots may be under way and one be filled; two datasets are in the learner's hands
    assert of_v >= system.env_steps - 128 - 2 * 4 * 8 - 4
    assert of_v / 4 - 6 <= of_p <= of_v / 4


def test_both_ratios_are_exact_each_learner_writes_its_own_part_and_one_checkpoint_holds_both(tmp_path: Path) -> None:
    with in_serial_mode(tmp_path, policy_ratio=0.5) as system:
        v, p = learners(system)
        begin = clone(v.model.state_dict())
        system.train(600)
        of_v, of_p = system.buffers.policies[0].shared_training.counts[0].tolist()
        assert v.feed.inserted == p.feed.inserted
        assert of_v * 32 == v.feed.drawn <= 32.0 * (v.feed.inserted - 128) < v.feed.drawn + 64
        assert of_p * 32 == p.feed.drawn
        assert of_p <= of_v / 2 < of_p + 2
        assert set(p.feed.replay.columns) == {"obs/obs", "actions", "policy_lag"}, "of single observations"
        assert torch.equal(p.feed.replay.columns["obs/obs"], v.feed.replay.columns["obs/obs"])
        system.save()
        state = load_checkpoint(find_checkpoint(system.cfg.run_dir))
    assert state["sgd_steps"] == of_v + of_p
    for name, value in state["model"].items():
        if name.split(".")[0] in ("encoder", "policy_head", "q", "target_q", "target_policy"):
            assert not torch.equal(value, begin[name]), name
    assert {entry["step"].item() for entry in state["optimizer"]["state"].values()} == {of_v, of_p}
    with in_serial_mode(tmp_path) as system:
        assert system.versions == [of_v + of_p]
        for learner in learners(system):
            torch.testing.assert_close(learner.model.state_dict(), state["model"], rtol=0, atol=0)
        system.train(600)
        later_v, later_p = (system.buffers.policies[0].shared_training.counts[0]
                            - torch.tensor([of_v + of_p, 0])).tolist()
        assert later_p <= later_v / 2 < later_p + 2, "the ratio holds for each start"


def test_a_population_of_two_learners_each(tmp_path: Path) -> None:
    """Both learners of a policy get its settings, and a copy of both parts of the donor."""
    with in_serial_mode(tmp_path, num_policies=2, replay_ratio=8.0, with_pbt=True, pbt_start_mutation=300,
                        pbt_period_env_steps=300, pbt_mutation_rate=1.0, pbt_replace_reward_gap=0.0,
                        pbt_replace_reward_gap_absolute=0.0, pbt_replace_fraction=0.5) as system:
        system.train(1800)
        events = read_lines(system.cfg.run_dir / "population.jsonl")
        assert any(event.get("donor") is not None for event in events)
        for policy in range(2):
            v, p = learners(system)[2 * policy : 2 * policy + 2]
            assert v.cfg.learning_rate == p.cfg.learning_rate
            assert v.cfg.noise_max == p.cfg.noise_max == pytest.approx(float(v.model.exploration[1]))
        assert learners(system)[2].cfg.noise_max != 0.8


@pytest.mark.slow
def test_it_learns_pendulum(tmp_path: Path) -> None:
    with PQL("Pendulum-v1", train_dir=str(tmp_path), seed=1, eval_every_env_steps=1_000, eval_episodes=10,
             device="cpu", encoder_mlp_layers=(64, 64)) as system:
        system.train(20_000, should_stop=lambda: system.buffers.best_score[0] > -200)
        assert float(system.buffers.best_score[0]) > -200
