"""Evaluation while training: on its own episodes, with the weights of one moment, and without stopping the training."""

import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_envs import EPISODE_LENGTH, GatedEvaluation
from parts import SMALL
from test_appo import metrics

from envs.vector_env import Step
from evaluate import Evaluator
from runtime.checkpoint import best_score
from runtime.utils import EVALUATION, ComponentError, derive_seed
from shared_buffers import EVALUATE
from trainer import APPO

PERIOD = 500  # env_steps between evaluations
KEYS = {"eval_return", "eval_return_std", "eval_length", "eval_env_steps", "eval_sgd_steps"}


def make(env: Any, train_dir: Path, **settings: Any) -> APPO:
    return APPO(env, **SMALL | {"train_dir": str(train_dir), "eval_every_env_steps": PERIOD, "eval_episodes": 6,
                                "report_interval_sec": 0.1} | settings)


def evaluations(appo: APPO) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that hold an evaluation."""
    return [row for row in metrics(appo.cfg.run_dir) if "eval_return" in row]


# ---- beside the training ---------------------------------------------------------------------------------------------


def test_evaluations_are_rows_of_the_metrics(tmp_path: Path) -> None:
    with make("CartPole-v1", tmp_path) as appo:
        for _ in range(2):
            appo.train(1100)
            assert evaluations(appo)[-1]["eval_env_steps"] >= appo.env_steps // PERIOD * PERIOD, "it was waited for"
    rows, summary = evaluations(appo), json.loads((appo.cfg.run_dir / "summary.json").read_text())
    for row in rows:
        assert row.keys() >= KEYS
        assert 8 <= row["eval_length"] == row["eval_return"] <= 500, "CartPole gives 1 for each step"
        assert PERIOD <= row["eval_env_steps"] <= row["env_steps"]
        # of weights that may be published in the middle of a dataset, which is reported at its end
        assert 0 < row["eval_sgd_steps"] <= summary["sgd_steps"]
    assert any(row["eval_return_std"] > 0 for row in rows), "the episodes differ"
    evaluated = [(row["eval_env_steps"], row["eval_sgd_steps"]) for row in rows]
    assert evaluated == sorted(set(evaluated)), "the same is not played twice"
    assert len({env_steps for env_steps, _ in evaluated}) <= appo.env_steps // PERIOD + 2, "one ends each train()"
    assert summary["evaluation"] == [{name: rows[-1][name] for name in KEYS}]


def test_training_goes_on_during_an_evaluation(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    begun: list[int] = []  # env_steps when the evaluation was seen to wait

    def watch() -> bool:
        if not begun and gate.with_suffix(".waiting").exists():
            begun.append(appo.env_steps)
        if begun and appo.env_steps >= begun[0] + 2 * PERIOD:
            gate.touch()
        return best_score(appo.cfg.run_dir)[0] > 0

    with make(lambda: GatedEvaluation(gate), tmp_path, experiment="gated") as appo:
        appo.train(10**9, should_stop=watch)
    row = evaluations(appo)[0]
    assert PERIOD <= row["eval_env_steps"] <= begun[0]
    assert row["env_steps"] >= begun[0] + 2 * PERIOD
    assert row["eval_sgd_steps"] < row["sgd_steps"]


@pytest.mark.parametrize("goal", [PERIOD, 10**9], ids=["waiting", "training"])
def test_stop_does_not_wait_for_a_long_evaluation(tmp_path: Path, goal: int) -> None:
    late = itertools.count()
    with make("failing_envs:EndlessEvaluation", tmp_path) as appo:
        appo.train(goal, should_stop=lambda: appo.env_steps >= PERIOD and next(late) > 10)
    assert not evaluations(appo)
    assert "killed" not in (appo.cfg.run_dir / "log.txt").read_text(), "every process has left by itself"
    assert not multiprocessing.active_children()


def test_failing_evaluation_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    with (pytest.raises(ComponentError) as failure, make("failing_envs:FailsInEvaluation", tmp_path, seed=5) as appo):
        appo.train(10**6)
    last = str(failure.value).rstrip().splitlines()[-1]
    assert f"seed {derive_seed(5, EVALUATION)}, step 1: step() raised ValueError" in last
    assert last in (appo.cfg.run_dir / "log.txt").read_text()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_serial_mode_gives_the_same_numbers_twice_and_learns_the_same_without_evaluations(tmp_path: Path) -> None:
    rows, learned = [], []
    for name, period in (("first", PERIOD), ("second", PERIOD), ("without", 0)):
        with make("CartPole-v1", tmp_path / name, serial_mode=True, eval_every_env_steps=period) as appo:
            appo.train(1200)
            learned.append(torch.cat([tensor.flatten().double() for tensor in appo.get_parameters()[0].values()]))
        rows.append(evaluations(appo))
    assert rows[0] == rows[1]
    assert [len(found) for found in rows] == [3, 3, 0], "the third one at the end"
    assert torch.equal(learned[0], learned[1])
    assert torch.equal(learned[0], learned[2])


def test_weights_are_taken_once_for_each_evaluation(tmp_path: Path) -> None:
    """Those that are published meanwhile play in the next one."""
    reports: list[tuple] = []
    with make("failing_envs:ActionIsReward", tmp_path, serial_mode=True) as appo:
        (evaluator,) = (component for component in appo.crew.components if isinstance(component, Evaluator))
        evaluator.report, step = reports.append, evaluator.env.step

        def publish(action: int, version: int) -> None:
            """Publish a policy that takes one action only."""
            appo.models[0].policy_head.bias.data.zero_()[action] = 100.0
            appo.buffers.policies[0].weights.publish(appo.models[0], version)

        def step_and_publish(actions: list[np.ndarray]) -> Step:
            publish(action=2, version=20)
            return step(actions)

        publish(action=1, version=10)
        appo.buffers.env_steps[0] = 1234
        evaluator.env.step = step_and_publish
        for _ in range(2):
            evaluator.evaluate(EVALUATE, 0)
    found = [content for kind, _, *contents in reports for content in contents if kind == "evaluated"]
    assert [(row["eval_return"], row["eval_return_std"], row["eval_env_steps"], row["eval_sgd_steps"])
            for row in found] == [(EPISODE_LENGTH * 1.0, 0.0, 1234, 10), (EPISODE_LENGTH * 2.0, 0.0, 1234, 20)]
