"""What every part needs: errors that are shown in one line, seeds, code by its name, generators, and the own rank.

*Seeds.* Every generator of random numbers has a seed of its own, derived from `--seed`, from what it is for, and from
how often the run was started: so a resumed run plays new episodes. NumPy's SeedSequence mixes all parts of such a key:
runs with neighboring seeds, and processes of one run, have nothing in common.

*Code by its name.* A setting names a function or class as "module:name", for the command line, for saved settings and
for every process. One that is given from Python travels along with its name, since no other process could import what a
notebook has defined.

Imports PyTorch, NumPy and gymnasium only within functions: train.py starts its processes before these are imported.
"""

import contextlib
import difflib
import functools
import gc
import importlib
import io
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from runtime.guard import RUN, start_guard

Values = dict[str, Any]  # settings, a row of the records, what a checkpoint holds: by their names

# ---- errors ------------------------------------------------------------------------------------------------------


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, never a traceback."""

    def __str__(self) -> str:
        return " ".join(Exception.__str__(self).splitlines())  # what was typed, or raised, may hold anything


class ComponentError(Exception):
    """A component failed; the text names it and holds its traceback."""


class EnvironmentFailure(ComponentError):
    """An environment raised an error, the cause, or returned numbers that cannot be learned from."""

    __str__ = UserError.__str__


def exit_status(main: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
    """Make a command return its exit status: 2 after one line about what the user can mend, else 0."""
    @functools.wraps(main)
    def status(argv: list[str]) -> int:
        try:
            main(argv)
        except UserError as error:
            print(f"{Path(main.__code__.co_filename).name}: {error}", file=sys.stderr)
            return 2
        return 0
    return status


def nearest(word: Any, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the known word that is most like this one; "" when none is."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def combine(rows: Sequence[Values]) -> Values:
    """Average the numbers of some rows, or take their extremes where names end with _max or _min.

    Some are of a part of the rows. What was not finite is None, also of an extreme, whose order would else decide: JSON
    has no such numbers.
    """
    combined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        function = {"max": max, "min": min}.get(name.rpartition("_")[2], fmean)
        combined[name] = function(values) if all(value is not None and isfinite(value) for value in values) else None
    return combined


# ---- seeds -------------------------------------------------------------------------------------------------------

# what a generator is for
ENVIRONMENT = 0  # 1 was another generator once: the numbers of seeds stay
SAMPLER, PROCESS, NETWORK, SHUFFLE, POPULATION, MAPPING, EVALUATION, REPLAY = range(2, 10)
MAX_SEED = 2**32 - 1  # one word of a SeedSequence; more would shift the parts of a key


def derive_seed(seed: int, purpose: int, start: int = 0, index: int = 0, part: int = 0) -> int:
    """Derive a seed in [0, 2^31) for one generator.

    Args:
        seed: `Config.seed`.
        purpose: one of the constants above.
        start: the number of the start of the run; 0 for what must be the same after each.
        index, part: which of several generators, for example the worker and its environment.
    """
    from numpy.random import SeedSequence

    return int(SeedSequence((seed, purpose, start, index, part)).generate_state(1)[0] >> 1)


# ---- code by its name --------------------------------------------------------------------------------------------

NAMES_CODE = ("env", "algo", "model", "encoder", "core", "policy_mapping")  # settings that may
NO_MODULE = "by_value"  # in names of what no other program can import
_USED: dict[Path, Values] = {}  # what code this program's systems were made of, by the folders of their runs


class Named(str):
    """The name of a function or class, or the id of an environment, which takes along what it names.

    Pickled by cloudpickle: as a name where other processes can import it, by value what a notebook or the running
    script defines. Unpickled only where it is used.
    """

    def __new__(cls, name: str, value: Any = None, pickled: bytes = b"") -> "Named":
        named = super().__new__(cls, name)
        named._value, named._pickled = value, pickled
        return named

    @property
    def value(self) -> Any:
        """What is named."""
        if self._value is None:
            import gymnasium as gym

            self._value, registered = cloudpickle.loads(self._pickled)
            gym.registry.update(registered)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._pickled:  # once: a worker that is replaced later gets the same
            self._pickled = cloudpickle.dumps((self._value, registered_here()))
        return Named, (str(self), None, self._pickled)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Named":
        return self


def registered_here() -> dict:
    """Return the environments that this program has registered with gymnasium; all processes have those of Atari."""
    import gymnasium as gym

    return {name: spec for name, spec in gym.registry.items() if not str(spec.entry_point).startswith("ale_py.")}


def reference(value: Any) -> Any:
    """Name a function or class, or the id of an environment that this program has registered, for every process.

    A function of the running script is named by the file of the script, and what the command line could not find again
    "by_value:name". Anything else is returned as it is.
    """
    if isinstance(value, str) and value in registered_here():
        return Named(value, registered_here()[value])
    if not callable(value):
        return value
    inner = getattr(value, "func", value)  # of a partial()
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = sys.modules.get(getattr(value, "__module__", None))
    if getattr(module, name, None) is value:
        found = module.__name__
        if found == "__main__":
            found = module.__spec__.name if module.__spec__ else Path(getattr(module, "__file__", None) or "").stem
        if found:
            return Named(f"{found}:{name}", value)
    name = re.sub(r"\W", "", name.rpartition(".")[2])  # of <lambda>
    return Named(f"{NO_MODULE}:{name}", value)


def find_function(flag: str, name: str) -> Callable:
    """Find the function or class that "module:name" names. Raises `UserError` when there is none."""
    if isinstance(name, Named):
        return name.value
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"--{flag}={name}: there is no module '{error.name}'; run it from the folder of its file, "
                        f"or set PYTHONPATH to that folder; {NO_MODULE} can only be given from Python") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"--{flag}={name}: module '{module_name}' has no function or class '{attribute}'"
                        f"{nearest(attribute, vars(module))}")
    return function


def import_module(name: str) -> ModuleType:
    """Import a user's module. From then on the working directory is searched too, as the last folder."""
    if not name or name.startswith("."):
        raise ModuleNotFoundError(f"no module is called '{name}'", name=name)
    if "" not in sys.path:
        sys.path.append("")
    return importlib.import_module(name)


