"""Whatever environments do, a run can be stopped, and nothing of it is left when it was killed."""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from running import ENDLESS, SMALL, Run, check_saved, run_train

from runtime import guard


class Leaves(CartPoleEnv):
    """Starts a program, and never ends it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.program = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL)


def sleep(begun: Connection) -> None:
    begun.send(True)
    time.sleep(1000)


class Starts(Leaves):
    """Starts a child of multiprocessing, too, and ends both."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        begun, writer = multiprocessing.Pipe(duplex=False)
        self.child = multiprocessing.get_context("fork").Process(target=sleep, args=(writer,))
        self.child.start()
        begun.recv()  # a fork forgets the signals that come before it runs

    def close(self) -> None:
        for started in self.child, self.program:
            started.terminate()  # they do not handle it as their parent does
        assert (self.child.join(20), self.child.exitcode, self.program.wait(20)) == (None, -15, -15)


class Holds(Starts):
    """Keeps the interpreter's lock for ever, in the third episode."""

    resets = 0

    def reset(self, **kwargs: Any) -> Any:
        self.resets += 1
        if self.resets > 3:
            Path("holds").touch()
            ctypes.PyDLL(None).sleep(1000)
        return super().reset(**kwargs)


@pytest.mark.parametrize("mode", ["--async_rl", "--serial_mode"])
def test_a_run_of_stubborn_environments_is_stopped_in_order(tmp_path: Path, mode: str) -> None:
    with Run(tmp_path, "--env=test_guard:Starts", *SMALL, *ENDLESS, mode) as run:
        assert run.learns()
        run.process.send_signal(SIGTERM)
    check_saved(run)


@pytest.mark.parametrize("whole_tree", [False, True])
def test_nothing_is_left_of_a_run_that_was_killed(tmp_path: Path, whole_tree: bool) -> None:
    """Not even of environments that hold the interpreter's lock and have started programs; others' programs stay."""
    of_another_run = psutil.Popen(["sleep", "1000"], env=os.environ | {guard.RUN: "1"})
    try:
        with Run(tmp_path, "--env=test_guard:Holds", *SMALL, *ENDLESS) as run:
            assert run.until((tmp_path / "holds").exists), "no environment holds the lock"
            assert list(run.temporary.glob("pipe_*"))
            for process in [run.process, *(run.process.children(recursive=True) if whole_tree else ())]:
                with contextlib.suppress(psutil.Error):  # it has ended with another one
                    if process.name() != "sleep":
                        process.kill()
        assert run.status == -SIGKILL
        assert of_another_run.poll() is None
    finally:
        of_another_run.kill()
        of_another_run.wait()


def test_nothing_is_left_of_what_commands_have_started_in_their_own_process(tmp_path: Path) -> None:
    run = run_train(tmp_path, "--env=test_guard:Leaves", *SMALL, "--serial_mode", "--train_for_env_steps=200")
    assert (run.status, run.err) == (0, "")
    flags = "--env=test_guard:Leaves", "--experiment=run", "--episodes=1000000"
    with Run(tmp_path, *flags, command="evaluate.py") as run:
        assert run.until(lambda: len(run.members()) > 12), "it does not start"
        run.process.kill()


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
        (of_cuda := Path(f"/dev/shm/cuda.shm.0.{child.pid:x}.1")).touch()  # CUDA's, which lies in no map of a process
        guard.kill_with_programs({child.pid})
        left = [path for path in (own, shared, of_cuda) if path.exists()]
    shared.unlink()
    assert left == [shared]
