"""Hung is told from idle, busy and asleep; failures are counted by the time in which something could be done."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from config import make_config
from runtime import pulse, recovery
from runtime.commands import Sampling
from runtime.pulse import BETWEEN, Watch, attach
from runtime.recovery import Recovery
from runtime.user_error import ComponentError

SPANS = (("inbox.get", "wait for work"), ("work", "work"), ("step", lambda split: f"step {split}"),
         ("state.save", "save"))
WAITING, WORKING, STEPPING, SAVING = range(4)
TIMEOUT = 10.0


class Clock:
    """A clock that stands still until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.now = 100.0
        for module in modules:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


class Rig:
    """A watch over one component, looked at twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: float) -> None:
        self.clock = Clock(monkeypatch, pulse)
        self.watch = Watch([SPANS], TIMEOUT, **{"step_timeout_sec": 3.0, "start_sec": 5.0} | settings)
        self.row = np.array([[1, BETWEEN, 0]])

    def seconds_until_hung(self, doing: int, *, has_mail: bool = False, counts: bool = False, most: float = 300) -> Any:
        """Return after how many seconds it is said to hang, and as what; None: never."""
        self.row[0, 1] = doing
        for half in range(int(2 * most)):
            self.clock.now += 0.5
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
        rig.clock.now += 10_000
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


# ---- counting --------------------------------------------------------------------------------------------------------


def make_recovery(monkeypatch: pytest.MonkeyPatch, clock: Clock | None, *, mail: bool = False,
                  **settings: float) -> Recovery:
    cfg = make_config({"env": "test", "device": "cpu", "max_restarts": 2, "restart_window_sec": 100.0} | settings)
    components = [SimpleNamespace(name="evaluator", role="evaluator", number=0, inbox=None, make=Component),
                  SimpleNamespace(name="learner", role="learner", number=0, inbox=None, make=Component)]
    policy = SimpleNamespace(trajectories_done=SimpleNamespace(empty=lambda: not mail))
    crew = SimpleNamespace(end=lambda index: None, processes=[SimpleNamespace(pid=0)] * 2)
    buffers = SimpleNamespace(policies=[policy], pulses=torch.ones(2, 3, dtype=torch.int64),
                              worker_inboxes=[], goal=torch.zeros(1))
    made = Recovery(cfg, buffers, crew, components, Sampling(buffers), lambda *words, **how: None)
    monkeypatch.setattr(made, "_replace", lambda component: None)
    return made


@pytest.mark.parametrize("mail", [False, True])
def test_a_run_that_stands_still_blames_a_batcher_or_ends(monkeypatch: pytest.MonkeyPatch, *, mail: bool) -> None:
    clock = Clock(monkeypatch, pulse, recovery)
    made = make_recovery(monkeypatch, clock, mail=mail, stall_timeout_sec=10.0)
    made.sampling.resume(goal=1000)
    for component in made.components:
        component.inbox = SimpleNamespace(empty=lambda: True)
    made.watch.seconds_still = 19.9
    made.watch.work = 0
    monkeypatch.setattr(made.watch, "look", lambda *_: [])
    clock.now += 0.5
    assert made.find_hung() == []
    made.watch.seconds_still, clock.now = 20.1, clock.now + 0.5
    if mail:
        assert [failure.why for failure in made.find_hung()] == [
            "learner hangs: it has taken no trajectories for 20 s (--stall_timeout_sec)"]
    else:
        with pytest.raises(ComponentError, match="nobody has done anything for 20 s: all wait for one another"):
            made.find_hung()
