"""The server that child processes are forked from: it imports everything once, so that they start in milliseconds.

Neither this file nor `ranks.py` imports PyTorch, so that `train.py` can start the server first: it imports PyTorch on
one core while the main process does the same on another.
"""

import contextlib
import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.guard import RUN, remove_at_end
from runtime.ranks import take_share_of_cores
from runtime.stop import SIGNALS
from runtime.user_error import UserError

ROOT = Path(__file__).parent.parent
STARTING = threading.RLock()  # a program may have several systems, in threads
MAX_FOLDER = 107 - len("/listener-12345678")  # bytes of the name of a socket

with contextlib.suppress(OSError):
    tempfile.gettempdir()  # it writes there to find it, as PyTorch does later, when the disk may be full


def start_server() -> ForkServerContext:
    """Start the server, in the background, unless it runs already; return the context that forks from it.

    It blocks SIGINT, SIGTERM and SIGHUP, and so do the children at first: Ctrl-C, `timeout`, service managers and
    closing terminals send them to the whole group, but it is the supervisor that stops the children, in order. The
    server ends with this process.
    """
    take_share_of_cores()
    allow_descriptors(4096)  # more than any run needs
    context = multiprocessing.get_context("forkserver")
    # every optimizer imports the last one, 1 s: once here, not in each learner
    context.set_forkserver_preload(["torch", "gymnasium", "appo", "torch._dynamo"])
    folder = util.get_temp_dir()
    if len(os.fsencode(folder)) > MAX_FOLDER:
        raise UserError(f"the folder for temporary files, {tempfile.gettempdir()}, has too long a name for the sockets "
                        "that processes meet at; set TMPDIR=/tmp")
    with STARTING:
        remove_at_end(folder)  # where the server listens
        resource_tracker.ensure_running()  # first, since it unblocks these signals at its end
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        here = os.open(".", os.O_RDONLY)
        of_program = dict(os.environ)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of one process must not spin on others' cores
        os.environ[RUN] = str(os.getpid())  # of all that comes from the server
        try:
            os.chdir(ROOT)  # the server looks for the modules in its folder alone, whatever `sys.path` is here
            forkserver.ensure_running()  # inherits the mask, and so do its children
        finally:
            os.environ.clear()
            os.environ.update(of_program)
            os.fchdir(here)
            os.close(here)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def allow_descriptors(needed: int) -> None:
    """Allow this process, and those that it will start, so many open files, or as many as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def make_pipe(context: Any, size: int) -> tuple[Connection, Connection]:
    """Make a pipe that holds so many bytes, its reader and its writer; elsewhere than on Linux as many as it may.

    Raises `UserError` where the system allows none so large.
    """
    reader, writer = context.Pipe(duplex=False)
    try:
        if hasattr(fcntl, "F_SETPIPE_SZ") and size > fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
    except PermissionError as error:
        raise UserError(f"the system allows no pipe of {size:,} bytes (/proc/sys/fs/pipe-max-size, and "
                        "pipe-user-pages-soft for all of a user); lower --num_envs_per_worker, or end other runs"
                        ) from error
    return reader, writer


@contextlib.contextmanager
def hiding_the_script() -> Iterator[None]:
    """Start processes that do not run the user's script once more: what they need of it is sent by value."""
    with STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


def wake_server() -> None:
    """Let the server go on if somebody has stopped it: who starts a process, or waits for the end of one, needs it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGCONT)