def check_trusted(saved: Values, given: Values, run_dir: Path) -> None:
    """Refuse to import what only the settings in a run's folder ask for: who sends a folder would run code here.

    Args:
        saved: the settings of the run.
        given: those that the user gives now.
    """
    unnamed = [flag for flag in NAMES_CODE if ":" in str(saved.get(flag)) and flag not in given]
    if unnamed and not given.get("trust_run"):
        raise UserError(f"{run_dir} asks to import {' '.join(f'--{flag}={saved[flag]}' for flag in unnamed)}; add "
                        "--trust_run if you know what that code does (in Python trust_run=True)")


def remember(run_dir: Path, settings: Values) -> None:
    """Note what code a system of this program was made of: its run may be loaded here without more trust."""
    _USED[run_dir] = {flag: settings[flag] for flag in NAMES_CODE}


def recall(run_dir: Path, saved: Values) -> Values:
    """Return those of a run's settings whose code this program has used for it; run_dir: where it was trained."""
    return {flag: code for flag, code in _USED.get(run_dir, {}).items() if code == saved.get(flag)}


# ---- generators --------------------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python, from which environments may draw."""
    import torch
    from numpy.random import mtrand

    torch.manual_seed(seed)
    mtrand.seed(derive_seed(seed, PROCESS, part=1))  # with one seed PyTorch's and NumPy's would draw the same
    random.seed(derive_seed(seed, PROCESS, part=2))


def global_states() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return how to read and write what a process has only once.

    That is the global generators, of NumPy, Python and PyTorch, for GPUs too if they are in use, and the number of
    PyTorch's threads.
    """
    import torch
    from numpy.random import mtrand

    accelerator = torch.accelerator.current_accelerator()
    of_gpus = getattr(torch.get_device_module(accelerator), "default_generators", ()) if accelerator else ()
    return [(lambda: mtrand.get_state(legacy=False), mtrand.set_state),
            (random.getstate, random.setstate),
            (torch.get_num_threads, torch.set_num_threads),
            *((each.get_state, each.set_state) for each in (torch.default_generator, *of_gpus))]


@contextlib.contextmanager
def left_alone(own: list[Any] | None = None) -> Iterator[None]:
    """Set `global_states` back afterwards. It costs 0.15 ms.

    own: the values to begin with (empty: those of now); in the end it holds those that there are then.
    """
    states = global_states()
    before = [read() for read, _ in states]
    for (_, write), value in zip(states, own or before, strict=False):  # a GPU may be in use only since then
        write(value)
    try:
        yield
    finally:
        if own is not None:
            own[:] = [read() for read, _ in states]
        for (_, write), value in zip(states, before, strict=True):
            write(value)


# ---- this rank ---------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """Which of how many systems this is: of all, and of those on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def this_rank() -> Rank:
    """Read what torchrun says; without it this is the only one."""
    return Rank(*(int(os.environ.get(name.upper(), default)) for name, default in Rank._field_defaults.items()))


