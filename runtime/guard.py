"""The guard: a small process that cleans up after a supervisor that was killed, and so could not do it.

It reads at a pipe that ends with the supervisor: who is there, and which temporary folders. Then it kills those that
are still there, with whatever they have started, and removes the folders. It belongs to no session and no parent of the
run: what kills these spares it. Used by `crew.py`; this file is also the guard's program, and imports nothing slow.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

Target = int | str  # a process or a folder


class Guard:
    """The supervisor's side."""

    def __init__(self) -> None:
        self.pipe: int | None = None  # its writing end

    def watch(self, target: Target) -> None:
        """Guard a process, and its group if it leads one, or a folder."""
        if self.pipe is None:
            reader, self.pipe = os.pipe()
            subprocess.run([sys.executable, "-I", "-S", __file__], stdin=reader, start_new_session=True, check=True)
            os.close(reader)
        self._write("+", target)

    def forget(self, target: Target) -> None:
        """Guard it no more."""
        self._write("-", target)

    def _write(self, sign: str, target: Target) -> None:
        with contextlib.suppress(OSError):  # somebody has killed the guard: the run goes on without
            os.write(self.pipe, f"{sign}{target}\n".encode())


GUARD = Guard()  # of this process


def main() -> None:
    """Be the guard."""
    if os.fork() > 0:
        return  # the run does not wait for its guard
    targets = set()
    for line in sys.stdin:
        (targets.add if line[0] == "+" else targets.discard)(line[1:-1])
    for target in targets:
        if not target.isdecimal():
            shutil.rmtree(target, ignore_errors=True)
            continue
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(int(target), signal.SIGKILL)


if __name__ == "__main__":
    main()
