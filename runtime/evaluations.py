"""When policies are scored: the supervisor's side of `evaluator.py`."""

from config import Config
from shared_buffers import EVALUATE, SharedBuffers


class Evaluations:
    """Asks for an evaluation every `eval_every_env_steps`, and for one of the last weights."""

    def __init__(self, cfg: Config, buffers: SharedBuffers) -> None:
        self.period, self.num_policies = cfg.eval_every_env_steps, cfg.num_policies  # 0: never
        self.inbox = buffers.evaluations
        self.under_way = False
        self.next = 0  # env_steps

    def begin(self, env_steps: int) -> None:
        """Wait for the end of a period after so many env_steps."""
        if self.period:
            self.next = (env_steps // self.period + 1) * self.period

    def ask(self, env_steps: int) -> None:
        """Ask for an evaluation when one is due and none is under way."""
        if self.period and not self.under_way and env_steps >= self.next:
            self.under_way = True
            self.begin(env_steps)
            self.inbox.put((EVALUATE, 0))

    def ask_for_last(self, env_steps: int, scored: list[int | None], versions: list[int]) -> bool:
        """Ask for one of the weights with which the training ends, unless it was done; tell whether it is under way.

        scored: the SGD steps of the weights that were scored last; versions: those of the newest, of each policy.
        """
        if self.period and not self.under_way and scored != versions:
            self.next = env_steps
            self.ask(env_steps)
        return self.under_way

    def scored(self, policy: int) -> None:
        """Note that a policy was scored; they take turns."""
        self.under_way = policy < self.num_policies - 1

    def lost(self, env_steps: int) -> None:
        """Note that the evaluator was replaced: what it was asked for has gone with it."""
        if self.under_way:
            self.under_way, self.next = False, min(self.next, env_steps)
