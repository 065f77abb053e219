"""Python programs without the seconds that importing PyTorch takes: each runs in a fork of a process that has done it.

A program finds what `python` would give it: its arguments, folder, output and exit status. But the modules of this
repository are imported already, and found from every folder; and what outlives the program is not waited for.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
DEADLINE_SEC = 300  # stands for "does not hang", also on a busy machine


def python(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run `python ARGUMENTS` in a folder, whose modules it can import; return its exit status, and what it has said."""
    server = start_server()
    print(json.dumps([arguments, str(folder)]), file=server.stdin, flush=True)
    return int(server.stdout.readline()), (folder / "output.txt").read_text()


@functools.cache
def start_server() -> subprocess.Popen:
    """Start the process that is forked; it ends when its input does, with this process."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)})


def serve() -> None:
    """Fork once for each line; print the exit status of each fork."""
    for name in ("gymnasium", "ale_py", "trainer", "torch._dynamo"):
        importlib.import_module(name)
    gc.freeze()  # else each fork looks for garbage among all of that at its end
    while line := sys.stdin.readline():
        if os.fork() == 0:
            become(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


def become(arguments: list[str], folder: str) -> None:
    """Turn this fork into the program."""
    signal.alarm(DEADLINE_SEC)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os.environ["PYTHONPATH"] = sys.path[0] = folder
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
