"""Checkpoints: when learners save, and what a resumed run begins with.

Of each policy the newest few (`--save_every_sec`), milestones and the best one are kept. A checkpoint that cannot be
written, since the disk is full or the folder is gone, is tried again; training goes on, and the progress line says so.
When a run ends by a failure, the weights that were published last are saved.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from algorithms import algorithm_class
from config import ANOTHER, Config, changes
from envs.vector_env import EnvInfo
from runtime import checkpoint
from runtime.processes import Service
from runtime.utils import NETWORK, ComponentError, UserError, derive_seed, this_rank
from services.progress import RETURN_WINDOW
from services.records import Records
from shared_buffers import SAVE, SAVE_BEST, SAVE_MILESTONE, SAVE_PERIODIC, SharedBuffers

DAMAGED = ".damaged"
SAVE_SHARE = 0.01  # of the time, at most, goes into periodic checkpoints
MIN_BEST_SEC, BEST_SHARE = 1.0, 0.02  # between two saves of a new best score; of the learner's time, at most
BEST_LINE_SEC = 20.0  # a new best checkpoint is told in a line at most this often


@dataclass
class Best:
    """What there is to know of the best checkpoint of a policy. Times are of `time.monotonic`."""

    every_sec: float  # between two saves
    last_save: float = 0.0
    last_line: float = 0.0
    is_being_saved: bool = False
    before: tuple[float, int] = -math.inf, 0  # the score of the one before, and its sort, while another one is saved


class Saving(Service):
    """Decides when learners save."""

    def start(self, trainer: Any) -> None:
        """Begin; nothing is due yet."""
        super().start(trainer)
        self.records = trainer.find(Records)  # knows the scores; without it there is no best checkpoint
        self.last_saved = dict.fromkeys((SAVE_PERIODIC, SAVE_MILESTONE), time.monotonic())
        self.save_sec = 0.0  # that a checkpoint takes
        self.unsaved: dict[tuple[int, int], str] = {}  # (policy, kind of checkpoint): why it could not be written
        self.best = [Best(MIN_BEST_SEC) for _ in trainer.models]

    def on(self, report: tuple) -> None:
        """Note what was saved; save when the trainer asks for it."""
        match report:
            case ("saved", policy, kind, name, seconds):
                self.unsaved.pop((policy, kind), None)
                self.save_sec = max(seconds, self.save_sec / 2)  # policies save at the same time
                if kind == SAVE_MILESTONE:
                    self.trainer.log(f"saved {name}{self.trainer.of(policy)} at env_steps={self.trainer.env_steps:,}")
                if kind == SAVE_BEST:
                    best = self.best[policy]
                    best.is_being_saved = False
                    best.every_sec = max(MIN_BEST_SEC, seconds / BEST_SHARE)
                    if time.monotonic() - best.last_line >= BEST_LINE_SEC:
                        best.last_line = time.monotonic()
                        self.tell_best(policy)
            case ("unsaved", policy, kind, why):
                if not self.unsaved:
                    self.trainer.log(f"cannot save in {self.trainer.cfg.run_dir}: {why}; training goes on, and tries "
                                     "again")
                self.unsaved[policy, kind] = why
                if kind == SAVE_BEST:  # the one before is still there
                    best, buffers = self.best[policy], self.trainer.buffers
                    buffers.best_score[policy], buffers.best_sort[policy] = best.before
                    best.is_being_saved = False
            case ("best", policy):
                self.tell_best(policy)
            case ("ended",):
                self.save_best(at_end=True)
            case ("save",):
                self.save_all()
            case ("save_published",):
                self.save_published()
        if report[0] in ("saved", "unsaved"):
            was_in_trouble = self.trainer.trouble
            self.trainer.trouble = next((f"NOT SAVED: {why}" for why in self.unsaved.values()), "")
            if was_in_trouble and not self.unsaved:
                self.trainer.log(f"can save in {self.trainer.cfg.run_dir} again")

    def tick(self) -> None:
        """Save what is due."""
        cfg, now = self.trainer.cfg, time.monotonic()
        if not self.trainer.commands.are_told_to_sample():
            return
        self.save_best()
        for kind, every_sec in ((SAVE_PERIODIC, max(cfg.save_every_sec, self.save_sec / SAVE_SHARE)),
                                (SAVE_MILESTONE, cfg.save_milestones_sec)):
            if now - self.last_saved[kind] >= every_sec:
                self.last_saved[kind] = now
                for policy in range(cfg.num_policies):
                    self.send(policy, kind)

    def send(self, policy: int, kind: int) -> None:
        """Let a learner save, unless it has not yet done so since the last time."""
        if (policy, 0, SAVE, kind) not in self.trainer.commands.open:
            self.trainer.commands.send(policy, SAVE, kind)

    def save_best(self, *, at_end: bool = False) -> None:
        """Save the policies that have never scored so high.

        The score is the mean true objective of a full window of episodes, or else return; where there are evaluations
        theirs counts instead, and the evaluator saves. At the end it does not matter when the last one was saved.
        """
        buffers, now = self.trainer.buffers, time.monotonic()
        if self.records is None or self.trainer.cfg.eval_every_env_steps:
            return
        for policy, (scores, best) in enumerate(zip(self.records.policies, self.best, strict=True)):
            is_full = len(scores.objectives) == RETURN_WINDOW
            is_due = at_end or (now - best.last_save >= best.every_sec and not best.is_being_saved)
            sort = checkpoint.sort_of_score(is_objective=scores.has_objective, is_evaluation=False)
            before = float(buffers.best_score[policy]), int(buffers.best_sort[policy])
            if is_full and is_due and checkpoint.is_better(scores.objective, sort, *before):
                if not best.is_being_saved:
                    best.before = before
                buffers.best_score[policy], buffers.best_sort[policy] = scores.objective, sort
                best.last_save, best.is_being_saved = now, True
                self.send(policy, SAVE_BEST)

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
        """Save the weights that were published last: all processes have ended."""
        trainer = self.trainer
        for policy in range(trainer.cfg.num_policies):
            try:
                name = save_published(trainer.cfg, trainer.buffers, policy)
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

    def tell_best(self, policy: int) -> None:
        trainer = self.trainer
        trainer.log(f"saved best.pt{trainer.of(policy)}, score {float(trainer.buffers.best_score[policy]):.2f}")


# ---- what a run begins with --------------------------------------------------------------------------------------


def save_published(cfg: Config, buffers: SharedBuffers, policy: int) -> str:
    """Save the newest weights of a policy whose learner is gone, beside all else of its last checkpoint.

    Returns the name of the file. Raises `OSError`, and `UserError` for weights that are not finite.
    """
    weights, _ = buffers.policies[policy].weights.read()
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise UserError("they are not finite")
    state = checkpoint.last_saved(cfg.run_dir, policy, **buffers.counts(policy)) | buffers.origin(cfg, policy) | {
        "model": weights, "population": buffers.place_in_population(cfg, policy)}
    name = checkpoint.checkpoint_name("checkpoint", state)
    checkpoint.save_checkpoint(state, checkpoint.policy_dir(cfg.run_dir, policy) / name)
    return name


class Found(NamedTuple):
    """What a policy begins with."""

    model: nn.Module
    path: Path | None  # the checkpoint with which a resumed run goes on
    state: dict[str, Any] | None  # what that holds
    damaged: list[Path]  # newer ones, which cannot be read


def find_policy(cfg: Config, policy: int, info: EnvInfo, kind: int) -> Found:
    """Make a policy's model, with the weights of its last whole checkpoint if the run is resumed and has one.

    The observations of its kind take the order of the checkpoint.
    """
    path, state, damaged = (checkpoint.load_newest(cfg.run_dir, policy) if cfg.restart_behavior == "resume" else
                            (None, None, []))
    if state is not None:
        info.kinds[kind] = info.as_trained(kind, state, path)
    torch.manual_seed(derive_seed(cfg.seed, NETWORK, index=policy))
    model = algorithm_class(cfg.algo)(cfg).make_model(*info.kinds[kind])
    if state is not None:
        load_weights(cfg, model, state, path)
    return Found(model, path, state, damaged)


def load_weights(cfg: Config, model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Load the weights of a resumed run. Raises `UserError` when they do not fit, naming the settings that changed."""
    try:
        checkpoint.load_weights(model, state, path, cfg.algo)
    except UserError as error:
        groups = {field.name: field.metadata["group"] for field in dataclasses.fields(cfg)}
        changed = changes(cfg)
        shaping = [text for name, text in changed.items()
                   if groups[name] == "model" or name.startswith(("env_", "res_", "normalize_"))]
        if not changed:  # but the code has
            raise
        raise UserError(f"{cfg.run_dir} holds a run of another network: {', '.join(shaping or changed.values())}; "
                        f"{ANOTHER}") from error


def restore(cfg: Config, buffers: SharedBuffers, policies: Sequence[Found]) -> None:
    """Put the counters, scores and weights of a run's checkpoints into what is shared; cfg: the settings of the run."""
    for path in (path for found in policies for path in found.damaged if this_rank().rank == 0):
        path.rename(path.with_suffix(DAMAGED))
    for policy, (model, _, state, _) in enumerate(policies):
        if state is not None:
            buffers.env_steps[-1] = max(int(buffers.env_steps[-1]), state["env_steps"])
            buffers.policy_steps[-1, policy] = state.get("policy_steps", state["env_steps"])
            buffers.best_score[policy], buffers.best_sort[policy] = checkpoint.best_score(cfg.run_dir, policy)
            buffers.policies[policy].weights.publish(model, state["sgd_steps"])
            if len(cfg.learners) > 1:
                counts = torch.tensor([state["sgd_steps"], state.get("env_steps_trained", 0)])
                buffers.policies[policy].shared_training.counts[:, 0] = counts


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
