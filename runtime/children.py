"""The server that child processes are forked from: it imports everything once, so that they start in milliseconds.

Neither this file nor `ranks.py` imports PyTorch, so that `train.py` can start the server first: it imports PyTorch on
one core while the main process does the same on another.
"""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from runtime.container import allow_descriptors
from runtime.ranks import take_share_of_cores
from runtime.stop import SIGNALS


def start_server() -> ForkServerContext:
    """Start the server, in the background, unless it runs already; return the context that forks from it.

    It and the children block SIGINT, SIGTERM and SIGHUP: Ctrl-C, `timeout`, service managers and closing terminals send
    them to the whole group, but it is the supervisor that stops the children, in order. The server ends with this
    process.
    """
    take_share_of_cores()
    allow_descriptors(4096)  # more than any run needs, which is checked in `memory.py`
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of one process must not spin on others' cores
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "appo"])
    resource_tracker.ensure_running()  # first, since it unblocks these signals at its end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()  # inherits the mask, and so do its children
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
