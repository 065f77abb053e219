"""What the supervisor tells learners and rollout workers, and who has not answered yet. Owned by the supervisor."""

from shared_buffers import PAUSE, RESUME, Message, SharedBuffers


class Sampling:
    """Lets the rollout workers sample, or pause."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.inboxes, self.goal = buffers.worker_inboxes, buffers.goal
        self.num_pauses = 0
        self.told: Message = (PAUSE, 0)
        self.paused: set[int] = set()  # the workers that have confirmed the last pause

    def resume(self, goal: int) -> None:
        """Let all workers sample until there are `goal` env_steps."""
        self.goal.fill_(goal)
        self._tell((RESUME, 0))

    def pause(self) -> None:
        """Let all workers pause."""
        self.num_pauses += 1
        self._tell((PAUSE, self.num_pauses))

    def _tell(self, message: Message) -> None:
        self.told = message
        self.paused.clear()
        self.repeat()

    def repeat(self) -> None:
        """Tell all workers once more, which have begun again."""
        for inbox in self.inboxes:
            inbox.put(self.told)

    def confirmed(self, worker: int, number: int) -> None:
        """Note that no action of a worker is under way since a pause."""
        if self.told == (PAUSE, number):
            self.paused.add(worker)

    def is_paused(self) -> bool:
        """Tell whether no action is under way anywhere."""
        return len(self.paused) == len(self.inboxes)


class Commands:
    """Sends commands that learners answer; after all processes have begun again, once more what is open."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.buffers = buffers
        self.open: list[tuple[int, int, int, int]] = []  # (policy, learner, kind, index), in the order of sending

    def send(self, policy: int, kind: int, index: int, learner: int = 0) -> None:
        """Send (kind, index) to a learner of a policy."""
        self.open.append((policy, learner, kind, index))
        self.buffers.policies[policy].commands[learner].put((kind, index))

    def answered(self, policy: int, kind: int, index: int, learner: int = 0) -> None:
        """Note an answer; one to a command that was given up is ignored."""
        if (policy, learner, kind, index) in self.open:
            self.open.remove((policy, learner, kind, index))

    def turns(self) -> list[int]:
        """List a policy's learners in the order in which they finish: the first one last, which publishes for all."""
        count = len(self.buffers.policies[0].commands)
        return [*range(count), 0] if count > 1 else [0]

    def forget(self, kind: int) -> None:
        """Wait no more for the answers to commands of a kind."""
        self.open = [command for command in self.open if kind != command[2]]

    def send_again(self) -> None:
        """Send the open commands to the new learners."""
        again, self.open = dict.fromkeys(self.open), []
        for policy, learner, kind, index in again:
            self.send(policy, kind, index, learner)

    def describe(self, kind: int) -> str:
        """Name the learners that have not answered a command of a kind."""
        policies = sorted({command[0] for command in self.open if command[2] == kind})
        return "the learner of " + ", ".join(f"policy {policy}" for policy in policies)
