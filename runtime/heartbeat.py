"""Heartbeats: how often each component has gone on, and whether it waits, so that hung is told from idle.

The inbox of a component's main thread (`shared_buffers.Inbox`) keeps its row of the shared table: it notes when the
component waits, and counts when it goes on. What takes long, steps of environments and SGD steps, calls `beat` besides.
Who waits for messages that are there, or does not go on for too long, hangs.
"""

import time
from collections.abc import Sequence

import numpy as np

COUNT, WAITS, KIND = range(3)  # how often it went on; whether it waits; what it does now:
ANYTHING, STEPS, SAVES = range(3)  # a step of environments, or a checkpoint
SAVE_PATIENCE = 10  # times longer: a large replay on a slow disk
START_SEC = 30.0  # more for a component that is being made
LONGEST_NAP_SEC = 1.0  # between two looks; more was time in which this process, perhaps the machine, slept


class Watch:
    """Looks at the table, and tells who has not gone on for too long, while this process was awake."""

    def __init__(self, num_components: int, timeout_sec: float, step_timeout_sec: float, start_sec: float) -> None:
        """Begin.

        Args:
            timeout_sec: for any one thing; step_timeout_sec: for one step of environments.
            start_sec: more time for a component that is being made.
        """
        self.timeout_sec, self.step_timeout_sec, self.start_sec = timeout_sec, step_timeout_sec, start_sec
        self.now, self.last_look = 0.0, time.monotonic()  # seconds awake
        self.seen = [(-1, 0.0)] * num_components  # each one's count, and when it was new
        self.progress, self.seconds_still = 0, 0.0  # of the run; for how long there was none

    def forget(self, index: int) -> None:
        """Begin anew with a component that was replaced."""
        self.seen[index], self.seconds_still = (-1, self.now), 0.0

    def look(self, table: np.ndarray, has_mail: Sequence[bool], progress: int) -> list[tuple[int, float, str]]:
        """Return who hangs: its index, for how many seconds, and the setting that says how long it may take.

        Args:
            table: [components, 3] int64.
            has_mail: whether there is something to do for each component; who waits for that is idle.
            progress: what was sampled and trained on so far.
        """
        now = time.monotonic()
        awake = min(now - self.last_look, LONGEST_NAP_SEC)
        self.now, self.last_look = self.now + awake, now
        hung, all_wait = [], True
        for index, (count, waits, kind) in enumerate(table[: len(self.seen)].tolist()):
            all_wait &= count > 0 and kind != SAVES  # else for who is being made, or saves
            if count != self.seen[index][0] or (waits and not has_mail[index]):
                self.seen[index] = count, self.now
                continue
            patience = SAVE_PATIENCE if kind == SAVES else 1
            allowed, setting = self.timeout_sec * patience + self.start_sec * (count == 0), "stall_timeout_sec"
            if kind == STEPS and self.step_timeout_sec < allowed:
                allowed, setting = self.step_timeout_sec, "env_timeout_sec"
            if self.now - self.seen[index][1] > allowed:
                hung.append((index, self.now - self.seen[index][1], setting))
        self.seconds_still = 0.0 if progress != self.progress else self.seconds_still + awake * all_wait
        self.progress = progress
        return hung
