"""A component that dies holding messages that nobody else will see is replaced, or ends the run in time.

What death and freezing do to the messages themselves is in `test_inbox.py`, to the weights in `test_shared_weights.py`.
"""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from parts import SMALL

from learner import Learner
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime.user_error import ComponentError
from shared_buffers import Inbox
from supervisor import Supervisor

TWO = SMALL | {"num_workers": 2, "stall_timeout_sec": 1.0, "max_restarts": 1}


def hit(component: Any, inbox: Inbox, *, call: int) -> None:
    """Let SIGKILL hit this process when it has taken messages that often."""
    get, calls = inbox.get, []

    def count(*args: Any) -> Any:
        messages = get(*args)
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return messages

    inbox.get = count


class HitWorker(RolloutWorker):
    def run(self) -> None:
        hit(self, self.inbox, call=20)
        super().run()


class HitServer(PolicyWorker):
    def run(self) -> None:
        hit(self, self.requests, call=20)
        super().run()


class HitBatcher(Learner):
    def run(self) -> None:
        hit(self, self.feed.inbox, call=10)
        super().run()


@pytest.mark.parametrize(("role", "component"), [
    ("rollout_worker_class", HitWorker), ("policy_worker_class", HitServer), ("learner_class", HitBatcher)])
def test_who_is_killed_with_messages_in_hand_is_replaced_and_the_run_does_not_wait_for_ever(
        role: str, component: type, tmp_path: Path) -> None:
    running = type("System", (Supervisor,), {role: component})("CartPole-v1", train_dir=str(tmp_path), **TWO)
    with pytest.raises(ComponentError, match="was killed by SIGKILL"):
        running.train(10**9)
    running.close()
    assert running.records.num_replaced == 1, "the one that took its place was hit too"
    assert not multiprocessing.active_children()
