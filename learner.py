"""The learner: turns trajectories into better weights.

Its feed hands out datasets of finished trajectories (`feed.py`). On each the learner takes `num_epochs` x
`num_batches_per_epoch` SGD steps, every one on a minibatch (more, up to `max_epochs`, while the next dataset is not
there), and publishes the weights after every step (in turns, and off-policy: after the last one). The algorithm says
what the loss is (`algorithm.py`). Several learners of a policy work together through a reducer (`runtime/several.py`).
Between two datasets a learner obeys the commands of the main process.

Rows that are not valid (the reset between two episodes, acted by too old a policy) change no loss, no gradient and no
statistic. Read next: `algorithm.py`.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algorithm import Algorithm, Loss, MaskedMean, Outputs, gather_sums, summarize
from algorithms import algorithm_class
from config import Config, tunable
from feed import Data, cut, select
from model import Joined
from normalizers import hold_units
from runtime import checkpoint
from runtime.machine import body_dtype, prepare
from runtime.processes import SAVES, Report
from runtime.several import DECISIONS, SGD_STEPS, Stats, agree, make_reducer
from runtime.utils import SHUFFLE, UserError, Values, derive_seed, this_rank
from shared_buffers import FINISH, LOAD, SAVE, SAVE_BEST, SAVE_MILESTONE, SharedBuffers

# observations evaluated at once on a CPU, about 260 of Atari: the activations of more would fall out of its cache
CPU_BYTES_PER_PASS = 7_400_000
MIN_NORMALIZER_ROWS = 512  # of as many datasets as come at once, however large the observations are
COMMAND_SEC = 0.05  # a learner without data looks for commands so often


class Learner:
    """Trains one policy. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("feed.next", "wait for a dataset"), ("feed.inbox.get", "wait for trajectories"),
        ("feed.returned.get", "wait for the learner"), ("feed.copy", "batch"), ("evaluate_part", "forward"),
        ("loss", "loss"), ("descend", "backward"), ("reducer.step", "optimizer step"), ("sgd_step", "SGD"),
        ("model.summarize", "normalizers"), ("weights.publish", "publish"), ("save", "save"))

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, learner: int, device: torch.device,
                 resume_from: Path | None, report: Report) -> None:
        """Begin with the published weights and, when resuming, the rest of a checkpoint.

        learner: which of the policy's learners. The first one publishes, saves and moves the observation statistics.
        All move the statistics of the returns, but only the first one's are published.

        report(("trained", policy, {name: number})) is called after each dataset, report(("saved", policy, reason, name,
        seconds)) or report(("unsaved", policy, reason, why)) after each file, report(("answered", (policy, learner,
        command, index))) after each command.
        """
        self.cfg = cfg
        self.buffers = buffers
        self.policy = policy
        self.number = learner
        self.device = device
        self.report = report
        self.is_first = learner == 0
        self.algorithm: Algorithm = algorithm_class(cfg.algo)(cfg, cfg.learners[learner])
        if this_rank().world_size > 1 and (cfg.roles or self.algorithm.update):
            raise UserError(f"--algo={cfg.algo} cannot be used with several ranks")
        own, spaces = buffers.policies[policy], buffers.spaces_of(policy)
        self.weights, self.commands = own.weights, own.commands[learner]
        self.model = self.algorithm.make_model(*spaces).to(device)
        # an `update` is called without autocast
        self.model.arithmetic = body_dtype("float32" if self.algorithm.update else cfg.precision, device, spaces[0])
        self.weights.refresh(self.model)
        self.reducer = make_reducer(own.shared_training, learner, buffers.store_prefix, cfg.stall_timeout_sec)
        self.optimizer = self.reducer.make_optimizer(self.model, self.algorithm.make_optimizer)
        self.sampled_before = buffers.count_sampled(policy, slice(-1, None))  # in earlier starts of the run
        self.has_ended = False  # no rank begins another dataset
        prepare(self.model, tf32=cfg.tf32, torch_compile=cfg.torch_compile)
        self.num_threads = 1 if cfg.serial_mode or cfg.torch_compile or device.type != "cpu" else cfg.learner_threads
        self.map = ThreadPoolExecutor(self.num_threads, "part").map if self.num_threads > 1 else map
        self.shuffle = torch.Generator().manual_seed(derive_seed(cfg.seed, SHUFFLE, buffers.start, policy, learner))
        self.priorities: Tensor | None = None  # of the last minibatch, where the algorithm has some
        self.images = {}  # of a dataset, normalized: {name: tensor}
        self.num_finishing = 0  # FINISH commands that wait for their answers
        self.feed = self.algorithm.make_feed(buffers, policy, learner)
        if cfg.serial_mode:
            self.feed.deliver = self.train_on_dataset
        self.obs_names = [name for name in self.feed.specs if name.startswith("obs/")]
        num_bytes = sum(self.feed.trajectories[name][0, 0].nbytes for name in self.obs_names)  # of an observation
        self.steps_per_pass = max(1, CPU_BYTES_PER_PASS // num_bytes)
        empty = self.observations(self.feed.trajectories, lambda slots: slots[0, :0].to(device))
        self.no_summaries = self.model.summarize(empty) + [torch.zeros(7)] * cfg.normalize_returns
        self.configure()
        if buffers.restarts:
            restore(self, checkpoint.last_saved(cfg.run_dir, policy, **buffers.counts(policy)))
        else:
            restore(self, checkpoint.load_checkpoint(resume_from) if resume_from else {})
        self.snapshot_period = -1  # in which the last snapshot was taken
        self.take_snapshot()

    # ---- datasets and commands -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Train on datasets as they come until told to stop."""
        self.feed.start()
        while self.obey_commands():
            self.commands.beat()
            dataset = self.feed.next(COMMAND_SEC)
            if dataset is not None:
                self.train_on_dataset(dataset)
            elif self.buffers.training_over:
                agree(self)
            else:
                self.answer_finish()
        if self.buffers.training_over:
            agree(self)

    def turn(self) -> None:
        """Do all there is to do, in this thread (serial mode)."""
        self.feed.turn()
        self.obey_commands()
        self.answer_finish()

    def obey_commands(self) -> bool:
        """Act on the commands that are there; return False when told to stop."""
        return self.commands.empty() or self.commands.serve(self.obey)

    def obey(self, command: int, index: int) -> None:
        """Act on a command and answer it, FINISH later."""
        if self.buffers.training_over:  # set before the last SAVE is sent: so all ranks save the same
            agree(self)
        if command == FINISH:
            self.num_finishing += 1
            return
        if command == SAVE:
            self.save(index)
        elif command == LOAD:
            self.load(index)
        else:  # CONFIGURE
            self.configure()
        self.report(("answered", (self.policy, self.number, command, index)))

    def answer_finish(self) -> None:
        """Answer FINISH commands as soon as there is nothing left to train on; publish what all learners have done."""
        if self.num_finishing and self.feed.is_idle():
            if self.is_first and len(self.cfg.learners) > 1:
                self.take_over()
                self.weights.publish(self.model, self.sgd_steps)
            for _ in range(self.num_finishing):  # several, where a signal has interrupted
                self.report(("answered", (self.policy, self.number, FINISH, 0)))
            self.num_finishing = 0

    def configure(self) -> None:
        """Use the policy's settings of now: a population's, or changed by `Trainer.change`; note them."""
        settings = dict(zip(tunable(self.cfg), self.buffers.settings[self.policy].tolist(), strict=True))
        cfg = dataclasses.replace(self.cfg, **settings)
        self.place_in_population = self.buffers.place_in_population(cfg, self.policy)
        self.sampled = self.buffers.count_sampled(self.policy)  # until the dataset that is trained on
        if cfg.learning_rate != self.cfg.learning_rate:
            self.learning_rate = scheduled_rate(cfg, int(self.sampled[0]))
        self.cfg = self.algorithm.cfg = self.feed.cfg = cfg

    def take_over(self) -> None:
        """Take over what other learners have done to the same weights."""
        if not self.is_first:
            self.weights.refresh(self.model)  # for the first learner's statistics of observations and returns
        self.reducer.take_over()
        self.sgd_steps = self.reducer.count(SGD_STEPS, self.sgd_steps, 0)
        self.decisions_trained = self.reducer.count(DECISIONS, self.decisions_trained, 0)

    def load(self, donor: int) -> None:
        """Take over another policy's newest checkpoint, or what the user gave where the donor is this policy itself.

        From their version on experience counts: nobody learns any more from the actions of the former weights. The
        counters and the learning rate stay this policy's own. Raises `UserError` when the weights do not fit.
        """
        if donor == self.policy:
            path = checkpoint.policy_dir(self.cfg.run_dir, donor) / checkpoint.GIVEN
            state = checkpoint.load_checkpoint(path)
        else:
            path, state, _ = checkpoint.load_newest(self.cfg.run_dir, donor)
        if state is not None:
            self.take_over()
            checkpoint.load_weights(self.model, state, path, self.cfg.algo)
            load_optimizer(self.optimizer, state)
            self.reducer.hand_over()
            self.sgd_steps = self.reducer.count(SGD_STEPS, self.sgd_steps, 1)
            self.buffers.first_version[self.policy] = self.sgd_steps  # before it is there: it is another's
            self.weights.publish(self.model, self.sgd_steps)

    def save(self, reason: int) -> None:
        """Write a checkpoint.

        reason: SAVE_PERIODIC (the newest few are kept), SAVE_MILESTONE (all are kept), SAVE_BEST (which replaces the
        one before).
        """
        self.commands.beat(SAVES)
        started = time.monotonic()
        folder = checkpoint.policy_dir(self.cfg.run_dir, self.policy)
        state = training_state(self)
        name = checkpoint.checkpoint_name("milestone" if reason == SAVE_MILESTONE else "checkpoint", state)
        if reason == SAVE_BEST:
            name = checkpoint.BEST
            state["score"] = float(self.buffers.best_score[self.policy])
            state["sort_of_score"] = int(self.buffers.best_sort[self.policy])
        try:
            if this_rank().rank == 0:  # all have the same
                checkpoint.save_checkpoint(state, folder / name)
                checkpoint.prune_checkpoints(folder, self.cfg.keep_checkpoints)
        except OSError as error:  # training goes on
            self.report(("unsaved", self.policy, reason, error.strerror or str(error)))
        else:
            self.report(("saved", self.policy, reason, name, time.monotonic() - started))

    def take_snapshot(self) -> None:
        """Keep the weights as an opponent for self-play, at the start and then one in each period of decisions."""
        period = int(self.sampled[1]) // self.cfg.self_play_snapshot_every_env_steps
        if self.is_first and self.cfg.self_play_past_fraction and period != self.snapshot_period:
            self.snapshot_period = period
            self.weights.add_snapshot(self.model, self.sgd_steps)

    # ---- training ------------------------------------------------------------------------------------------------

    def train_on_dataset(self, dataset: Any) -> None:
        """Take all SGD steps on a dataset, unless all ranks end or none has a valid row; then give it back."""
        self.take_over()
        lag = self.feed.admit(dataset.tensors, self.sgd_steps)
        data, valid = self.prepare(dataset), dataset.tensors["valid"]
        num_valid, of_ranks = agree(self, lag[valid], summarize_data(self, data, valid))
        if num_valid:
            self.decisions_trained = self.reducer.count(DECISIONS, self.decisions_trained, num_valid)
            self.buffers.decisions_trained[self.policy] = self.decisions_trained
            if self.cfg.normalize_returns:  # before targets are normalized: the first ones would be far outside
                self.model.returns.update(of_ranks.pop())
            self.take_sgd_steps(dataset, data, of_ranks)
        else:
            self.feed.allow_next()
        self.feed.release(dataset)

    def take_sgd_steps(self, dataset: Any, data: Data, of_ranks: list[Tensor]) -> None:
        """Run all epochs over a dataset; publish the weights, report. of_ranks: what moves observation statistics."""
        cfg = self.cfg
        hold_units(self.model, hold=True)
        epochs = max(cfg.num_epochs, cfg.max_epochs if cfg.async_rl and not cfg.serial_mode else 1)
        images = self.model.normalize_images(data, self.images, self.map) if epochs > 1 else {}
        minibatches = [rows if isinstance(rows, slice) else rows.to(self.device, non_blocking=True)
                       for _ in range(epochs) for rows in self.feed.split(self.shuffle)]
        sums, stats = gather_sums(self.reducer, data, minibatches), []
        for step, rows in enumerate(minibatches, 1):
            may_end = step >= cfg.num_epochs * cfg.num_batches_per_epoch
            if enough := may_end and (step == len(minibatches) or self.feed.has_next()):
                self.feed.allow_next()
            minibatch = {name: select(tensor, rows) for name, tensor in (data | images).items()}
            stats.append(self.sgd_step(minibatch | sums[step - 1], last=enough))
            last = bool(stats[-1].pop("stopping"))
            if self.priorities is not None:
                dataset.set_priorities(rows, self.priorities.cpu())
            if step % cfg.num_batches_per_epoch == 0:
                self.learning_rate = next_learning_rate(cfg, self.learning_rate, int(self.sampled[0]),
                                                        stats[-cfg.num_batches_per_epoch:])
            if last and self.is_first:  # within a dataset all its observations are normalized alike
                self.model.update_normalizers(of_ranks)
            if self.is_first and (last or (cfg.async_rl and self.algorithm.datasets_at_once == 1)):
                self.weights.publish(self.model, self.sgd_steps, wait=False)
            if last:
                break
        if not enough:
            self.feed.allow_next()
        hold_units(self.model, hold=False)
        self.take_snapshot()
        self.weights.finish_publishing()
        self.report(("trained", self.policy, describe(self, summarize(stats, self.model), dataset.tensors["valid"])))

    def prepare(self, dataset: Any) -> Data:
        """Copy a dataset to the device; add what the algorithm computes once for all its SGD steps."""
        data = {name: tensor.to(self.device, non_blocking=True) for name, tensor in dataset.tensors.items()}
        self.algorithm.env_steps = int(self.sampled[0])
        with torch.no_grad():
            data |= self.algorithm.prepare(self.model, data, self.evaluate)
        return data

    def sgd_step(self, minibatch: Data, *, last: bool = False) -> Data:
        """Take an SGD step on a minibatch of trajectories [B, T(+1), ...], return statistics.

        last: this rank would end the dataset with this step. The statistic "stopping" is above 0 if any rank would, or
        if the run ends.
        """
        self.commands.beat()
        self.buffers.sgd_steps_begun[self.policy] += 1
        stats = {"stopping": self.buffers.stopping + float(last)}  # of any rank
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        data = {name: tensor.transpose(0, 1) for name, tensor in minibatch.items()}  # [T(+1), B, ...]
        if self.algorithm.update is None:
            loss = self.loss(self.unroll(minibatch), data)
            stats |= {"loss": loss.total} | loss.statistics
            self.priorities = loss.priorities
            norm = self.descend(loss.total, None, stats)
        else:  # it descends by each of its losses
            norms: list[Tensor] = []
            stats |= self.algorithm.update(self.model, data, lambda loss, parameters:
                                           norms.append(self.descend(loss, parameters, {})))
            norm = torch.stack(norms).norm()
        self.sgd_steps = self.reducer.count(SGD_STEPS, self.sgd_steps, 1)
        self.algorithm.after_sgd_step(self.model, self.sgd_steps)
        return {name: torch.as_tensor(value).detach() for name, value in stats.items()} | {"grad_norm": norm}

    def loss(self, outputs: Outputs, data: Data) -> Loss:
        """Compute the loss of a minibatch [T(+1), B, ...] from what the network says of it, [T+1, B, ...]."""
        with torch.no_grad():
            data = data | self.algorithm.targets(self.model, outputs, data)
        return self.algorithm.loss(self.model, outputs, data, MaskedMean(data["valid"], self.reducer))

    def descend(self, loss: Tensor, parameters: Iterable[nn.Parameter] | None, stats: Stats) -> Tensor:
        """Take a step that lowers a loss, of these parameters alone if some are given; return its gradient's norm.

        The stats become those of all ranks.
        """
        self.model.zero_grad(set_to_none=True)
        loss.backward(inputs=None if parameters is None else list(parameters))
        return self.reducer.step(self.optimizer, self.cfg.max_grad_norm or math.inf, stats)

    # ---- the network ---------------------------------------------------------------------------------------------

    def unroll(self, minibatch: Data) -> Outputs:
        """Evaluate trajectories [B, T+1, ...]; return what the algorithm needs, [T+1, B, ...], with gradient."""
        names = (*self.obs_names, "rnn_states", "new_episode", *self.algorithm.inputs)
        length = (self.cfg.recurrence or self.cfg.rollout) if self.model.state_size else 1
        groups = map(self.evaluate, cut({name: minibatch[name] for name in names}, length))
        size = len(minibatch["valid"])
        return tuple(torch.cat([rows.reshape(size, -1, *rows.shape[2:]) for rows in of_groups], 1).transpose(0, 1)
                     for of_groups in zip(*groups, strict=True))

    def evaluate(self, sequences: Data, function: Callable[..., tuple] | None = None) -> Outputs:
        """Ask the network about sequences {name: [N, L, ...]}; return what `Algorithm.evaluate` says, [N, L, ...].

        function: another one with the same arguments.
        """
        shape, num_parts = sequences["new_episode"].shape, 1
        if self.device.type == "cpu":
            num_parts = self.num_threads * math.ceil(shape.numel() / (self.num_threads * self.steps_per_pass))
        size = math.ceil(shape[0] / num_parts)
        parts = [{name: tensor[start : start + size] for name, tensor in sequences.items()}
                 for start in range(0, shape[0], size)]
        function, with_gradient = function or self.algorithm.evaluate, torch.is_grad_enabled()  # that is of a thread
        outputs = list(self.map(lambda part: self.evaluate_part(part, function, with_gradient=with_gradient), parts))
        if len(outputs) > 1:
            outputs = [Joined.apply(torch.empty(0, requires_grad=True), self.map, outputs)]
        return tuple(rows.unflatten(0, shape) for rows in outputs[0])

    def observations(self, data: Data, take: Callable[[Tensor], Tensor]) -> Data:
        """Return the leaves of observations in some data, what `take` makes of each."""
        return {name.removeprefix("obs/"): take(data[name]) for name in self.obs_names}

    def evaluate_part(self, part: Data, function: Callable[..., tuple], *, with_gradient: bool) -> Outputs:
        """Ask the network about some of the sequences, [n, L, ...]; the answers are [n * L, ...]."""
        obs = self.observations(part, lambda rows: rows.flatten(0, 1))
        more = (part[name].flatten(0, 1) for name in self.algorithm.inputs if name in part)
        dtype = self.model.arithmetic
        with (torch.set_grad_enabled(with_gradient),
              torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)):
            return function(self.model, obs, part["rnn_states"][:, 0], part["new_episode"], *more)


