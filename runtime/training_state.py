"""All that a learner's checkpoint holds: the model, its optimizer, the counters, the learning rate, perhaps a replay.

It is saved, resumed, copied from another policy (population-based training) and kept as a snapshot (self-play) as one.
Owned by the learner; `learner.py` is what changes it.
"""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from config import Config, tunable
from reducer import Reducer, state_tensors
from runtime import checkpoint
from runtime.ranks import this_rank
from runtime.user_error import UserError
from shared_buffers import SAVE_BEST, SAVE_MILESTONE, SAVE_PERIODIC, SharedBuffers, SharedWeights


class TrainingState:
    """The state of the training of one policy."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, model: torch.nn.Module,
                 optimizer: torch.optim.Optimizer, report: Callable[[tuple], None],
                 saved: dict[str, Any] | None, is_first: bool = True) -> None:
        """Begin with the published weights and, when resuming, the rest of a checkpoint.

        saved: what that holds. is_first: of several learners of a policy the first one keeps files and snapshots.
        """
        self.cfg, self.buffers, self.policy, self.report = cfg, buffers, policy, report
        self.model, self.optimizer, self.is_first = model, optimizer, is_first
        self.weights = buffers.policies[policy].weights
        self.folder = checkpoint.policy_dir(cfg.run_dir, policy)
        self.weights.refresh(model)
        # env_steps, and decisions of all agents that have played this policy, as of the dataset that is trained on
        self.sampled = self.count_sampled()
        self.sampled_before = self.count_sampled(slice(-1, None))  # in earlier starts of the run
        self.has_ended = False  # no rank begins another dataset
        self.sgd_steps = 0  # also the version of the published weights
        self.decisions_trained = 0
        self.learning_rate: float | Tensor = cfg.learning_rate  # a tensor where a GPU follows the KL, unread
        self.place_in_population: dict[str, Any] = {}  # what the weights were learned with, saved beside them
        self.configure()
        if saved is not None:
            self.load_state_dict(saved)
        if buffers.restarts:  # the last weights of the learner before were published
            self.sgd_steps = max(self.sgd_steps, self.weights.version)
            self.decisions_trained = max(self.decisions_trained, int(buffers.decisions_trained[policy]))
        elif saved is None and is_first:  # of a run that ended before it could be resumed
            checkpoint.prune_checkpoints(self.folder, 0, "snapshot")
        # in decisions of the policy; the first opponent of a new run is its beginning, a resumed run has some already
        self.next_snapshot = self.snapshot_after() if self.weights.num_snapshots else 0
        if is_first:
            self.take_snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint holds; the tensors are the live ones."""
        optimizer = self.optimizer_state() | {"class": type(self.optimizer).__name__}
        env_steps, policy_steps = self.count_sampled().tolist()
        return origin(self.cfg, self.buffers, self.policy) | {
            "model": self.model.state_dict(), "optimizer": optimizer, "sgd_steps": self.sgd_steps,
            "env_steps": env_steps, "policy_steps": policy_steps, "env_steps_trained": self.decisions_trained,
            "learning_rate": float(self.learning_rate), "initial_learning_rate": self.cfg.learning_rate,
            "population": self.place_in_population}

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state, with the rate as a number."""
        state = self.optimizer.state_dict()
        return state | {"param_groups": [group | {"lr": float(self.learning_rate)} for group in state["param_groups"]]}

    def newest(self, reducer: Reducer) -> dict[str, Any]:
        """Return `state_dict`, after taking over what other learners have done."""
        self.take_over(reducer)
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; the weights come from `SharedWeights`.

        Settings stay those of the configuration, since the command line may have changed them.
        """
        self.sgd_steps = state["sgd_steps"]
        self.decisions_trained = state.get("env_steps_trained", 0)
        if "optimizer" in state:  # the best one from an evaluator has none
            self.load_optimizer(state["optimizer"])
        if self.cfg.lr_schedule != "constant" and state.get("initial_learning_rate") == self.cfg.learning_rate:
            self.learning_rate = state["learning_rate"]
        elif self.cfg.lr_schedule == "linear_decay":
            self.learning_rate = self.linear_rate()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take over what an optimizer has learned, but not its settings."""
        state = copy.deepcopy(state)  # its tensors may lie in a file
        self.optimizer.load_state_dict(state | {"param_groups": self.optimizer_state()["param_groups"]})

    def count_sampled(self, rows: slice = slice(None)) -> torch.Tensor:
        """Count env_steps, and decisions of the policy, sampled so far; in the last row are those sampled elsewhere."""
        return torch.stack([self.buffers.env_steps[rows].sum(), self.buffers.policy_steps[rows, self.policy].sum()])

    @property
    def policy_steps(self) -> int:
        """Count the decisions of all agents that have played this policy, until the last dataset."""
        return int(self.sampled[1])

    # ---- other learners ------------------------------------------------------------------------------------------

    def agree(self, reducer: Reducer) -> bool:
        """Tell the other ranks what was sampled here and whether this one ends, before each dataset; learn the same.

        When one ends, all do. Returns False then.
        """
        if self.has_ended:
            return False
        own = self.count_sampled(slice(-1))
        news = torch.cat([torch.tensor([int(self.buffers.training_over), self.sgd_steps]), own])
        ranks = torch.stack(reducer.gather(news))
        assert (ranks[:, 1] == self.sgd_steps).all(), f"the ranks are apart: {ranks[:, 1].tolist()} SGD steps"
        self.sampled = self.sampled_before + ranks[:, 2:].sum(0)
        self.buffers.env_steps[-1], self.buffers.policy_steps[-1, self.policy] = self.sampled - own
        self.has_ended = bool(ranks[:, 0].any())
        if self.has_ended:
            self.buffers.training_over.fill_(True)
        return not self.has_ended

    def take_over(self, reducer: Reducer) -> None:
        """Take over what other learners have done to the same weights."""
        if not self.is_first:
            self.weights.refresh(self.model)  # for the first learner's statistics of observations and returns
        self.sgd_steps, self.decisions_trained = reducer.take_over(
            self.model, (self.sgd_steps, self.decisions_trained))

    # ---- files ---------------------------------------------------------------------------------------------------

    def publish(self, *, wait: bool = True) -> None:
        """Make the weights the newest ones; wait=False, on a GPU: as soon as it has copied them."""
        self.weights.publish(self.model, self.sgd_steps, wait=wait)

    def save(self, reason: int, kept: dict[str, Any], reducer: Reducer) -> None:
        """Write a checkpoint: SAVE_PERIODIC (the newest few are kept), SAVE_MILESTONE (all are kept), or SAVE_BEST
        (which replaces the one before).

        kept: what a periodic one keeps beside it, a replay.
        """
        started = time.monotonic()
        state = reducer.read_between_steps(lambda: self.newest(reducer)) | (kept if reason == SAVE_PERIODIC else {})
        if reason == SAVE_BEST:
            state["score"] = float(self.buffers.best_score[self.policy])
            state["sort_of_score"] = int(self.buffers.best_sort[self.policy])
        names = {SAVE_BEST: checkpoint.BEST, SAVE_MILESTONE: checkpoint.checkpoint_name("milestone", state)}
        path = self.folder / names.get(reason, checkpoint.checkpoint_name("checkpoint", state))
        try:
            if this_rank().rank == 0:  # all have the same
                checkpoint.save_checkpoint(state, path)
                checkpoint.prune_checkpoints(self.folder, self.cfg.keep_checkpoints)
        except OSError as error:  # training goes on
            self.report(("unsaved", self.policy, reason, error.strerror or str(error)))
        else:
            self.report(("saved", self.policy, reason, path.name, time.monotonic() - started))

    # ---- population ----------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Take over this policy's settings from the supervisor: a population's, or changed between calls of train()."""
        place = place_in_population(self.cfg, self.buffers, self.policy)
        values = place["settings"]
        self.place_in_population = place if self.cfg.with_pbt else {}
        self.sampled = self.count_sampled()
        is_new = values.get("learning_rate", self.cfg.learning_rate) != self.cfg.learning_rate
        kinds = {field.name: field.type for field in dataclasses.fields(self.cfg)}
        self.cfg = dataclasses.replace(self.cfg, **{name: kinds[name](value) for name, value in values.items()})
        if is_new:
            decays = self.cfg.lr_schedule == "linear_decay"
            self.learning_rate = self.linear_rate() if decays else self.cfg.learning_rate

    def copy_policy(self, donor: int, reducer: Reducer) -> None:
        """Take over the weights and the optimizer of another policy's newest checkpoint.

        The counters and the learning rate stay this policy's own. Nobody learns any more from the actions of its former
        weights.
        """
        with contextlib.suppress(UserError):  # all have gone away: this policy keeps its own weights
            path, state, _ = checkpoint.load_newest(self.cfg.run_dir, donor)
            if state is not None:
                checkpoint.load_weights(self.model, state, path, self.cfg.algo)
                self.load_optimizer(state["optimizer"])
                self.begin_anew(reducer)
        self.report(("copied", self.policy, donor))

    def load_given(self, reducer: Reducer, *, reset_optimizer: bool) -> None:
        """Take over the parameters that the user gave, and the optimizer if the file holds one.

        As in `copy_policy` the counters stay, and nobody learns from what former weights have acted.
        """
        path = self.folder / checkpoint.GIVEN
        self.take_over(reducer)
        try:
            state = checkpoint.load_checkpoint(path)
            if "optimizer" in state:
                check_optimizer(self.optimizer, state)
            checkpoint.load_weights(self.model, state, path, self.cfg.algo)
        except UserError as error:
            self.report(("loaded", self.policy, int(reset_optimizer), str(error)))
            return
        if reset_optimizer:
            for tensor in state_tensors(self.optimizer):
                tensor.zero_()
        elif "optimizer" in state:
            self.load_optimizer(state["optimizer"])
        self.begin_anew(reducer)
        self.report(("loaded", self.policy, int(reset_optimizer), ""))

    def begin_anew(self, reducer: Reducer) -> None:
        """Publish weights that were not learned here; from their version on experience counts."""
        reducer.replace_shared(self.model)
        self.sgd_steps = reducer.add_sgd_step(self.sgd_steps)
        self.buffers.first_version[self.policy] = self.sgd_steps  # before it is there: it is another's
        self.publish()

    def take_snapshot(self) -> None:
        """Keep the weights as an opponent for self-play when it is time."""
        if not self.cfg.self_play_past_fraction or self.policy_steps < self.next_snapshot:
            return
        self.next_snapshot = self.snapshot_after()
        self.weights.add_snapshot(self.model, self.sgd_steps)
        state = self.state_dict()
        try:
            checkpoint.save_checkpoint(state, self.folder / checkpoint.checkpoint_name("snapshot", state))
            checkpoint.prune_checkpoints(self.folder, self.cfg.self_play_snapshots, "snapshot")
        except OSError as error:  # it is an opponent all the same, until the run ends
            self.report(("unsaved", self.policy, None, error.strerror or str(error)))

    def snapshot_after(self) -> int:
        """Return the decisions of the policy at which the next snapshot is due."""
        period = self.cfg.self_play_snapshot_every_env_steps
        return (self.policy_steps // period + 1) * period

    # ---- schedules -----------------------------------------------------------------------------------------------

    def update_learning_rate(self, stats: Sequence[dict[str, torch.Tensor]]) -> None:
        """Set the rate of the next epoch from the progress of the whole run, or from the mean KL of the last epoch.

        stats: those of each SGD step of the last epoch.
        """
        cfg = self.cfg
        if cfg.lr_schedule == "linear_decay":
            self.learning_rate = self.linear_rate()
        elif cfg.lr_schedule == "kl_adaptive":
            if "kl" not in stats[0]:
                raise UserError(f"--lr_schedule=kl_adaptive: the loss of --algo={cfg.algo} has no statistic 'kl'")
            kl = torch.stack([step["kl"] for step in stats]).mean()
            on_cpu = kl.device.type == "cpu"  # a fused optimizer needs a float32 on a GPU
            rate = torch.zeros_like(kl, dtype=torch.float64 if on_cpu else torch.float32) + self.learning_rate
            rate = kl_adaptive_rate(rate, kl, cfg.lr_schedule_kl_threshold, cfg.lr_adaptive_min, cfg.lr_adaptive_max)
            self.learning_rate = float(rate) if on_cpu else rate

    def read_statistics(self, stats: Sequence[dict[str, Tensor]],
                        priorities: Sequence[Tensor]) -> tuple[dict[str, float], list[Tensor]]:
        """Summarize the statistics of a dataset's SGD steps, and bring its priorities to the CPU, all in one copy.

        Steps whose gradient was not finite were skipped, and count in `skipped_sgd_steps` alone. Raises `UserError`
        when the last two of a dataset were (or its only one), or when weights are not finite: it is not the data.
        """
        rates = [self.learning_rate] if isinstance(self.learning_rate, Tensor) else []
        numbers = torch.stack([value for step in stats for value in step.values()])
        with torch.no_grad():
            size = torch.stack(torch._foreach_norm(list(self.model.parameters()))).norm()
        numbers, size, *rest = read_together([numbers, size, *priorities, *rates])
        values = iter(numbers.tolist())
        steps = [dict(zip(step, values, strict=False)) for step in stats]
        taken = [step for step in steps if math.isfinite(step["grad_norm"])]
        goes_on = any(math.isfinite(step["grad_norm"]) for step in steps[-2:])
        if not (goes_on and size.isfinite()):
            what = "weights" if goes_on else "gradients"
            raise UserError(f"learning has diverged: {what} are non-finite; use a lower --learning_rate")
        summary = {"skipped_sgd_steps": len(steps) - len(taken)}
        for name in dict.fromkeys(name for step in taken for name in step):  # some are of a part of the steps
            column = [step[name] for step in taken if name in step]
            summary[name] = (max(column) if name.endswith("_max") else min(column) if name.endswith("_min") else
                             sum(column) / len(column))
        return summary | {"learning_rate": float(rest.pop() if rates else self.learning_rate)}, rest

    def linear_rate(self) -> float:
        """Return the rate that falls from its initial value to 0 over the env_steps of the whole run."""
        return self.cfg.learning_rate * max(0.0, 1 - int(self.sampled[0]) / self.cfg.train_for_env_steps)


def kl_adaptive_rate(rate: Tensor, kl: Tensor, threshold: float, smallest: float, largest: float) -> Tensor:
    """Divide the rate by 1.5 when the KL is above twice the threshold, multiply it by 1.5 when below half of it."""
    rate = torch.where(kl > 2 * threshold, rate / 1.5, torch.where(kl < threshold / 2, rate * 1.5, rate))
    return rate.clamp(smallest, largest)


def read_together(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the CPU, as one."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def origin(cfg: Config, buffers: SharedBuffers, policy: int) -> dict[str, Any]:
    """Return what every checkpoint says of the policy that it is of."""
    return {"algo": str(cfg.algo), "config": cfg.as_dict(),
            "spaces": buffers.info.spaces_of(buffers.policies[policy].kind)}


def place_in_population(cfg: Config, buffers: SharedBuffers, policy: int) -> dict[str, Any]:
    """Return the settings and the reward shaping that a policy has now, and when they were updated."""
    return {"settings": dict(zip(tunable(cfg), buffers.settings[policy].tolist(), strict=True)),
            "shaping": dict(zip(buffers.shaping_names, buffers.shaping[policy].tolist(), strict=True)),
            "last_update": int(buffers.last_update[policy])}


def save_published(cfg: Config, buffers: SharedBuffers, policy: int) -> str:
    """Save the newest weights of a policy whose learner is gone, beside all else of its last checkpoint.

    Returns the name of the file. Raises `OSError`, and `UserError` for weights that are not finite.
    """
    state: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # all are damaged
        state = checkpoint.load_newest(cfg.run_dir, policy)[1] or {}
    weights, version = buffers.policies[policy].weights.read()
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise UserError("they are not finite")
    state |= origin(cfg, buffers, policy) | {
        "model": weights, "sgd_steps": version, "env_steps": int(buffers.env_steps.sum()),
        "policy_steps": int(buffers.policy_steps[:, policy].sum()),
        "env_steps_trained": int(buffers.decisions_trained[policy]),
        "population": place_in_population(cfg, buffers, policy) if cfg.with_pbt else {}}
    path = checkpoint.policy_dir(cfg.run_dir, policy) / checkpoint.checkpoint_name("checkpoint", state)
    checkpoint.save_checkpoint(state, path)
    return path.name


def check_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise `UserError` when a checkpoint is of a run with another optimizer."""
    own = type(optimizer).__name__
    saved = state["optimizer"].get("class", "Adam")
    if own != saved:
        raise UserError(f"the run was trained with the optimizer {saved}, not {own}; resume it with {saved}")


def restore_weights(cfg: Config, policy: int, weights: SharedWeights, model: torch.nn.Module,
                    state: dict[str, Any]) -> None:
    """Publish the weights of a checkpoint, and the snapshots that lie beside it."""
    if cfg.self_play_past_fraction:
        folder = checkpoint.policy_dir(cfg.run_dir, policy)
        snapshots = checkpoint.list_checkpoints(folder, "snapshot")[::-1]
        newer = {path for path in snapshots if int(path.name.split("_")[1]) > state["sgd_steps"]}
        if this_rank().rank == 0:
            for path in newer:  # they came after the checkpoint, before a crash
                path.unlink()
        for path in [path for path in snapshots if path not in newer][-cfg.self_play_snapshots:]:
            try:
                snapshot = checkpoint.load_checkpoint(path)
            except checkpoint.DamagedCheckpoint:  # one opponent fewer
                continue
            checkpoint.load_weights(model, snapshot, path, cfg.algo)
            weights.add_snapshot(model, snapshot["sgd_steps"])
        model.load_state_dict(state["model"])
    weights.publish(model, state["sgd_steps"])
