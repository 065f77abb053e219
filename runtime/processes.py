"""The components of a run: how their processes start, report, hang, die and end.

A component has `run`, which serves its inbox until it is told to stop, and `turn`, which does all there is to do
without waiting. `Processes` runs each in a process of its own, `OneProcess` all in this one (`--serial_mode`). A child
process reports through a pipe that it shares with nobody: its death, at whatever moment, is seen as the end of the
pipe or of the process. Its heartbeat is a row of a shared table, in which `services/recovery.py` sees who hangs.

Imports nothing slow: `train.py` watches for signals from its first moment on, and starts the server that child
processes are forked from before it imports PyTorch. What only Linux has is asked for first; elsewhere processes have no
names and pipes the size that they have. Read next: `guard.py`.
"""

import contextlib
import ctypes
import fcntl
import functools
import json
import multiprocessing
import os
import queue
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle

from runtime.guard import COMPONENT, RUN, kill_with_programs, remove_at_end
from runtime.utils import (
    PROCESS,
    SIGNALS,
    STOP_SIGNAL,
    ComponentError,
    UserError,
    Values,
    derive_seed,
    forgive,
    left_alone,
    own_cores,
    seed_all,
    take_share_of_cores,
)

ROOT = Path(__file__).parent.parent
START_SEC = 30.0  # more for a component that is being made
KILL_SEC = 10.0  # for what was killed to end
PR_SET_NAME = 15
# What libraries read when a process begins. Threads of one process must not spin on others' cores; glibc keeps large
# freed blocks: a training pass frees and allocates the same activations again and again, else at a page fault per 4 KB.
FOR_LIBRARIES = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_MMAP_THRESHOLD_": "32000000",
                 "MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_TOP_PAD_": "64000000"}  # bytes
STARTING = threading.Lock()  # a program may have several systems, in threads
Report = Callable[[tuple], None]


class Component(NamedTuple):
    """How a component is made: make(*args), or make(*args, report)."""

    name: str
    make: Callable[..., Any]
    args: tuple
    role: str  # "rollout_worker", "policy_worker", "learner" or "evaluator"
    number: int  # of the rollout worker, or of the policy
    inbox: Any  # that its main thread waits at
    heartbeat: Any  # [3] int64 tensor, its row of the table of heartbeats
    reports: bool = True
    niceness: int = 0
    # the number of the core that its process is bound to; Sample Factory binds by default. Here it costs 1 to 4 % while
    # learning, and gains 3 to 5 % when only sampling
    core: int | None = None


class Service:
    """What a run may have beside its pipeline. It lives in the main process, with its `trainer.Trainer`.

    It hears all that components report, and has a turn in each round of the trainer's loop.
    """

    trainer: Any

    def start(self, trainer: Any) -> None:
        """Begin; no process has started yet."""
        self.trainer = trainer

    def components(self) -> list[Component]:
        """Return the components that it needs beside the pipeline."""
        return []

    def on(self, report: tuple) -> bool | None:
        """Act on a report, of a component or of the trainer (`Trainer.tell`); return True if it mends a death.

        It may wait (`Trainer.wait_until`): then rounds of the loop run within it.
        """

    def tick(self) -> None:
        """Do what is due, in each round of the loop."""

    def close(self) -> None:
        """Leave things in order; all processes have ended."""


# ---- in the main process -----------------------------------------------------------------------------------------


