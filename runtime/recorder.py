"""Writes down what a component does and when, for `tools/timeline.py`. Used by `runtime/crew.py`."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_SPANS = 200_000  # of one process; about 30 MB
WAIT = "wait"  # spans whose names begin so are time in which a thread had nothing to do


class Span(NamedTuple):
    """One thing that one thread did. Times in ns of `time.perf_counter_ns`, which all processes share."""

    thread: str
    name: str
    begin: int
    end: int


class Recorder:
    """Writes down the newest spans of one process."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def attach(self, component: Any, *, waits: bool = True) -> None:
        """Record the calls of a component's `SPANS`: a method, and the name of its calls or a function that returns it.

        waits=False leaves out the names that begin with `WAIT`: nobody waits in serial mode.
        """
        for path, name in component.SPANS:
            if not waits and isinstance(name, str) and name.startswith(WAIT):
                continue
            *parents, method = path.split(".")
            owner = functools.reduce(getattr, parents, component)
            setattr(owner, method, self._recorded(getattr(owner, method), name))

    def _recorded(self, function: Callable, name: str | Callable[..., str]) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            label = name if isinstance(name, str) else name(*args, **kwargs)
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append(Span(threading.current_thread().name, label, begin, time.perf_counter_ns()))

        return call
