"""The command `train.py`: its records, exit statuses, refusals and resumption, and that it leaves nothing behind."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts import make_config
from running import CARTPOLE, Run, newest_state, run_train

import train
from config import configure, parse_settings
from runtime.checkpoint import load_saved

GOAL = 2000  # env_steps of the shared run
SUMMARY_KEYS = {"env_steps", "env_frames", "sgd_steps", "wall_sec", "fps", "mean_return", "policy_lag_mean",
                "policy_lag_max"}


def read_json(text: str) -> Any:
    """Parse JSON as everyone else does: NaN and Infinity are none."""
    return json.loads(text, parse_constant=pytest.fail)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [read_json(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_summary(run_dir: Path) -> dict[str, Any]:
    return read_json((run_dir / "summary.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, to show that nothing has changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run, which no test changes."""
    run = run_train(tmp_path_factory.mktemp("finished"), *CARTPOLE, f"--train_for_env_steps={GOAL}")
    assert run.status == 0, run.err
    return run


@pytest.fixture
def run_dir(finished: Run, tmp_path: Path) -> Path:
    """Return a copy of the finished run, in a train_dir of its own."""
    return Path(shutil.copytree(finished.run_dir, tmp_path / "runs" / "run"))


# ---- a run that ends of its own accord; other ends are in test_stop.py and test_recovery.py --------------------------


def test_finished_run_is_quiet_and_leaves_settings_a_checkpoint_and_curves(finished: Run) -> None:
    assert finished.err == ""
    assert f"records in {finished.run_dir}" in finished.out
    cfg = make_config(load_saved(finished.run_dir / "config.json"))
    assert (cfg.env, cfg.num_envs_per_worker, cfg.encoder_mlp_layers) == ("CartPole-v1", 4, (16,))
    state, summary = newest_state(finished.run_dir), read_summary(finished.run_dir)
    assert state["sgd_steps"] == summary["sgd_steps"]
    assert 0 < state["env_steps"] <= summary["env_steps"]
    (events,) = (finished.run_dir / "tensorboard" / "policy_00").glob("events.out.tfevents.*")
    assert b"episode/return_mean" in events.read_bytes()


def test_finished_run_has_a_summary_and_metrics(finished: Run) -> None:
    summary, rows = read_summary(finished.run_dir), read_rows(finished.run_dir)
    assert summary.keys() >= SUMMARY_KEYS
    assert GOAL <= summary["env_steps"] < 2 * GOAL
    assert summary["env_frames"] == summary["env_steps"]
    assert summary["fps"] == pytest.approx(summary["env_frames"] / summary["wall_sec"])
    assert 5 < summary["mean_return"][0] <= 500
    assert 0 <= summary["policy_lag_mean"] <= summary["policy_lag_max"]
    assert all(row.keys() >= SUMMARY_KEYS - {"policy_lag_mean", "policy_lag_max"} for row in rows)
    assert any(row.keys() >= SUMMARY_KEYS | {"loss", "entropy", "learning_rate"} for row in rows), "it has learned"
    for name in ("env_steps", "sgd_steps", "wall_sec", "num_episodes"):
        values = [row[name] for row in rows]
        assert values == sorted(values), name
        assert 0 < values[-1] <= summary[name]


# ---- the run's folder exists -----------------------------------------------------------------------------------------


