"""The command `train.py`: its records, exit statuses, refusals and resumption, and that it leaves nothing behind."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from parts import make_config

import train
import trainer
from config import configure, parse_settings
from runtime.checkpoint import find_checkpoint, load_checkpoint, load_saved

TRAIN_PY = Path(train.__file__)
DEADLINE_SEC = 60.0  # stands for "does not hang", also on a busy machine
GOAL = 2000  # env_steps of the shared run
SMALL = ("--env=CartPole-v1", "--experiment=first", "--num_workers=1", "--num_envs_per_worker=4", "--rollout=16",
         "--batch_size=128", "--num_batches_per_epoch=1", "--num_epochs=8", "--encoder_mlp_layers=16", "--device=cpu",
         "--report_interval_sec=0.2", "--stall_timeout_sec=30")
ENDLESS = ("--train_for_env_steps=1e9", "--num_epochs=64")  # nearly always in the middle of a dataset
SUMMARY_KEYS = {"env_steps", "env_frames", "sgd_steps", "wall_sec", "fps", "mean_return", "policy_lag_mean",
                "policy_lag_max"}


class Outcome(NamedTuple):
    """How a run of the command ended."""

    status: int
    out: str
    err: str


def run_train(train_dir: Path, *flags: str, disturb: Callable[[subprocess.Popen], None] | None = None,
              at_once: bool = False) -> Outcome:
    """Run train.py to its end, check that it leaves no process, shared memory or half-written file behind.

    `disturb` is called with the process once it has learned something, or at once.
    """
    train_dir.mkdir(parents=True, exist_ok=True)
    shm_before = shm_files()
    process = subprocess.Popen(
        [sys.executable, TRAIN_PY, f"--train_dir={train_dir}", *flags], cwd=train_dir, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(train_dir)},
        start_new_session=True)
    try:
        if disturb is not None:
            if not at_once:
                wait_until(lambda: has_learned(train_dir) or process.poll() is not None, "it does not learn")
                assert process.poll() is None, process.communicate()
            disturb(process)
        out, err = process.communicate(timeout=DEADLINE_SEC)  # until the last child has closed the pipes
        wait_until(lambda: not members(process), "processes are left")
        wait_until(lambda: not shm_files() - shm_before - shm_in_use(), "shared memory is left")
    finally:
        for member in members(process):
            member.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL or not list(train_dir.rglob("*.tmp"))  # killed while it wrote one
    return Outcome(process.returncode, out, err)


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + DEADLINE_SEC
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


def has_learned(train_dir: Path) -> bool:
    """Tell whether there is a summary of something learned; it is written after the metrics."""
    return any(read_summary(path.parent)["sgd_steps"] > 0 for path in train_dir.glob("*/summary.json"))


def members(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the living processes of the session that `process` leads or led."""
    found = []
    for member in psutil.process_iter():
        try:
            if os.getsid(member.pid) == process.pid and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def shm_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


def shm_in_use() -> set[str]:
    """Return the files in /dev/shm that a living process has mapped: here, those of other programs."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        used |= {line.split("/dev/shm/", 1)[1].split(" ")[0] for line in lines if "/dev/shm/" in line}
    return used


def read_json(text: str) -> Any:
    """Parse JSON as everyone else does: NaN and Infinity are none."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")
    return json.loads(text, parse_constant=refuse)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of metrics.jsonl."""
    return [read_json(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_summary(run_dir: Path) -> dict[str, Any]:
    return read_json((run_dir / "summary.json").read_text())


def newest_state(run_dir: Path) -> dict[str, Any]:
    return load_checkpoint(find_checkpoint(run_dir))


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a folder, to show that nothing has changed."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a finished run, which no test changes: its folder and its outcome."""
    train_dir = tmp_path_factory.mktemp("finished")
    outcome = run_train(train_dir, *SMALL, f"--train_for_env_steps={GOAL}")
    assert outcome.status == 0, outcome
    return SimpleNamespace(run_dir=train_dir / "first", outcome=outcome)


@pytest.fixture
def run_dir(finished: SimpleNamespace, tmp_path: Path) -> Path:
    """Return a copy of the finished run, in a train_dir of its own."""
    return Path(shutil.copytree(finished.run_dir, tmp_path / "runs" / "first"))


# ---- the end, of its own accord and otherwise ------------------------------------------------------------------------


