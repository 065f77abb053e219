"""Hung is told from idle, busy and asleep."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.processes import ANYTHING, COUNT, KIND, SAVES, START_SEC, STEPS, WAITS
from services import recovery
from services.recovery import Watch

STALL, STEP = 10.0, 3.0  # the timeouts


class Rig:
    """A watch over one component, looked at twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.watch = Watch(1, STALL, STEP)
        self.row = np.array([[1, 0, ANYTHING]])
        self.look()

    def look(self, *, has_mail: bool = False, progress: int = 0) -> list[Any]:
        return self.watch.look(self.row, [has_mail], progress)

    def first_hang(self, *, has_mail: bool = False, counts: bool = False) -> Any:
        """Return after how many seconds it hangs, and the setting that says so; None: not within 5 minutes."""
        for half in range(1, 600):
            self.now += 0.5
            self.row[0, COUNT] += counts
            for _, _, setting in self.look(has_mail=has_mail):
                return half / 2, setting
        return None


@pytest.mark.parametrize(("row", "how", "expected"), [
    ([1, True, ANYTHING], {}, None),
    ([1, True, ANYTHING], {"has_mail": True}, (STALL + 0.5, "stall_timeout_sec")),
    ([1, False, ANYTHING], {}, (STALL + 0.5, "stall_timeout_sec")),
    ([1, False, ANYTHING], {"counts": True}, None),
    ([1, False, STEPS], {}, (STEP + 0.5, "env_timeout_sec")),
    ([1, False, SAVES], {}, (10 * STALL + 0.5, "stall_timeout_sec")),
    ([0, False, ANYTHING], {}, (STALL + START_SEC + 0.5, "stall_timeout_sec")),  # it is being made
])
def test_hung_is_told_from_idle_and_busy(monkeypatch: pytest.MonkeyPatch, row: list[int], how: dict[str, bool],
                                         expected: Any) -> None:
    rig = Rig(monkeypatch)
    rig.row[:] = row
    rig.look()
    assert rig.first_hang(**how) == expected


def test_time_asleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for _ in range(9):
        rig.now += 10_000
        assert not rig.look(has_mail=True)


def test_it_is_seen_that_nobody_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.row[0, WAITS] = True
    assert rig.first_hang() is None
    before, rig.row[0, KIND] = rig.watch.seconds_still, SAVES
    assert before > 250
    assert rig.first_hang() is None
    assert rig.watch.seconds_still == before, "others may wait for who saves"
    rig.look(progress=1)
    assert rig.watch.seconds_still == 0