def test_resume_continues_counters_and_records(finished: Run, run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    """No other setting is given: the rest comes from the saved ones, but for how it runs."""
    assert train.main([f"--train_dir={run_dir.parent}", "--env=CartPole-v1", "--experiment=run",
                       f"--train_for_env_steps={2 * GOAL}"]) == 0
    out, err = capsys.readouterr()
    assert not err
    before, after = newest_state(finished.run_dir), newest_state(run_dir)
    assert f"resumed at env_steps={before['env_steps']:,} sgd_steps={before['sgd_steps']:,}" in out
    assert f"changed: train_for_env_steps {GOAL} -> {2 * GOAL}, device cpu -> auto\n" in out
    for name in ("sgd_steps", "env_steps", "env_steps_trained"):
        assert after[name] > before[name]
    assert {int(adam["step"]) for adam in after["optimizer"]["state"].values()} == {after["sgd_steps"]}

    first, second = read_summary(finished.run_dir), read_summary(run_dir)
    assert 2 * GOAL <= second["env_steps"] < 3 * GOAL
    assert second["sgd_steps"] == after["sgd_steps"]
    for name in ("wall_sec", "num_episodes"):
        assert second[name] > first[name]

    rows, new = read_rows(finished.run_dir), read_rows(run_dir)
    assert new[: len(rows)] == rows
    for name in ("env_steps", "sgd_steps"):
        assert min(row[name] for row in new[len(rows):]) >= before[name]
    saved = [make_config(load_saved(folder / "config.json")) for folder in (finished.run_dir, run_dir)]
    assert {name for name, value in vars(saved[0]).items() if value != getattr(saved[1], name)} == {
        "train_dir", "train_for_env_steps", "device"}


@pytest.mark.parametrize(("flags", "complaint"), [
    ([], f"has 2,0.. of {GOAL:,} env_steps, .* of inf s, .*raise --train_for_env_steps, --train_for_seconds or"),
    (["--train_for_seconds=0.001"], r" of 0\.001 s")])
def test_finished_run_started_again_says_how_it_could_go_on_and_loses_nothing(
        finished: Run, run_dir: Path, capsys: pytest.CaptureFixture, flags: list[str], complaint: str) -> None:
    assert train.main([f"--train_dir={run_dir.parent}", "--env=CartPole-v1", "--experiment=run", "--serial_mode",
                       *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nothing to do" in line]
    assert re.search(complaint, line)
    assert (run_dir / "config.json").read_text() == (finished.run_dir / "config.json").read_text()
    before, after = newest_state(finished.run_dir), newest_state(run_dir)
    for name in ("sgd_steps", "env_steps", "model"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)
    first, second = read_summary(finished.run_dir), read_summary(run_dir)
    for name in SUMMARY_KEYS - {"wall_sec", "env_steps", "env_frames"}:  # a checkpoint's env_steps are a few fewer
        assert second[name] == first[name], name


@pytest.mark.parametrize(("behavior", "folders"), [("restart", {"run", "run_old"}), ("overwrite", {"run"})])
def test_beginning_anew(finished: Run, run_dir: Path, behavior: str, folders: set[str],
                        capsys: pytest.CaptureFixture) -> None:
    assert train.main([*CARTPOLE, "--serial_mode", f"--train_dir={run_dir.parent}", "--train_for_env_steps=300",
                       f"--restart_behavior={behavior}"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "resumed" not in printed.out
    for state in (newest_state(run_dir), read_summary(run_dir), *read_rows(run_dir)):
        assert state["env_steps"] < GOAL
    assert {folder.name for folder in run_dir.parent.iterdir()} == folders
    if behavior == "restart":
        assert contents(run_dir.with_name("run_old")) == contents(finished.run_dir)


@pytest.mark.parametrize(("folder", "given"), [
    ("runs/second", ["--train_dir=runs", "--experiment=second"]), ("train_dir/CartPole-v1", [])])
def test_moved_or_renamed_run_is_resumed_where_it_is(
        finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, given: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.run_dir, folder)
    cfg = configure(parse_settings(["--env=CartPole-v1", *given], ""))
    assert cfg.run_dir == tmp_path / folder
    assert cfg.num_envs_per_worker == 4, "the saved settings are used"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls the command in this process, checks how it refuses, and returns the line."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> str:
        before = contents(tmp_path)
        assert train.main([*argv, "--serial_mode"]) == 2
        out, err = capfd.readouterr()
        assert not out
        (line,) = err.splitlines()
        assert line.startswith("train.py: ")
        assert contents(tmp_path) == before, "nothing was written, changed or lost"
        return line

    return call


@pytest.mark.parametrize(("env", "flags", "named"), [
    ("", "", "--env"), ("CartPol-v1", "", "CartPole"), ("no_such_module:Env-v0", "", "no_such_module"),
    *(("CartPole-v1", flags, named) for flags, named in (
        ("--num_worker=2", "--num_workers"), ("--device=cudda", "--device"), ("--train_dir=a_file/runs", "a_file/runs"),
        ("--self_play_past_fraction=0.5", "--self_play_past_fraction"))),
    ("Pendulum-v1", "--exploration_loss=symmetric_kl", "--exploration_loss"),
    ("CartPole-v1", "--algo=apex --lr_schedule=kl_adaptive", "--lr_schedule"),
    ("tiny_games:HunterAndPrey", "", "--num_policies=2"),
    *(("tiny_games:HigherWins", f"--num_policies=2 --policy_mapping=tiny_games:{name}", "--policy_mapping")
      for name in ("too_large", "one_too_few", "all_play_first"))])
def test_bad_input_is_refused_with_one_line(refuse: Callable[..., str], tmp_path: Path, env: str, flags: str,
                                            named: str) -> None:
    (tmp_path / "a_file").touch()
    assert named in refuse(*([f"--env={env}"] if env else []), "--batch_size=64", *flags.split())


def test_refusal_is_status_2_and_one_line_of_the_real_command(run_dir: Path) -> None:
    before = contents(run_dir)
    run = run_train(run_dir.parent, *CARTPOLE, "--train_for_env_steps=1e9", "--encoder_mlp_layers", "32")
    assert (run.status, run.out, run.err.count("\n")) == (2, "", 1)
    assert f"{run_dir} holds a run of another network: encoder_mlp_layers 16 -> 32" in run.err
    assert contents(run_dir) == before


@pytest.mark.parametrize("content", ["{", "[1, 2]"])
def test_damaged_settings_are_refused(refuse: Callable[..., str], run_dir: Path, content: str) -> None:
    (run_dir / "config.json").write_text(content)
    assert "config.json" in refuse(f"--train_dir={run_dir.parent}", "--env=CartPole-v1", "--experiment=run")


@pytest.mark.parametrize("behavior", ["resume", "restart", "overwrite"])
def test_too_little_shared_memory_is_refused_and_nothing_is_lost(
        refuse: Callable[..., str], run_dir: Path, behavior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=512))
    assert "/dev/shm" in refuse(f"--train_dir={run_dir.parent}", *CARTPOLE, "--num_epochs=3",
                                f"--restart_behavior={behavior}")
