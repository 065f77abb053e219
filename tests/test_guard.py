"""Whatever environments do, a run can be stopped, and nothing of it is left when it was killed."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from test_train import ENDLESS, SMALL, TRAIN_PY, newest_state, read_summary, run_train, wait_until

from runtime import guard

STUBBORN = '''
import ctypes
import multiprocessing
import signal
import subprocess
import time
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv


class Handles(CartPoleEnv):
    """Installs signal handlers of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)


class Starts(CartPoleEnv):
    """Starts processes: a program that outlives it, and a child of multiprocessing."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pipe, other = multiprocessing.Pipe()
        self.child = multiprocessing.get_context("fork").Process(target=self.answer, args=(other,))
        self.child.start()
        self.pipe.send(1)
        assert self.pipe.recv() == 2
        self.program = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    @staticmethod
    def answer(pipe):
        pipe.send(pipe.recv() + 1)
        time.sleep(1000)

    def close(self):
        for started in self.child, self.program:
            started.terminate()  # they do not handle it as their parent does
        assert (self.child.join(20), self.child.exitcode, self.program.wait(20)) == (None, -15, -15)


class HandlesAndStarts(Handles, Starts):
    pass


class Holds(Starts):
    """Keeps the interpreter's lock for ever, in the third episode."""
    resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        if self.resets > 3:
            Path("holds").touch()
            ctypes.PyDLL(None).sleep(1000)
        return super().reset(**kwargs)


class Leaves(CartPoleEnv):
    """Starts a program and never ends it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        program = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL)
        with open("programs", "a") as file:
            file.write(f"{program.pid}\\n")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    return tmp_path


def temporary_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("pymp-*")}


@pytest.mark.parametrize(("env", "mode"), [
    ("HandlesAndStarts", "--async_rl"), ("Starts", "--serial_mode")])
def test_a_run_of_stubborn_environments_is_stopped_in_order(folder: Path, env: str, mode: str) -> None:
    outcome = run_train(folder, f"--env=stubborn:{env}", *SMALL[1:], *ENDLESS, mode,
                        disturb=lambda process: process.send_signal(signal.SIGTERM))
    assert (outcome.status, outcome.err) == (0, "")
    assert newest_state(folder / "first")["sgd_steps"] == read_summary(folder / "first")["sgd_steps"] > 0


@pytest.mark.parametrize("whole_tree", [False, True])
def test_nothing_is_left_of_a_run_that_was_killed(folder: Path, whole_tree: bool) -> None:
    """Not even of environments that hold the interpreter's lock and have started programs; others' programs stay."""
    before = temporary_folders()
    of_another_run = subprocess.Popen(["sleep", "1000"], env=os.environ | {guard.RUN: "1"})

    def kill(process: subprocess.Popen) -> None:
        wait_until((folder / "holds").exists, "no environment holds the lock")
        tree = psutil.Process(process.pid).children(recursive=True)
        assert temporary_folders() - before
        programs.extend(child for child in tree if child.name() == "sleep")
        process.kill()
        for child in tree if whole_tree else ():
            if child not in programs:
                child.kill()

    programs: list[psutil.Process] = []
    outcome = run_train(folder, "--env=stubborn:Holds", *SMALL[1:], *ENDLESS, disturb=kill, at_once=True)
    assert outcome.status == -signal.SIGKILL
    wait_until(lambda: not temporary_folders() - before, "temporary folders are left")
    wait_until(lambda: not any(program.is_running() for program in programs), "programs are left")
    assert len(programs) >= 4
    assert of_another_run.poll() is None
    of_another_run.kill()
    of_another_run.wait()


def test_nothing_is_left_of_what_commands_have_started_in_their_own_process(folder: Path) -> None:
    def programs() -> list[psutil.Process]:
        numbers = set(map(int, (folder / "programs").read_text().split()))
        return [process for process in psutil.process_iter()
                if process.pid in numbers and process.status() != psutil.STATUS_ZOMBIE]

    outcome = run_train(folder, "--env=stubborn:Leaves", *SMALL[1:], "--serial_mode", "--train_for_env_steps=200")
    assert (outcome.status, outcome.err) == (0, "")
    wait_until(lambda: not programs(), "programs are left")
    (folder / "programs").unlink()
    evaluate = subprocess.Popen(
        [sys.executable, str(TRAIN_PY.with_name("evaluate.py")), "--env=stubborn:Leaves", "--experiment=first",
         f"--train_dir={folder}", "--episodes=1000000"], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)})
    wait_until(lambda: (folder / "programs").exists() and len(programs()) > 10, "it does not start")
    evaluate.kill()
    evaluate.wait()
    wait_until(lambda: not programs(), "programs are left")


@pytest.mark.parametrize("which", ["SIGKILL", "SIGSTOP"])
def test_a_server_that_dies_or_is_stopped_does_not_hold_up_the_end(tmp_path: Path, which: str) -> None:
    """All components die with the server that they are forked from; a stopped one cannot tell of their ends."""
    def disturb(process: subprocess.Popen) -> None:
        server = next(child for child in psutil.Process(process.pid).children() if child.children())
        server.send_signal(getattr(signal, which))
        if which == "SIGKILL":
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
        guard.signal_with_programs([child.pid], signal.SIGKILL)
        left = [path for path in (own, shared) if path.exists()]
    shared.unlink()
    assert left == [shared]


FORGETS = """
import gc
import psutil
from trainer import APPO

def make(name):
    return APPO("CartPole-v1", train_dir=".", experiment=name, num_workers=1, num_envs_per_worker=4, rollout=16,
                batch_size=128, device="cpu")

def components():
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    return sum(name in ("rollout_0", "learner", "policy_0") for name in names)

if __name__ == "__main__":
    one, other = make("one"), make("other")
    one.train(500)
    assert components() == 6
    del one
    gc.collect()
    print("left", components())
"""


def test_a_system_that_is_forgotten_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORGETS)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, text=True, capture_output=True, check=False,
                          timeout=120, env=os.environ | {"PYTHONPATH": str(Path(guard.__file__).parent.parent)})
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line.startswith("left")] == ["left 3"]
