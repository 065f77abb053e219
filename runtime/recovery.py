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

An error in the code of a policy worker or a learner would come again: it ends the run. So do too many replacements
within a while, with the first failure.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from config import Config
from runtime.checkpoint import policy_dir
from runtime.commands import Sampling
from runtime.crew import Component, Processes
from runtime.files import remove_unfinished
from runtime.pulse import COUNT, START_SEC, WAITS, Watch, is_waiting
from runtime.ranks import this_rank
from runtime.user_error import ComponentError
from shared_buffers import HANDED_IN, IDLE, SLOTS, SPLIT, TAKEN, WITH_WORKER, Inbox, Message, SharedBuffers

LOOK_SEC = 0.25  # between two looks for components that hang
PATIENCE_SEC = 2.0  # for policy workers to finish what they are writing for a rollout worker that is gone


class Failure(NamedTuple):
    """Why a component must be replaced."""

    index: int  # of the component
    why: str  # in one line
    traceback: str = ""  # if it raised an error
    seconds: float = 0.0  # until it was noticed

    def describe(self) -> str:
        return self.traceback or self.why


class Recovery:
    """Decides about replacements, and makes them."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, crew: Processes, components: Sequence[Component],
                 sampling: Sampling, log: Callable[..., None]) -> None:
        self.cfg, self.buffers, self.crew, self.components, self.log = cfg, buffers, crew, components, log
        self.sampling = sampling
        self.watch = Watch([component.make.SPANS for component in components], cfg.stall_timeout_sec,
                           cfg.env_timeout_sec, START_SEC)
        self.last_look = time.monotonic()
        # those within the window, and when they were; the time in which something hung does not count
        self.failures: collections.deque[tuple[float, Failure]] = collections.deque()
        self.seconds_hung = 0.0
        self.count = 0  # of all replacements
        self.unsent: collections.deque[tuple[Inbox, Message]] = collections.deque()  # there was no room

    def find_hung(self) -> list[Failure]:
        """Return the components that do nothing for too long though there is something to do."""
        if time.monotonic() - self.last_look < LOOK_SEC:
            return []
        self.last_look = time.monotonic()
        self._send_rest()
        # a learner looks for commands all the time, so its waits count
        has_mail = [component.role == "learner" or not component.inbox.empty() or self._is_stopped(index)
                    for index, component in enumerate(self.components)]
        found = [Failure(hung.index, f"{self.components[hung.index].name} hangs: no sign of life for "
                         f"{hung.seconds:.0f} s{f', in {hung.doing!r}' if hung.doing else ''} (--{hung.setting})",
                         seconds=hung.seconds) for hung in self.watch.look(self.buffers.pulses.numpy(), has_mail)]
        if self.watch.seconds_still > 2 * self.cfg.stall_timeout_sec and self.sampling.goes_on and not found:
            found = self._find_batcher()
        return found

    def _find_batcher(self) -> list[Failure]:
        """Blame learners that take no trajectories, though all wait: their batchers, threads beside the main one, hang.

        Raises `ComponentError` if there are none.
        """
        seconds = self.watch.seconds_still
        self.watch.seconds_still = 0.0
        inboxes = [policy.trajectories_done for policy in self.buffers.policies]
        found = [Failure(index, f"{component.name} hangs: it has taken no trajectories for {seconds:.0f} s "
                         "(--stall_timeout_sec)", seconds=seconds) for index, component in enumerate(self.components)
                 if component.role == "learner" and not inboxes[component.number].empty()]
        if not found:
            raise ComponentError(f"nobody has done anything for {seconds:.0f} s: all wait for one another")
        return found

    def _is_stopped(self, index: int) -> bool:
        """Tell whether a process was stopped: it does not wait, though it may look as if (the inbox may be shared)."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.crew.processes[index].pid}/stat").read_text()
            return stat.rsplit(")", 1)[1].split()[0] in "Tt"
        return False

    def handle(self, failure: Failure) -> Component:
        """Replace a component; return it. Raises `ComponentError` when that is not allowed."""
        component = self.components[failure.index]
        self.crew.end(failure.index)
        self.seconds_hung += failure.seconds
        now = time.monotonic() - self.seconds_hung
        self.failures.append((now, failure))
        while now - self.failures[0][0] > self.cfg.restart_window_sec:
            self.failures.popleft()
        several_learners = component.role == "learner" and len(self.cfg.learners) > 1
        comes_again = failure.traceback and component.role in ("learner", "policy_worker")
        if this_rank().world_size > 1 or several_learners or comes_again:
            raise ComponentError(failure.describe())
        if len(self.failures) > self.cfg.max_restarts:
            raise ComponentError(self.failures[0][1].describe())
        self.count += 1
        self.log(f"{failure.why}; it is replaced ({len(self.failures)} of at most {self.cfg.max_restarts} in "
                 f"{self.cfg.restart_window_sec:.0f} s)")
        if failure.traceback:
            self.log(failure.traceback, to_console=False)
        self._replace(component)
        return component

    def bring_learners_back(self) -> list[int]:
        """Start learners anew that are dead, so that their published weights can be saved; return their policies."""
        policies = []
        for index, component in enumerate(self.components):
            if (component.role == "learner" and len(self.cfg.learners) == 1
                    and not self.crew.processes[index].is_alive()):
                self._replace(component)
                policies.append(component.number)
        return policies

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
            self._send(policy.trajectories_done, (SLOTS, *handed_in))
        self._wait_for_writers()
        self._send(buffers.worker_inboxes[worker], self.sampling.told)

    def _wait_for_writers(self) -> None:
        """Wait until no policy worker is still writing what the worker that is gone had asked for; end who is late."""
        deadline = time.monotonic() + PATIENCE_SEC
        pulses = self.buffers.pulses
        late = []
        # who has not begun will look into the tables later
        writers = {index: int(pulses[index, WAITS]) for index, component in enumerate(self.components)
                   if component.role == "policy_worker" and pulses[index, COUNT] > 0
                   and self.crew.processes[index].is_alive()}
        for index, before in writers.items():
            while not is_waiting(self.components[index].make.SPANS, pulses[index]) and pulses[index, WAITS] == before:
                if time.monotonic() > deadline:
                    late.append(self.components[index])
                    break
                time.sleep(0.001)
        for component in {component.number: component for component in late}.values():
            self.count += 1
            self.log(f"{component.name} has not answered for {PATIENCE_SEC:.0f} s; it is replaced too")
            self._replace(component)

    def _ask_again(self, policy: int) -> None:
        """Ask for all that a policy has not answered, and tell the rollout workers to look what it has answered.

        Nobody else reads its requests now.
        """
        buffers = self.buffers
        requests = self.buffers.policies[policy].requests
        awaiting = (buffers.awaited_policy == policy).any(1).nonzero()[:, 0].tolist()
        answered = [split for split in awaiting if buffers.answered[policy, split] == buffers.asked[split]]
        pending = [split for split in awaiting if split not in answered]
        # first noted, then drained: who asks meanwhile is among the drained ones, or will be there once
        drained = [split for kind, split in self._drain(requests) if kind == SPLIT]
        for split in dict.fromkeys([*pending, *drained]):
            self._send(requests, (SPLIT, split))
        for split in answered:
            self._send(buffers.worker_inboxes[buffers.worker_of_split(split)], (SPLIT, split))

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
        remove_unfinished(policy_dir(self.cfg.run_dir, policy))
        for inbox in (own.trajectories_done, *own.commands):
            self._drain(inbox)
        places = buffers.slot_place[own.first_slot : own.first_slot + buffers.num_slots]
        was_trained_on = not self.cfg.async_rl and bool((places == TAKEN).all())
        places[places == TAKEN] = WITH_WORKER if was_trained_on else HANDED_IN
        for slot, place in enumerate(places.tolist(), own.first_slot):
            if place == HANDED_IN:
                self._send(own.trajectories_done, (SLOTS, slot))
            else:
                self._send(buffers.worker_inboxes[buffers.worker_of_slot(slot)], (SLOTS, slot))

    def _send(self, inbox: Inbox, message: Message) -> None:
        """Send a message as soon as there is room: who should read may hang."""
        self.unsent.append((inbox, message))
        self._send_rest()

    def _send_rest(self) -> None:
        while self.unsent and self.unsent[0][0].has_room():
            inbox, message = self.unsent.popleft()
            inbox.put(message)
