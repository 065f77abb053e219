"""Evaluation while training: on its own episodes, with the weights of one moment, and without stopping the training."""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_env import CountingEnv, episode_length, number_of, reward_code
from failing_envs import EPISODE_LENGTH
from one_policy import CPU, make_buffers
from parts import make_config
from test_appo import metrics

from envs.families import probe
from envs.vector_env import Step
from model import ActorCritic
from runtime.evaluator import Evaluator, play
from runtime.seeding import EVALUATION, derive_seed
from runtime.user_error import ComponentError
from shared_buffers import EVALUATE
from trainer import APPO

SMALL: dict[str, Any] = {
    "num_workers": 1, "num_envs_per_worker": 4, "rollout": 16, "batch_size": 64, "num_batches_per_epoch": 2,
    "encoder_mlp_layers": (16,), "device": "cpu", "report_interval_sec": 0.1}
PERIOD = 500  # env_steps between evaluations
KEYS = {"eval_return", "eval_return_std", "eval_length", "eval_env_steps", "eval_sgd_steps"}


def make(env: str, train_dir: Path, **settings: Any) -> APPO:
    return APPO(env, **SMALL | {"train_dir": str(train_dir), "eval_every_env_steps": PERIOD, "eval_episodes": 6}
                | settings)


def evaluations(appo: APPO) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that hold an evaluation."""
    return [row for row in metrics(appo.cfg.run_dir) if "eval_return" in row]


def summary(appo: APPO) -> dict[str, Any]:
    return json.loads((appo.cfg.run_dir / "summary.json").read_text())


# ---- a run with evaluations ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> APPO:
    """Return a closed APPO that was trained twice, in asynchronous mode."""
    with make("CartPole-v1", tmp_path_factory.mktemp("finished"), seed=3) as appo:
        for _ in range(2):
            appo.train(1100)
            last = appo.records.policies[0].last_evaluation["eval_env_steps"]
            assert last >= appo.env_steps // PERIOD * PERIOD, "train() has waited for the last one that was due"
    return appo


def test_evaluations_are_rows_of_the_metrics(finished: APPO) -> None:
    rows = evaluations(finished)
    assert rows
    for row in rows:
        assert row.keys() >= KEYS
        assert 8 <= row["eval_return"] <= 500
        assert row["eval_length"] == row["eval_return"], "CartPole gives 1 for each step"
        assert PERIOD <= row["eval_env_steps"] <= row["env_steps"]
        # of weights that may be published in the middle of a dataset, which is reported at its end
        assert 0 < row["eval_sgd_steps"] <= summary(finished)["sgd_steps"]
    assert any(row["eval_return_std"] > 0 for row in rows), "the episodes differ"
    evaluated = [(row["eval_env_steps"], row["eval_sgd_steps"]) for row in rows]
    assert evaluated == sorted(set(evaluated)), "the same is not played twice"
    assert len({env_steps for env_steps, _ in evaluated}) <= finished.env_steps // PERIOD + 2, "one ends each train()"
    assert summary(finished)["evaluation"] == [{name: rows[-1][name] for name in KEYS}]


# ---- beside the training ---------------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file that the evaluations of `gated_env:make` wait for."""
    path = tmp_path / "gate"
    (tmp_path / "gated_env.py").write_text(
        "from pathlib import Path\nfrom failing_envs import GatedEvaluation\n\n"
        f"def make():\n    return GatedEvaluation(Path({str(path)!r}))\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("gated_env", None)


def test_training_goes_on_during_an_evaluation(tmp_path: Path, gate: Path) -> None:
    begun: list[int] = []  # env_steps when the evaluation was seen to wait

    def watch() -> bool:
        if not begun and gate.with_suffix(".waiting").exists():
            begun.append(appo.env_steps)
        if begun and appo.env_steps >= begun[0] + 2 * PERIOD:
            gate.touch()
        return bool(appo.records.policies[0].last_evaluation)

    with make("gated_env:make", tmp_path) as appo:
        appo.train(10**9, should_stop=watch)
    row = evaluations(appo)[0]
    assert PERIOD <= row["eval_env_steps"] <= begun[0]
    assert row["env_steps"] >= begun[0] + 2 * PERIOD
    assert row["eval_sgd_steps"] < row["sgd_steps"]


@pytest.mark.parametrize("when", ["training", "waiting"])
def test_stop_does_not_wait_for_a_long_evaluation(tmp_path: Path, when: str) -> None:
    goal = PERIOD if when == "waiting" else 10**9
    with make("failing_envs:EndlessEvaluation", tmp_path) as appo:
        appo.train(goal, should_stop=lambda: appo.evaluations.under_way and appo.env_steps >= min(goal, 2 * PERIOD))
        assert appo.evaluations.under_way
    assert not evaluations(appo)
    assert "killed" not in (appo.cfg.run_dir / "log.txt").read_text(), "every process has left by itself"
    assert not multiprocessing.active_children()


def test_failing_evaluation_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    with (pytest.raises(ComponentError) as failure,
          make("failing_envs:FailsInEvaluation", tmp_path, seed=5) as appo):
        appo.train(10**6)
    last = str(failure.value).rstrip().splitlines()[-1]
    assert f"seed {derive_seed(5, EVALUATION)}, step 1: step() raised ValueError" in last
    assert last in (appo.cfg.run_dir / "log.txt").read_text()
    assert not multiprocessing.active_children()


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eval_deterministic", [False, True])
def test_serial_mode_gives_the_same_numbers_twice_and_learns_the_same_without_evaluations(
        tmp_path: Path, eval_deterministic: bool) -> None:
    runs = []
    for name, period in (("first", PERIOD), ("second", PERIOD), ("without", 0)):
        with make("CartPole-v1", tmp_path / name, serial_mode=True, eval_deterministic=eval_deterministic,
                  eval_every_env_steps=period) as appo:
            appo.train(1200)
        runs.append(appo)
    assert [len(evaluations(run)) for run in runs] == [3, 3, 0], "the third one at the end"
    assert summary(runs[2])["evaluation"] == [None]
    rows = [metrics(run.cfg.run_dir) for run in runs]
    assert rows[0] == rows[1]
    losses = [[row["loss"] for row in rows[number] if "loss" in row] for number in (0, 2)]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 1


class Bench:
    """An evaluator in this process, whose weights and environments the test holds."""

    def __init__(self, env: str, **settings: Any) -> None:
        cfg = self.cfg = make_config({"env": env, "encoder_mlp_layers": (16,), "eval_every_env_steps": 1, **settings})
        ((obs_space, action_space),) = probe(cfg).kinds
        torch.manual_seed(0)
        self.model = ActorCritic(cfg, obs_space, action_space)
        self.buffers = make_buffers(cfg, obs_space, action_space, self.model)
        self.buffers.best_score.fill_(np.inf)  # nothing is better: there is no folder in which it could be saved
        self.buffers.best_sort.fill_(9)
        self.reports: list[dict[str, float]] = []
        self.evaluator = Evaluator(cfg, self.buffers, [CPU], self.receive)

    def receive(self, report: tuple) -> None:
        kind, policy, content = report
        assert (kind, policy) == ("evaluated", 0)
        self.reports.append(content)

    def evaluate(self) -> dict[str, float]:
        self.evaluator.handle(EVALUATE, 0)
        return self.reports[-1]

    def publish_policy(self, action: int, version: int) -> None:
        """Publish a policy that takes one action only."""
        with torch.no_grad():
            self.model.policy_head.bias.zero_()[action] = 100.0
        self.buffers.policies[0].weights.publish(self.model, version)


def test_weights_are_taken_once_for_each_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("failing_envs:ActionIsReward", eval_episodes=3)
    bench.publish_policy(action=1, version=10)
    bench.buffers.env_steps[0] = 1234
    step = bench.evaluator.env.step

    def step_and_publish(actions: list[np.ndarray]) -> Step:
        bench.publish_policy(action=2, version=20)
        return step(actions)

    monkeypatch.setattr(bench.evaluator.env, "step", step_and_publish)
    assert bench.evaluate() == {"eval_return": EPISODE_LENGTH * 1.0, "eval_return_std": 0.0,
                                "eval_length": EPISODE_LENGTH, "eval_env_steps": 1234, "eval_sgd_steps": 10}
    later = bench.evaluate()
    assert (later["eval_return"], later["eval_sgd_steps"]) == (EPISODE_LENGTH * 2.0, 20)


# ---- play ------------------------------------------------------------------------------------------------------------


class ZeroPlayer:
    """Always takes action 0; notes whether it is told rightly that a new episode begins."""

    def __init__(self) -> None:
        self.told_rightly: list[bool] = []

    def act(self, step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        self.told_rightly.append((fresh == (step.obs[0]["obs"][:, 2] == 0)).all())
        actions[0][:] = 0


@pytest.mark.parametrize("num_episodes", [1, 2, 3, 8, 11])
def test_play_spreads_episodes_evenly_with_their_true_returns_and_shows_every_step(num_episodes: int) -> None:
    env, player, seen = CountingEnv(3), ZeroPlayer(), []
    episodes = [(episode.env, episode.returns.tolist(), episode.lengths.tolist()) for episode in
                play(env, [player], num_episodes, 5, lambda env: seen.append(env.observe()["obs"]))]
    numbers = [number_of(derive_seed(5, EVALUATION, index=i)) for i in range(3)]
    expected, ends = [], []
    for i, number in enumerate(numbers):
        end = -1
        for episode in range(num_episodes // 3 + (i < num_episodes % 3)):
            t = np.arange(episode_length(number, episode))
            expected.append((i, [float(reward_code(number, episode, t, 0).sum())], [len(t)]))
            end += len(t) + 1  # one step more resets
        ends.append(end)
    assert sorted(episodes) == sorted(expected)
    assert len(seen) == max(ends) + 1, "the first observation, then each step until the last episode's end"
    assert (seen[0] == [[number, 0, 0] for number in numbers]).all()
    assert all(player.told_rightly), "memory is reset with the episode"