def test_finished_run_is_quiet_and_keeps_its_settings(finished: SimpleNamespace) -> None:
    assert finished.outcome.err == ""
    cfg = make_config(load_saved(finished.run_dir / "config.json"))
    assert (cfg.env, cfg.num_envs_per_worker, cfg.encoder_mlp_layers) == ("CartPole-v1", 4, (16,))
    assert f"records in {finished.run_dir}" in finished.outcome.out


def test_finished_run_has_a_summary_and_metrics(finished: SimpleNamespace) -> None:
    summary, rows = read_summary(finished.run_dir), read_rows(finished.run_dir / "metrics.jsonl")
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


def test_finished_run_has_a_checkpoint_and_tensorboard_events(finished: SimpleNamespace) -> None:
    state, summary = newest_state(finished.run_dir), read_summary(finished.run_dir)
    assert state["sgd_steps"] == summary["sgd_steps"]
    assert 0 < state["env_steps"] <= summary["env_steps"]
    events = list((finished.run_dir / "tensorboard" / "policy_00").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert b"episode/return_mean" in events[0].read_bytes()


def test_ctrl_c_saves_and_ends_with_status_0(tmp_path: Path) -> None:
    """Other signals are in `test_stop.py`; SIGTERM to the main process alone ends most runs of `test_recovery.py`."""
    outcome = run_train(tmp_path, *SMALL, *ENDLESS, disturb=lambda process: os.killpg(process.pid, signal.SIGINT))
    assert (outcome.status, outcome.err) == (0, "")
    state, summary = newest_state(tmp_path / "first"), read_summary(tmp_path / "first")
    assert state["sgd_steps"] == summary["sgd_steps"] > 0
    assert 0 < state["env_steps"] <= summary["env_steps"]


# ---- the run's folder exists -----------------------------------------------------------------------------------------


def test_resume_continues_counters_and_records(finished: SimpleNamespace, run_dir: Path) -> None:
    """No other setting is given: the rest comes from the saved ones, but for how it runs."""
    outcome = run_train(run_dir.parent, "--env=CartPole-v1", "--experiment=first", f"--train_for_env_steps={2 * GOAL}")
    assert (outcome.status, outcome.err) == (0, "")
    before, after = newest_state(finished.run_dir), newest_state(run_dir)
    assert f"resumed at env_steps={before['env_steps']:,} sgd_steps={before['sgd_steps']:,}" in outcome.out
    assert f"changed: train_for_env_steps {GOAL} -> {2 * GOAL}, device cpu -> auto\n" in outcome.out
    assert after["sgd_steps"] > before["sgd_steps"]
    assert after["env_steps"] > before["env_steps"]
    assert after["env_steps_trained"] > before["env_steps_trained"]
    assert {int(adam["step"]) for adam in after["optimizer"]["state"].values()} == {after["sgd_steps"]}

    first, second = read_summary(finished.run_dir), read_summary(run_dir)
    assert 2 * GOAL <= second["env_steps"] < 3 * GOAL
    assert second["sgd_steps"] == after["sgd_steps"]
    for name in ("wall_sec", "num_episodes"):
        assert second[name] > first[name]

    metrics = [(folder / "metrics.jsonl").read_text() for folder in (finished.run_dir, run_dir)]
    assert metrics[1].startswith(metrics[0])
    new_rows = read_rows(run_dir / "metrics.jsonl")[metrics[0].count("\n"):]
    assert new_rows
    assert all(row["env_steps"] >= before["env_steps"] for row in new_rows)
    assert all(row["sgd_steps"] >= before["sgd_steps"] for row in new_rows)
    saved = [make_config(load_saved(folder / "config.json")) for folder in (finished.run_dir, run_dir)]
    assert {name for name, value in vars(saved[0]).items() if value != getattr(saved[1], name)} == {
        "train_dir", "train_for_env_steps", "device"}


def test_finished_run_started_again_ends_at_once_and_loses_nothing(finished: SimpleNamespace, run_dir: Path) -> None:
    assert train.main([f"--train_dir={run_dir.parent}", *SMALL, f"--train_for_env_steps={GOAL}", "--serial_mode"]) == 0
    before, after = newest_state(finished.run_dir), newest_state(run_dir)
    assert after["sgd_steps"] == before["sgd_steps"]
    assert after["env_steps"] == before["env_steps"]
    assert all(torch.equal(after["model"][name], weights) for name, weights in before["model"].items())
    first, second = read_summary(finished.run_dir), read_summary(run_dir)
    for name in SUMMARY_KEYS - {"wall_sec", "env_steps", "env_frames"}:  # a checkpoint's env_steps are a few fewer
        assert second[name] == first[name], name


@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
def test_beginning_anew(finished: SimpleNamespace, run_dir: Path, behavior: str,
                        capsys: pytest.CaptureFixture) -> None:
    assert train.main([f"--train_dir={run_dir.parent}", *SMALL, "--serial_mode", "--train_for_env_steps=300",
                       f"--restart_behavior={behavior}"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "resumed" not in printed.out
    assert newest_state(run_dir)["env_steps"] < GOAL
    assert read_summary(run_dir)["env_steps"] < GOAL
    assert all(row["env_steps"] < GOAL for row in read_rows(run_dir / "metrics.jsonl"))
    folders = {folder.name: folder for folder in run_dir.parent.iterdir()}
    if behavior == "restart":
        assert folders.keys() == {"first", "first_old"}
        assert contents(folders["first_old"]) == contents(finished.run_dir)
    else:
        assert folders.keys() == {"first"}


@pytest.mark.parametrize("folder", ["runs/second", "train_dir/CartPole-v1"])
def test_moved_or_renamed_run_is_resumed_where_it_is(
        finished: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.run_dir, folder)
    given = ["--train_dir=runs", "--experiment=second"] if folder == "runs/second" else []
    cfg = configure(parse_settings(["--env=CartPole-v1", *given], ""))
    assert cfg.run_dir == tmp_path / folder
    assert cfg.num_envs_per_worker == 4, "the saved settings are used"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
           ) -> Iterator[Callable[..., str]]:
    """Return a function that calls the command in this process, checks how it refuses, and returns the line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "start_server", lambda: torch.multiprocessing.get_context("spawn"))
    monkeypatch.setattr(train, "start_server", lambda: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*argv: str) -> str:
        before = contents(tmp_path)
        assert train.main(list(argv)) == 2
        out, err = capfd.readouterr()
        assert not out
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("train.py: ")
        assert contents(tmp_path) == before, "nothing was written, changed or lost"
        return lines[0]

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("env", "flags", "named"), [
    ("", "", "--env"), ("CartPol-v1", "", "CartPole"), ("no_such_module:Env-v0", "", "no_such_module"),
    *(("CartPole-v1", flags, named) for flags, named in (
        ("--num_worker=2", "--num_workers"), ("--device=cudda", "--device"), ("--train_dir=a_file/runs", "a_file/runs"),
        ("--self_play_past_fraction=0.5", "--self_play_past_fraction"))),
    ("tiny_games:HunterAndPrey", "", "--num_policies=2"),
    *(("tiny_games:HigherWins", f"--num_policies=2 --policy_mapping=tiny_games:{name}", "--policy_mapping")
      for name in ("too_large", "one_too_few", "all_play_first"))])
def test_bad_input_is_refused_with_one_line(refuse: Callable[..., str], tmp_path: Path, env: str, flags: str,
                                            named: str) -> None:
    (tmp_path / "a_file").touch()
    assert named in refuse(*([f"--env={env}"] if env else []), "--serial_mode", "--batch_size=64", *flags.split())


def test_refusal_is_status_2_and_one_line_of_the_real_command(run_dir: Path) -> None:
    before = contents(run_dir.parent)
    outcome = run_train(run_dir.parent, *SMALL, "--train_for_env_steps=1e9", "--encoder_mlp_layers", "32")
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert f"{run_dir} holds a run of another network: encoder_mlp_layers 16 -> 32" in outcome.err
    assert contents(run_dir.parent) == before


@pytest.mark.parametrize("content", ["{", "[1, 2]"])
def test_damaged_settings_are_refused(refuse: Callable[..., str], run_dir: Path, content: str) -> None:
    (run_dir / "config.json").write_text(content)
    assert "config.json" in refuse(f"--train_dir={run_dir.parent}", "--env=CartPole-v1", "--experiment=first")


@pytest.mark.parametrize("behavior", ["resume", "restart", "overwrite"])
def test_too_little_shared_memory_is_refused_and_nothing_is_lost(
        refuse: Callable[..., str], run_dir: Path, behavior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=512))
    assert "/dev/shm" in refuse(f"--train_dir={run_dir.parent}", *SMALL, "--num_epochs=3",
                                f"--restart_behavior={behavior}")
