"""Recovery: replaces what has died or hangs.

    rollout worker   is replaced alone, since environments are what fails. Its unfinished trajectories are lost; its
                     successor begins with other seeds, and hands in again what the learner has not looked at yet.
    evaluator        is replaced alone; its evaluation begins again.
    anything else    all processes end, and begin again on the same shared memory: the weights that were published last,
                     the counters and the settings live on; the moments of the optimizer and a rate that follows the KL
                     are those of the newest checkpoint; what was under way is lost.

So nobody keeps a record of what one process may not have heard, but the trainer of its own commands. Trajectories that
a dead rollout worker may have handed in are handed in once more: the feed sees in `slot_place` which it has. An error
in the code of a policy worker or a learner would come again: it ends the run. So do too many replacements within a
while, with the first failure.
"""

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil

from runtime.checkpoint import remove_unfinished
from runtime.processes import SAVES, START_SEC, STEPS, Service
from runtime.utils import ComponentError, this_rank
from shared_buffers import WITH_WORKER, SharedBuffers

LOOK_SEC = 0.25  # between two looks for components that hang
SAVE_PATIENCE = 10  # times longer: a large replay on a slow disk
LONGEST_NAP_SEC = 1.0  # between two looks; more was time in which this process, perhaps the machine, slept
PLAYS = ("rollout_worker", "evaluator")  # who has environments


class Failure(NamedTuple):
    """Why a component must be replaced."""

    index: int  # of the component
    why: str  # in one line
    traceback: str = ""  # if it raised an error
    seconds: float = 0.0  # until it was noticed


class Recovery(Service):
    """Decides about replacements, and makes them."""

    def start(self, trainer: Any) -> None:
        """Begin to watch."""
        super().start(trainer)
        # those within the window, and when they were; the time in which something hung does not count
        self.failures: deque[tuple[float, Failure]] = deque()
        self.seconds_hung = 0.0

    def on(self, report: tuple) -> bool | None:
        """Replace a component that has died; nothing is replaced before all were ready for the first time."""
        match report:
            case ("ready_to_train",):
                cfg = self.trainer.cfg
                self.watch = Watch(len(self.trainer.components), cfg.stall_timeout_sec, cfg.env_timeout_sec)
            case ("died", *failure) if self.trainer.is_ready:
                self.replace(Failure(*failure))
                return True
        return None

    def tick(self) -> None:
        """Replace a component that hangs."""
        if self.trainer.is_ready and time.monotonic() - self.watch.last_look >= LOOK_SEC:
            for failure in self.find_hung()[:1]:  # its replacement may replace others that hang
                self.replace(failure)

    def find_hung(self) -> list[Failure]:
        """Return the components that do nothing for too long though there is something to do."""
        trainer, buffers, components = self.trainer, self.trainer.buffers, self.trainer.components
        # a learner looks for commands all the time, so its waits count
        has_mail = [component.role == "learner" or not component.inbox.empty() or self.is_stopped(index)
                    for index, component in enumerate(components)]
        progress = int(buffers.env_steps.sum() + buffers.sgd_steps_begun.sum())
        hung = self.watch.look(buffers.heartbeats.numpy(), has_mail, progress)
        found = [Failure(index, f"{components[index].name} hangs: no sign of life for {seconds:.0f} s (--{setting})",
                         seconds=seconds) for index, seconds, setting in hung]
        seconds = self.watch.seconds_still
        if seconds > 2 * trainer.cfg.stall_timeout_sec and trainer.commands.are_told_to_sample() and not found:
            # a message is lost, or a batcher, a thread beside the main one, hangs
            index = next(index for index, component in enumerate(components) if component.role == "learner")
            found = [Failure(index, f"{components[index].name} hangs: all have waited for one another for "
                             f"{seconds:.0f} s (--stall_timeout_sec)", seconds=seconds)]
        return found

    def is_stopped(self, index: int) -> bool:
        """Return whether a process was stopped: it does not wait, though it may look so (its inbox may be shared)."""
        with contextlib.suppress(psutil.Error, IndexError):
            return psutil.Process(self.trainer.crew.processes[index].pid).status() in ("stopped", "tracing-stop")
        return False

    def replace(self, failure: Failure) -> None:
        """Replace what has failed: alone, or with all others. Raises `ComponentError` when that is not allowed."""
        trainer, cfg = self.trainer, self.trainer.cfg
        plays = trainer.components[failure.index].role in PLAYS
        self.seconds_hung += failure.seconds
        now = time.monotonic() - self.seconds_hung
        self.failures.append((now, failure))
        while now - self.failures[0][0] > cfg.restart_window_sec:
            self.failures.popleft()
        others = [process.is_alive() for each, process in zip(trainer.components, trainer.crew.processes, strict=True)
                  if each.role not in PLAYS]
        alone = plays and all(others)
        if this_rank().world_size > 1 or (failure.traceback and not plays):
            raise ComponentError(failure.traceback or failure.why)
        if len(self.failures) > cfg.max_restarts:
            raise ComponentError(self.failures[0][1].traceback or self.failures[0][1].why)
        trainer.log(f"{failure.why}; {'it is replaced' if alone else 'all processes begin again'} "
                    f"({len(self.failures)} of at most {cfg.max_restarts} in {cfg.restart_window_sec:.0f} s)")
        trainer.log(failure.traceback, to_console=False)
        indices = [failure.index] if alone else list(range(len(trainer.components)))
        self.start_anew(indices)
        trainer.tell("replaced", indices)

    def start_anew(self, indices: Sequence[int]) -> None:
        """Start some components anew, one or all."""
        trainer, buffers, crew = self.trainer, self.trainer.buffers, self.trainer.crew
        crew.end(*indices)
        if len(indices) > 1:
            remove_unfinished(trainer.cfg.run_dir)
            lost = forget_all(buffers, trainer.cfg.rollout)
            trainer.log(f"{lost:,} decisions are lost, and what learners had taken")
        for index in indices:
            component = trainer.components[index]
            if component.role == "rollout_worker":
                forget_worker(buffers, component.number)
                if len(indices) == 1:  # else they are told with all others
                    component.inbox.put(trainer.commands.told)
            elif component.role == "evaluator":
                component.inbox.drain()
            buffers.heartbeats[index] = 0
            self.watch.forget(index)
            crew.start_one(index)


