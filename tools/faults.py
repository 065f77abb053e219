"""What `tools/chaos.py` does to runs: kills, freezes, full disks, environments that misbehave, damaged files."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from runtime.checkpoint import list_checkpoints, policy_dir
from runtime.files import read_lines
from runtime.records import read_summary

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SEC = 60.0  # then it hangs
STALL_SEC = 4.0
FLAGS = ("--env=checked:Telling", "--num_workers=2", "--num_envs_per_worker=8", "--rollout=16", "--batch_size=256",
         "--encoder_mlp_layers=16", "--device=cpu", "--report_interval_sec=0.2", "--normalize_input=False",
         "--eval_every_env_steps=3000", "--eval_episodes=2", f"--stall_timeout_sec={STALL_SEC}",
         "--max_restarts=1000000", "--train_for_env_steps=1e12", "--save_every_sec=2", "--learning_rate=1e-5")
CHECKED = ("--algo=checked:Checked", "--policy_workers_per_policy=2")
MODES = {
    "feed-forward": CHECKED,
    "recurrent": (*CHECKED, "--use_rnn", "--rnn_size=16"),
    "synchronous": (*CHECKED, "--async_rl=False", "--num_batches_per_epoch=1"),
    "population": (*CHECKED, "--num_policies=2", "--with_pbt", "--pbt_period_env_steps=5000",
                   "--pbt_start_mutation=5000"),
    "replay": ("--algo=APEX", "--replay_size=20000", "--replay_warmup=1024"),
}


class Job:
    """One run of train.py, in a session and with a folder for temporary files of its own."""

    def __init__(self, folder: Path, mode: str, seed: int) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))  # with a short name: sockets lie there
        (folder / "fault").unlink(missing_ok=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(self.temporary)}
        self.num_components, self.has_learned = 5, False  # at least so many
        self.output = (folder / "output.txt").open("a")
        self.log_begin, self.log_before = len(self.read_log()), self.log_number()
        self.shm_before = set(os.listdir("/dev/shm"))
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *FLAGS, *MODES[mode], f"--seed={seed}", f"--train_dir={folder}",
             "--experiment=run"], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=self.output,
            stderr=self.output, start_new_session=True)
        self.tree = psutil.Process(self.process.pid)

    def read_log(self) -> str:
        with contextlib.suppress(OSError):
            return (self.run_dir / "log.txt").read_text(errors="replace")
        return ""

    def read_new_log(self) -> str:
        """Return what this start has written: at the end of the log, or in a new one if the run was laid aside."""
        return self.read_log()[self.log_begin if self.log_number() == self.log_before else 0 :]

    def log_number(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run_dir / "log.txt").stat().st_ino
        return 0

    def sgd_steps(self) -> int:
        return read_summary(self.run_dir).get("sgd_steps", -1)

    def env_steps(self) -> tuple[int, int]:
        """Return those sampled, and those of them trained on."""
        for row in reversed(read_lines(self.run_dir / "metrics.jsonl")):
            parts = row.get("policies", [row])
            if all(part.get("env_steps_trained") is not None for part in parts):
                return row["env_steps"], sum(part["env_steps_trained"] for part in parts)
        return 0, 0

    def members(self) -> list[psutil.Process]:
        """Return the processes of the run, dead ones excepted."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [each for each in [self.tree, *self.tree.children(recursive=True)] if is_alive(each)]
        return []

    def components(self) -> dict[str, int]:
        """Return the numbers of the components' processes by their names."""
        found = {}
        for member in self.members():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{member.pid}/comm").read_text().strip()
                if re.match(r"(rollout|learner|policy|evaluator)", name):
                    found[re.sub(r"^(rollout|policy)_", r"\1_worker_", name)] = member.pid
        return found

    def server(self) -> psutil.Process:
        """Return the server that the components are forked from."""
        return next(child for child in self.tree.children() if "forkserver" in " ".join(child.cmdline()))

    def usage(self) -> tuple[int, int, int]:
        """Return descriptors, threads and megabytes of the supervisor."""
        return self.tree.num_fds(), self.tree.num_threads(), self.tree.memory_info().rss >> 20

    def wait(self, condition: Callable[[], Any], seconds: float = DEADLINE_SEC) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self.process.poll() is not None and not condition()):
                return False
            time.sleep(0.02)
        return True

    def wait_for_learning(self) -> bool:
        """Wait until it learns more than it has learned now."""
        if not self.has_learned:  # the summary is of an earlier start
            self.has_learned = self.wait(lambda: "first SGD step" in self.read_new_log())
            return self.has_learned
        before = self.sgd_steps()
        return self.wait(lambda: self.sgd_steps() > before)

    def blamed(self, begin: int) -> set[str]:
        """Return the components that were replaced, by what the log says from there on."""
        line = r"^\S+ \S+ (\w+) (?:was killed|left|hangs|failed).*; it is replaced \("
        return set(re.findall(line, self.read_log()[begin:], re.MULTILINE))

    def end(self) -> None:
        """Wait for the end of the run."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEADLINE_SEC)

    def leaks(self, members: Sequence[psutil.Process]) -> list[str]:
        """Tell what is left, now that it has ended, of its processes, shared memory and temporary files."""
        def left() -> list[str]:
            shm = {name for name in set(os.listdir("/dev/shm")) - self.shm_before
                   if any(str(member.pid) in name for member in members)}
            return [*(f"process {member.pid}" for member in members if is_alive(member)), *sorted(shm),
                    *(name for name in os.listdir(self.temporary) if not name.startswith("torchinductor"))]  # its cache

        deadline = time.monotonic() + 10
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
        found = left()
        shutil.rmtree(self.temporary, ignore_errors=True)
        return found


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# ---- faults that a run must survive: each returns whom the run should blame ------------------------------------------


def choose(job: Job, rng: random.Random) -> tuple[str, int]:
    components = job.components()
    name = rng.choice(sorted(components))
    return name, components[name]


def kill_component(job: Job, rng: random.Random) -> str:
    name, process = choose(job, rng)
    os.kill(process, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS]))
    return name


def freeze_component(job: Job, rng: random.Random) -> str:
    name, process = choose(job, rng)
    os.kill(process, signal.SIGSTOP)
    return name


def freeze_briefly(job: Job, rng: random.Random) -> str:
    _, process = choose(job, rng)
    os.kill(process, signal.SIGSTOP)
    time.sleep(rng.uniform(0, STALL_SEC / 2))
    os.kill(process, signal.SIGCONT)
    return ""


def freeze_all(job: Job, rng: random.Random) -> str:
    members = job.members()
    for member in members:
        member.suspend()
    time.sleep(STALL_SEC + rng.uniform(0, 2))
    for member in members:
        member.resume()
    return ""


def spoil_environment(job: Job, rng: random.Random) -> str:
    components = {process: name for name, process in job.components().items()}
    what = rng.choice(["raise", "hang", "leave", "crash", "hold the interpreter's lock"])
    (job.folder / "new").write_text(what)
    (job.folder / "new").rename(job.folder / "fault")
    job.wait(lambda: list(job.folder.glob("fault.*")))
    taken = [int(path.suffix[1:]) for path in job.folder.glob("fault.*")]
    for path in job.folder.glob("fault.*"):
        path.unlink()
    return components[taken[0]] if taken else "an environment"


def kill_server(job: Job, rng: random.Random) -> str:
    job.server().kill()
    return "*"  # all die with it


def freeze_server(job: Job, rng: random.Random) -> str:
    job.server().suspend()
    return kill_component(job, rng)


def fill_disk(job: Job, rng: random.Random) -> str:
    members = [member.pid for member in job.members()]
    for size in (rng.choice([0, 100, 5000]), resource.RLIM_INFINITY):
        for process in members:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        time.sleep(rng.uniform(0.5, 3))
    return ""


def remove_folder(job: Job, rng: random.Random) -> str:
    shutil.rmtree(job.run_dir, ignore_errors=True)
    return ""


def tear_lines(job: Job, rng: random.Random) -> str:
    for name in ("metrics.jsonl", "population.jsonl"):
        if (job.run_dir / name).exists():
            with (job.run_dir / name).open("a") as file:
                file.write('{"env_steps": 12')
    return ""


SURVIVED = {"component killed": (kill_component, 8), "component frozen": (freeze_component, 3),
            "component frozen briefly": (freeze_briefly, 2), "all frozen, then woken": (freeze_all, 1),
            "environment raises, hangs, leaves, crashes": (spoil_environment, 4),
            "fork server killed": (kill_server, 1), "fork server frozen, then a component killed": (freeze_server, 1),
            "disk full for a while": (fill_disk, 1), "run folder removed": (remove_folder, 1),
            "lines torn while training": (tear_lines, 1)}


# ---- faults that end a run, and what is done to its folder before it is resumed --------------------------------------


def send(*numbers: int) -> Callable[[Job, random.Random], bool]:
    """Make a fault that sends a signal to the supervisor; it returns whether the run ends in order."""
    def fault(job: Job, rng: random.Random) -> bool:
        number = rng.choice(numbers)
        rng.choice([os.kill, os.killpg])(job.process.pid, number)
        return number != signal.SIGKILL
    return fault


def kill_tree(job: Job, rng: random.Random) -> bool:
    for member in job.members():
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return False


def kill_while_lock_is_held(job: Job, rng: random.Random) -> bool:
    (job.folder / "new").write_text("hold the interpreter's lock")
    (job.folder / "new").rename(job.folder / "fault")
    job.wait(lambda: list(job.folder.glob("fault.*")))
    for path in job.folder.glob("fault*"):
        path.unlink()
    job.process.kill()
    return False


ENDING = {"SIGTERM, SIGINT or SIGHUP": send(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
          "supervisor killed": send(signal.SIGKILL), "whole tree killed": kill_tree,
          "supervisor killed, an environment holds the lock": kill_while_lock_is_held}


def damage_checkpoint(job: Job, rng: random.Random) -> Path | None:
    """Damage the newest checkpoint, if there is another; return it."""
    checkpoints = list_checkpoints(policy_dir(job.run_dir))
    if len(checkpoints) < 2:
        return None
    newest = checkpoints[0]
    data = bytearray(newest.read_bytes())
    place = rng.randrange(len(data))
    how = rng.choice(["flip", "cut off", "zero", "empty"])
    if how == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif how == "zero":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    else:
        del data[place if how == "cut off" else 0 :]
    newest.write_bytes(data)
    return newest
