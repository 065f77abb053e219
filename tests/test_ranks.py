"""Tests of several ranks: their learners, in processes of their own, are one; whole systems under torchrun."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rig import Rig
from torch import Tensor
from torch.distributed import TCPStore

from algorithm import gather_sums
from config import configure
from learner import training_state
from runtime.checkpoint import find_checkpoint, load_checkpoint, read_lines
from runtime.processes import start_server
from runtime.several import Ranks, from_rank_0, join_ranks, open_store, tell_settings
from runtime.utils import SIGNALS, take_share_of_cores

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    with start_server().Pool(4, signal.pthread_sigmask, (signal.SIG_UNBLOCK, SIGNALS)) as pool:
        yield pool


def on_ranks(pool: Pool, size: int, act: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what act(rank, *args) returns in each of so many ranks."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return pool.starmap(as_rank, [(rank, size, server.port, act, args) for rank in range(size)], chunksize=1)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "localhost"}


def as_rank(rank: int, size: int, port: int, act: Callable[..., Any], args: tuple) -> Any:
    os.environ |= environment(rank, size, port)
    torch.set_num_threads(1)
    open_store.cache_clear()  # each group of ranks has a store of its own
    try:
        return act(rank, *args)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# ---- learners ----------------------------------------------------------------------------------------------------


def digest(rig: Rig) -> str:
    """Sum up the weights and the optimizer's moments."""
    state = training_state(rig.learner)
    moments = [tensor for of_one in state["optimizer"]["state"].values() for tensor in of_one.values()]
    flat = torch.cat([tensor.double().flatten() for tensor in (*state["model"].values(), *moments)])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def train_on_own_data(rank: int, empty: tuple[int, int], settings: dict[str, Any]) -> tuple[int, list[tuple]]:
    """Train on three datasets; return how many rows were valid, and what all ranks must have in common.

    empty: the rank, and the number of its dataset, without a valid row.
    """
    rig, seen, valid, messages = Rig(**settings), [], 0, []
    reducer = rig.learner.reducer
    meet = reducer.meet
    reducer.meet = lambda *args: messages.append(args) or meet(*args)
    for dataset in range(3):
        rig.buffers.env_steps[0] += 1000 + rank
        rig.buffers.policy_steps[0] += 1000 + rank
        own = rig.dataset(seed=100 * rank + 10 * dataset)
        if (rank, dataset) == empty:
            own.tensors["valid"].fill_(False)
        valid += int(own.tensors["valid"].sum())
        rig.learner.train_on_dataset(own)
        weights, state = rig.shared.weights, rig.learner
        snapshots = tuple(weights.version_of(number) for number in range(weights.num_snapshots))
        seen.append((digest(rig), state.sgd_steps, state.learning_rate, state.decisions_trained, int(state.sampled[0]),
                     snapshots, len(messages)))
    return valid, seen


@pytest.mark.parametrize(("size", "empty", "settings"), [
    (2, (1, 1), {"num_epochs": 2, "num_batches_per_epoch": 2, "lr_schedule": "kl_adaptive", "lr_adaptive_max": 1e-2,
                 "lr_schedule_kl_threshold": 1e-4}),
    (2, (0, 0), {"with_vtrace": False, "num_epochs": 2, "num_batches_per_epoch": 2, "lr_schedule": "linear_decay",
                 "train_for_env_steps": 100_000}),
    (4, (0, 2), {"use_rnn": True, "rnn_size": 8, "algo": "impala", "self_play_past_fraction": 0.5,
                 "self_play_snapshot_every_env_steps": 3500}),
], ids=["kl_adaptive", "linear_decay", "self_play"])
def test_after_every_dataset_all_ranks_are_the_same(processes: Pool, size: int, empty: tuple[int, int],
                                                    settings: dict[str, Any]) -> None:
    valid, ranks = zip(*on_ranks(processes, size, train_on_own_data, empty, settings), strict=True)
    assert len(set(valid)) > 1
    assert all(rank == ranks[0] for rank in ranks)
    hashes, steps, rates, decisions, sampled, snapshots, messages = zip(*ranks[0], strict=True)
    assert len(set(hashes)) == 3
    assert len(set(rates)) == (1 if "use_rnn" in settings else 3)
    per_dataset = settings.get("num_epochs", 1) * settings.get("num_batches_per_epoch", 1)
    assert steps == (per_dataset, 2 * per_dataset, 3 * per_dataset)
    of_dataset = 1 + 2 * per_dataset if settings.get("with_vtrace", True) else 2 + per_dataset
    assert messages == tuple(n * of_dataset for n in (1, 2, 3)), "one a dataset, two an SGD step; with GAE two and one"
    assert sampled == tuple(n * sum(1000 + rank for rank in range(size)) for n in (1, 2, 3))
    assert decisions[-1] == sum(valid)
    if "use_rnn" in settings:  # due at 0, 3500 and 7000 decisions of all ranks
        assert snapshots == ((0, 1), (0, 1, 2), (0, 1, 2, 3))


