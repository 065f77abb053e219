"""Checkpoints: when learners save, and what a resumed run begins with.

Of each policy the newest few (`--save_every_sec`), milestones and the best one are kept. A checkpoint that cannot be
written, since the disk is full or the folder is gone, is tried again; training goes on, and the progress line says so.
When a run ends by a failure, the weights that were published last are saved.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from algorithms import algorithm_class
from config import ANOTHER, Config, changes
from envs.flat_spaces import AgentKind
from runtime import checkpoint
from runtime.processes import Service
from runtime.several import copy_run
from runtime.utils import NETWORK, ComponentError, UserError, Values, derive_seed, this_rank
from services.progress import RETURN_WINDOW
from services.records import Records
from shared_buffers import SAVE, SAVE_BEST, SAVE_MILESTONE, SAVE_PERIODIC, SharedBuffers

DAMAGED = ".damaged"
SAVE_SHARE = 0.01  # of the time, at most, goes into periodic checkpoints
MIN_BEST_SEC, BEST_SHARE = 1.0, 0.02  # between two saves of a new best score; of the learner's time, at most
BEST_LINE_SEC = 20.0  # a new best checkpoint of the training is told in a line at most this often


class Saving(Service):
    """Decides when learners save."""

    def start(self, trainer: Any) -> None:
        """Begin; nothing is due yet."""
        super().start(trainer)
        self.records = trainer.find(Records)  # knows the scores; without it there is no best checkpoint
        self.last_saved = dict.fromkeys((SAVE_PERIODIC, SAVE_MILESTONE), time.monotonic())
        self.last_best = [0.0] * trainer.cfg.num_policies  # when the best one was saved
        self.last_line = [0.0] * trainer.cfg.num_policies  # when a line told of it
        self.save_sec = dict.fromkeys((SAVE_PERIODIC, SAVE_BEST, SAVE_MILESTONE), 0.0)  # that a checkpoint takes
        self.unsaved: dict[tuple[int, int], str] = {}  # (policy, kind of checkpoint): why it could not be written
        self.before: dict[int, tuple[float, int]] = {}  # policy: the best score before the last one, and its sort

    def on(self, report: tuple) -> None:
        """Note what was saved; save when the trainer asks for it."""
        trainer, buffers = self.trainer, self.trainer.buffers
        match report:
            case ("saved", policy, kind, name, seconds):
                self.save_sec[kind] = max(seconds, self.save_sec[kind] / 2)  # policies save at the same time
                if self.unsaved.pop((policy, kind), None) and not self.unsaved:
                    trainer.log(f"can save in {trainer.cfg.run_dir} again")
                if kind == SAVE_MILESTONE:
                    trainer.log(f"saved {name}{trainer.of(policy)} at env_steps={trainer.env_steps:,}")
                now, is_evaluated = time.monotonic(), trainer.cfg.eval_every_env_steps > 0  # then it is rare
                if kind == SAVE_BEST and (is_evaluated or now - self.last_line[policy] >= BEST_LINE_SEC):
                    self.last_line[policy] = now
                    trainer.log(f"saved best.pt{trainer.of(policy)}, score {float(buffers.best_score[policy]):.2f}")
            case ("unsaved", policy, kind, why):
                if not self.unsaved:
                    trainer.log(f"cannot save in {trainer.cfg.run_dir}: {why}; training goes on, and tries again")
                self.unsaved[policy, kind] = why
                if kind == SAVE_BEST and policy in self.before:  # that one is still there
                    buffers.best_score[policy], buffers.best_sort[policy] = self.before[policy]
            case ("ended",):
                self.save_best(at_end=True)
            case ("save",):
                self.save_all()
            case ("save_published",):
                self.save_published()
        trainer.trouble = next((f"NOT SAVED: {why}" for why in self.unsaved.values()), "")

    def tick(self) -> None:
        """Save what is due."""
        cfg, now = self.trainer.cfg, time.monotonic()
        if not self.trainer.commands.are_told_to_sample():
            return
        self.save_best()
        for kind, every_sec in ((SAVE_PERIODIC, max(cfg.save_every_sec, self.save_sec[SAVE_PERIODIC] / SAVE_SHARE)),
                                (SAVE_MILESTONE, cfg.save_milestones_sec)):
            if now - self.last_saved[kind] >= every_sec:
                self.last_saved[kind] = now
                for policy in range(cfg.num_policies):
                    if not self.is_saving(policy, kind):
                        self.trainer.commands.send(policy, SAVE, kind)

    def is_saving(self, policy: int, kind: int) -> bool:
        """Return whether a learner was told to save, and has not yet done so."""
        return (policy, 0, SAVE, kind) in self.trainer.commands.open

    def save_best(self, *, at_end: bool = False) -> None:
        """Save the policies that have never scored so high.

        The score is the mean true objective of a full window of episodes, or else return; where there are evaluations
        theirs counts instead, and the evaluator saves. At the end it does not matter when the last one was saved.
        """
        buffers, now = self.trainer.buffers, time.monotonic()
        if self.records is None or self.trainer.cfg.eval_every_env_steps:
            return
        every_sec = 0.0 if at_end else max(MIN_BEST_SEC, self.save_sec[SAVE_BEST] / BEST_SHARE)
        for policy, scores in enumerate(self.records.policies):
            is_full = len(scores.objectives) == RETURN_WINDOW
            is_due = now - self.last_best[policy] >= every_sec and not self.is_saving(policy, SAVE_BEST)
            sort = checkpoint.sort_of_score(is_objective=scores.has_objective, is_evaluation=False)
            before = float(buffers.best_score[policy]), int(buffers.best_sort[policy])
            if is_full and is_due and checkpoint.is_better(scores.objective, sort, *before):
                self.before[policy], self.last_best[policy] = before, now
                buffers.best_score[policy], buffers.best_sort[policy] = scores.objective, sort
                self.trainer.commands.send(policy, SAVE, SAVE_BEST)

    def save_all(self) -> None:
        """Save all policies and wait until that is done. Raises `ComponentError` when a learner does not answer."""
        trainer = self.trainer
        try:
            for _ in range(2):  # once more if it could not be written: the folder may be made anew now
                for policy in range(trainer.cfg.num_policies):
                    trainer.commands.send(policy, SAVE, SAVE_PERIODIC)
                trainer.wait_for_answers(SAVE, "save")
                if not any(kind == SAVE_PERIODIC for _, kind in self.unsaved):
                    break
        except ComponentError:
            trainer.give_up(save=True)
            raise

    def save_published(self) -> None:
        """Save the weights that were published last; all processes have ended.

        Everything else is that of the policy's last checkpoint.
        """
        trainer, cfg, buffers = self.trainer, self.trainer.cfg, self.trainer.buffers
        for policy, own in enumerate(buffers.policies):
            try:
                weights, _ = own.weights.read()
                if not all(tensor.isfinite().all() for tensor in weights.values()):
                    raise UserError("they are not finite")
                state = checkpoint.last_saved(cfg.run_dir, policy, **buffers.counts(policy))
                state |= buffers.origin(cfg, policy)
                state["model"] = weights
                state["population"] = buffers.place_in_population(cfg, policy)
                name = checkpoint.checkpoint_name("checkpoint", state)
                checkpoint.save_checkpoint(state, checkpoint.policy_dir(cfg.run_dir, policy) / name)
                trainer.tell("saved", policy, SAVE_PERIODIC, name, 0.0)
            except (OSError, RuntimeError, UserError) as error:  # a full disk, a broken GPU, weights that diverged
                trainer.log(f"the last weights of policy {policy} are not saved: {error}")

    def check_saved(self) -> None:
        """Raise `ComponentError` when the last periodic checkpoint of a policy could not be written."""
        if unsaved := [f"policy {policy}: {why}" for (policy, kind), why in self.unsaved.items()
                       if kind == SAVE_PERIODIC]:
            raise ComponentError(f"what was learned last is not in {self.trainer.cfg.run_dir}: {', '.join(unsaved)}")

    def close(self) -> None:
        """Say that something could not be saved, unless there is another failure to tell of."""
        if not self.trainer.has_failed:
            self.check_saved()


# ---- what a run begins with --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a policy begins with."""

    model: nn.Module
    path: Path | None  # the checkpoint with which a resumed run goes on
    state: Values | None  # what that holds
    damaged: list[Path]  # newer ones, which cannot be read


