"""The crew: the components of a run, each in a process of its own, or all in this one (`--serial_mode`).

A component has `run`, which serves its inbox until it is told to stop, and `turn`, which does all there is to do
without waiting. It reports to the supervisor. A child process does so through a pipe of its own, which shares no lock
with any other process: its death, at whatever moment, is seen as the end of its pipe. Used by `supervisor.py`.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from runtime.console import forgive
from runtime.recorder import Recorder, Span
from runtime.seeding import PROCESS, derive_seed
from runtime.user_error import ComponentError, UserError

FORGOTTEN = 255  # what multiprocessing takes for the exit code of a process whose fork server has died
Report = Callable[[tuple], None]


class Stalls:
    """Notices components that do nothing though they have something to do."""

    def __init__(self, timeout_sec: float) -> None:
        self.timeout_sec = timeout_sec
        self.moved: dict[str, tuple[int, float]] = {}  # each counter's value and when it last changed

    def check(self, counters: dict[str, int]) -> None:
        """Raise `ComponentError` when one of these counters has stood still for too long; forget the others."""
        now, before = time.monotonic(), self.moved
        self.moved = {}
        for name, value in counters.items():
            seen, since = before.get(name, (value, now))
            self.moved[name] = (value, since if value == seen else now)
            if value == seen and now - since > self.timeout_sec:
                raise ComponentError(f"{name} has done nothing for {now - since:.0f} s (--stall_timeout_sec), at "
                                     + ", ".join(f"{other}={count:,}" for other, count in counters.items()))


class Component(NamedTuple):
    """How a component is made: make(*args), or make(*args, report)."""

    name: str
    make: Callable[..., Any]
    args: tuple
    reports: bool = True
    niceness: int = 0
    core: int | None = None  # the one that its process is bound to


class ReportPipe:
    """The pipe through which one child reports. Reading never waits for the rest of a report: the child may be frozen.

    It is handed over to the child, which alone must hold the writing end: so the death of the child ends the pipe.
    """

    SIZE = struct.Struct("I")

    def __init__(self, context: Any) -> None:
        self.reader, self.writer = context.Pipe(duplex=False)
        self.received = bytearray()

    def __getstate__(self) -> dict[str, Any]:
        return {"writer": self.writer}

    def send(self, report: tuple) -> None:
        """Send a report (by the child)."""
        data = pickle.dumps(report)
        data = memoryview(self.SIZE.pack(len(data)) + data)
        while data:
            data = data[os.write(self.writer.fileno(), data):]

    def receive(self) -> list[tuple]:
        """Return the reports that are complete, once the reader is ready. Raises `EOFError` when the child has died."""
        part = os.read(self.reader.fileno(), 1 << 16)
        if not part:
            raise EOFError
        self.received += part
        reports = []
        while len(self.received) >= self.SIZE.size:
            end = self.SIZE.size + self.SIZE.unpack_from(self.received)[0]
            if len(self.received) < end:
                break
            reports.append(pickle.loads(self.received[self.SIZE.size : end]))
            del self.received[:end]
        return reports


class Processes:
    """Every component in a child process."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.processes: list[Any] = []
        self.pipes: dict[Connection, tuple[str, ReportPipe]] = {}  # by their reading ends
        self.spans: dict[str, Iterable[Span]] = {}  # of each component, in the order in which they were made
        # also when nobody calls kill(): multiprocessing would wait for ever for children that ignore SIGTERM
        self.finalizer = weakref.finalize(self, kill_all, self.processes)

    def start(self, components: Sequence[Component], report: Report, seed: int, start: int, *, trace: bool) -> None:
        """Start a process for each component; trace: it records what it does."""
        for index, component in enumerate(components):
            pipe = ReportPipe(self.context)
            self.pipes[pipe.reader] = component.name, pipe
            self.spans[component.name] = []
            process = self.context.Process(
                target=run_component, name=component.name, daemon=True,
                args=(component, pipe, derive_seed(seed, PROCESS, start, index), trace))
            self.processes.append(process)
            process.start()
            pipe.writer.close()  # now the child holds the only writing end

    def advance(self, report: Report, timeout_sec: float = 0.1, *, expect_death: bool = False) -> None:
        """Wait for what components report, and pass it on; ("ready",) says that one was made.

        Raises `ComponentError` when a process has died or failed.
        """
        for reader in wait(list(self.pipes), timeout_sec):
            name, pipe = self.pipes[reader]
            try:
                reports = pipe.receive()
            except (EOFError, OSError):
                del self.pipes[reader]
                if not expect_death:
                    raise ComponentError(self._obituary(name)) from None
                continue
            for kind, *content in reports:
                if kind == "error":
                    raise ComponentError(*content)
                if kind == "refused":
                    raise UserError(*content)
                if kind == "spans":
                    self.spans[content[0]] = content[1]
                else:
                    report((kind, *content))

    def _obituary(self, name: str) -> str:
        process = next(process for process in self.processes if process.name == name)
        process.join(5)
        code = process.exitcode
        if code is None or code >= 0:
            return f"{name} left with status {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {signal.Signals(-code).name}{hint}"

    def leave(self, report: Report, timeout_sec: float) -> list[str]:
        """Wait for the processes, which were told to stop, and pass on their last reports; return who is late."""
        deadline = time.monotonic() + timeout_sec
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            self.advance(report, 0.05, expect_death=True)
        while wait(list(self.pipes), 0):
            self.advance(report, 0, expect_death=True)
        return [process.name for process in self.processes if process.is_alive()]

    def kill(self) -> None:
        """End every process that is still there, whatever its state."""
        kill_all(self.processes)


