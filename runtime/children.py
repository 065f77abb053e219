"""The server that child processes are forked from: it imports everything once, so that they start in milliseconds.

Neither this file nor `ranks.py` imports PyTorch, so that `train.py` can start the server first: it imports PyTorch on
one core while the main process does the same on another.
"""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from runtime.ranks import take_share_of_cores


def start_server() -> ForkServerContext:
    """Start the server, in the background, unless it runs already; return the context that forks from it.

    It and the children block SIGINT and SIGTERM: Ctrl-C, `timeout` and service managers send them to the whole group,
    but it is the supervisor that stops the children, in order. The server ends with this process.
    """
    take_share_of_cores()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of one process must not spin on others' cores
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "appo"])
    resource_tracker.ensure_running()  # first, since it unblocks these signals at its end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()  # inherits the mask, and so do its children
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