def find_policy(cfg: Config, policy: int, kind: AgentKind, store_prefix: str) -> Found:
    """Make a policy's model, with the weights of its last whole checkpoint if the run is resumed and rank 0 has one.

    kind: of the agents that it plays; their observations take the order of the checkpoint.
    """
    path, state, damaged = None, None, []
    if cfg.restart_behavior == "resume":
        if this_rank().world_size > 1:
            copy_run(f"{store_prefix}/files", cfg.run_dir)
        path, state, damaged = checkpoint.load_newest(cfg.run_dir, policy)
    if state is not None:
        kind.obs_space = kind.as_trained(state, path)
    torch.manual_seed(derive_seed(cfg.seed, NETWORK, index=policy))
    model = algorithm_class(cfg.algo)(cfg).make_model(kind.obs_space, kind.action_space)
    if state is not None:
        load_weights(cfg, model, state, path)
    return Found(model, path, state, damaged)


def load_weights(cfg: Config, model: nn.Module, state: Values, path: Path) -> None:
    """Load the weights of a resumed run. Raises `UserError` when they do not fit, naming the settings that changed."""
    try:
        checkpoint.load_weights(model, state, path, cfg.algo)
    except UserError as error:
        changed = changes(cfg)
        shaping = [changed[field.name] for field in dataclasses.fields(cfg) if field.name in changed and (
            field.metadata["group"] == "model" or field.name.startswith(("env_", "res_", "normalize_")))]
        if not changed:  # but the code has
            raise
        raise UserError(f"{cfg.run_dir} holds a run of another network: {', '.join(shaping or changed.values())}; "
                        f"{ANOTHER}") from error


