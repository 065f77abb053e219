"""Several hosts, each a network namespace with files of its own: they find each other, learn, stop and resume."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime.checkpoint import find_checkpoint, load_checkpoint, read_lines

ROOT = Path(__file__).resolve().parent.parent
NAMES = Path("/etc/netns")  # where `ip netns exec` finds the hosts file of a namespace


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


class Hosts:
    """Hosts on one wire. Each calls itself 127.0.1.1, as a Debian does, and has a folder of its own."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.tag = folder, f"h{os.getpid()}"
        self.torchruns: list[subprocess.Popen] = []
        self.started: list[psutil.Process] = []
        run(f"ip netns add {self.tag}")  # the wire
        run(f"ip -n {self.tag} link add wire type bridge")
        run(f"ip -n {self.tag} link set wire up")
        for number in range(size):
            host = self.namespace(number)
            run(f"ip netns add {host}")
            run(f"ip -n {self.tag} link add port{number} type veth peer name eth0 netns {host}")
            run(f"ip -n {self.tag} link set port{number} master wire up")
            run(f"ip -n {host} addr add 192.168.77.{number + 1}/24 dev eth0")
            run(f"ip -n {host} link set eth0 up")
            run(f"ip -n {host} link set lo up")
            (NAMES / host).mkdir(parents=True)
            others = [f"{'127.0.1.1' if other == number else f'192.168.77.{other + 1}'} host{other}"
                      for other in range(size)]
            (NAMES / host / "hosts").write_text("\n".join(["127.0.0.1 localhost", *others, ""]))

    def namespace(self, number: int) -> str:
        return f"{self.tag}_{number}"

    def start(self, size: int, *flags: str) -> None:
        """Start a torchrun on each of the first hosts."""
        for number in range(size):
            train = f"""-m torch.distributed.run --nnodes {size} --node-rank {number} --nproc-per-node 1
                --master-addr host0 train.py --env=CartPole-v1 --device=cpu --report_interval_sec=0.5
                --experiment=run --train_dir={self.folder / str(number)}"""
            script = f'hostname host{number} && exec "$@"'
            command = ["ip", "netns", "exec", self.namespace(number), "unshare", "--uts", "sh", "-c", script, "sh",
                       sys.executable, *train.split(), *flags]
            with (self.folder / f"{number}.txt").open("w") as output:
                self.torchruns.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output))

    def wait_for_rows(self) -> None:
        """Wait until rank 0 has reported training."""
        metrics, deadline = self.folder / "0/run/metrics.jsonl", time.monotonic() + 60
        before = len(read_lines(metrics))
        while not any(row["sgd_steps"] for row in read_lines(metrics)[before:]):
            assert time.monotonic() < deadline, self.output(0)
            time.sleep(0.1)
        self.started = [child for each in self.torchruns for child in psutil.Process(each.pid).children(recursive=True)]

    def output(self, number: int) -> str:
        return (self.folder / f"{number}.txt").read_text()

    def processes(self, number: int) -> list[psutil.Process]:
        """Return all processes of a host."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(number)], capture_output=True, check=True)
        return [psutil.Process(int(pid)) for pid in found.stdout.split()]

    def rank(self, number: int) -> psutil.Process:
        """Return the main process of the rank on a host."""
        torchrun = psutil.Process(self.torchruns[number].pid)
        return next(child for child in torchrun.children() if "train.py" in child.cmdline())

    def end(self, timeout_sec: float = 60, dead: int | None = None) -> list[int]:
        """Wait for the end of all processes; return the statuses of the torchruns.

        dead: a host without power, which removes nothing.
        """
        statuses = [each.wait(timeout_sec) for each in self.torchruns]
        assert not psutil.wait_procs(self.started, timeout=10)[1], "a process is left"
        for number, torchrun in enumerate(self.torchruns):
            left = [*Path(tempfile.gettempdir()).glob(f"rank_*_of_{torchrun.pid}_*")]
            assert not left or number == dead
        return statuses

    def close(self) -> None:
        for number in range(8):
            with contextlib.suppress(subprocess.CalledProcessError, psutil.NoSuchProcess):
                for process in self.processes(number):
                    process.kill()
                run(f"ip netns del {self.namespace(number)}")
                (NAMES / self.namespace(number) / "hosts").unlink()
                (NAMES / self.namespace(number)).rmdir()
        run(f"ip netns del {self.tag}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    try:
        made = Hosts(tmp_path, 3)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    try:
        yield made
    finally:
        made.close()


def test_hosts_learn_cartpole_stop_and_resume_with_another_number_of_them(hosts: Hosts) -> None:
    """Only the first host has files; who resumes elsewhere gets its settings, weights and counts."""
    hosts.start(2, "--stop_at_return=475", "--train_for_seconds=120", "--learning_rate=2e-3")
    hosts.wait_for_rows()
    assert hosts.end(150) == [0, 0], hosts.output(0)
    folder = hosts.folder / "0/run"
    assert json.loads((folder / "summary.json").read_text())["reached_return"][0] >= 475
    assert re.search(r"\d+% wait for host[01]", hosts.output(0))
    assert not (hosts.folder / "1").exists()
    saved = load_checkpoint(find_checkpoint(folder))
    hosts.torchruns.clear()
    hosts.start(3, "--stop_at_return=1000", "--train_for_seconds=inf")
    hosts.wait_for_rows()
    hosts.rank(2).send_signal(signal.SIGTERM)
    assert hosts.end() == [0, 0, 0], hosts.output(0)
    assert f"resumed at env_steps={saved['env_steps']:,} sgd_steps={saved['sgd_steps']:,}" in hosts.output(0)
    again = load_checkpoint(find_checkpoint(folder))
    assert again["sgd_steps"] > saved["sgd_steps"]
    assert again["config"]["learning_rate"] == 2e-3
    assert len([*folder.glob(f"checkpoints/policy_00/checkpoint_{again['sgd_steps']:09}_*")]) == 1


@pytest.mark.parametrize("seed", range(int(os.environ.get("HOST_FAULTS", "0"))))
def test_random_faults_end_all_hosts_with_one_line_that_names_the_place(hosts: Hosts, seed: int) -> None:
    """A fault at any time once all train: HOST_FAULTS=40 python -m pytest tests/test_hosts.py; 20 s each."""
    rng = random.Random(seed)
    size, fault = rng.choice([2, 3]), ("rank", "component", "host", "wire", "SIGTERM")[seed % 5]
    hosts.start(size)
    hosts.wait_for_rows()
    time.sleep(rng.uniform(0.0, 5.0))
    victim = rng.randrange(size)
    role = rng.choice(["rollout_0", "policy_0", "learner"])
    begun = time.monotonic()
    if fault == "rank":
        hosts.rank(victim).kill()
    elif fault == "component":
        next(process for process in hosts.processes(victim) if process.name() == role).kill()
    elif fault == "host":
        for process in hosts.processes(victim):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    elif fault == "wire":
        run(f"ip -n {hosts.tag} link set port{victim} down")
    else:
        hosts.rank(victim).send_signal(signal.SIGTERM)
    statuses = hosts.end(dead=victim if fault == "host" else None)
    said = [[line for line in hosts.output(number).splitlines() if line.startswith("train.py: ")]
            for number in range(size)]
    seconds = time.monotonic() - begun
    print(f"seed {seed}: {fault} {role if fault == 'component' else ''} of host{victim} among {size}, "
          f"{seconds:.1f} s, {statuses}", *said, sep="\n    ")
    assert seconds < (45 if fault == "wire" else 15)
    if fault == "SIGTERM":
        assert statuses == [0] * size
        assert sum(map(len, said)) == 0
        assert hosts.output(0).count("records in") == 2
        return
    dead = {victim} if fault in ("rank", "host") else set()
    for number in set(range(size)) - dead:
        assert statuses[number] == 1
        (line,) = said[number]
        if fault == "wire":  # each side has lost the other
            assert re.search(r"rank \d on host\d is lost, no sign of life since \d\d:\d\d:\d\d; .* resumes from", line)
        elif fault == "component" and number == victim:
            assert "was killed by SIGKILL" in line
        else:
            assert f"rank {victim} on host{victim}" in line
            assert "resumes from" in line
