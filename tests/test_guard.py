"""Whatever environments do, a run can be stopped, and nothing of it is left when it was killed."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_train import ENDLESS, SMALL, TRAIN_PY, newest_state, read_summary, run_train, wait_until

from runtime import guard

STUBBORN = '''
import ctypes, multiprocessing, os, signal, subprocess, time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv


class Leaves(CartPoleEnv):
    """Starts a program, and never ends it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.program = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL)
        with open("programs", "a") as file:
            file.write(f"{self.program.pid}\\n")


class Starts(Leaves):
    """Starts a child of multiprocessing, too, and ends both."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        self.child.start()

    def close(self):
        for started in self.child, self.program:
            started.terminate()  # they do not handle it as their parent does
        assert (self.child.join(20), self.child.exitcode, self.program.wait(20)) == (None, -15, -15)


class Holds(Starts):
    """Keeps the interpreter's lock for ever, in the third episode."""
    resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        if self.resets > 3:
            Path("holds").touch()
            ctypes.PyDLL(None).sleep(1000)
        return super().reset(**kwargs)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    return tmp_path


def programs(folder: Path) -> list[int]:
    """Return the programs of environments that have not ended."""
    written = (folder / "programs").read_text().split() if (folder / "programs").exists() else []
    return [process.pid for process in psutil.process_iter()
            if str(process.pid) in written and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the run a folder for temporary files; with a short name, since sockets lie there."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.mark.parametrize("mode", ["--async_rl", "--serial_mode"])
def test_a_run_of_stubborn_environments_is_stopped_in_order(folder: Path, temporary: Path, mode: str) -> None:
    outcome = run_train(folder, "--env=stubborn:Starts", *SMALL[1:], *ENDLESS, mode,
                        disturb=lambda process: process.send_signal(signal.SIGTERM))
    assert not list(temporary.glob("pymp-*"))
    assert (outcome.status, outcome.err, programs(folder)) == (0, "", [])
    assert newest_state(folder / "first")["sgd_steps"] == read_summary(folder / "first")["sgd_steps"] > 0


@pytest.mark.parametrize("whole_tree", [False, True])
def test_nothing_is_left_of_a_run_that_was_killed(folder: Path, temporary: Path, whole_tree: bool) -> None:
    """Not even of environments that hold the interpreter's lock and have started programs; others' programs stay."""
    def kill(process: subprocess.Popen) -> None:
        wait_until((folder / "holds").exists, "no environment holds the lock")
        tree = psutil.Process(process.pid).children(recursive=True)
        assert list(temporary.glob("pipe_*/pipe"))
        process.kill()
        for child in tree if whole_tree else ():
            if child.name() != "sleep":
                child.kill()

    of_another_run = subprocess.Popen(["sleep", "1000"], env=os.environ | {guard.RUN: "1"})
    try:
        outcome = run_train(folder, "--env=stubborn:Holds", *SMALL[1:], *ENDLESS, disturb=kill, at_once=True)
        assert outcome.status == -signal.SIGKILL
        wait_until(lambda: not list(temporary.glob("pymp-*")), "temporary folders are left")
        wait_until(lambda: not programs(folder), "programs are left")
        assert of_another_run.poll() is None
    finally:
        of_another_run.kill()
        of_another_run.wait()


def test_nothing_is_left_of_what_commands_have_started_in_their_own_process(folder: Path) -> None:
    outcome = run_train(folder, "--env=stubborn:Leaves", *SMALL[1:], "--serial_mode", "--train_for_env_steps=200")
    assert (outcome.status, outcome.err) == (0, "")
    wait_until(lambda: not programs(folder), "programs are left")
    evaluate = subprocess.Popen(
        [sys.executable, str(TRAIN_PY.with_name("evaluate.py")), "--env=stubborn:Leaves", "--experiment=first",
         f"--train_dir={folder}", "--episodes=1000000"], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)})
    wait_until(lambda: len(programs(folder)) > 10, "it does not start")
    evaluate.kill()
    evaluate.wait()
    wait_until(lambda: not programs(folder), "programs are left")


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_is_stopped_does_not_hold_up_the_end(tmp_path: Path, which: signal.Signals) -> None:
    """Nobody can say how components end that are forked from it; a stopped one only says it when it goes on."""
    def disturb(process: subprocess.Popen) -> None:
        server = next(child for child in psutil.Process(process.pid).children() if child.children())
        server.send_signal(which)
        if which == signal.SIGKILL:
            wait_until(lambda: read_summary(tmp_path / "first").get("num_replaced", 0) > 0, "nothing is replaced")
        steps = read_summary(tmp_path / "first")["sgd_steps"]
        wait_until(lambda: read_summary(tmp_path / "first")["sgd_steps"] > steps + 50, "it does not go on")
        process.send_signal(signal.SIGTERM)

    outcome = run_train(tmp_path, *SMALL, *ENDLESS, disturb=disturb)
    assert (outcome.status, outcome.err) == (0, "")


MAPS = """import mmap, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
mapped = [mmap.mmap(file.fileno(), 8) for file in files]
print("mapped", flush=True)
time.sleep(100)"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no files here")
def test_who_is_killed_leaves_no_shared_memory_but_what_others_use() -> None:
    """A game engine removes its own only when it ends in order."""
    own, shared = (Path(f"/dev/shm/{os.getpid()}_{name}") for name in ("own", "shared"))
    for path in own, shared:
        path.write_bytes(bytes(8))
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 8), subprocess.Popen(
            [sys.executable, "-c", MAPS, own, shared], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"mapped\n"
        guard.kill_with_programs({child.pid})
        left = [path for path in (own, shared) if path.exists()]
    shared.unlink()
    assert left == [shared]


FORGETS = """
import gc
from pathlib import Path
import psutil
from trainer import APPO

def make(name):
    return APPO("CartPole-v1", train_dir=".", experiment=name, num_workers=1, num_envs_per_worker=4, rollout=16,
                batch_size=128, device="cpu")

if __name__ == "__main__":
    one, other = make("one"), make("other")
    of_one, of_other = ([psutil.Process(process.pid) for process in each.crew.processes] for each in (one, other))
    one.train(500)
    pipes = [Path(inbox.name) for inbox in one.buffers.worker_inboxes]
    assert all(pipe.exists() for pipe in pipes)
    del one
    gc.collect()
    assert not any(pipe.exists() for pipe in pipes)
    assert not any(process.is_running() for process in of_one)
    assert all(process.is_running() for process in of_other)
"""


def test_a_system_that_is_forgotten_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORGETS)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, text=True, capture_output=True, check=False,
                          timeout=120, env=os.environ | {"PYTHONPATH": str(TRAIN_PY.parent)})
    assert (done.returncode, done.stderr) == (0, "")
