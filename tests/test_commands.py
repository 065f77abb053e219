"""What the supervisor tells others, and who has not answered yet."""

from types import SimpleNamespace

import torch

from runtime.commands import Commands, Sampling
from runtime.inbox import FINISH, PAUSE, RESUME, SAVE


class Box:
    """Keeps what is put into it."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int]] = []

    def put(self, message: tuple[int, int]) -> None:
        self.messages.append(message)


def test_a_new_learner_hears_once_what_the_one_before_has_not_answered() -> None:
    boxes = [[Box(), Box()], [Box()]]
    commands = Commands(SimpleNamespace(policies=[SimpleNamespace(commands=own) for own in boxes]))
    commands.send(0, SAVE, 1)
    commands.send(0, SAVE, 2)
    commands.send(0, SAVE, 2)
    commands.send(0, FINISH, 7, learner=1)
    commands.send(1, SAVE, 1)
    commands.answered(0, SAVE, 1)
    commands.answered(0, FINISH, 6, learner=1)  # of a call that was given up
    for box in (*boxes[0], *boxes[1]):
        box.messages.clear()
    commands.send_again(0)
    assert [box.messages for box in (*boxes[0], *boxes[1])] == [[(SAVE, 2)], [(FINISH, 7)], []]
    assert commands.is_open(0, SAVE, 2)
    assert commands.describe(SAVE) == "the learner of policy 0, policy 1"
    commands.answered(0, SAVE, 2)
    commands.answered(1, SAVE, 1)
    assert not commands.awaits(SAVE)
    assert commands.awaits(FINISH)


def test_all_are_paused_when_each_has_confirmed_the_last_pause() -> None:
    boxes = [Box(), Box()]
    sampling = Sampling(SimpleNamespace(worker_inboxes=boxes, goal=torch.zeros(1, dtype=torch.int64)))
    sampling.pause()
    sampling.confirmed(0, 1)
    sampling.resume(goal=500)
    sampling.confirmed(1, 1)  # too late
    sampling.pause()
    sampling.confirmed(0, 2)
    sampling.confirmed(1, 1)
    assert not sampling.is_paused()
    sampling.confirmed(1, 2)
    assert sampling.is_paused()
    assert boxes[0].messages == boxes[1].messages == [(PAUSE, 1), (RESUME, 0), (PAUSE, 2)]
    assert int(sampling.goal) == 500
