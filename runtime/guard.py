"""The guard: a small process that cleans up after a main process that was killed, and so could not do it.

It reads at a pipe that ends with the main process. Then it kills the server of the processes and all that came from it
(components, and the programs that their environments have started: each carries the number of the main process in its
environment) and removes temporary folders and shared memory. It belongs to no session and no parent of the run: what
kills these spares it. This file is also the guard's program; it imports nothing of ours, and nothing slow at first.
Shared memory has files only on Linux; elsewhere nothing of it is found, and nothing is left.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN, COMPONENT = "STARTED_BY_RUN", "STARTED_BY_COMPONENT"  # in the environment of what these processes have started
SHM = Path("/dev/shm")  # where Linux keeps shared memory; in containers it often has 64 MB


def started_by(kind: str, processes: set[int]) -> set[int]:
    """Find the programs that have one of these numbers as their `RUN` or `COMPONENT`, and their forks."""
    import psutil

    numbers = {str(process) for process in processes}
    return {process.pid for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get(kind) in numbers}  # it may be another user's, or have ended


def kill_with_programs(processes: set[int]) -> None:
    """Kill components, which may lead groups, with all that they have started, in whatever session that is.

    Only a program that was started with an empty environment, in a session of its own, is not found.
    """
    victims = processes | started_by(COMPONENT, processes)
    segments = segments_of(victims)
    for process in victims:
        for send in os.killpg, os.kill:  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(process, signal.SIGKILL)
    if segments:  # of shared memory, which who is killed cannot remove: game engines have some
        others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - victims
        subprocess.run(["rm", "-f", "--", *(segments - segments_of(others))], check=False)


def segments_of(processes: set[int]) -> set[str]:
    """Return the files of shared memory that processes have mapped, and those that CUDA has named after them."""
    found: set[str] = set()
    for process in processes:
        found.update(map(str, SHM.glob(f"cuda.shm.*.{process:x}.*")))
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            found.update(re.findall(r"/dev/shm/\S+$", Path(f"/proc/{process}/maps").read_text(), re.MULTILINE))
    return found


@functools.cache
def start_guard() -> int:
    """Start the guard of this process; return the writing end of its pipe."""
    reader, writer = os.pipe()
    subprocess.run([sys.executable, "-P", __file__, str(os.getpid())], stdin=reader, start_new_session=True,
                   env={name: os.environ[name] for name in os.environ.keys() - {RUN, COMPONENT}}, check=True)
    os.close(reader)
    return writer


def leave_guard() -> None:
    """Close the guard's pipe in a process that was forked by hand: only the main process may hold it open."""
    if start_guard.cache_info().currsize:
        os.close(start_guard())
        start_guard.cache_clear()


os.register_at_fork(after_in_child=leave_guard)


def remove_at_end(path: str) -> None:
    """Remove a folder or a file when this process has ended, however that comes."""
    with contextlib.suppress(OSError):  # somebody has killed the guard: the run goes on without
        os.write(start_guard(), os.fsencode(path) + b"\0")


if __name__ == "__main__" and os.fork() == 0:  # the run does not wait for its guard
    run, paths = int(sys.argv[1]), sys.stdin.buffer.read().split(b"\0")[:-1]  # until the main process ends
    while left := started_by(RUN, {run}):
        kill_with_programs(left)
        time.sleep(0.05)
    subprocess.run(["rm", "-rf", "--", *paths, *segments_of({run}), *SHM.glob(f"torch_{run}_*")], check=False)