def restore(cfg: Config, buffers: SharedBuffers, policies: Sequence[Found]) -> None:
    """Put the counters, scores and weights of a run's checkpoints into what is shared; cfg: the settings of the run."""
    for policy, (model, _, state, damaged) in enumerate(policies):
        for path in damaged:
            path.rename(path.with_suffix(DAMAGED))
        if state is not None:
            own, steps = buffers.policies[policy], state["env_steps"]
            buffers.env_steps[-1] = max(int(buffers.env_steps[-1]), steps)
            buffers.policy_steps[-1, policy] = state.get("policy_steps", steps)
            buffers.best_score[policy], buffers.best_sort[policy] = checkpoint.best_score(cfg.run_dir, policy)
            own.weights.publish(model, state["sgd_steps"])
            if own.shared_training is not None:
                counts = state["sgd_steps"], state.get("env_steps_trained", 0)
                own.shared_training.counts[:, 0] = torch.tensor(counts)


def describe_resume(trainer: Any) -> str:
    """Say where a resumed run goes on, and which checkpoints are missing there; "" for a new run."""
    policies = trainer.found
    if not any(found.state for found in policies):
        return ""
    lines = [f"{path} is damaged and is called {path.with_suffix(DAMAGED).name} now; the run goes on with "
             f"{found.path.name}" for found in policies for path in found.damaged]
    new = [str(policy) for policy, found in enumerate(policies) if found.state is None]
    where = f"resumed at env_steps={trainer.env_steps:,} sgd_steps={sum(trainer.versions):,}"
    missing = [f"no checkpoint of policy {', '.join(new)}: it begins anew"] if new else []
    return "\n".join([where, *lines, *missing, ""])
