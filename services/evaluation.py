"""Evaluations: when the evaluator, a process of its own (`evaluate.py`), scores the newest weights.

In a list of services it stands before `Records`, which writes the row of the last evaluation.
"""

from evaluate import Evaluator
from runtime.processes import Component, Service
from services.records import Records
from shared_buffers import EVALUATE


class Evaluation(Service):
    """Asks for an evaluation every `eval_every_env_steps`, and for one of the last weights."""

    is_under_way = False
    last = 0  # env_steps when one was asked for, or when the call of train() began

    def components(self) -> list[Component]:
        """Return the evaluator."""
        buffers = self.trainer.buffers
        args = self.trainer.cfg, buffers.seen_by("evaluator", 0), self.trainer.devices
        return [Component("evaluator", Evaluator, args, "evaluator", 0, buffers.evaluations, buffers.heartbeats[-1],
                          niceness=10)]

    def on(self, report: tuple) -> None:
        """Follow what the evaluator does; score the last weights of a call of train()."""
        match report:
            case ("begun",):
                self.last = self.trainer.env_steps
            case ("evaluated", policy, _):  # they take turns
                self.is_under_way = policy < self.trainer.cfg.num_policies - 1
            case ("replaced", indices) if len(self.trainer.components) - 1 in indices and self.is_under_way:
                self.ask()
            case ("ended",):
                self.score_last()

    def tick(self) -> None:
        """Ask for an evaluation when one is due and none is under way."""
        period = self.trainer.cfg.eval_every_env_steps
        is_due = self.trainer.env_steps // period > self.last // period
        if is_due and not self.is_under_way and self.trainer.commands.are_told_to_sample():
            self.ask()

    def ask(self) -> None:
        """Ask for an evaluation."""
        self.is_under_way, self.last = True, self.trainer.env_steps
        self.trainer.buffers.evaluations.put((EVALUATE, *range(self.trainer.cfg.num_policies)))

    def score_last(self) -> None:
        """Wait until the weights with which the training ended are scored, unless somebody asks for a stop."""
        trainer, records = self.trainer, self.trainer.find(Records)
        while not trainer.asks():
            if not self.is_under_way:
                if records is None or trainer.versions == [
                        policy.last_evaluation.get("eval_sgd_steps") for policy in records.policies]:
                    break
                self.ask()
            trainer.turn()
