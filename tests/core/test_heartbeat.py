"""Hung is told from idle, busy and asleep."""

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import heartbeat
from runtime.heartbeat import ANYTHING, COUNT, KIND, SAVES, STEPS, WAITS, Watch
from shared_buffers import PAUSE, Inbox

TIMEOUT = 10.0


class Rig:
    """A watch over one component, looked at twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.watch = Watch(1, TIMEOUT, step_timeout_sec=3.0, start_sec=5.0)
        self.row = np.array([[1, 0, ANYTHING]])
        self.watch.look(self.row, [False], 0)

    def seconds_until_hung(self, *, has_mail: bool = False, counts: bool = False, most: float = 300) -> Any:
        """Return after how many seconds it is said to hang, and the setting that says so; None: never."""
        for half in range(int(2 * most)):
            self.now += 0.5
            self.row[0, COUNT] += counts
            if found := self.watch.look(self.row, [has_mail], 0):
                assert [index for index, *_ in found] == [0]
                return (half + 1) / 2, found[0][2]
        return None


@pytest.mark.parametrize(("row", "how", "expected"), [
    ([1, True, ANYTHING], {}, None),
    ([1, True, ANYTHING], {"has_mail": True}, (10.5, "stall_timeout_sec")),
    ([1, False, ANYTHING], {}, (10.5, "stall_timeout_sec")),
    ([1, False, ANYTHING], {"counts": True}, None),
    ([1, False, STEPS], {}, (3.5, "env_timeout_sec")),
    ([1, False, SAVES], {}, (100.5, "stall_timeout_sec")),
    ([0, False, ANYTHING], {}, (15.5, "stall_timeout_sec")),  # it is being made
])
def test_hung_is_told_from_idle_and_busy(monkeypatch: pytest.MonkeyPatch, row: list[int], how: dict[str, bool],
                                         expected: Any) -> None:
    rig = Rig(monkeypatch)
    rig.row[:] = row
    rig.watch.look(rig.row, [False], 0)
    assert rig.seconds_until_hung(**how) == expected


def test_time_asleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for _ in range(9):
        rig.now += 10_000
        assert not rig.watch.look(rig.row, [True], 0)


def test_it_is_seen_that_nobody_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.row[0, WAITS] = True
    assert rig.seconds_until_hung(most=60) is None
    assert rig.watch.seconds_still >= 59
    before, rig.row[0, KIND] = rig.watch.seconds_still, SAVES
    assert rig.seconds_until_hung(most=60) is None
    assert rig.watch.seconds_still == before, "others may wait for who saves"
    rig.watch.look(rig.row, [False], 1)
    assert rig.watch.seconds_still == 0, "there was progress"


def test_an_inbox_notes_who_waits_and_who_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, seen, read = Inbox(multiprocessing, 10), [], os.read
    inbox.put((PAUSE, 0))
    inbox.heartbeat = row = np.zeros(3, int)
    monkeypatch.setattr(os, "read", lambda *args: seen.append(row.tolist()) or read(*args))
    inbox.beat(SAVES)
    assert row.tolist() == [1, False, SAVES]
    inbox.get()
    assert seen == [[1, True, SAVES]]
    assert row.tolist() == [2, False, ANYTHING]
