"""Ctrl-C, SIGTERM and SIGHUP: one stops the training in order, one more Ctrl-C ends the program at once.

Imports nothing slow: `train.py` watches from its first moment on.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal has gone away
AGAIN_SEC = 1.0  # some programs and people send a signal twice


class StopRequest:
    """Remembers that a signal asked for a stop; raises `KeyboardInterrupt` where there is nothing to put in order."""

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.num_deferring = self.num_watching = 0  # nested `with` statements
        self.before: dict[int, Any] = {}  # handlers

    def __call__(self) -> bool:
        """Tell whether a stop was requested."""
        return self.requested_at is not None

    @contextlib.contextmanager
    def watching(self) -> Iterator["StopRequest"]:
        """Handle the signals meanwhile, but leave those alone that the program ignores or handles by itself."""
        if self.num_watching == 0:
            self.requested_at = None
            self._install()
        self.num_watching += 1
        try:
            yield self
        finally:
            self.num_watching -= 1
            if self.num_watching == 0:
                for number, handler in self.before.items():
                    signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator["StopRequest"]:
        """Let the first signal wait for who asks whether a stop was requested; raise it after all if nobody will."""
        with self.watching():
            self.num_deferring += 1
            try:
                yield self
            finally:
                self.num_deferring -= 1
            if self() and self.is_outermost:
                raise KeyboardInterrupt

    @property
    def is_outermost(self) -> bool:
        """Tell whether nobody around will ask whether a stop was requested."""
        return self.num_watching == 1

    def _install(self) -> None:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # no other thread may
            self.before = {number: signal.getsignal(number) for number in SIGNALS
                           if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)}
        for number in self.before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, now = self.requested_at is None, time.monotonic()
        if first:
            self.requested_at = now
        again = number == signal.SIGINT and not first and now - self.requested_at > AGAIN_SEC
        if again or (first and not self.num_deferring):
            raise KeyboardInterrupt


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Undo what foreign code does to the handlers of these signals: an environment may install its own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other thread may, the foreign code neither
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)  # also where only C knows of another one


def end(status: int) -> NoReturn:
    """End this program, which has done all it had to do."""
    for number in SIGNALS:  # some send them twice
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # Python would look for garbage among all that was imported: 0.4 s on a Zen 5
    sys.exit(status)


STOP_SIGNAL = StopRequest()  # signals are of the whole process


def leave_stopping_to_the_supervisor() -> None:
    """Let a component do nothing when one of these signals comes: it is the supervisor that stops it, in order.

    What its environments start must not inherit that. Programs do not inherit handlers, as they would a blocked signal.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _forget() -> None:
    """Let a process that was forked by hand end at these signals, as any other."""
    for number in SIGNALS:
        if signal.getsignal(number) in (_do_nothing, STOP_SIGNAL._handle):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
