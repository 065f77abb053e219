"""The whole system: reproducible, resumable, bounded when the learner is slow; learns CartPole and Pendulum."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import learners, make_config

from algorithm import Loss
from appo import AsyncPPO
from runtime import checkpoint
from runtime.checkpoint import prepare_run_dir
from runtime.utils import UserError
from services.records import Records
from trainer import APPO, Trainer

CLOCK = {"wall_sec", "fps"}
SMALL: dict[str, Any] = {
    "num_workers": 2, "num_envs_per_worker": 4, "rollout": 16, "batch_size": 64, "num_batches_per_epoch": 2,
    "num_epochs": 2, "encoder_mlp_layers": (16,), "serial_mode": True, "train_for_env_steps": 3000}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without the clock times."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def start(train_dir: Path, **settings: Any) -> APPO:
    return APPO("CartPole-v1", **SMALL | {"train_dir": str(train_dir)} | settings)


def run(train_dir: Path, *steps: int, **settings: Any) -> APPO:
    with start(train_dir, **settings) as appo:
        for n in steps or (None,):
            appo.train(n)
    return appo


@pytest.mark.parametrize("async_rl", [False, True])
def test_serial_mode_gives_bit_identical_figures_twice(tmp_path: Path, *, async_rl: bool) -> None:
    first, second, other = (
        run(tmp_path / name, async_rl=async_rl, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    rows = metrics(first.cfg.run_dir)
    assert len(rows) > 10
    assert rows == metrics(second.cfg.run_dir)
    assert rows != metrics(other.cfg.run_dir), "the seed matters"
    for a, b in zip(learners(first)[0].model.parameters(), learners(second)[0].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_synchronous_mode_has_no_lag_and_asynchronous_mode_has_some(tmp_path: Path) -> None:
    for async_rl in (False, True):
        rows = metrics(run(tmp_path / str(async_rl), async_rl=async_rl, serial_mode=False).cfg.run_dir)
        lag = max(row.get("policy_lag_max", 0) for row in rows)
        assert (lag > 0) == async_rl


def test_a_resumed_run_continues_counters_schedule_optimizer_and_normalizer(tmp_path: Path) -> None:
    settings = {"lr_schedule": "linear_decay", "train_for_env_steps": 4000}
    first = run(tmp_path, 2000, **settings)
    saved = checkpoint.load_checkpoint(checkpoint.find_checkpoint(first.cfg.run_dir))
    with start(tmp_path, **settings) as second:
        resumed = learners(second)[0].state.state_dict()
        assert all(resumed.pop(name) == saved.pop(name) for name in ("algo", "config", "spaces"))
        assert saved.pop("format") == checkpoint.FORMAT
        assert resumed["optimizer"].pop("class") == saved["optimizer"].pop("class") == "Adam"
        for state in (resumed, saved):  # set before each step, from the state's own
            del state["optimizer"]["param_groups"][0]["lr"]
        torch.testing.assert_close(resumed, saved, rtol=0, atol=0)
        assert second.env_steps == first.env_steps
        windows = [system.find(Records).policies[0].window() for system in (first, second)]
        assert windows[0] == windows[1]
        assert windows[0]["returns"], "the last episodes count on"
        rows_before = len(metrics(second.cfg.run_dir))
        second.train()
    rows = metrics(second.cfg.run_dir)
    assert len(rows) > rows_before, "metrics.jsonl is continued, not begun anew"
    for row in rows:  # one schedule over the whole run, across the resume
        expected = 1e-3 * max(0.0, 1 - row["env_steps"] / 4000)
        assert row["learning_rate"] == pytest.approx(expected, rel=1e-12)
    steps = [row["sgd_steps"] for row in rows]
    assert steps == sorted(steps)
    assert second.env_steps >= 4000


class SlowPPO(AsyncPPO):
    """Takes 20 ms more for each SGD step."""

    def loss(self, *args: Any) -> Loss:
        time.sleep(0.02)
        return super().loss(*args)


def test_a_slow_learner_bounds_memory_and_lag(tmp_path: Path) -> None:
    with start(tmp_path, algo=SlowPPO, serial_mode=False, async_rl=True, rollout=8, batch_size=32) as appo:
        appo.train(1500)
        cfg, num_slots = appo.cfg, appo.buffers.num_slots
    rows = [row for row in metrics(cfg.run_dir) if "policy_lag_max" in row]
    # datasets: one is trained on, one is complete, the others are in all slots
    ahead = 2 + math.ceil(num_slots / cfg.trajectories_per_dataset)
    steps_per_dataset = cfg.num_batches_per_epoch * cfg.num_epochs
    assert 0 < max(row["policy_lag_max"] for row in rows) <= ahead * steps_per_dataset
    held = (num_slots + 3 * cfg.trajectories_per_dataset) * cfg.rollout
    assert all(row["env_steps"] - row["env_steps_trained"] <= held for row in rows), "sampling waits for the learner"


def test_a_folder_in_which_a_process_trains_is_refused(tmp_path: Path) -> None:
    def folder(**given: Any) -> Any:
        cfg = make_config({"env": "CartPole-v1", "train_dir": str(tmp_path)} | given)
        return prepare_run_dir(cfg.run_dir, vars(cfg))

    lock = folder()
    (tmp_path / "link").symlink_to(tmp_path)
    for given in ({"restart_behavior": "resume"}, {"restart_behavior": "restart"}, {"restart_behavior": "overwrite"},
                  {"train_dir": str(tmp_path / "link")}):
        with pytest.raises(UserError, match="another process trains"):
            folder(**given)
    lock.close()
    folder().close()


def test_a_folder_that_holds_no_run_is_never_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "CartPole-v1" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    cfg = make_config({"env": "CartPole-v1", "train_dir": str(tmp_path), "restart_behavior": "overwrite"})
    with pytest.raises(UserError, match="holds no run"):
        prepare_run_dir(cfg.run_dir, vars(cfg))
    assert precious.read_text() == "years of work"


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with start(tmp_path) as appo:
        appo.train(500)
        learners(appo)[0].model.value_head.bias.data.fill_(math.nan)
        with pytest.raises(UserError, match=r"has diverged: .* non-finite; use a lower --learning_rate"):
            appo.train(500)
    assert "non-finite" in (appo.cfg.run_dir / "log.txt").read_text()
    assert not list(appo.cfg.run_dir.rglob("*.pt")), "a resumed run would go on with that"


@pytest.mark.slow
@pytest.mark.parametrize(("env", "algo", "goal"), [
    ("CartPole-v1", "appo", 475.0), ("Pendulum-v1", "appo", -300.0), ("CartPole-v1", "impala", 475.0)])
def test_learns_with_the_default_settings(tmp_path: Path, env: str, algo: str, goal: float) -> None:
    """Train as `python train.py --env ENV` does, until the mean return of the last 100 episodes reaches the goal."""
    with Trainer(env, algo=algo, train_dir=str(tmp_path), num_workers=2) as system:
        records = system.find(Records).policies[0]
        system.train(should_stop=lambda: len(records.returns) == 100 and records.mean_return >= goal)
        assert records.mean_return >= goal, f"{system.env_steps} env_steps"