def exact(rig: Rig, data: dict[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of a minibatch over all ranks, and statistics."""
    model, reducer = rig.learner.model.to(dtype), rig.learner.reducer
    for part in (*model.normalizers, model.returns):
        part.double()
    model.arithmetic = model.normalizers[0].precision = dtype
    data = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in data.items()}
    columns = (data[name].T for name in ("rewards", "terminated", "truncated", "valid"))
    own = model.returns.summarize(*columns, 0.99), *model.summarize({"obs": data["obs/obs"].flatten(0, 1)})
    of_returns, *of_obs = reducer.gather(*own)
    model.returns.update(of_returns)
    model.update_normalizers(of_obs)
    float_ = Tensor.float
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(Tensor, "float", Tensor.double if dtype == torch.float64 else float_)  # the model converts to it
        data |= gather_sums(reducer, data, [slice(None)])[0]
        _, stats = rig.gradients(data)
    stats["grad_norm"] = reducer.step(torch.optim.SGD(model.parameters(), 0.0), float("inf"), stats)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, stats


def own_half(rig: Rig, rank: int, *, empty: bool) -> dict[str, Tensor]:
    data = rig.minibatch(seed=rank, end=0.1 + 0.2 * rank)
    if empty and rank == 1:
        data["valid"].fill_(False)
    return data


def gradients_of_own_half(rank: int, settings: dict[str, Any], dtype: torch.dtype,
                          empty: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rig = Rig(**settings)
    return exact(rig, own_half(rig, rank, empty=empty), dtype)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("settings", [
    {}, {"kl_loss_coeff": 0.5, "exploration_loss": "symmetric_kl"}, {"with_vtrace": False}, {"algo": "impala"},
    {"algo": "a3c", "normalize_returns": False}], ids=str)
def test_gradients_are_those_of_one_learner_on_the_joint_batch(processes: Pool, settings: dict[str, Any], empty: bool,
                                                               dtype: torch.dtype, precision: float) -> None:
    ranks = on_ranks(processes, 2, gradients_of_own_half, settings, dtype, empty)
    rig = Rig(**settings)
    halves = [own_half(rig, rank, empty=empty) for rank in range(2)]
    joint = exact(rig, {name: torch.cat([half[name] for half in halves]) for name in halves[0]}, dtype)
    ratios = {"ratio_min", "ratio_max"}  # of each rank's own rows
    for grads, stats in ranks:
        for name, grad in grads.items():
            error = (grad - joint[0][name]).abs().max()
            assert error <= precision * joint[0][name].abs().max(), name
        torch.testing.assert_close({name: stat for name, stat in stats.items() if name not in ratios},
                                   {name: stat for name, stat in joint[1].items() if name not in ratios},
                                   rtol=100 * precision, atol=precision)


def stop_in_the_middle(rank: int) -> tuple[int, int, str]:
    """Train on a dataset of 12 SGD steps, and on another one; rank 1 is told to stop in the third step."""
    rig = Rig(num_epochs=6, num_batches_per_epoch=2)
    rig.before_each_sgd_step(lambda data: rank == 1 and rig.learner.sgd_steps == 2 and rig.buffers.stopping.fill_(True))
    return rig.train(rank)["sgd_steps"], rig.train(10 + rank)["sgd_steps"], digest(rig)


def test_a_rank_that_stops_within_a_dataset_takes_the_same_steps_as_all(processes: Pool) -> None:
    ranks = on_ranks(processes, 3, stop_in_the_middle)
    assert ranks[0][:2] == (3, 4), "this step, and one of the next dataset"
    assert ranks == [ranks[0]] * 3


# ---- whole systems -----------------------------------------------------------------------------------------------


class Run:
    """Two ranks that train CartPole; whatever becomes of them, they leave nothing behind."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py",
                   "--env=CartPole-v1", "--device=cpu", "--report_interval_sec=0.5", "--train_for_seconds=300"]
        self.folder, self.torchrun = folder / "two", subprocess.Popen(
            [*command, f"--train_dir={folder}", "--experiment=two", *flags], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.processes: list[psutil.Process] = []

    def wait_for_rows(self) -> None:
        """Wait until new SGD steps are written; all processes are there then."""
        deadline, metrics = time.monotonic() + 300, self.folder / "metrics.jsonl"
        before = max((row["sgd_steps"] for row in read_lines(metrics)), default=0)
        while not any(row["sgd_steps"] > before for row in read_lines(metrics)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self.processes = psutil.Process(self.torchrun.pid).children(recursive=True)
        assert len(self.temporary_folders()) == 1

    def temporary_folders(self) -> list[Path]:
        return [*Path(tempfile.gettempdir()).glob(f"rank_*_of_{self.torchrun.pid}_*")]

    def end(self) -> str:
        """Wait for the end of all processes; return what was printed."""
        try:
            output = self.torchrun.communicate(timeout=60)[0]
            left = psutil.wait_procs(self.processes, timeout=20)[1]
        finally:
            for process in (self.torchrun, *self.processes):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
        assert not left
        assert not self.temporary_folders(), "its output has ended, and so has the guard"
        return output

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


def test_two_ranks_end_at_the_same_step_when_stopped_and_go_on_together(tmp_path: Path) -> None:
    """Ctrl-C reaches torchrun, which passes it on. What is resumed ends with torchrun."""
    run = Run(tmp_path, "--eval_every_env_steps=1_000_000_000", "--eval_episodes=3")
    run.wait_for_rows()
    run.torchrun.send_signal(signal.SIGINT)
    output = run.end()
    assert "the ranks are apart" not in output
    assert "failed" not in output, output
    assert "did not" not in output, output
    assert output.count("first SGD step") == 1, "rank 0 alone speaks"
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    saved = load_checkpoint(find_checkpoint(run.folder))
    assert saved["sgd_steps"] == run.summary()["sgd_steps"]
    run = Run(tmp_path)
    run.wait_for_rows()
    run.torchrun.kill()
    run.end()
    resumed = f"resumed at env_steps={saved['env_steps']:,} sgd_steps={saved['sgd_steps']:,}"
    assert resumed in (run.folder / "log.txt").read_text()
    assert run.summary()["sgd_steps"] > saved["sgd_steps"]


def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.wait_for_rows()
    rank_1 = next(process for process in psutil.Process(run.torchrun.pid).children()
                  if process.environ()["RANK"] == "1")
    rank_1.kill()
    output = run.end()
    assert run.torchrun.returncode != 0
    assert f"train.py: rank 1 on {socket.gethostname()} is lost, no sign of life since " in output
    assert run.summary()["sgd_steps"] > 0


def begin(rank: int) -> tuple[Any, ...]:
    """Take over settings, and bytes that are more than the store takes at once."""
    prefix, given = join_ranks({"env": "CartPole-v1", "num_workers": rank + 1} | (
        {"algo": "IMPALA", "learning_rate": 3e-3} if rank == 0 else {"learning_rate": 1e-3}))
    cfg = configure(given)
    tell_settings(prefix, vars(cfg))
    many = from_rank_0("many", bytes(range(250)) * 40_000 if rank == 0 else b"")
    return cfg.algo, cfg.learning_rate, cfg.stop_at_return, cfg.num_workers, hashlib.sha256(many).hexdigest()


def test_the_settings_of_rank_0_and_large_files_reach_all(processes: Pool) -> None:
    ranks = on_ranks(processes, 2, begin)
    many = hashlib.sha256(bytes(range(250)) * 40_000).hexdigest()
    assert ranks == [("impala", 3e-3, float("inf"), rank + 1, many) for rank in range(2)]


@pytest.mark.parametrize(("ages", "store_age", "failure", "expected"), [
    ((1, 1, 1), 1, "", ""),
    ((1, 40, 35), 1, "", "rank 1 on b is lost, no sign of life since "),
    ((33, 33, 33), 32, "", "rank 0 on a is lost, no sign of life since "),  # where the store is
    ((70, 71, 99), 40, "", "rank 2 on c is lost, no sign of life since "),  # before the store was lost
    ((1, 1, 1), 1, "rank 2 on c has failed: learner was killed", "rank 2 on c has failed: learner was killed"),
])
def test_who_is_lost(ages: tuple[int, ...], store_age: int, failure: str, expected: str) -> None:
    """ages: seconds since each rank, or the store, was heard last."""
    now, ranks = time.monotonic(), Ranks.__new__(Ranks)
    ranks.answered_at = now - store_age
    ranks.heard = [({"name": name} | ({"failure": failure} if failure and age == 1 else {}), now - age)
                   for name, age in zip(("rank 0 on a", "rank 1 on b", "rank 2 on c"), ages, strict=True)]
    found = ranks.find_lost(30.0)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[set[int]] = []
    monkeypatch.setattr("runtime.utils.CORES", [0, 1, 2, 5, 7])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(set(cores)))
    for rank in range(2):
        for name, value in environment(rank, 2, 1).items():
            monkeypatch.setenv(name, value)
        take_share_of_cores()
    assert taken == [{0, 1}, {2, 5}]
