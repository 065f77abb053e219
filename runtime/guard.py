"""The guard: a small process that cleans up after a supervisor that was killed, and so could not do it.

It reads at a pipe that ends with the supervisor: who is there, and which temporary folders. Then it kills those that
are still there, with whatever they have started, and removes the folders and the supervisor's shared memory. It belongs
to no session and no parent of the run: what kills these spares it. Used by `crew.py`, `children.py` and `ranks.py`;
this file is also the guard's program, and imports nothing slow.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Target = int | str  # a process or a folder
STARTED_BY = "STARTED_BY_COMPONENT"  # the process, in the environment of all programs that it starts


def signal_with_programs(processes: Iterable[int], number: int) -> None:
    """Send a signal to processes, which may lead groups, with all that they have started, in whatever session that is.

    Only a program that was started with an empty environment, in a session of its own, is not found.
    """
    processes = set(processes)
    marks = {f"{STARTED_BY}={process}".encode() for process in processes}
    for process in processes:
        _signal(os.killpg, process, number)
        _signal(os.kill, process, number)  # it may not lead its group yet
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                _signal(os.kill, int(folder.name), number)


def _signal(send: Callable[[int, int], None], process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(process, number)


class Guard:
    """The supervisor's side."""

    def __init__(self) -> None:
        self.pipe: int | None = None  # its writing end

    def watch(self, target: Target) -> None:
        """Guard a process, and its group if it leads one, or a folder."""
        if self.pipe is None:
            reader, self.pipe = os.pipe()
            own = {name: value for name, value in os.environ.items() if name != STARTED_BY}
            subprocess.run([sys.executable, "-I", "-S", __file__, str(os.getpid())], stdin=reader, env=own,
                           start_new_session=True, check=True)
            os.close(reader)
        self._write("+", target)

    def forget(self, target: Target) -> None:
        """Guard it no more."""
        self._write("-", target)

    def leave(self) -> None:
        """Let go of it, in a process that was forked by hand: the guard must see the end of the supervisor."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def _write(self, sign: str, target: Target) -> None:
        with contextlib.suppress(OSError):  # somebody has killed the guard: the run goes on without
            os.write(self.pipe, f"{sign}{target}\n".encode())


GUARD = Guard()  # of this process
os.register_at_fork(after_in_child=GUARD.leave)


def main() -> None:
    """Be the guard."""
    if os.fork() > 0:
        return  # the run does not wait for its guard
    targets = set()
    for line in sys.stdin:
        (targets.add if line[0] == "+" else targets.discard)(line[1:-1])
    signal_with_programs([int(target) for target in targets if target.isdecimal()], signal.SIGKILL)
    for target in targets:
        if not target.isdecimal():
            shutil.rmtree(target, ignore_errors=True)
    for name in os.listdir("/dev/shm"):
        if name.startswith(f"torch_{sys.argv[1]}_"):
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")


if __name__ == "__main__":
    main()