class OneProcess:
    """Every component in this process, without threads, in a fixed order: slow, but a debugger can step through it."""

    def __init__(self) -> None:
        self.components: list[Any] = []
        self.processes: list[Any] = []  # there is none
        self.spans: dict[str, Iterable[Span]] = {}

    def start(self, components: Sequence[Component], report: Report, seed: int, start: int, *, trace: bool) -> None:
        """Make each component; trace: record what it does."""
        torch.set_num_threads(1)  # as in every process of the other modes
        torch.manual_seed(derive_seed(seed, PROCESS, start))
        for component in components:
            made = component.make(*component.args, *([report] if component.reports else []))
            self.components.append(made)
            report(("ready",))
            if trace:
                recorder = Recorder()
                recorder.attach(made, waits=False)
                self.spans[component.name] = recorder.spans

    def advance(self, report: Report) -> None:
        """Give each component one turn; they report by themselves."""
        for component in self.components:
            component.turn()

    def leave(self, report: Report, timeout_sec: float) -> list[str]:
        """Close what has environments."""
        for component in self.components:
            if hasattr(component, "close"):
                component.close()
        return []

    def kill(self) -> None:
        """Do nothing: there is no process."""


def kill_all(processes: list[Any]) -> None:
    """End every process that was started and is still there, whatever its state, and wait for its end."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
        if process.exitcode == FORGOTTEN:  # the fork server has died, and nobody knows how it ended, or whether
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    for process in started:
        process.join()


def run_component(component: Component, pipe: ReportPipe, seed: int, trace: bool) -> None:
    """Run one component in this process until it is told to stop; report its traceback if it fails."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    forgive()
    os.nice(component.niceness)
    if component.core is not None:
        os.sched_setaffinity(0, {component.core})
    keep_freed_memory()
    torch.set_num_threads(1)  # cores are shared between processes instead
    torch.manual_seed(seed)
    try:
        running, recorder = component.make(*component.args, *([pipe.send] if component.reports else [])), Recorder()
        if trace:
            recorder.attach(running)
        pipe.send(("ready",))
        running.run()
        if trace:
            pipe.send(("spans", component.name, list(recorder.spans)))
    except BaseException as error:  # noqa: BLE001  whatever it is, the supervisor must hear of it
        is_refusal = isinstance(error, UserError)
        text = str(error) if is_refusal else f"{component.name} failed\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):
            pipe.send(("refused" if is_refusal else "error", text))
        sys.exit(1)


def leave_with_parent() -> None:
    """End this process at once when the supervisor dies, however it dies."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks.

    A training pass allocates and frees the same large activations again and again; giving them back to the system each
    time costs a page fault per 4 KB.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap and trim thresholds, top pad
            mallopt(parameter, size)
