"""What a run allocates is counted, and refused where it does not fit; what a container leaves of the machine."""

import math
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts import learners

from apex import APEX
from appo import APPO
from config import algorithm_class, make_config
from envs.families import probe
from feed import Batch
from runtime import children, container, memory
from runtime.memory import TABLES_BYTES, count_bytes
from runtime.run_folder import configure
from runtime.user_error import UserError
from shared_buffers import SharedBuffers

ROOT = Path(__file__).parent.parent
LARGE = {"num_workers": 2, "num_envs_per_worker": 32, "rollout": 512, "batch_size": 1024,
         "encoder_mlp_layers": (1000, 1000)}  # megabytes of trajectories, and of each copy of the weights


@pytest.mark.parametrize("settings", [
    {"env": "CartPole-v1"}, {"env": "CartPole-v1", "algo": "impala", "optimizer": "adam", "num_learners": 2},
    {"env": "tiny_games:HigherWins", "num_policies": 2, "self_play_past_fraction": 0.5, "self_play_snapshots": 3},
], ids=str)
def test_what_is_counted_is_what_is_shared(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configure(LARGE | settings)
    info, allocated, share = probe(cfg), [], torch.Tensor.share_memory_
    kinds, devices = [0] * cfg.num_policies, [torch.device("cpu")] * cfg.num_policies
    models = [algorithm_class(cfg.algo)(cfg).make_model(*info.kinds[0]) for _ in kinds]
    monkeypatch.setattr(torch.Tensor, "share_memory_",
                        lambda tensor: (allocated.append(tensor.nbytes), share(tensor))[1])
    SharedBuffers(cfg, info, kinds, models, devices, multiprocessing.get_context("spawn"))
    shared, datasets, replays = count_bytes(cfg, info, kinds, models, devices)
    assert shared - TABLES_BYTES <= sum(allocated) <= shared
    assert sum(allocated) > 8 * TABLES_BYTES
    batch = Batch(memory.trajectory_specs(cfg, *info.kinds[0], 0), cfg.trajectories_per_dataset)
    of_batch = sum(tensor.nbytes for tensor in batch.tensors.values())
    assert (datasets, replays) == (2 * len(cfg.learners) * len(kinds) * of_batch, 0)


def test_a_replay_is_counted_and_the_one_that_is_named_fits(tmp_path: Path) -> None:
    with APEX("CartPole-v1", train_dir=str(tmp_path), serial_mode=True) as apex:
        feed = learners(apex)[0].feed
        counted = feed.algorithm.bytes_of_feed(apex.buffers.specs[0])
        assert counted == sum(tensor.nbytes for tensor in feed.replay.arrays.values())
    with pytest.raises(UserError, match=r"allocates [\d,]+ bytes of memory, [\d,]+ are free; use at most") as error:
        APEX("CartPole-v1", replay_size=100_000_000_000, train_dir=str(tmp_path / "large"))
    assert not (tmp_path / "large").exists()
    _, free = (int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})+", str(error.value)))
    fits = int(str(error.value).rsplit("=", 1)[1])
    cfg = configure({"env": "CartPole-v1", "algo": "apex", "replay_size": fits})
    assert 0.6 * free < algorithm_class("apex")(cfg).bytes_of_feed(apex.buffers.specs[0]) <= free


def test_more_than_the_memory_is_refused_before_anything_is_written(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    make = {"env": "CartPole-v1", "train_dir": str(tmp_path), "serial_mode": True}
    monkeypatch.setattr(memory, "memory_limit", lambda: 2 * TABLES_BYTES)
    with pytest.raises(UserError, match=r", 2,097,152 are free; lower --num_envs_per_worker, --rollout, --batch_size"):
        APPO(**make, **LARGE)
    assert not list(tmp_path.iterdir())
    APPO(**make, num_workers=1, num_envs_per_worker=2, rollout=8, batch_size=16, encoder_mlp_layers=(8,)).close()


# ---- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "cores", "limit"), [
    ({"cpu.max": "150000 100000", "memory.max": "8000"}, 2, 8000), ({"cpu.max": "50000 100000"}, 1, math.inf),
    ({"cpu.max": "max 100000", "memory.max": "max"}, 9, math.inf), ({}, 9, math.inf),
    ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2, math.inf),
    ({"memory/memory.limit_in_bytes": "77"}, 9, 77),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 9, math.inf)], ids=str)
def test_the_limits_of_a_container_are_those_of_its_control_group(
        files: dict[str, str], cores: int, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    monkeypatch.setattr(container, "os", SimpleNamespace(sched_getaffinity=lambda process: range(9)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert (container.cpu_cores(), container.memory_limit()) == (cores, limit)
    assert make_config({"env": "CartPole-v1"}).num_workers == cores


def test_the_limit_of_open_files_is_lifted_as_far_as_the_system_lets(tmp_path: Path) -> None:
    script = ("import resource; from runtime.children import allow_descriptors as allow; "
              "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 200)); allow(30); allow(100); allow(1000); "
              "print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "(200, 200)\n"
    train = f"exec {sys.executable} train.py --env CartPole-v1 --num_workers 1 --device cpu --train_for_env_steps 500"
    done = subprocess.run(["bash", "-c", f"ulimit -Sn 40; {train} --train_dir {tmp_path}"], cwd=ROOT,
                          capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_a_folder_for_temporary_files_must_leave_room_for_the_names_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children.util, "get_temp_dir", lambda: f"/tmp/{'x' * 80}/pymp-12345678")
    with pytest.raises(UserError, match=r"has too long a name .* set TMPDIR=/tmp"):
        children.start_server()
