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
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import cloudpickle
import torch

from runtime.children import hiding_the_script, start_server, wake_server
from runtime.console import forgive
from runtime.generators import left_alone, seed_all
from runtime.guard import COMPONENT, RUN, signal_with_programs
from runtime.recorder import Recorder, Span
from runtime.seeding import PROCESS, derive_seed
from runtime.stop import leave_stopping_to_the_supervisor
from runtime.user_error import ComponentError, UserError

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of Linux's prctl
KILL_SEC = 10.0  # for what was killed to end
START_ATTEMPTS = 5
Report = Callable[[tuple], None]


class Component(NamedTuple):
    """How a component is made: make(*args), or make(*args, report)."""

    name: str
    make: Callable[..., Any]
    args: tuple
    role: str  # "rollout_worker", "policy_worker", "learner" or "evaluator"
    number: int  # of the rollout worker, or of the policy
    inbox: Any  # that its main thread waits at
    heartbeat: torch.Tensor  # its row of the table in `heartbeat.py`
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
        """Return the reports that are complete, without waiting. Raises `EOFError` when nothing is there: it died."""
        part = wait([self.reader], 0) and os.read(self.reader.fileno(), 1 << 16)  # somebody may hold the pipe open
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
        self.place = os.getcwd(), {**os.environ, RUN: str(os.getpid())}  # the server's may be of an earlier system
        self.processes: list[Any] = []
        self.pipes: dict[Connection, tuple[str, ReportPipe]] = {}  # by their reading ends
        self.spans: dict[str, Iterable[Span]] = {}  # of each component, in the order in which they were made
        # also when nobody calls kill(): multiprocessing would wait for ever for children that ignore SIGTERM
        self.finalizer = weakref.finalize(self, kill_all_of, os.getpid(), self.processes)

    def start(self, components: Sequence[Component], report: Report, seed: int, start: int, *, trace: bool) -> None:
        """Start a process for each component; trace: it records what it does."""
        self.components, self.trace = list(components), trace
        self.seeds = [derive_seed(seed, PROCESS, start, index) for index in range(len(components))]
        self.pipe_of: list[ReportPipe | None] = [None] * len(components)
        for index in range(len(components)):
            self.processes.append(self._process(index))
            self._start_process(index)
        CREWS.add(self)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, pause_all)

    def _process(self, index: int) -> Any:
        component, pipe = self.components[index], ReportPipe(self.context)
        self.pipe_of[index] = pipe
        self.pipes[pipe.reader] = index, pipe
        self.spans[component.name] = []
        component = component._replace(make=cloudpickle.dumps(component.make))  # it may be of the user's script
        return self.context.Process(target=run_component, name=component.name,
                                    args=(component, pipe, self.seeds[index], self.trace, *self.place))

    def _start_process(self, index: int) -> None:
        start_process(self.processes[index], self.components[index].name)
        self.pipe_of[index].writer.close()  # now the child holds the only writing end

    def end(self, index: int) -> None:
        """End the process of a component, whatever its state."""
        self.pipes.pop(self.pipe_of[index].reader, None)
        kill_all([self.processes[index]])

    def replace(self, index: int) -> None:
        """Start a component anew whose process has ended."""
        self.seeds[index] = derive_seed(self.seeds[index], PROCESS)
        self.processes[index] = self._process(index)
        self._start_process(index)

    def advance(self, report: Report, timeout_sec: float = 0.1, *, expect_death: bool = False) -> None:
        """Wait for what components report, and pass it on.

        ("ready", index) says that one was made, ("died", index, why, traceback) that its process has died or failed.
        Raises `UserError` when one refuses its settings.
        """
        # what a component has started may hold its pipe open
        ended = {process.sentinel: self.pipe_of[index].reader for index, process in enumerate(self.processes)
                 if self.pipe_of[index].reader in self.pipes}
        ready = wait([*self.pipes, *ended], timeout_sec)
        for reader in dict.fromkeys(ended.get(each, each) for each in ready):
            if reader not in self.pipes:  # it was ended meanwhile
                continue
            index, pipe = self.pipes[reader]
            try:
                reports = pipe.receive()
            except (EOFError, OSError):
                del self.pipes[reader]
                if not expect_death:
                    report(("died", index, describe_end(self.components[index].name, self.processes[index]), ""))
                continue
            for kind, *content in reports:
                if kind == "error":
                    del self.pipes[reader]
                    report(("died", index, *content))
                elif kind == "refused":
                    raise UserError(*content)
                elif kind == "spans":
                    self.spans[content[0]] = content[1]
                else:
                    report((kind, *([index] if kind == "ready" else content)))

    def leave(self, report: Report, timeout_sec: float) -> list[str]:
        """Wait for the processes, which were told to stop, and pass on their last reports; return who is late."""
        wake_server()
        deadline = time.monotonic() + timeout_sec
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            self.advance(report, 0.05, expect_death=True)
        while wait(list(self.pipes), 0):
            self.advance(report, 0, expect_death=True)
        return [process.name for process in self.processes if process.is_alive()]

    def kill(self) -> None:
        """End every process that is still there, whatever its state."""
        if self.finalizer.alive:  # once: later their numbers may be those of other programs
            self.finalizer.detach()
            CREWS.discard(self)
            own = signal.getsignal(signal.SIGTSTP) == pause_all and not CREWS
            if own and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            kill_all(self.processes)


CREWS: weakref.WeakSet[Processes] = weakref.WeakSet()  # of this program


