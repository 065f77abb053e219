"""Tests of Ape-X: its targets, loss and priorities against slow references, who explores, that it learns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from algorithm import MaskedMean
from algorithms.apex import ApeX
from config import configure
from distributions import FORBIDDEN
from envs.flat_spaces import ACTION_MASK
from runtime.several import ALONE
from trainer import APEX

OBS_SPACE = {"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32), ACTION_MASK: spaces.MultiBinary(5)}
ACTIONS = spaces.Discrete(5)


def make(**settings: Any) -> tuple[ApeX, torch.nn.Module]:
    """Make the algorithm and a network whose target differs from it."""
    torch.manual_seed(0)
    algorithm = ApeX(configure({"env": "CartPole-v1", "algo": "apex", "normalize_input": False} | settings))
    model = algorithm.make_model(OBS_SPACE, ACTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return algorithm, model


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
    algorithm, model = make()
    size = 40
    obs, later = random_obs(size), random_obs(size)
    data: dict[str, Tensor] = {f"obs/{name}": value for name, value in obs.items()}
    data |= {f"following_obs/{name}": value for name, value in later.items()}
    data |= {"rewards": torch.randn(size), "weights": torch.rand(size),
             "discounts": torch.where(torch.rand(size) < 0.2, 0.0, 0.9), "new_episode": torch.ones(size).bool(),
             "actions": obs[ACTION_MASK].float().argmax(1, keepdim=True).float(), "rnn_states": torch.zeros(size, 0)}
    data = {name: value[:, None] for name, value in data.items()}

    def ask(rows: dict[str, Tensor], function: Any) -> tuple[Tensor, ...]:
        parts = {name.removeprefix("obs/"): rows[name][:, 0] for name in rows if name.startswith("obs/")}
        return tuple(out[:, None] for out in function(model, parts, rows["rnn_states"][:, 0], rows["new_episode"]))

    with torch.no_grad():
        data |= algorithm.prepare(model, data, ask)
    outputs = algorithm.evaluate(model, obs, torch.zeros(size, 0), torch.ones(size, 1).bool())
    by_time = {name: value.transpose(0, 1) for name, value in data.items()}
    mean = MaskedMean(torch.ones(1, size).bool(), ALONE)
    loss = algorithm.loss(model, tuple(out[None] for out in outputs), by_time, mean)

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


@pytest.mark.parametrize("n", [1, 3])
def test_first_priorities_are_those_of_the_networks_that_acted(n: int) -> None:
    algorithm, _ = make(n_step=n, gamma=0.9)
    length = 12
    rewards, taken = torch.randn(length), torch.randn(length)
    best = taken + torch.rand(length) * (torch.rand(length) < 0.5)
    ends = {4: "terminated", 8: "truncated"}
    returns, discounts, steps = [], [], []
    for t in range(length):
        stop = min([end for end in ends if end >= t] + [t + n - 1, length - 1])
        steps.append(stop - t + 1)
        returns.append(sum(0.9**k * float(rewards[t + k]) for k in range(steps[-1])))
        discounts.append(0.0 if ends.get(stop) == "terminated" else 0.9 ** steps[-1])
    found = algorithm.first_priorities({
        "rewards": torch.tensor(returns), "discounts": torch.tensor(discounts), "steps": torch.tensor(steps),
        "q_taken": taken, "q_best": best})
    for t in range(length):
        later = t + steps[t]
        if discounts[t] and later == length:
            assert found[t].isnan(), "nobody has looked at what follows the trajectory"
        else:
            follows = discounts[t] * float(best[later]) if discounts[t] else 0.0
            assert float(found[t]) == pytest.approx(abs(returns[t] + follows - float(taken[t])), abs=1e-5)


def test_each_agent_explores_by_its_own_epsilon_among_what_is_allowed() -> None:
    algorithm, model = make()
    count = 4000
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
    algorithm, model = make(target_every_sgd_steps=10)
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
