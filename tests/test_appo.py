"""The whole system: reproducible, resumable, bounded when the learner is slow; learns CartPole and Pendulum."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import learners, make_config

from algorithm import Loss
from appo import AsyncPPO
from runtime.checkpoint import prepare_run_dir, read_lines
from runtime.utils import UserError
from services.records import Records
from trainer import APPO, Trainer

CLOCK = {"wall_sec", "fps"}
SMALL: dict[str, Any] = {
    "num_workers": 2, "num_envs_per_worker": 4, "rollout": 16, "batch_size": 64, "num_batches_per_epoch": 2,
    "num_epochs": 2, "encoder_mlp_layers": (16,), "serial_mode": True, "train_for_env_steps": 3000}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without the clock times."""
    rows = read_lines(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def start(train_dir: Path, **settings: Any) -> APPO:
    return APPO("CartPole-v1", **SMALL | {"train_dir": str(train_dir)} | settings)


def run(train_dir: Path, steps: int | None = None, **settings: Any) -> APPO:
    with start(train_dir, **settings) as appo:
        appo.train(steps)
    return appo


@pytest.mark.parametrize("async_rl", [False, True])
def test_serial_mode_gives_bit_identical_figures_twice(tmp_path: Path, *, async_rl: bool) -> None:
    first, second, other = (
        run(tmp_path / name, 2000, async_rl=async_rl, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    rows = metrics(first.cfg.run_dir)
    assert len(rows) > 10
    assert rows == metrics(second.cfg.run_dir)
    assert rows != metrics(other.cfg.run_dir), "the seed matters"
    for a, b in zip(learners(first)[0].model.parameters(), learners(second)[0].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resumed_run_goes_on_with_its_records_and_one_schedule(tmp_path: Path) -> None:
    """The rest of what is resumed is in `test_learner.py`, `test_train.py` and `test_stop.py`."""
    for steps in (2000, None):
        appo = run(tmp_path, steps, lr_schedule="linear_decay", train_for_env_steps=4000)
    rows = metrics(appo.cfg.run_dir)
    assert rows[0]["env_steps"] < 2000
    assert appo.env_steps >= 4000
    for row in rows:
        expected = 1e-3 * max(0.0, 1 - row["env_steps"] / 4000)
        assert row["learning_rate"] == pytest.approx(expected, rel=1e-12)
    steps = [row["sgd_steps"] for row in rows]
    assert steps == sorted(steps)


class SlowPPO(AsyncPPO):
    """Takes 20 ms more for each SGD step."""

    def loss(self, *args: Any) -> Loss:
        time.sleep(0.02)
        return super().loss(*args)


@pytest.mark.parametrize("async_rl", [False, True])
def test_a_slow_learner_bounds_memory_and_lag_which_is_0_in_turns(tmp_path: Path, *, async_rl: bool) -> None:
    appo = run(tmp_path, 1000, algo=SlowPPO, serial_mode=False, async_rl=async_rl, rollout=8, batch_size=32)
    cfg, num_slots = appo.cfg, appo.buffers.num_slots
    rows = [row for row in metrics(cfg.run_dir) if "policy_lag_max" in row]
    # datasets: one is trained on, one is complete, the others are in all slots
    ahead = 2 + math.ceil(num_slots / cfg.trajectories_per_dataset)
    least, most = (1, ahead * cfg.num_batches_per_epoch * cfg.num_epochs) if async_rl else (0, 0)
    assert least <= max(row["policy_lag_max"] for row in rows) <= most
    held = (num_slots + 3 * cfg.trajectories_per_dataset) * cfg.rollout
    assert all(row["env_steps"] - row["env_steps_trained"] <= held for row in rows), "sampling waits for the learner"


def folder(train_dir: Path, **given: Any) -> Any:
    """Prepare a run's folder, return its lock."""
    cfg = make_config({"env": "CartPole-v1", "train_dir": str(train_dir)} | given)
    return prepare_run_dir(cfg.run_dir, vars(cfg))


def test_a_folder_in_which_a_process_trains_is_refused(tmp_path: Path) -> None:
    lock = folder(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for train_dir, behavior in ((tmp_path, "resume"), (tmp_path, "restart"), (tmp_path, "overwrite"),
                                (tmp_path / "link", "resume")):
        with pytest.raises(UserError, match="another process trains"):
            folder(train_dir, restart_behavior=behavior)
    lock.close()
    folder(tmp_path).close()


def test_a_folder_that_holds_no_run_is_never_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "CartPole-v1" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(UserError, match="holds no run"):
        folder(tmp_path, restart_behavior="overwrite")
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
    ("CartPole-v1", "appo", 475.0), ("Pendulum-v1", "appo", -500.0), ("CartPole-v1", "impala", 195.0)])
def test_learns_with_the_default_settings(tmp_path: Path, env: str, algo: str, goal: float) -> None:
    """Train as `python train.py --env ENV` does, until the mean return of the last 100 episodes reaches the goal."""
    with Trainer(env, algo=algo, train_dir=str(tmp_path), num_workers=2) as system:
        records = system.find(Records).policies[0]
        system.train(should_stop=lambda: len(records.returns) == 100 and records.mean_return >= goal)
        assert records.mean_return >= goal, f"{system.env_steps} env_steps"