def pause_all(number: int, frame: Any) -> None:
    """Stop with all children, which Ctrl-Z does not reach in their groups, and go on with them."""
    processes = [process.pid for crew in CREWS for process in crew.processes]
    signal_with_programs(processes, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    signal_with_programs(processes, signal.SIGCONT)


class OneProcess:
    """Every component in this process, without threads, in a fixed order: slow, but a debugger can step through it."""

    def __init__(self) -> None:
        self.own: list[Any] = []  # what the process has only once: the program keeps its own
        self.components: list[Any] = []  # that were made
        self.processes: list[Any] = []  # there is none
        self.spans: dict[str, Iterable[Span]] = {}

    def start(self, components: Sequence[Component], report: Report, seed: int, start: int, *, trace: bool) -> None:
        """Make each component; trace: record what it does."""
        with left_alone(self.own):
            torch.set_num_threads(1)  # as in every process of the other modes
            seed_all(derive_seed(seed, PROCESS, start))
            for component in components:
                made = component.make(*component.args, *([report] if component.reports else []))
                self.components.append(made)
                report(("ready", len(self.components) - 1))
                if trace:
                    recorder = Recorder()
                    recorder.attach(made, waits=False)
                    self.spans[component.name] = recorder.spans

    def advance(self, report: Report) -> None:
        """Give each component one turn; they report by themselves."""
        with left_alone(self.own):
            for component in self.components:
                component.turn()

    def leave(self, report: Report, timeout_sec: float) -> list[str]:
        """Close what has environments."""
        with left_alone(self.own):
            for component in self.components:
                if hasattr(component, "close"):
                    component.close()
        return []

    def kill(self) -> None:
        """Do nothing: there is no process."""


def start_process(process: Any, name: str) -> None:
    """Start a process that the server forks. Raises `ComponentError`."""
    for attempt in range(START_ATTEMPTS):
        start_server()  # unless it runs already
        wake_server()
        try:
            with hiding_the_script():
                process.start()
            break
        except (OSError, EOFError) as error:  # it, or the server, was killed meanwhile
            if attempt == START_ATTEMPTS - 1:
                raise ComponentError(f"{name} could not be started: {error}") from error
            time.sleep(0.1)


def describe_end(name: str, process: Any) -> str:
    """Tell how a process has ended."""
    wake_server()  # which knows it
    process.join(5)
    code = process.exitcode
    if code is None or code >= 0:
        return f"{name} left with status {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"{name} was killed by {signal.Signals(-code).name}{hint}"


def kill_all_of(supervisor: int, processes: list[Any]) -> None:
    """End the processes of a supervisor, but not from another process that was forked from it by hand."""
    if os.getpid() == supervisor:
        kill_all(processes)


def kill_all(processes: list[Any]) -> None:
    """End every process that was started, whatever its state, with all that it has started; wait for its end."""
    started = [process for process in processes if process.pid is not None]
    descriptors = []
    for process in started:
        with contextlib.suppress(OSError, AttributeError):  # it has ended; older kernels, strict containers; macOS
            descriptors.append(os.pidfd_open(process.pid))
    if started:
        signal_with_programs([process.pid for process in started], signal.SIGKILL)
        wake_server()
    deadline = time.monotonic() + KILL_SEC  # one that waits for a disk that hangs dies when that comes back
    for descriptor in descriptors:  # `join` asks the server, which says that they have ended when it has itself
        wait([descriptor], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))


def run_component(component: Component, pipe: ReportPipe, seed: int, trace: bool, folder: str,
                  environment: Mapping[str, str]) -> None:
    """Run one component in this process until it is told to stop; report its traceback if it fails."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    enter_child(component.name)
    os.nice(component.niceness)
    if component.core is not None:
        os.sched_setaffinity(0, {component.core})
    keep_freed_memory()
    torch.set_num_threads(1)  # cores are shared between processes instead
    seed_all(seed)
    try:
        make, recorder = cloudpickle.loads(component.make), Recorder()
        running = make(*component.args, *([pipe.send] if component.reports else []))
        if component.inbox is not None:
            component.inbox.heartbeat = component.heartbeat.numpy()
            component.inbox.beat()
        if trace:
            recorder.attach(running)
        pipe.send(("ready",))
        running.run()
        if trace:
            pipe.send(("spans", component.name, list(recorder.spans)))
    except BaseException as error:  # noqa: BLE001  whatever it is, the supervisor must hear of it
        with contextlib.suppress(OSError):
            pipe.send(("refused", str(error)) if isinstance(error, UserError) else
                      ("error", f"{component.name} failed: {describe(error)}",
                       f"{component.name} failed\n{traceback.format_exc()}"))
        sys.exit(1)


def describe(error: BaseException) -> str:
    """Describe an error in one line."""
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[-1]}" if lines else "")


def enter_child(name: str) -> None:
    """Begin in a child process: nothing that happens to the console or to the group of the supervisor ends it."""
    leave_with_parent(name)
    leave_stopping_to_the_supervisor()
    forgive()


def leave_with_parent(name: str) -> None:
    """Let this process end when the supervisor dies, however it dies; the guard ends what it has started. Name it."""
    os.setpgid(0, 0)
    os.environ[COMPONENT] = str(os.getpid())
    server = forkserver._forkserver  # it ends when nobody holds this pipe
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_NAME, name.replace("_worker", "").encode())
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server dies with the supervisor

    if wait([multiprocessing.parent_process().sentinel], 0):  # it has died before
        os.kill(0, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks.

    A training pass allocates and frees the same large activations again and again; giving them back to the system each
    time costs a page fault per 4 KB.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap and trim thresholds, top pad
            mallopt(parameter, size)
