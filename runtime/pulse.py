"""Signs of life: how much each component has done and what it is doing, so that hung is told from idle.

A component writes into its row of a shared table whenever its main thread begins or ends one of its `SPANS`; the
supervisor looks at the table. Who waits for messages that are there, or does the same thing for too long, hangs.
"""

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from runtime.recorder import WAIT, find_method

COUNT, DOING, WAITS = range(3)  # things begun; the one under way; those of them that were waits
BETWEEN = -1  # two spans
STEPS_OF_ENVIRONMENTS = ("step", "env.step")  # spans of rollout workers and the evaluator
SAVES, PATIENCE_WITH_SAVES = "state.save", 10  # a large replay on a slow disk may take so many times longer
START_SEC = 30.0  # more for a component that is being made
LONGEST_NAP_SEC = 1.0  # between two looks; more was time in which this process, perhaps the machine, slept


def attach(component: Any, row: Tensor) -> None:
    """Let a component note what its main thread does in a row [3] int64 of the shared table."""
    row = row.numpy()
    row[DOING] = BETWEEN
    for number, (path, _) in enumerate(component.SPANS):
        owner, method = find_method(component, path)
        setattr(owner, method, _noted(getattr(owner, method), row, number, waits=is_wait(component.SPANS[number])))


def is_wait(span: tuple[str, Any]) -> bool:
    """Tell whether who is in this span has nothing to do."""
    return str(span[1]).startswith(WAIT)


def _noted(function: Any, row: np.ndarray, number: int, *, waits: bool) -> Any:
    thread = threading.get_ident()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return function(*args, **kwargs)
        before = row[DOING]
        row[DOING] = number
        row[COUNT] += 1
        row[WAITS] += waits
        try:
            return function(*args, **kwargs)
        finally:
            row[DOING] = before

    return call


def is_waiting(spans: Sequence[tuple[str, Any]], row: Sequence[int]) -> bool:
    """Tell whether a component with these `SPANS` waits for something, by its row of the table."""
    return row[COUNT] > 0 and row[DOING] != BETWEEN and is_wait(spans[int(row[DOING])])


class Hung(NamedTuple):
    """A component that does not go on."""

    index: int
    seconds: float
    doing: str  # "": nothing that has a name
    setting: str  # that says how long it may take


class Watch:
    """Looks at the table, and tells who has not moved for too long. Time in which this process slept does not count."""

    def __init__(self, spans: Sequence[Sequence[tuple[str, Any]]], timeout_sec: float, step_timeout_sec: float,
                 start_sec: float) -> None:
        """Begin.

        Args:
            spans: `SPANS` of each component.
            timeout_sec: for any one thing; step_timeout_sec: for one step of environments.
            start_sec: more time for a component that is being made.
        """
        self.spans, self.timeout_sec, self.step_timeout_sec = spans, timeout_sec, step_timeout_sec
        self.start_sec = start_sec
        self.now, self.last_look = 0.0, time.monotonic()  # seconds awake
        self.seen = [(-1, 0.0)] * len(spans)  # each one's count, and when it was new
        self.work, self.seconds_still = 0, 0.0  # things done by all, waits aside; for how long nothing was

    def forget(self, index: int) -> None:
        """Begin anew with a component that was replaced."""
        self.seen[index], self.seconds_still = (-1, self.now), 0.0

    def look(self, table: np.ndarray, has_mail: Sequence[bool]) -> list[Hung]:
        """Return who hangs.

        Args:
            table: [components, 3] int64.
            has_mail: whether there is something to do for each component; who waits for that is idle.
        """
        now = time.monotonic()
        awake = min(now - self.last_look, LONGEST_NAP_SEC)
        self.now, self.last_look = self.now + awake, now
        rows = table[: len(self.spans)].tolist()
        work = 0
        hung = []
        for index, row in enumerate(rows):
            count, doing, waits = row
            work += count - waits
            idle = is_waiting(self.spans[index], row) and not has_mail[index]
            if count != self.seen[index][0] or idle:
                self.seen[index] = count, self.now
                continue
            path, name = ("", "") if count == 0 or doing == BETWEEN else self.spans[index][doing]
            allowed = self.timeout_sec + (self.start_sec if count == 0 else 0)
            setting = "stall_timeout_sec"
            if path == SAVES:
                allowed *= PATIENCE_WITH_SAVES
            if count == 0 or path == SAVES:  # the others may have to wait for that
                self.seconds_still = 0.0
            if path in STEPS_OF_ENVIRONMENTS and self.step_timeout_sec < allowed:
                allowed, setting = self.step_timeout_sec, "env_timeout_sec"
            if self.now - self.seen[index][1] > allowed:
                doing = name if isinstance(name, str) else path
                hung.append(Hung(index, self.now - self.seen[index][1], doing, setting))
        self.seconds_still = self.seconds_still + awake if work == self.work else 0.0
        self.work = work
        return hung