def summarize_data(learner: Learner, data: Data, valid: Tensor) -> list[Tensor]:
    """Sum up a dataset for the normalizers: the observations of valid rows, and the returns if they are normalized.

    Of observations of many bytes a random sample: neighboring images are nearly equal, the others would add cost and
    little information. It is random since any regular choice would meet the episodes of some length always in the same
    steps. `valid` is on the CPU.
    """
    summaries = []
    if learner.is_first:
        trajectory, t = valid.nonzero(as_tuple=True)
        rows = trajectory * data[learner.obs_names[0]].shape[1] + t  # of trajectories, T + 1 of each, in one line
        size = max(MIN_NORMALIZER_ROWS, learner.steps_per_pass) // learner.algorithm.datasets_at_once
        rows = rows[torch.randperm(len(rows), generator=learner.shuffle)[:size]].to(learner.device, non_blocking=True)
        obs = learner.observations(data, lambda columns: columns.flatten(0, 1).index_select(0, rows))
        summaries = learner.model.summarize(obs)
    if learner.cfg.normalize_returns:
        columns = (data[name].T for name in ("rewards", "terminated", "truncated", "valid"))
        summaries.append(learner.model.returns.summarize(*columns, learner.cfg.gamma))
    return summaries


def describe(learner: Learner, summary: Values, valid: Tensor) -> Values:
    """Join what there is to say of a dataset."""
    prefix = "" if learner.is_first or not learner.algorithm.role else f"{learner.algorithm.role}_"
    return {f"{prefix}{name}": value for name, value in (summary | learner.feed.statistics()).items()} | {
        **learner.of_dataset,
        "valid_fraction": float(valid.double().mean()),
        "learning_rate": learner.learning_rate,
        "sgd_steps": learner.sgd_steps,
        "env_steps_trained": learner.decisions_trained,
    }


