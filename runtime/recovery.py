"""Replaces what has died or hangs, while the rest of the run goes on. Owned by the supervisor.

Messages may die with a process: those that it has read and not acted upon. What is true stands in the tables of
`shared_buffers.py`, so all that might have been lost is sent again; who gets a message twice sees that in the table.

    rollout worker   its environments and unfinished trajectories are lost. It begins with other seeds, and hands in
                     again what the learner has not looked at yet.
    policy worker    nothing is lost. All of its policy are replaced together, since nobody knows who has read which
                     request; whatever is not answered is asked again.
    learner          the dataset that it trained on is lost, and what its feed has kept. The weights that were
                     published last live on; the moments of the optimizer are those of the newest checkpoint.
    evaluator        its evaluation begins again.

An error in the code of a policy worker, a learner or the evaluator would come again: it ends the run. So do too many
replacements within a while, with the first failure.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from config import Config
from runtime.crew import Component, Processes
from runtime.inbox import PAUSE, RESUME, SLOTS, SPLIT, Inbox, Message
from runtime.pulse import WAITS, Watch, is_waiting
from runtime.ranks import this_rank
from runtime.user_error import ComponentError
from shared_buffers import HANDED_IN, IDLE, TAKEN, WITH_WORKER, SharedBuffers

LOOK_SEC = 0.25  # between two looks for components that hang
PATIENCE_SEC = 2.0  # for policy workers to finish what they are writing for a rollout worker that is gone


class Failure(NamedTuple):
    """Why a component must be replaced."""

    index: int  # of the component
    why: str  # in one line
    traceback: str = ""  # if it raised an error

    def describe(self) -> str:
        return self.traceback or self.why


class Recovery:
    """Decides about replacements, and makes them."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, crew: Processes, components: Sequence[Component],
                 log: Callable[..., None]) -> None:
        self.cfg, self.buffers, self.crew, self.components, self.log = cfg, buffers, crew, components, log
        self.watch = Watch([component.make.SPANS for component in components], cfg.stall_timeout_sec,
                           cfg.env_timeout_sec, cfg.decorrelate_experience_max_seconds)
        self.last_look = time.monotonic()
        self.times: collections.deque[float] = collections.deque()  # of the last failures
        self.first: Failure | None = None  # of those within the window
        self.count = 0  # of all replacements
        self.sampling = False  # what rollout workers are told

    def find_hung(self) -> list[Failure]:
        """Return the components that do nothing for too long though there is something to do."""
        if time.monotonic() - self.last_look < LOOK_SEC:
            return []
        self.last_look = time.monotonic()
        # a learner looks for commands all the time, so its waits count
        has_mail = [component.role == "learner" or not component.inbox.empty() or self._is_stopped(index)
                    for index, component in enumerate(self.components)]
        return [Failure(hung.index, f"{self.components[hung.index].name} hangs: no sign of life for "
                        f"{hung.seconds:.0f} s{f', in {hung.doing!r}' if hung.doing else ''} (--{hung.setting})")
                for hung in self.watch.look(self.buffers.pulses.numpy(), has_mail)]

    def _is_stopped(self, index: int) -> bool:
        """Tell whether a process was stopped: it does not wait, though it may look as if (the inbox may be shared)."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.crew.processes[index].pid}/stat").read_text()
            return stat.rsplit(")", 1)[1].split()[0] in "Tt"
        return False

    def handle(self, failure: Failure) -> Component:
        """Replace a component; return it. Raises `ComponentError` when that is not allowed."""
        component, now = self.components[failure.index], time.monotonic()
        self.crew.end(failure.index)
        while self.times and now - self.times[0] > self.cfg.restart_window_sec:
            self.times.popleft()
        if not self.times:
            self.first = failure
        self.times.append(now)
        several_learners = component.role == "learner" and len(self.cfg.learners) > 1
        if this_rank().world_size > 1 or several_learners or (failure.traceback and component.role != "rollout_worker"):
            raise ComponentError(failure.describe())
        if len(self.times) > self.cfg.max_restarts:
            raise ComponentError(self.first.describe())
        self.count += 1
        self.log(f"{failure.why}; it is replaced ({len(self.times)} of at most {self.cfg.max_restarts} in "
                 f"{self.cfg.restart_window_sec:.0f} s)")
        if failure.traceback:
            self.log(failure.traceback, to_console=False)
        self._replace(component)
        return component

    def _replace(self, component: Component) -> None:
        indices = [index for index, other in enumerate(self.components)
                   if (other.role, other.number) == (component.role, component.number)]
        for index in indices:
            self.crew.end(index)
        if component.role == "rollout_worker":
            self._clear_worker(component.number)
        elif component.role == "policy_worker":
            self._ask_again(component.number)
        elif component.role == "learner":
            self._clear_learner(component.number)
        else:
            self._drain(component.inbox)
        for index in indices:
            self.buffers.pulses[index] = 0
            self.watch.forget(index)
            self.crew.replace(index)

    def _clear_worker(self, worker: int) -> None:
        """Let nobody act for the splits of a worker that is gone."""
        buffers, num_splits = self.buffers, self.cfg.worker_num_splits
        splits = slice(worker * num_splits, (worker + 1) * num_splits)
        buffers.awaited_policy[splits] = IDLE
        buffers.answered[:, splits] = buffers.asked[splits]
        buffers.replacements[worker] += 1
        for policy, slots in zip(buffers.policies, buffers.slots_of_worker(worker), strict=True):
            handed_in = [slot for slot in slots if buffers.slot_place[slot] == HANDED_IN]
            policy.trajectories_done.put((SLOTS, *handed_in))
        self._wait_for_writers()
        buffers.worker_inboxes[worker].put((RESUME if self.sampling else PAUSE, 0))

    def _wait_for_writers(self) -> None:
        """Wait until no policy worker is still writing what the worker that is gone had asked for; end who is late."""
        deadline, pulses, late = time.monotonic() + PATIENCE_SEC, self.buffers.pulses, []
        writers = {index: int(pulses[index, WAITS]) for index, component in enumerate(self.components)
                   if component.role == "policy_worker"}
        for index, before in writers.items():
            while not is_waiting(self.components[index].make.SPANS, pulses[index]) and pulses[index, WAITS] == before:
                if time.monotonic() > deadline:
                    late.append(self.components[index])
                    break
                time.sleep(0.001)
        for component in {component.number: component for component in late}.values():
            self._replace(component)

    def _ask_again(self, policy: int) -> None:
        """Ask for all that a policy has not answered, and tell the rollout workers to look what it has answered.

        Nobody else reads its requests now.
        """
        buffers, requests = self.buffers, self.buffers.policies[policy].requests
        awaiting = (buffers.awaited_policy == policy).any(1).nonzero()[:, 0].tolist()
        answered = [split for split in awaiting if buffers.answered[policy, split] == buffers.asked[split]]
        pending = [split for split in awaiting if split not in answered]
        # first noted, then drained: who asks meanwhile is among the drained ones, or will be there once
        drained = [split for kind, split in self._drain(requests) if kind == SPLIT]
        for split in dict.fromkeys([*pending, *drained]):
            requests.put((SPLIT, split))
        for split in answered:
            buffers.worker_inboxes[buffers.worker_of_split(split)].put((SPLIT, split))

    def _drain(self, inbox: Inbox) -> list[Message]:
        """Take all messages out of an inbox whose readers are gone."""
        messages: list[Message] = []
        while not inbox.empty():
            messages += inbox.get()
        return messages

    def _clear_learner(self, policy: int) -> None:
        """Hand in again what a learner has not trained on, and tell the rollout workers again what is free.

        What it had taken is still whole. In synchronous mode it may have trained on that; then all is taken.
        """
        buffers, own = self.buffers, self.buffers.policies[policy]
        buffers.learners_replaced[policy] += 1
        for inbox in (own.trajectories_done, *own.commands):
            self._drain(inbox)
        places = buffers.slot_place[own.first_slot : own.first_slot + buffers.num_slots]
        was_trained_on = not self.cfg.async_rl and bool((places == TAKEN).all())
        places[places == TAKEN] = WITH_WORKER if was_trained_on else HANDED_IN
        for slot, place in enumerate(places.tolist(), own.first_slot):
            if place == HANDED_IN:
                own.trajectories_done.put((SLOTS, slot))
            else:
                buffers.worker_inboxes[buffers.worker_of_slot(slot)].put((SLOTS, slot))
