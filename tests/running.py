"""One start of `train.py`, as a user types it: watched while it runs, and checked to leave nothing behind."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil

from runtime.checkpoint import find_checkpoint, load_checkpoint
from runtime.guard import segments_of

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SEC = 60.0  # stands for "does not hang", also on a busy machine
SMALL = ("--num_workers=1", "--num_envs_per_worker=4", "--rollout=16", "--batch_size=128", "--num_batches_per_epoch=1",
         "--num_epochs=8", "--encoder_mlp_layers=16", "--device=cpu", "--report_interval_sec=0.2",
         "--stall_timeout_sec=30", "--experiment=run")
CARTPOLE = ("--env=CartPole-v1", *SMALL)
ENDLESS = ("--train_for_env_steps=1e9", "--num_epochs=64")  # nearly always in the middle of a dataset
STALL_SEC = 4.0  # after which a component of these is taken for hung
TELLING = ("--env=checked:Telling", "--num_workers=2", "--num_envs_per_worker=8", "--rollout=16", "--batch_size=256",
           "--encoder_mlp_layers=16", "--normalize_input=False", "--learning_rate=1e-5", "--device=cpu",
           "--eval_every_env_steps=3000", "--eval_episodes=2", f"--stall_timeout_sec={STALL_SEC}", "--save_every_sec=2",
           "--max_restarts=1000000", "--report_interval_sec=0.2", "--train_for_env_steps=1e12", "--experiment=run")
CHECKED = ("--algo=checked:Checked", "--policy_workers_per_policy=2")


def wait_until(condition: Callable[[], Any], seconds: float = DEADLINE_SEC) -> bool:
    """Wait until something is so; return whether it is."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def newest_state(run_dir: Path) -> dict[str, Any]:
    return load_checkpoint(find_checkpoint(run_dir))


def shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("*")}


class Run:
    """A start of a command, in a session and with a folder for temporary files of its own; it says all into two files.

    As a context manager it waits for the end and asserts that nothing is left; then there are `status`, `out`, `err`.
    """

    def __init__(self, folder: Path, *flags: str, command: str = "train.py") -> None:
        self.folder, self.run_dir, self.begun = folder, folder / "run", time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="run-"))  # with a short name: sockets lie there
        self.shm_before = shared_memory()
        with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
            self.process = psutil.Popen(
                [sys.executable, ROOT / command, f"--train_dir={folder}", *flags], cwd=folder, stdout=out,
                stderr=err, stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {
                    "PYTHONPATH": f"{folder}:{ROOT / 'tests'}", "TMPDIR": str(self.temporary)})

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        try:
            if kind is None:
                self.status = self.process.wait(DEADLINE_SEC)
                assert wait_until(lambda: not self.left()), self.left()
                self.out, self.err = ((self.folder / name).read_text() for name in ("out.txt", "err.txt"))
        finally:
            self.close()

    def close(self) -> None:
        """Kill what is left, and remove its temporary files."""
        self.kill()
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def kill(self) -> None:
        """Kill all its processes but the guard, which cleans up."""
        for member in self.members():
            with contextlib.suppress(psutil.Error):
                if "guard.py" not in " ".join(member.cmdline()):
                    member.kill()

    def read(self, name: str) -> str:
        """Return what this start has written into a file of the run; "": nothing yet."""
        path = self.run_dir / name
        with contextlib.suppress(OSError):
            return path.read_text(errors="replace") if path.stat().st_mtime > self.begun else ""
        return ""

    def summary(self) -> dict[str, Any]:
        """Return what it has reported last."""
        return json.loads(self.read("summary.json") or "{}")

    def until(self, condition: Callable[[], Any], seconds: float = DEADLINE_SEC) -> bool:
        """Wait until something is so; return whether it came before the time was over and before the run's end."""
        wait_until(lambda: condition() or self.process.poll() is not None, seconds)
        return bool(condition())

    def learns(self) -> bool:
        """Wait until it has learned more, twice: the first may be what was not reported yet; return whether it has."""
        for before in (self.summary().get("sgd_steps", 0) for _ in range(2)):
            grew = self.until(lambda before=before: self.summary().get("sgd_steps", 0) > before)
        return grew

    def blamed(self, begin: int = 0) -> set[str]:
        """Return the components that were replaced, by what the log says from there on."""
        line = r"^\S+ \S+ (\w+) (?:was killed|left|hangs|failed).*; (?:it is replaced|all processes begin again) \("
        return set(re.findall(line, self.read("log.txt")[begin:], re.MULTILINE))

    def members(self) -> list[psutil.Process]:
        """Return all processes that come from this start, also those that outlived the one that started them."""
        return [process for process in psutil.process_iter(["environ"])
                if (process.info["environ"] or {}).get("TMPDIR") == str(self.temporary)]  # a zombie has none

    def components(self) -> dict[str, psutil.Process]:
        """Return the processes of the components by the names that the log gives them."""
        found = {}
        for member in self.members():
            with contextlib.suppress(psutil.Error):
                if re.match(r"(rollout|learner|policy|evaluator)", member.name()):
                    found[re.sub(r"^(rollout|policy)_", r"\1_worker_", member.name())] = member
        return found

    def server(self) -> psutil.Process:
        """Return the process that components are forked from."""
        return next(child for child in self.process.children() if "forkserver" in " ".join(child.cmdline()))

    def left(self) -> list[str]:
        """Return what there is of its processes, of shared memory that nobody uses, and of unfinished files."""
        shm = shared_memory() - self.shm_before - segments_of(set(psutil.pids()))
        files = [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor")]  # its cache
        unfinished = [] if self.process.poll() == -SIGKILL else self.run_dir.rglob("*.tmp")
        return [f"process {member.pid}" for member in self.members()] + [*shm, *map(str, [*files, *unfinished])]


def run_train(folder: Path, *flags: str) -> Run:
    """Run the command to its end."""
    with Run(folder, *flags) as run:
        return run


def check_saved(run: Run) -> None:
    """Check that it has ended in order, with all that it has learned."""
    assert (run.status, run.err) == (0, "")
    state, summary = newest_state(run.run_dir), run.summary()
    assert state["sgd_steps"] == summary["sgd_steps"] > 0
    assert 0 < state["env_steps"] <= summary["env_steps"]
