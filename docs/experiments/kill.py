"""Does learning go on when a process is killed in the middle of training?

    python -m docs.experiments.kill

CartPole trains, and each of its processes gets SIGKILL in turn. It prints after how many seconds it was replaced, alone
or with all others, and another SGD step was taken.
"""

import contextlib
import io
import os
import signal
import tempfile
import threading
import time

from services.records import Records
from trainer import APPO

SETTLE_SEC = 1.0


def kill(system, index):
    """Kill a process while the system trains; return the seconds until learning has gone on without it."""
    process = system.crew.processes[index]
    count, versions, seconds = system.find(Records).num_replaced, None, 0.0
    begin = time.monotonic() + SETTLE_SEC
    killer = threading.Timer(SETTLE_SEC, os.kill, (process.pid, signal.SIGKILL))
    killer.start()

    def has_gone_on():
        nonlocal versions, seconds
        if versions is None and system.find(Records).num_replaced > count:  # it was replaced
            versions = system.versions
        seconds = time.monotonic() - begin
        return versions is not None and system.versions > versions

    try:
        system.train(10**9, should_stop=has_gone_on)
    finally:
        killer.cancel()  # after Ctrl-C
    return seconds


if __name__ == "__main__":
    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          APPO("CartPole-v1", train_dir=folder, num_workers=2, num_envs_per_worker=8) as system):
        found = [(component.name, kill(system, index)) for index, component in enumerate(system.components)]
    for name, seconds in found:
        print(f"{name:16} killed: learning went on after {seconds:.1f} s")
