"""A component that dies or freezes inside an operation of the transport ends the run in time, and leaves nothing."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from learner import Learner
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime.crew import ComponentError
from supervisor import Supervisor

SMALL: dict[str, Any] = {"num_workers": 2, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 64,
                         "num_batches_per_epoch": 1, "num_epochs": 1, "encoder_mlp_layers": (8,), "device": "cpu",
                         "decorrelate_experience_max_seconds": 0.0, "stall_timeout_sec": 2.0}


def hit(component: Any, owner: Any, name: str, *, call: int) -> None:
    """Let the signal that the experiment is named after hit this process at the end of a call of a method."""
    function, calls = getattr(owner, name), []

    def count(*args: Any) -> Any:
        result = function(*args)
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), getattr(signal, component.cfg.experiment))
        return result

    setattr(owner, name, count)


class HitWorker(RolloutWorker):
    """Is hit when it has taken messages that nobody else will ever see."""

    def run(self) -> None:
        hit(self, self.inbox, "get", call=20)
        super().run()


class HitServer(PolicyWorker):
    """Is hit when it has taken requests, before it answers them."""

    def run(self) -> None:
        hit(self, self.requests, "get", call=20)
        super().run()


class HitReader(PolicyWorker):
    """Is hit while it copies weights, before it looks whether they are whole."""

    def run(self) -> None:
        hit(self, self.weights, "_finish_copies", call=3)
        super().run()


class HitWriter(Learner):
    """Is hit when it has written weights that it has not published."""

    def run(self) -> None:
        hit(self, self.weights, "_finish_copies", call=3)
        super().run()


class HitBatcher(Learner):
    """Is hit when it has taken trajectories out of their inbox."""

    def run(self) -> None:
        hit(self, self.feed.inbox, "get", call=10)
        super().run()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("component", [HitWorker, HitServer, HitReader, HitWriter, HitBatcher])
def test_the_run_ends_whatever_happens_inside_the_transport(component: type, name: str, tmp_path: Path) -> None:
    role = {RolloutWorker: "rollout_worker_class", PolicyWorker: "policy_worker_class",
            Learner: "learner_class"}[component.__base__]
    running = type("System", (Supervisor,), {role: component})(
        "CartPole-v1", train_dir=str(tmp_path), experiment=name, **SMALL)
    begin = time.monotonic()
    with pytest.raises(ComponentError, match="was killed by SIGKILL" if name == "SIGKILL" else "has done nothing"):
        running.train(10**9)
    assert time.monotonic() < begin + 60, "it does not wait for ever"
    running.close()
    assert not multiprocessing.active_children()