# ---- what a checkpoint holds -----------------------------------------------------------------------------------------


def training_state(learner: Learner) -> Values:
    """Return all that a checkpoint holds, of all learners of the policy; the model's tensors are the live ones."""
    learner.take_over()
    return learner.buffers.origin(learner.cfg, learner.policy) | {
        "model": learner.model.state_dict(),
        "sgd_steps": learner.sgd_steps, "env_steps_trained": learner.decisions_trained,
        # a copy: another learner may change it while it is written, and its checksum would be wrong
        "optimizer": copy.deepcopy(learner.optimizer.state_dict()) | {"class": type(learner.optimizer).__name__},
        "learning_rate": learner.learning_rate, "initial_learning_rate": learner.cfg.learning_rate,
        "population": learner.place_in_population,
    }


def restore(learner: Learner, state: Values) -> None:
    """Take over what `training_state` returned, or a part of it; the weights come from `SharedWeights`.

    Settings stay those of the configuration, since the command line may have changed them.
    """
    learner.sgd_steps = state.get("sgd_steps", 0)  # also the version of the published weights
    learner.decisions_trained = state.get("env_steps_trained", 0)
    load_optimizer(learner.optimizer, state)
    learner.learning_rate = scheduled_rate(learner.cfg, int(learner.sampled[0]))
    if learner.cfg.lr_schedule != "constant" and state.get("initial_learning_rate") == learner.cfg.learning_rate:
        learner.learning_rate = state["learning_rate"]