class Processes:
    """Every component in a child process."""

    def __init__(self) -> None:
        self.place = os.getcwd(), {**os.environ, RUN: str(os.getpid())}  # those of now, also for who is replaced later
        self.processes: list[Any] = []  # of each component
        self.running: dict[Any, int] = {}  # those that have neither left nor died, and the indices of their components
        self.reports: queue.SimpleQueue[tuple[Any, tuple]] = queue.SimpleQueue()  # of which process, and what
        self.spans: dict[str, Iterable[Span]] = {}
        # Ends every process that is still there, whatever its state: once, later their numbers may be those of other
        # programs. Also when nobody calls it: multiprocessing would wait for ever for children that ignore SIGTERM.
        self.kill = util.Finalize(self, kill_all, [self.processes], exitpriority=0)

    def start(self, components: Sequence[Component], report: Report, seed: int, start: int, *, trace: bool) -> None:
        """Start a process for each component; trace: it records what it does."""
        self.components, self.trace = components, trace
        self.key, self.times_started = (seed, PROCESS, start), [0] * len(components)
        for index in range(len(components)):
            self.start_one(index)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, pause_all)

    def start_one(self, index: int) -> None:
        """Start the process of a component, with a seed of its own: a fork of the server."""
        component, (reader, writer) = self.components[index], multiprocessing.Pipe(duplex=False)
        by_value = component._replace(make=cloudpickle.dumps(component.make))  # it may be of the user's script
        seed = derive_seed(*self.key, index, self.times_started[index])
        self.times_started[index] += 1
        args = index, by_value, writer, seed, self.trace, *self.place
        start_server()  # unless it runs already
        for method in "forkserver", "spawn":
            process = multiprocessing.get_context(method).Process(target=run_component, name=component.name, args=args)
            self.processes[index : index + 1] = [process]  # first, so that it is ended whatever interrupts this
            try:
                with starting():
                    process.start()
                break
            except (OSError, EOFError):  # the server was killed meanwhile, or cannot be started here
                if method == "spawn":
                    raise
        writer.close()  # now the child holds the only one
        threading.Thread(target=listen, args=(process, reader, self.reports), daemon=True).start()
        self.running[process], self.spans[component.name] = index, []

    def end(self, *indices: int) -> None:
        """End the processes of some components, whatever their state."""
        ended = [self.processes[index] for index in indices]
        self.running = {process: index for process, index in self.running.items() if process not in ended}
        kill_all(ended)

    def advance(self, report: Report, timeout_sec: float = 0.1) -> None:
        """Wait for what components report, and pass it on.

        ("ready", index) says that one was made, ("died", index, why, traceback) that its process has died or failed.
        Raises `UserError` when one refuses its settings.
        """
        with contextlib.suppress(queue.Empty):
            for _ in range(max(1, self.reports.qsize())):
                process, (kind, *content) = self.reports.get(timeout=timeout_sec)
                if process not in self.running:  # it was ended, for what another has reported
                    continue
                if kind in ("died", "ended", "left"):
                    index = self.running.pop(process)
                if kind == "refused":
                    raise UserError(*content)
                if kind == "left":
                    (self.spans[process.name],) = content
                elif kind == "ended":
                    report(("died", index, describe_death(process), ""))
                else:
                    report((kind, *content))

    def leave(self, report: Report, timeout_sec: float) -> list[str]:
        """Wait for the processes, which were told to stop, and pass on their last reports; return who is late."""
        wake_server()
        deadline = time.monotonic() + timeout_sec
        while self.running and time.monotonic() < deadline:
            self.advance(lambda each: each[0] == "died" or report(each))  # who dies now has saved all
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.name for process in self.processes if process.is_alive()]


def pause_all(number: int, frame: Any) -> None:
    """Stop with all children, which Ctrl-Z does not reach in their groups, and go on with them."""
    from psutil import Process

    children = Process().children(recursive=True)
    for child in children:
        child.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)
    for child in children:
        child.resume()


def listen(process: Any, reader: Connection, reports: queue.SimpleQueue) -> None:
    """Pass on what a child reports, and that it has ended; in a thread of its own, since it may freeze in a report."""
    with contextlib.suppress(EOFError, OSError):
        while reader in wait([reader, process.sentinel]):  # what it has started may hold the pipe open
            reports.put((process, reader.recv()))
    reports.put((process, ("ended",)))