class Watch:
    """Looks at the table, and says who has not gone on for too long, while this process was awake."""

    def __init__(self, num_components: int, timeout_sec: float, step_timeout_sec: float) -> None:
        """Begin. timeout_sec: for any one thing; step_timeout_sec: for one step of environments."""
        self.timeout_sec, self.step_timeout_sec = timeout_sec, step_timeout_sec
        self.now, self.last_look = 0.0, time.monotonic()  # seconds awake
        self.seen = [(-1, 0.0)] * num_components  # each one's count, and when it was new
        self.progress, self.seconds_still = 0, 0.0  # of the run; for how long there was none

    def forget(self, index: int) -> None:
        """Begin anew with a component that was replaced."""
        self.seen[index], self.seconds_still = (-1, self.now), 0.0

    def look(self, table: Any, has_mail: Sequence[bool], progress: int) -> list[tuple[int, float, str]]:
        """Return who hangs: its index, for how many seconds, and the setting that says how long it may take.

        Args:
            table: [components, 3] int64 array.
            has_mail: whether there is something to do for each component; who waits for that is idle.
            progress: what was sampled and trained on so far.
        """
        now, hung, all_wait = time.monotonic(), [], True
        awake = min(now - self.last_look, LONGEST_NAP_SEC)
        self.now, self.last_look = self.now + awake, now
        for index, (count, waits, kind) in enumerate(table[: len(self.seen)].tolist()):
            all_wait &= count > 0 and kind != SAVES  # else for who is being made, or saves
            if count != self.seen[index][0] or (waits and not has_mail[index]):
                self.seen[index] = count, self.now
            seconds = self.now - self.seen[index][1]
            patience = SAVE_PATIENCE if kind == SAVES else 1
            if kind == STEPS and seconds > self.step_timeout_sec:
                hung.append((index, seconds, "env_timeout_sec"))
            elif seconds > self.timeout_sec * patience + START_SEC * (count == 0):
                hung.append((index, seconds, "stall_timeout_sec"))
        self.seconds_still = 0.0 if progress != self.progress else self.seconds_still + awake * all_wait
        self.progress = progress
        return hung


def forget_worker(buffers: SharedBuffers, worker: int) -> None:
    """Let nobody act for a rollout worker that is gone, and nothing that was meant for it reach its successor."""
    buffers.generation[worker] += 1
    buffers.worker_inboxes[worker].drain()


def forget_all(buffers: SharedBuffers, rollout: int) -> int:
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
    buffers.evaluations.drain()
    return lost
