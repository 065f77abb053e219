"""What a container leaves of the machine; limits that the system sets."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import make_config

from runtime import children, container
from runtime.user_error import UserError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("files", "cores"), [
    ({"cpu.max": "150000 100000"}, 2), ({"cpu.max": "50000 100000"}, 1), ({"cpu.max": "max 100000"}, 9), ({}, 9),
    ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 9)], ids=str)
def test_the_cores_of_a_container_are_those_of_its_control_group(
        files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    monkeypatch.setattr(container, "os", SimpleNamespace(sched_getaffinity=lambda process: range(9)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert container.cpu_cores() == cores
    assert make_config({"env": "CartPole-v1"}).num_workers == cores


def test_the_limit_of_open_files_is_lifted_as_far_as_the_system_lets() -> None:
    script = ("import resource; from runtime.children import allow_descriptors as allow; "
              "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 200)); allow(30); allow(100); allow(1000); "
              "print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "(200, 200)\n"


def test_a_folder_for_temporary_files_must_leave_room_for_the_names_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children.util, "get_temp_dir", lambda: f"/tmp/{'x' * 80}/pymp-12345678")
    with pytest.raises(UserError, match=r"has too long a name .* set TMPDIR=/tmp"):
        children.start_server()
