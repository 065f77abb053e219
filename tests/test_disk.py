"""What is on the disk: damaged files are noticed, whole ones found; a disk that cannot be written ends nothing."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import SMALL

from evaluate import main as evaluate
from runtime.checkpoint import (
    BEST,
    FORMAT,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    policy_dir,
    prune_checkpoints,
    read_lines,
    save_checkpoint,
)
from runtime.utils import ComponentError, UserError
from train import main as train
from trainer import APPO

# the thread of TensorBoard's writer prints its error when it ends
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def make(train_dir: Path, **settings: Any) -> APPO:
    return APPO("CartPole-v1", serial_mode=True, train_dir=str(train_dir), experiment="run", **SMALL | settings)


# ---- checkpoints -------------------------------------------------------------------------------------------------

STATE = {"model": {"weight": torch.arange(3000.0) / 7}, "sgd_steps": 1, "env_steps": 2, "optimizer": {
    "state": {0: {"exp_avg": torch.arange(3000.0) / 9}}, "param_groups": [{"lr": 0.1, "fused": None, "params": [0]}]}}


def flip_a_bit(data: bytearray, rng: np.random.Generator) -> None:
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))


def cut_off(data: bytearray, rng: np.random.Generator) -> None:
    del data[rng.integers(len(data)):]


def zero_a_block(data: bytearray, rng: np.random.Generator) -> None:
    begin = 512 * int(rng.integers(len(data) // 512))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))


@pytest.mark.parametrize("damage", [flip_a_bit, cut_off, zero_a_block])
def test_no_damaged_checkpoint_is_loaded_with_other_numbers(tmp_path: Path, damage: Any) -> None:
    """Damage where nothing lies, between the parts of the archive, does not count."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(STATE, path)
    whole, rng, num_refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(100):
        data = bytearray(whole)
        damage(data, rng)
        path.write_bytes(data)
        try:
            loaded = load_checkpoint(path)
        except UserError:
            num_refused += 1
        else:
            torch.testing.assert_close(loaded, STATE | {"format": FORMAT}, rtol=0, atol=0)
    assert num_refused > 50


def test_checkpoints_of_other_versions(tmp_path: Path) -> None:
    """The first format kept a running mean in two parts."""
    path, means = tmp_path / "checkpoint.pt", {"mean": torch.tensor(1e6), "remainder": torch.tensor(0.015)}
    torch.save(STATE | {"format": FORMAT + 1}, path)
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, this program reads {FORMAT}"):
        load_checkpoint(path)
    torch.save(STATE | {"format": 1, "model": {f"returns.{name}": part for name, part in means.items()}}, path)
    (mean,) = load_checkpoint(path)["model"].items()
    assert mean == ("returns.mean", pytest.approx(1e6 + 0.015, abs=1e-8))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Another one's name says when it was saved. A folder, a pipe and other files are none of ours."""
    with make(tmp_path) as appo:
        appo.train(200)
        appo.save()
        appo.train(200)
    folder = policy_dir(tmp_path / "run")
    newest, before, *_ = list_checkpoints(folder)
    data = newest.read_bytes()[:-1000]
    newest.write_bytes(data)
    another, stray = folder / "checkpoint_000090000_00000900000.pt", folder / "checkpoint_zzz.pt"
    for path in (another, stray):
        path.write_bytes(before.read_bytes())
    (folder / "checkpoint_000090001_00000900000.pt").mkdir()
    os.mkfifo(folder / "checkpoint_000090002_00000900000.pt")
    path, state, damaged = load_newest(tmp_path / "run")
    assert (path, damaged) == (before, [another, newest])
    assert evaluate(["--env=CartPole-v1", f"--train_dir={tmp_path}", "--experiment=run", "--episodes=1",
                     "--checkpoint=latest", "--device=cpu"]) == 0
    seen = capsys.readouterr()
    assert f"checkpoint {newest} is damaged, the one before plays" in seen.err
    assert f"playing {before}" in seen.out
    with make(tmp_path) as appo:
        assert appo.env_steps == state["env_steps"]
        appo.train(200)
    assert f"{newest} is damaged and is called {newest.stem}.damaged now" in capsys.readouterr().out
    assert newest.with_suffix(".damaged").read_bytes() == data
    prune_checkpoints(folder, 1)
    assert stray.exists(), "it is not ours"
    (left,) = list_checkpoints(folder)
    left.write_bytes(b"")
    with pytest.raises(UserError, match=r"all its checkpoints are damaged .*; begin anew: train\.py"):
        make(tmp_path)


