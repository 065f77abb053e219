"""The slots of one rollout worker, by policy, and where each of them is.

    free          nobody has it
    held          an agent fills it
    unfinished    an agent that drew another policy has left it behind at row t; the next agent that draws this policy
                  goes on filling it
    away          with the learner, until that gives it back

No environment and no process is involved here. Used by `rollout_worker.py`. Read next: `policy_worker.py`.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np


class SlotPool:
    """Counts and lends the slots of each policy."""

    def __init__(self, slots: Sequence[Iterable[int]], away: Iterable[int] = ()) -> None:
        """Begin with all slots free but those away; slots: those of each policy."""
        self.away = set(away)
        self.free = [deque(slot for slot in own if slot not in self.away) for own in slots]
        self.num_away = [sum(slot in self.away for slot in own) for own in slots]
        self.unfinished: list[deque[tuple[int, int]]] = [deque() for _ in slots]  # (slot, t)

    def send_away(self, policy: int, slots: Sequence[int]) -> None:
        """Note held slots that go to the learner."""
        self.away.update(slots)
        self.num_away[policy] += len(slots)

    def receive(self, policy: int, slot: int) -> None:
        """Take a slot back that the learner has done with, if it was away: a message may come twice."""
        if slot in self.away:
            self.away.remove(slot)
            self.num_away[policy] -= 1
            self.free[policy].append(slot)

    def leave(self, policy: int, slot: int, t: int, *, is_worthless: bool) -> None:
        """Take a held slot that is filled up to row t away from its agent; worthless: nobody learns from it."""
        if is_worthless or t == 0:
            self.free[policy].append(slot)
        else:
            self.unfinished[policy].append((slot, t))

    def take_out(self, needed: np.ndarray) -> list[tuple[int, int, int]]:
        """Take unfinished slots out, (policy, slot, t), which the caller must cut and hand in.

        It takes them only when too few slots are free or away for the agents that need empty ones: none waits for ever.
        needed: the policy of each such agent.
        """
        taken = []
        for policy, (free, unfinished) in enumerate(zip(self.free, self.unfinished, strict=True)):
            missing = np.count_nonzero(needed == policy) - len(free) - self.num_away[policy]
            for _ in range(min(missing, len(unfinished))):
                taken.append((policy, *unfinished.popleft()))
        return taken

    def suffices(self, rigid: np.ndarray, flexible: np.ndarray) -> bool:
        """Tell whether there are slots for agents of these policies: empty ones for `rigid`, any for `flexible`."""
        for policy, (free, unfinished) in enumerate(zip(self.free, self.unfinished, strict=True)):
            num_rigid = np.count_nonzero(rigid == policy)
            num_flexible = np.count_nonzero(flexible == policy)
            if num_rigid > len(free) or num_rigid + num_flexible > len(free) + len(unfinished):
                return False
        return True

    def take(self, policy: int, *, may_go_on: bool) -> tuple[int, int]:
        """Lend a slot and the row to begin at: an unfinished one if there is one and the agent may go on in it."""
        if may_go_on and self.unfinished[policy]:
            return self.unfinished[policy].popleft()
        return self.free[policy].popleft(), 0
