"""Hung is told from idle, busy and asleep."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime import pulse
from runtime.pulse import BETWEEN, Watch, attach

SPANS = (("inbox.get", "wait for work"), ("work", "work"), ("step", lambda split: f"step {split}"),
         ("state.save", "save"))
WAITING, WORKING, STEPPING, SAVING = range(4)
TIMEOUT = 10.0


class Rig:
    """A watch over one component, looked at twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: float) -> None:
        self.now = 100.0
        monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.watch = Watch([SPANS], TIMEOUT, **{"step_timeout_sec": 3.0, "start_sec": 5.0} | settings)
        self.row = np.array([[1, BETWEEN, 0]])

    def seconds_until_hung(self, doing: int, *, has_mail: bool = False, counts: bool = False, most: float = 300) -> Any:
        """Return after how many seconds it is said to hang, and as what; None: never."""
        self.row[0, 1] = doing
        for half in range(int(2 * most)):
            self.now += 0.5
            self.row[0, 0] += counts
            if found := self.watch.look(self.row, [has_mail]):
                assert found[0].index == 0
                return (half + 1) / 2, found[0].doing, found[0].setting
        return None


@pytest.mark.parametrize(("doing", "how", "expected"), [
    (WAITING, {}, None),
    (WAITING, {"has_mail": True}, (10.5, "wait for work", "stall_timeout_sec")),
    (WORKING, {}, (10.5, "work", "stall_timeout_sec")),
    (WORKING, {"counts": True}, None),
    (BETWEEN, {}, (10.5, "", "stall_timeout_sec")),
    (STEPPING, {}, (3.5, "step", "env_timeout_sec")),
    (SAVING, {}, (100.5, "save", "stall_timeout_sec")),
])
def test_hung_is_told_from_idle_and_busy(monkeypatch: pytest.MonkeyPatch, doing: int, how: dict[str, bool],
                                         expected: Any) -> None:
    rig = Rig(monkeypatch)
    rig.watch.look(rig.row, [False])
    assert rig.seconds_until_hung(doing, **how) == expected


def test_who_is_being_made_has_more_time_and_no_name_for_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.row[0, 0] = 0
    rig.watch.look(rig.row, [False])
    assert rig.seconds_until_hung(WAITING) == (15.5, "", "stall_timeout_sec")


def test_time_asleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.watch.look(rig.row, [False])
    for _ in range(9):
        rig.now += 10_000
        assert not rig.watch.look(rig.row, [True])


def test_it_is_seen_that_nobody_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    assert rig.seconds_until_hung(WAITING, most=60) is None
    assert rig.watch.seconds_still >= 59
    rig.row[0, 0] += 2
    rig.row[0, 2] += 1  # one of them was a wait
    rig.watch.look(rig.row, [False])
    assert rig.watch.seconds_still == 0
    assert rig.seconds_until_hung(SAVING, most=60) is None, "it is busy, whatever the count says"
    assert rig.watch.seconds_still <= 0.5


class Component:
    """Does something within something."""

    SPANS = SPANS[:2]

    def __init__(self) -> None:
        self.inbox = SimpleNamespace(get=lambda: self.seen.append(self.row.tolist()))
        self.row, self.seen = torch.zeros(3, dtype=torch.int64), []

    def work(self) -> None:
        self.seen.append(self.row.tolist())
        self.inbox.get()
        self.seen.append(self.row.tolist())


def test_a_component_notes_what_it_does() -> None:
    component = Component()
    attach(component, component.row)
    component.work()
    assert component.seen == [[1, WORKING, 0], [2, WAITING, 1], [2, WORKING, 1]]
    assert component.row.tolist() == [2, BETWEEN, 1]