def load_optimizer(optimizer: torch.optim.Optimizer, state: Values) -> None:
    """Take over what a checkpoint's optimizer has learned, if it is of the same class, but not its settings."""
    learned = copy.deepcopy(state.get("optimizer"))  # its tensors may lie in the file
    if learned and learned.get("class", "Adam") == type(optimizer).__name__:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(learned | {"param_groups": groups})


# ---- the learning rate -----------------------------------------------------------------------------------------------


def scheduled_rate(cfg: Config, env_steps: int) -> float:
    """Return the learning rate after so many env_steps; linear_decay: it falls to 0 over those of the whole run."""
    left = max(0.0, 1 - env_steps / cfg.train_for_env_steps) if cfg.lr_schedule == "linear_decay" else 1.0
    return cfg.learning_rate * left


def next_learning_rate(cfg: Config, rate: float, env_steps: int, stats: Sequence[Data]) -> float:
    """Return the learning rate of the next epoch.

    kl_adaptive divides it by 1.5 when the mean KL of the last epoch is above twice its threshold, and multiplies it by
    1.5 when that is below half of it. stats: those of each SGD step of the last epoch; on a GPU this waits for them.
    """
    if cfg.lr_schedule != "kl_adaptive":
        return scheduled_rate(cfg, env_steps)
    kl = float(torch.stack([step["kl"] for step in stats]).mean())
    if kl > 2 * cfg.lr_schedule_kl_threshold:
        rate /= 1.5
    elif kl < cfg.lr_schedule_kl_threshold / 2:
        rate *= 1.5
    return min(max(rate, cfg.lr_adaptive_min), cfg.lr_adaptive_max)
