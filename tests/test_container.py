"""What control groups leave of the machine, in made-up folders of both versions; open files."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import make_config
from runtime import container
from runtime.memory import check_processes
from runtime.user_error import UserError
from shared_buffers import num_components

ROOT = Path(__file__).parent.parent
GB = 10**9


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_limit_of_the_second_version_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/box\n")
    root = tmp_path / "cgroup"
    write(root)
    write(root / "pod", cpu__max="150000 100000", memory__max=str(8 * GB), memory__current=str(7 * GB),
          memory__stat=f"anon 5\ninactive_file {2 * GB}")
    write(root / "pod" / "box", cpu__max="max 100000", memory__max="max", memory__current=str(GB),
          memory__stat="inactive_file 0")
    assert container.cpu_limit(root, own) == 1.5
    assert container.memory_left(root, own) == 3 * GB
    write(root / "pod" / "box", cpu__max="50000 100000", memory__max=str(2 * GB))
    assert container.cpu_limit(root, own) == 0.5
    assert container.memory_left(root, own) == GB
    write(root / "pod" / "box", memory__current=str(3 * GB))
    assert container.memory_left(root, own) == 0


def test_the_first_version(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/box\n3:memory:/box\n1:name=systemd:/box\n")
    root = tmp_path / "cgroup"
    write(root / "cpu,cpuacct" / "box", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write(root / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(root / "memory" / "box", memory__limit_in_bytes=str(4 * GB), memory__usage_in_bytes=str(GB),
          memory__stat=f"inactive_file 7\ntotal_inactive_file {GB // 2}")
    write(root / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes=str(9 * GB))
    assert container.cpu_limit(root, own) == 2.0
    assert container.memory_left(root, own) == 3.5 * GB


@pytest.mark.parametrize("text", ["", "0::/\n"])
def test_without_control_groups_there_is_no_limit(tmp_path: Path, text: str) -> None:
    own = tmp_path / "own"
    own.write_text(text)
    for where in (own, tmp_path / "missing"):
        assert container.cpu_limit(tmp_path, where) == container.memory_left(tmp_path, where) == math.inf


def test_the_default_of_workers_follows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(container, "cpu_limit", lambda: 0.3)
    assert container.cpu_cores() == make_config({"env": "CartPole-v1"}).num_workers == 1
    monkeypatch.setattr(container, "cpu_limit", lambda: math.inf)
    assert container.cpu_cores() == cores


def test_processes_that_do_not_fit_are_refused_before_anything_is_made() -> None:
    cfg = make_config({"env": "CartPole-v1", "num_workers": 20, "num_policies": 2, "policy_workers_per_policy": 3})
    assert [num_components(cfg, count) for count in (1, 2)] == [20 + 4, 20 + 2 * 4]
    check_processes(cfg, 3 * GB)
    with pytest.raises(UserError, match=r"the processes alone need about 2\.7 GB of memory, 1\.0 GB are free"):
        check_processes(cfg, GB)


def test_as_many_open_files_are_allowed_as_the_system_lets() -> None:
    script = ("import resource; from runtime.container import allow_descriptors as allow; "
              "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 200)); print(allow(30), allow(100), allow(1000), "
              "resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "40 100 200 (200, 200)\n"


@pytest.mark.parametrize("limit", ["-Sn 40", "-n 40"])
def test_few_open_files_work_or_are_told_in_one_line(limit: str, tmp_path: Path) -> None:
    train = f"exec {sys.executable} train.py --env CartPole-v1 --num_workers 1 --device cpu --train_for_env_steps 500"
    done = subprocess.run(["bash", "-c", f"ulimit {limit}; {train} --train_dir {tmp_path}"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    if limit == "-Sn 40":
        assert done.returncode == 0, "the limit is the user's own to lift"
    else:
        line = (f"train.py: 116 files must be open at once, the system allows {limit.split()[1]}; enter "
                "`ulimit -n 116` before, or lower --num_workers\n")
        assert (done.returncode, done.stderr) == (2, line)
        assert not list(tmp_path.rglob("checkpoint*"))
