"""Python programs without the seconds that importing PyTorch takes: each runs in a fork of a process that has done it.

A program finds what `python` would give it: its arguments, folder, output and exit status. But the modules of this
repository are imported already, and found from every folder; and what outlives the program is not waited for.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEADLINE_SEC = 300  # stands for "does not hang", also on a busy machine


def python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` in a folder; it and its children can import the modules of that folder."""
    server = start_server()
    with tempfile.TemporaryDirectory() as outputs:
        paths = [f"{outputs}/{name}" for name in ("stdout", "stderr")]
        server.stdin.write(json.dumps([arguments, str(folder), paths]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the server has died"
        return subprocess.CompletedProcess(arguments, int(status), *(Path(path).read_text() for path in paths))


@functools.cache
def start_server() -> subprocess.Popen:
    """Start the process that is forked; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)})
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Fork once for each line; tell the exit status of each fork."""
    for name in ("gymnasium", "ale_py", "appo", "torch._dynamo"):
        importlib.import_module(name)
    gc.freeze()  # else each fork looks for garbage among all of that at its end
    while line := sys.stdin.readline():
        if os.fork() == 0:
            become(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


def become(arguments: list[str], folder: str, outputs: list[str]) -> None:
    """Turn this fork into the program."""
    signal.alarm(DEADLINE_SEC)
    os.chdir(folder)
    for number, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ["PYTHONPATH"] = folder
    sys.path[0] = folder
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