def start_server() -> Any:
    """Start the server that children are forked from, unless it runs already; return the context that does it.

    It works in the background: it imports everything once, so that the children start in milliseconds. It ends when
    this process and all children have ended.
    """
    take_share_of_cores()
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), most), most))  # more than any run needs
    context = multiprocessing.get_context("forkserver")
    # every optimizer imports the last one, 1 s: once here, not in each learner
    context.set_forkserver_preload(["torch", "gymnasium", "appo", "torch._dynamo"])
    remove_at_end(util.get_temp_dir())  # where the server listens
    resource_tracker.ensure_running()  # first, since it unblocks signals at its end
    with starting():
        forkserver.ensure_running()
    wake_server()
    return context


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start what belongs to this run, finds our modules, and does not run the user's script once more.

    It begins with SIGINT, SIGTERM and SIGHUP blocked, which Ctrl-C, `timeout`, service managers and closing terminals
    send to the whole group: the main process stops the others, in order.
    """
    with STARTING:
        script, environment = sys.modules["__main__"], dict(os.environ)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        sys.modules["__main__"] = ModuleType("__main__")  # what is needed of the script is sent by value
        # PYTHONSAFEPATH: the working folder may hold modules named as ours
        os.environ |= {**FOR_LIBRARIES, **os.environ, RUN: str(os.getpid()), "PYTHONSAFEPATH": "1",
                       "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        try:
            yield
        finally:
            sys.modules["__main__"] = script
            os.environ.clear()
            os.environ.update(environment)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def wake_server() -> None:
    """Let the server go on if somebody has stopped it: who starts a process, or waits for the end of one, needs it."""
    with contextlib.suppress(ProcessLookupError, TypeError):  # there may be none
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGCONT)


def describe_death(process: Any) -> str:
    """Return in one line how a process has ended."""
    wake_server()  # which knows it
    process.join(5)
    code = process.exitcode or 0
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    how = f"left with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}{hint}"
    return f"{process.name} {how}"


def kill_all(processes: Sequence[Any]) -> None:
    """End every process that was started, whatever its state, with all that it has started; wait for its end."""
    started = [process for process in processes if process.pid]
    kill_with_programs({process.pid for process in started})
    wake_server()
    deadline = time.monotonic() + KILL_SEC  # one that waits for a disk that hangs dies when that comes back
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))


def make_pipe(size: int) -> tuple[str, Connection]:
    """Make a pipe that holds so many bytes (elsewhere than on Linux as many as it may); return its name, and open it.

    Other processes open it by its name, as many pipes as they like: only some 250 descriptors can be handed to one.
    """
    name = tempfile.mktemp(prefix="pipe_")
    os.mkfifo(name, 0o600)  # it fails where there is something of this name
    remove_at_end(name)
    pipe = Connection(os.open(name, os.O_RDWR))
    util.Finalize(pipe, Path(name).unlink, [True], exitpriority=-1)  # with the system: a program may have several
    try:
        if hasattr(fcntl, "F_SETPIPE_SZ") and size > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
    except PermissionError as error:
        raise UserError(f"the system allows no pipe of {size:,} bytes (/proc/sys/fs/pipe-max-size, and "
                        "pipe-user-pages-soft for all of a user); lower --num_envs_per_worker, or end other runs"
                        ) from error
    return name, pipe


# ---- in a child process ------------------------------------------------------------------------------------------


def run_component(index: int, component: Component, reports: Connection, seed: int, trace: bool,
                  folder: str, environment: Mapping[str, str]) -> None:
    """Set this process up, make a component and run it until it is told to stop; report its traceback if it fails."""
    import torch

    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**environment, COMPONENT: str(os.getpid())})
    os.setpgid(0, 0)  # so Ctrl-C does not reach what environments start either, such as the engines of games
    threading.Thread(target=end_with_main_process, daemon=True).start()
    forgive()
    with contextlib.suppress(AttributeError):  # only Linux names processes
        ctypes.CDLL(None).prctl(PR_SET_NAME, component.name.replace("_worker", "").encode())
    os.nice(component.niceness)
    if component.core is not None:
        cores = own_cores()
        os.sched_setaffinity(0, {cores[component.core % len(cores)]})
    # it is the main process that stops it; what environments start would inherit blocked or ignored signals
    with contextlib.suppress(KeyboardInterrupt), STOP_SIGNAL.watching(deferring=True):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        torch.set_num_threads(1)  # cores are shared between processes instead
        seed_all(seed)
        try:
            make, more = cloudpickle.loads(component.make), [reports.send] if component.reports else []
            running = make(*component.args, *more)
            if component.inbox is not None:
                component.inbox.heartbeat = component.heartbeat.numpy()
                component.inbox.beat()
            spans = record(running) if trace else []
            reports.send(("ready", index))
            running.run()
            reports.send(("left", list(spans)))
        except BaseException as error:  # noqa: BLE001  whatever it is, the main process must hear of it
            lines = [type(error).__name__, *str(error).strip().splitlines()[-1:]]
            text = f"{component.name} failed\n{traceback.format_exc()}"
            with contextlib.suppress(OSError):
                reports.send(("refused", str(error)) if isinstance(error, UserError) else
                             ("died", index, f"{component.name} failed: {': '.join(lines)}", text))
            sys.exit(1)


def end_with_main_process() -> None:
    """End when the main process has died. The guard ends what has no time for that, and what environments started."""
    wait([multiprocessing.parent_process().sentinel])
    os.kill(0, signal.SIGKILL)


class Call:
    """Calls a function once, in a child process, which it may crash or freeze, and reports what it returns."""

    def __init__(self, function: Callable[[], Any], report: Report) -> None:
        report(("returned", function()))

    def run(self) -> None:
        """Return: all is reported."""


def call_in_child(name: str, function: Callable[[], Any], seed: int, timeout_sec: float) -> Any:
    """Return what a function returns in a child process of its own.

    Raises `UserError` as that does, `ComponentError` when it fails, dies, or takes longer than timeout_sec.
    """
    reports: list[tuple] = []
    crew = Processes()
    component = Component(name, functools.partial(Call, function), (), "call", 0, None, None)
    deadline = time.monotonic() + timeout_sec
    try:
        crew.start([component], reports.append, derive_seed(seed, PROCESS, part=3), 0, trace=False)
        while not reports and time.monotonic() < deadline:
            crew.advance(reports.append)
    finally:
        crew.kill()
    late = f"{name} hangs: more than {timeout_sec:.0f} s (--stall_timeout_sec)"
    kind, *content = reports[0] if reports else ("died", 0, late, "")
    if kind == "died":
        raise ComponentError(content[2] or content[1])
    return content[0]


# ---- serial mode -------------------------------------------------------------------------------------------------


class OneProcess:
    """Every component in this process, without threads, in a fixed order: slow, but a debugger can step through it."""

    def __init__(self) -> None:
        self.own: list[Any] = []  # what the process has only once: the program keeps its own
        self.components: list[Any] = []  # that were made
        self.spans: dict[str, Iterable[Span]] = {}

    def start(self, components: Sequence[Component], report: Report, seed: int, start: int, *, trace: bool) -> None:
        """Make each component; trace: record what it does."""
        import torch

        with left_alone(self.own):
            torch.set_num_threads(1)  # as in every process of the other modes
            seed_all(derive_seed(seed, PROCESS, start))
            for index, component in enumerate(components):
                made = component.make(*component.args, *([report] if component.reports else []))
                self.components.append(made)
                self.spans[component.name] = record(made) if trace else []
                report(("ready", index))

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


# ---- heartbeats ----------------------------------------------------------------------------------------------------

# The table has a row for each component. The inbox of its main thread (`shared_buffers.Inbox`) notes there when the
# component waits, and counts when it goes on. What takes long, steps of environments and SGD steps, counts besides.

COUNT, WAITS, KIND = range(3)  # how often it went on; whether it waits; what it does now:
ANYTHING, STEPS, SAVES = range(3)  # a step of environments, or a checkpoint


# ---- spans, for the timeline -------------------------------------------------------------------------------------

MAX_SPANS = 200_000  # of one process; about 30 MB
WAIT = "wait"  # spans whose names begin so are time in which a thread had nothing to do


class Span(NamedTuple):
    """One thing that one thread did. Times in ns of `time.perf_counter_ns`, which all processes share."""

    thread: str
    name: str
    begin: int
    end: int


def record(component: Any) -> deque[Span]:
    """Write down the calls that a component lists in `SPANS`, from now on; return where the newest of them lie.

    SPANS: for each method its path from the component, and the name of its calls or a function that returns it.
    """
    spans: deque[Span] = deque(maxlen=MAX_SPANS)
    for path, name in component.SPANS:
        *parents, method = path.split(".")
        owner = functools.reduce(getattr, parents, component)
        setattr(owner, method, functools.partial(call_and_note, spans, name, getattr(owner, method)))
    return spans


def call_and_note(spans: deque[Span], name: str | Callable[..., str], function: Callable, /, *args: Any,
                  **kwargs: Any) -> Any:
    """Call a function, and write down when."""
    label, begin = name if isinstance(name, str) else name(*args, **kwargs), time.perf_counter_ns()
    try:
        return function(*args, **kwargs)
    finally:
        spans.append(Span(threading.current_thread().name, label, begin, time.perf_counter_ns()))


def write_trace(path: Path, spans: Mapping[str, Iterable[Span]], begin: int, end: int) -> None:
    """Write the spans of each process that lie in [begin, end] ns as Chrome trace events, a row for each thread.

    `tools/timeline.py` draws the file. Raises `OSError` when the disk is full.
    """
    events: list[Values] = []
    rows: dict[str, int] = {}
    for process, recorded in spans.items():
        for span in recorded:
            first, last = max(span.begin, begin), min(span.end, end)
            if first <= last:
                label = process if span.thread == "MainThread" else f"{process}, {span.thread}"
                pid = rows.setdefault(label, len(rows))
                events.append({"ph": "X", "pid": pid, "tid": 0, "name": span.name, "cat": label,
                               "ts": (first - begin) / 1e3, "dur": (last - first) / 1e3})  # us
    events += [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}} for label, pid in rows.items()]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
