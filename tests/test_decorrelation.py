"""Decorrelated starts: environments of equally long episodes are spread over the episode before training begins."""

import itertools
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counting_agents import CountingAgents, Script
from gymnasium import spaces
from parts import rollout_workers

from appo import APPO
from envs import vector_env
from envs.flat_spaces import random_action
from envs.multi_agent import ParallelVectorEnv
from envs.vector_env import Ahead, play_ahead
from runtime.user_error import UserError

LENGTH = 40
SMALL: dict[str, Any] = {
    "num_workers": 2, "num_envs_per_worker": 16, "worker_num_splits": 2, "rollout": 8, "batch_size": 64,
    "num_batches_per_epoch": 1, "num_epochs": 1, "encoder_mlp_layers": (8,), "device": "cpu", "serial_mode": True}


class Clock(gym.Env):
    """Episodes of `LENGTH` steps whose reward is 1 each; shows the step, and allows one action only."""

    observation_space = spaces.Dict({"t": spaces.Box(0, LENGTH, (1,), np.float32),
                                     "action_mask": spaces.MultiBinary(3)})
    action_space = spaces.Discrete(3)

    def show(self) -> dict[str, Any]:
        return {"t": np.full(1, self.t, np.float32), "action_mask": np.eye(3, dtype=np.int8)[self.t % 3]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action == self.t % 3, "the others are forbidden"
        self.t += 1
        return self.show(), 1.0, False, self.t == LENGTH, {}


def ages(appo: APPO) -> np.ndarray:
    """Return in which step each environment is, [workers, splits, N]."""
    return np.array([[[int(env.unwrapped.t) for env in split.env._env.envs] for split in worker.splits.values()]
                     for worker in rollout_workers(appo)])


def test_without_it_environments_stay_in_step(tmp_path: Path) -> None:
    with APPO("test_decorrelation:Clock", train_dir=str(tmp_path), **SMALL) as appo:
        assert not ages(appo).any()
        appo.train(1000)
        assert all(len(set(split)) == 1 for worker in ages(appo) for split in worker)


def test_environments_are_spread_over_an_episode(tmp_path: Path) -> None:
    with APPO("test_decorrelation:Clock", train_dir=str(tmp_path), decorrelate_experience_max_seconds=10,
              **SMALL) as appo:
        begin = ages(appo).ravel()
        assert len(set(begin.tolist())) > 15, "of 32 environments"
        assert begin.max() < LENGTH
        assert abs(begin.mean() - (LENGTH - 1) / 2) < 5 * LENGTH / np.sqrt(12 * len(begin))
        appo.train(3000)
        (policy,) = appo.records.policies
        assert policy.num_episodes > 20
        assert set(policy.lengths) == {LENGTH}, "no episode is reported whose beginning others have played"
        assert set(policy.returns) == {float(LENGTH)}
        assert len(set(ages(appo).ravel().tolist())) > 15, "they stay spread"


def test_a_worker_may_be_spread_as_a_whole(tmp_path: Path) -> None:
    with APPO("test_decorrelation:Clock", train_dir=str(tmp_path), decorrelate_experience_max_seconds=10,
              decorrelate_envs_on_one_worker=False, **SMALL | {"num_workers": 4}) as appo:
        begin = ages(appo).reshape(4, -1)
    assert (begin == begin[:, :1]).all()
    assert len(set(begin[:, 0].tolist())) > 1


def test_it_is_the_same_twice_and_another_after_a_resume(tmp_path: Path) -> None:
    begin = []
    for name in ("a", "b", "b"):
        with APPO("test_decorrelation:Clock", train_dir=str(tmp_path), experiment=name,
                  decorrelate_experience_max_seconds=1e-9, **SMALL) as appo:  # no limit in serial mode
            begin.append(ages(appo).tolist())
            appo.train(64)
    assert begin[0] == begin[1] != begin[2]


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless episode whose steps take a second is cut off after half of the time; a share of it follows."""
    taken: list[int] = []
    monkeypatch.setattr(vector_env.time, "monotonic", lambda: 1000.0 + len(taken))

    def advance(shown: int) -> tuple[int, bool]:
        taken.append(shown)
        return shown + 1, False

    assert play_ahead(lambda: 0, advance, 0.5, 20) == 5
    assert taken == [*range(10), *range(5)]


def test_an_endless_episode_is_cut_off_without_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_env, "MAX_STEPS_AHEAD", 30)
    assert play_ahead(lambda: 0, lambda shown: (shown + 1, False), 0.5, math.inf) == 15


@pytest.mark.parametrize("env", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_it_is_refused_where_environments_are_stepped_together(tmp_path: Path, env: str) -> None:
    with pytest.raises(UserError, match="stepped together, in C\\+\\+ or NumPy, and cannot begin apart; leave it at 0"):
        APPO(env, train_dir=str(tmp_path), decorrelate_experience_max_seconds=1, serial_mode=True)


def test_an_episode_that_ends_too_early_begins_anew() -> None:
    lengths = iter((10, 3, 99))
    begun = []

    def begin() -> tuple[int, int]:
        begun.append(next(lengths))
        return 0, begun[-1]

    assert play_ahead(begin, lambda shown: ((shown[0] + 1, shown[1]), shown[0] + 1 == shown[1]), 0.7, 1e9) == (0, 99)
    assert begun == [10, 3, 99]


@pytest.mark.parametrize("rules", [
    {}, {"naps": "info"}, {"naps": "mask"}, {"naps": "mask in info"}, {"naps": "missing"},
    {"turns": True, "naps": "mask"},
    {"deaths": True}, {"late": True}, {"num_kinds": 3}])
def test_several_agents_play_ahead_by_the_rules(rules: dict[str, Any]) -> None:
    """`CountingAgents` refuses actions of agents that are gone, forbidden ones, and any but 0 of one that sleeps."""
    script = Script(**rules)
    env = ParallelVectorEnv(lambda: CountingAgents(script), 30, "counting_agents")
    step = env.reset(range(30), Ahead(np.linspace(0, 0.99, 30), 1e9, np.random.default_rng(0)))
    reached = [single.t for single in env._envs]
    assert len(set(reached)) > 1
    assert step.was_reset.all()
    for i, single in enumerate(env._envs):
        for agent in range(script.num_agents):
            assert step.active[i * script.num_agents + agent] == script.acts(
                single.number, agent, single.episode, single.t)
    for _ in range(40):
        rows = []
        for kind, shown in zip(env.kinds, step.obs, strict=True):
            mask = shown.get("action_mask")
            rows.append(np.zeros((len(kind.index), 1), np.float32) if mask is None else
                        mask.argmax(1)[:, None].astype(np.float32))
        step = env.step(rows)


def test_random_actions_are_spread_over_what_is_allowed() -> None:
    space = spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": spaces.Box(-1, 1, (2,)), "c": spaces.MultiBinary(2),
                         "d": spaces.Discrete(2, start=5)})
    mask, rng = np.array([1, 0, 0, 1, 1, 1, 1]), np.random.default_rng(0)
    drawn = [random_action(space, mask, rng) for _ in range(300)]
    assert all(space.contains(action) for action in drawn)
    assert {tuple(action["a"].tolist()) for action in drawn} == {(0, 1), (0, 2)}
    assert {int(action["d"]) for action in drawn} == {5, 6}
    assert {tuple(action["c"].tolist()) for action in drawn} == set(itertools.product((0, 1), repeat=2))
    assert np.std([action["b"] for action in drawn]) > 0.5
    nothing = random_action(space, np.zeros(7), None)
    assert (nothing["a"].tolist(), int(nothing["d"]), nothing["c"].tolist()) == ([0, 0], 5, [0, 0])