def test_without_a_whole_checkpoint_a_milestone_is_resumed_or_else_the_best(tmp_path: Path) -> None:
    """The best of an evaluator holds no optimizer."""
    with make(tmp_path, save_milestones_sec=0.1, eval_every_env_steps=500, eval_episodes=1) as appo:
        appo.train(1000)
    folder = policy_dir(tmp_path / "run")
    milestones, best = list_checkpoints(folder, "milestone"), load_checkpoint(folder / BEST)
    for path in list_checkpoints(folder):
        path.write_bytes(b"damaged")
    for number in (load_checkpoint(milestones[0])["sgd_steps"], best["sgd_steps"]):
        assert evaluate(["--env=CartPole-v1", f"--train_dir={tmp_path}", "--experiment=run", "--episodes=1",
                         "--checkpoint=latest", "--device=cpu"]) == 0
        with make(tmp_path, eval_every_env_steps=0) as appo:
            assert appo.versions == [number]
            appo.train(100)
        assert load_checkpoint(find_checkpoint(tmp_path / "run"))["sgd_steps"] > number
        for path in [*list_checkpoints(folder, "milestone"), *list_checkpoints(folder)]:
            path.unlink()


def test_a_run_with_nothing_to_resume_is_laid_aside(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with make(tmp_path) as appo:
        appo.train(200)
    for path in policy_dir(tmp_path / "run").glob("*.pt"):
        path.unlink()
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    with make(tmp_path) as appo:
        assert appo.env_steps == 0
    assert f"nothing to resume in {tmp_path / 'run'}, which is called run_old now\n" in capsys.readouterr().out
    assert read_lines(tmp_path / "run_old" / "metrics.jsonl") == rows != []


# ---- a folder that cannot be written -----------------------------------------------------------------------------


def test_training_goes_on_while_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with make(tmp_path) as appo:
        appo.train(200)
        appo.save()
        saved = find_checkpoint(run_dir)
        run_dir.rename(elsewhere)
        run_dir.write_text("in the way")
        appo.train(200)
        for _ in range(2):
            with pytest.raises(ComponentError, match=r"what was learned last is not in .*policy 0: Not a directory"):
                appo.save()
        appo.train(200)
        lines = capsys.readouterr().out.splitlines()
        assert sum("NOT SAVED: Not a directory" in line for line in lines) > 2
        run_dir.unlink()
        elsewhere.rename(run_dir)
        assert find_checkpoint(run_dir) == saved, "what was saved before is there"
        appo.train(200)
        appo.save()
        assert load_checkpoint(find_checkpoint(run_dir))["sgd_steps"] == appo.versions[0]
    steps = [row["env_steps"] for row in read_lines(run_dir / "metrics.jsonl")]
    assert steps == sorted(steps)
    assert steps[0] < 200
    assert steps[-1] > 600


@pytest.mark.parametrize("what", ["run", "run/checkpoints", "run/config.json", "run/starts.json"])
def test_what_is_removed_is_made_anew_and_can_be_resumed(tmp_path: Path, what: str) -> None:
    with make(tmp_path) as appo:
        appo.train(200)
        (tmp_path / what).rename(tmp_path / "gone")
        appo.train(200)
        assert (tmp_path / what).exists(), "with the next report: the run may be killed then"
    with make(tmp_path) as appo:
        assert appo.env_steps >= 400
        assert appo.buffers.start == 1


# ---- trust -------------------------------------------------------------------------------------------------------


def test_code_that_only_a_run_folder_names_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with make(tmp_path) as appo:
        appo.train(100)
    path = tmp_path / "run" / "config.json"
    (tmp_path / "evil.py").write_text("raise RuntimeError('it was imported')\n")
    where = ["--env=CartPole-v1", f"--train_dir={tmp_path}", "--experiment=run"]
    for flag in ("algo", "model", "encoder", "core", "policy_mapping"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {flag: "evil:f"}))
        for command in (train, evaluate):
            assert command(where) == 2
            line = capsys.readouterr().err
            assert f"asks to import --{flag}=evil:f; add --trust_run if you know what that code does" in line
        with pytest.raises(RuntimeError, match="it was imported"):
            evaluate([*where, "--trust_run"])
        path.write_text(json.dumps(json.loads(path.read_text()) | {flag: "appo" if flag == "algo" else ""}))


def test_a_full_disk_is_told_wherever_it_ends(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(250_000)}, "sgd_steps": 0, "env_steps": 0}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (1, 1000, 5000, 100_000, 500_000, 999_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save_checkpoint(state, tmp_path / "checkpoint.pt")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