def own_cores() -> list[int]:
    """Return the cores that this process may use; where the system does not say it (macOS), all."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


CORES = own_cores()  # of all ranks on this machine


def take_share_of_cores() -> None:
    """Bind this process, and so its children, to this rank's share of the cores: as many as any other's."""
    own = this_rank()
    if own.world_size > 1:  # PyTorch would write where in its code it was when the store of a run is lost
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if hasattr(os, "sched_setaffinity"):
            share = max(1, len(CORES) // own.local_world_size)
            os.sched_setaffinity(0, CORES[own.local_rank * share : (own.local_rank + 1) * share] or CORES)


# ---- signals that ask for a stop ---------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ask for a stop; SIGHUP: the terminal has gone away
AGAIN_SEC = 1.0  # some programs and people send a signal twice


class StopSignal:
    """Remembers that SIGINT, SIGTERM or SIGHUP came, for a loop that asks; raises `KeyboardInterrupt` where none does.

    One more Ctrl-C raises it everywhere. There is one of these for the whole process, whatever systems it has.
    """

    came_at: float | None = None
    num_deferring = 0  # nested `with` statements

    def __call__(self) -> bool:
        """Return whether one came."""
        return self.came_at is not None

    @contextlib.contextmanager
    def watching(self, *, deferring: bool) -> Iterator[bool]:
        """Handle the signals meanwhile, but those that the program ignores or handles by itself.

        deferring: one waits for a loop that asks; the outermost `with` raises it after all. Yields whether it is that.
        """
        free = [number for number in SIGNALS if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
                and threading.current_thread() is threading.main_thread()]  # no other thread may
        before = {number: signal.signal(number, self._handle) for number in free}
        self.num_deferring += deferring
        try:
            yield bool(before)
        finally:
            self.num_deferring -= deferring
            for number, handler in before.items():
                signal.signal(number, handler)
            came, self.came_at = self(), None if before else self.came_at
        if came and before and deferring:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, now = self.came_at is None, time.monotonic()
        self.came_at = now if is_first else self.came_at
        is_again = number == signal.SIGINT and now - self.came_at > AGAIN_SEC
        if is_again or (is_first and not self.num_deferring):
            raise KeyboardInterrupt


STOP_SIGNAL = StopSignal()


def forget_handlers() -> None:
    """End at these signals as any other process does: in one that is forked by hand."""
    for number in SIGNALS:
        if signal.getsignal(number) == STOP_SIGNAL._handle:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=forget_handlers)


def run_command(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command with the arguments that were typed, and end; what it has started ends with it, in any case."""
    os.environ[RUN] = str(os.getpid())  # by which the guard finds what is started from now on
    start_guard()
    status = main(sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # some send them twice
    gc.freeze()  # Python would look for garbage among all that was imported: 0.4 s on a Zen 5
    sys.exit(status)


# ---- the console, which may go away: that ends the output, not the training --------------------------------------


class Forgiving(io.FileIO):
    """A file that loses what it cannot write."""

    def write(self, data: bytes) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def forgive() -> None:
    """Replace the outputs of this process by ones that never fail: environments print, too."""
    for number, name in enumerate(("stdout", "stderr"), 1):
        file = io.BufferedWriter(Forgiving(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(file, errors="backslashreplace", line_buffering=True))


def say(text: str, end: str = "\n") -> None:
    """Print, if that is possible."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        print(text, end=end, flush=True)


def show_progress(line: str) -> bool:
    """Show how far the training has come; return whether the line is open: a terminal's takes the place of the last."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = (os.get_terminal_size().columns or 80) - 1 if is_terminal else 0
    say(f"\r{line[:width]:{width}}" if is_terminal else line, end="" if is_terminal else "\n")
    return is_terminal
