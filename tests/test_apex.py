"""Tests of Ape-X: its targets, loss and priorities against slow references, who explores, that it learns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rig import OBS_SPACE, Rig
from torch import Tensor

from algorithms.replay import n_step
from distributions import FORBIDDEN
from envs.flat_spaces import ACTION_MASK
from trainer import APEX


def make(**settings: Any) -> Rig:
    """Make a learner whose target network differs from the newest one."""
    rig = Rig(spaces.Discrete(5), OBS_SPACE | {ACTION_MASK: spaces.MultiBinary(5)}, algo="apex", normalize_input=False,
              replay_size=1000, **settings)
    with torch.no_grad():
        for parameter in rig.learner.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return rig


def random_obs(count: int) -> dict[str, Tensor]:
    masks = torch.rand(count, 5) < 0.6
    masks[torch.arange(count), torch.randint(5, (count,))] = True
    return {"obs": torch.randn(count, 4), ACTION_MASK: masks.to(torch.uint8)}


def slow_q(model: torch.nn.Module, obs: dict[str, Tensor], row: int) -> list[float]:
    """Compute V + A - mean of A over what is allowed, one observation at a time; nan: forbidden."""
    with torch.no_grad():
        features = model.encoder({"obs": obs["obs"][row : row + 1]})
        advantages, value = model.policy_head(features)[0].tolist(), float(model.value_head(features))
    allowed = [bool(bit) for bit in obs[ACTION_MASK][row]]
    mean = sum(a for a, ok in zip(advantages, allowed, strict=True) if ok) / sum(allowed)
    return [value + a - mean if ok else float("nan") for a, ok in zip(advantages, allowed, strict=True)]


def test_dueling_double_q_targets_and_the_loss_equal_a_slow_reference() -> None:
    rig, size = make(), 40
    model, obs, later = rig.learner.model, random_obs(size), random_obs(size)
    data: dict[str, Tensor] = {f"obs/{name}": value for name, value in obs.items()}
    data |= {f"following_obs/{name}": value for name, value in later.items()}
    data |= {"rewards": torch.randn(size), "weights": torch.rand(size),
             "discounts": torch.where(torch.rand(size) < 0.2, 0.0, 0.9),
             "actions": obs[ACTION_MASK].float().argmax(1, keepdim=True).float(), "rnn_states": torch.zeros(size, 0)}
    data |= dict.fromkeys(("new_episode", "valid"), torch.ones(size, dtype=torch.bool))
    data = {name: value[:, None] for name, value in data.items()}
    data |= rig.prepared(data)
    loss = rig.loss(data)

    total, errors = 0.0, []
    for row in range(size):
        newest, target = slow_q(model, later, row), slow_q(model.target, later, row)
        best = max((q, a) for a, q in enumerate(newest) if not np.isnan(q))[1]
        y = float(data["rewards"][row]) + float(data["discounts"][row]) * target[best]
        assert float(data["targets"][row]) == pytest.approx(y, abs=1e-4)
        action = int(data["actions"][row])
        error = slow_q(model, obs, row)[action] - y
        errors.append(abs(error))
        total += float(data["weights"][row]) * error**2 / 2 / size
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-4)
    np.testing.assert_allclose(loss.priorities[0], errors, atol=1e-4)
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(name.startswith("target") for name, _ in model.named_parameters()), "no optimizer sees the target"


@pytest.mark.parametrize(("n", "death"), [(1, 4), (3, 4), (3, 11)])
def test_first_priorities_are_those_of_the_networks_that_acted(n: int, death: int) -> None:
    algorithm, length = make().learner.algorithm, 12
    rewards, taken = torch.randn(2, length)
    best = taken + torch.rand(length) * (torch.rand(length) < 0.5)
    terminated, truncated = (torch.arange(length) == end for end in (death, 8))
    returns, discounts, steps = n_step(rewards, terminated, truncated, 0.9, n)
    found = algorithm.first_priorities({"rewards": returns, "discounts": discounts, "steps": steps, "q_taken": taken,
                                        "q_best": best})
    for t in range(length):
        later = t + int(steps[t])
        if discounts[t] and later == length:
            assert found[t].isnan(), "nobody has looked at what follows the trajectory"
        else:
            follows = discounts[t] * best[later] if discounts[t] else 0.0
            assert float(found[t]) == pytest.approx(float(abs(returns[t] + follows - taken[t])), abs=1e-5)


def test_each_agent_explores_by_its_own_epsilon_among_what_is_allowed() -> None:
    learner, count = make().learner, 4000
    algorithm, model = learner.algorithm, learner.model
    obs = {name: value[:1].expand(count, -1) for name, value in random_obs(1).items()}
    obs[ACTION_MASK] = torch.tensor([1, 0, 1, 1, 0], dtype=torch.uint8).expand(count, -1)
    states, new = torch.zeros(count, 0), torch.ones(count).bool()
    with torch.no_grad():
        greedy = algorithm.act(model, obs, states, new)[0]
        assert len(greedy["actions"].unique()) == 1
        assert torch.equal(greedy["q_taken"], greedy["q_best"])
        for agent_rank, epsilon in ((0.0, 0.4), (0.5, 0.4**4.5), (1.0, 0.4**8)):
            columns = algorithm.act(model, obs, states, new, agent_rank=torch.full((count,), agent_rank))[0]
            assert set(columns["actions"].unique().tolist()) <= {0.0, 2.0, 3.0}
            others = float((columns["actions"] != greedy["actions"]).float().mean())
            expected = epsilon * 2 / 3
            assert others == pytest.approx(expected, abs=4 * (expected / count) ** 0.5 + 1e-9)
    assert (model(model.normalize(obs), states, new[:, None])[0][:, 1] == FORBIDDEN).all()


def test_the_target_network_is_a_copy_made_every_so_many_steps() -> None:
    learner = make(target_every_sgd_steps=10).learner
    algorithm, model = learner.algorithm, learner.model
    before = model.target.policy_head.weight.clone()
    algorithm.after_sgd_step(model, 19)
    assert torch.equal(model.target.policy_head.weight, before)
    algorithm.after_sgd_step(model, 20)
    assert torch.equal(model.target.policy_head.weight, model.policy_head.weight)
    assert model.target.policy_head.weight.data_ptr() != model.policy_head.weight.data_ptr()


@pytest.mark.slow
def test_it_learns_cartpole(tmp_path: Path) -> None:
    with APEX("CartPole-v1", train_dir=str(tmp_path), seed=1, eval_every_env_steps=10_000, eval_episodes=20,
              device="cpu") as system:
        system.train(100_000, should_stop=lambda: system.buffers.best_score[0] >= 200)
        assert float(system.buffers.best_score[0]) >= 200
