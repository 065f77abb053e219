"""Replaces what has died or hangs. Owned by the supervisor.

    rollout worker   is replaced alone, since environments are what fails. Its unfinished trajectories are lost; its
                     successor begins with other seeds, and hands in again what the learner has not looked at yet.
    evaluator        is replaced alone; its evaluation begins again.
    anything else    all processes end, and begin again on the same shared memory: the weights that were published last,
                     the counters and the settings live on; the moments of the optimizer and a rate that follows the KL
                     are those of the newest checkpoint; what was under way is lost.

So nobody keeps a record of what one process may not have heard. Trajectories that a dead rollout worker may have handed
in are handed in once more: the feed sees in `slot_place` which it has. An error in the code of a policy worker or a
learner would come again: it ends the run. So do too many replacements within a while, with the first failure.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from config import Config
from reducer import BEGUN, FINISHED
from runtime.commands import Sampling
from runtime.crew import Component, Processes
from runtime.files import remove_unfinished
from runtime.heartbeat import START_SEC, Watch
from runtime.ranks import this_rank
from runtime.user_error import ComponentError
from shared_buffers import RESUME, WITH_WORKER, SharedBuffers

LOOK_SEC = 0.25  # between two looks for components that hang
PLAYS = ("rollout_worker", "evaluator")  # who has environments


class Failure(NamedTuple):
    """Why a component must be replaced."""

    index: int  # of the component
    why: str  # in one line
    traceback: str = ""  # if it raised an error
    seconds: float = 0.0  # until it was noticed


class Recovery:
    """Decides about replacements, and makes them."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, crew: Processes, components: Sequence[Component],
                 sampling: Sampling, log: Callable[..., None]) -> None:
        self.cfg, self.buffers, self.crew, self.components, self.log = cfg, buffers, crew, components, log
        self.sampling = sampling
        self.watch = Watch(len(components), cfg.stall_timeout_sec, cfg.env_timeout_sec, START_SEC)
        self.last_look = time.monotonic()
        # those within the window, and when they were; the time in which something hung does not count
        self.failures: collections.deque[tuple[float, Failure]] = collections.deque()
        self.seconds_hung = 0.0
        self.count = 0  # of all replacements

    def find_hung(self) -> list[Failure]:
        """Return the components that do nothing for too long though there is something to do."""
        if time.monotonic() - self.last_look < LOOK_SEC:
            return []
        self.last_look = time.monotonic()
        # a learner looks for commands all the time, so its waits count
        has_mail = [component.role == "learner" or not component.inbox.empty() or self._is_stopped(index)
                    for index, component in enumerate(self.components)]
        progress = int(self.buffers.env_steps.sum() + self.buffers.sgd_steps_begun.sum())
        hung = self.watch.look(self.buffers.heartbeats.numpy(), has_mail, progress)
        found = [Failure(index, f"{self.components[index].name} hangs: no sign of life for {seconds:.0f} s "
                         f"(--{setting})", seconds=seconds) for index, seconds, setting in hung]
        if self.watch.seconds_still > 2 * self.cfg.stall_timeout_sec and self.sampling.told[0] == RESUME and not found:
            # a message is lost, or a batcher, a thread beside the main one, hangs
            index = next(index for index, component in enumerate(self.components) if component.role == "learner")
            seconds = self.watch.seconds_still
            found = [Failure(index, f"{self.components[index].name} hangs: all have waited for one another for "
                             f"{seconds:.0f} s (--stall_timeout_sec)", seconds=seconds)]
        return found

    def _is_stopped(self, index: int) -> bool:
        """Tell whether a process was stopped: it does not wait, though it may look as if (the inbox may be shared)."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.crew.processes[index].pid}/stat").read_text()
            return stat.rsplit(")", 1)[1].split()[0] in "Tt"
        return False

    def handle(self, failure: Failure) -> bool:
        """Replace what has failed: alone, or with all others; tell whether all have begun again.

        Raises `ComponentError` when that is not allowed.
        """
        component = self.components[failure.index]
        self.crew.end(failure.index)
        self.seconds_hung += failure.seconds
        now = time.monotonic() - self.seconds_hung
        self.failures.append((now, failure))
        while now - self.failures[0][0] > self.cfg.restart_window_sec:
            self.failures.popleft()
        others = [process.is_alive() for each, process in zip(self.components, self.crew.processes, strict=True)
                  if each.role not in PLAYS]
        alone = all(others) and component.role in PLAYS
        if this_rank().world_size > 1 or (failure.traceback and component.role not in PLAYS):
            raise ComponentError(failure.traceback or failure.why)
        if len(self.failures) > self.cfg.max_restarts:
            raise ComponentError(self.failures[0][1].traceback or self.failures[0][1].why)
        self.count += 1
        what = "it is replaced" if alone else "all processes begin again"
        self.log(f"{failure.why}; {what} ({len(self.failures)} of at most {self.cfg.max_restarts} in "
                 f"{self.cfg.restart_window_sec:.0f} s)")
        if failure.traceback:
            self.log(failure.traceback, to_console=False)
        self._begin_again([failure.index] if alone else list(range(len(self.components))))
        return not alone

    def _begin_again(self, indices: Sequence[int]) -> None:
        """Start some components anew, one or all."""
        for index in indices:
            self.crew.end(index)
        if len(indices) > 1:
            remove_unfinished(self.cfg.run_dir)
            self.log(f"{begin_again(self.buffers, self.cfg.rollout):,} decisions are lost, and what learners had taken")
        for index in indices:
            component = self.components[index]
            if component.role == "rollout_worker":
                forget_worker(self.buffers, component.number)
                if len(indices) == 1:  # else as soon as all are ready
                    component.inbox.put(self.sampling.told)
            elif component.role == "evaluator":
                component.inbox.drain()
            self.buffers.heartbeats[index] = 0
            self.watch.forget(index)
            self.crew.replace(index)


def forget_worker(buffers: SharedBuffers, worker: int) -> None:
    """Let nobody act for a rollout worker that is gone, and nothing that was meant for it reach its successor."""
    buffers.generation[worker] += 1
    buffers.worker_inboxes[worker].drain()


def begin_again(buffers: SharedBuffers, rollout: int) -> int:
    """Empty what all processes, which are gone, had under way; return how many decisions are lost.

    Weights, counters and settings live on.
    """
    lost = int(buffers.agent_t.sum()) + rollout * int((buffers.slot_place != WITH_WORKER).sum())
    buffers.restarts += 1
    buffers.slot_place.fill_(WITH_WORKER)
    buffers.agent_t.zero_()
    for policy in buffers.policies:
        for inbox in (policy.requests, policy.trajectories_done, *policy.commands, *policy.passed_on):
            inbox.drain()
        if policy.shared_training is not None:  # a learner may have died within a step
            policy.shared_training.counts[BEGUN] = policy.shared_training.counts[FINISHED]
    buffers.evaluations.drain()
    return lost
