"""The learner: turns trajectories into better weights.

Two threads. The batcher copies finished trajectories into the batch that is being filled and frees their slots at
once; the training thread takes complete datasets, runs `num_epochs` x `num_batches_per_epoch` SGD steps on each and
publishes the weights after every one. Two batches exist, so that the next one is filled while the last SGD step of this
one runs. It is not filled earlier: the trajectories wait in their slots, the rollout workers wait for slots, and so
memory and policy lag stay bounded when the learner is the slowest part.

The loss is PPO's with V-trace targets (Sample Factory, arXiv 2006.11751, section 3.4). Its parts are pure functions
at the end of this file. Rows that are not valid (the reset between two episodes, acted by too old a policy) change no
loss, no gradient and no statistic. Read next: `appo.py`.
"""

import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

import checkpoint
from config import Config
from model import body_dtype, make_model
from pbt import flatten_shaping, hyperparameters
from seeding import SHUFFLE, derive_seed
from shared_buffers import (
    CONFIGURE,
    COPY,
    SAVE,
    SAVE_BEST,
    SAVE_DONOR,
    SAVE_MILESTONE,
    SLOTS,
    STOP,
    Message,
    SharedBuffers,
    Spec,
    allocate,
    obs_dtype,
)
from vtrace import gae, vtrace

# observations evaluated at once on a CPU, about 260 of Atari: the activations of more would fall out of its cache
CPU_BYTES_PER_PASS = 7_400_000
MAX_NORMALIZED_TARGET = 10.0  # deviations
ADVANTAGE_FLOOR = 0.01  # the least deviation of advantages, in units of the value targets
MIN_NORMALIZER_ROWS = 512  # of one dataset, however large the observations are


class Batch:
    """The trajectories of one dataset, [B, T(+1), ...], while it is filled and while it is trained on."""

    def __init__(self, specs: dict[str, Spec], size: int, *, pinned: bool = False) -> None:
        """Allocate it; pinned: in memory that a GPU can read by itself."""
        tensors = allocate(specs, size, shared=False)
        self.tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()} if pinned else tensors
        self.slots: list[int] = []  # where its trajectories came from

    @property
    def num_free(self) -> int:
        """Count the trajectories that still fit."""
        return len(self.tensors["values"]) - len(self.slots)


class Learner:
    """Owns the weights of one policy and their optimizer. One process; shares `SharedBuffers`."""

    SPANS = (  # what `timeline.py` records
        ("work.get", "wait for a dataset"), ("shared.trajectories_done.get", "wait for trajectories"),
        ("next_batch.get", "wait for the learner"), ("copy", "batch"), ("evaluate", "forward"), ("loss", "loss"),
        ("carry_back", "backward"), ("optimizer.step", "optimizer step"), ("update_normalizers", "normalizers"),
        ("shared.weights.publish", "publish"))

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, device: torch.device,
                 report: Callable[[tuple], None], resume_from: Path | None = None) -> None:
        """Begin with the published weights and, when resuming, the rest of a checkpoint.

        report(("trained", policy, {name: number})) is called after each dataset, report(("saved", policy, kind, name,
        seconds)) after each file.
        """
        self.cfg, self.buffers, self.policy, self.device, self.report = cfg, buffers, policy, device, report
        self.shared, self.trajectories = buffers.policies[policy], buffers.trajectories_of(policy)
        obs_space, action_space = buffers.spaces_of(policy)
        specs = buffers.specs[self.shared.kind]
        self.folder = checkpoint.policy_dir(cfg.run_dir, policy)
        self.dtype = body_dtype(cfg, device, obs_space)
        self.obs_names = [f"obs/{name}" for name in obs_space]
        self.steps_per_pass = steps_per_pass(obs_space)
        self.num_threads = 1 if cfg.serial_mode or device.type != "cpu" else cfg.learner_threads
        self.map = ThreadPoolExecutor(self.num_threads, "part").map if self.num_threads > 1 else map
        self.model = make_model(cfg, obs_space, action_space).to(device)
        self.shared.weights.refresh(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), cfg.learning_rate,
                                          (cfg.adam_beta1, cfg.adam_beta2), cfg.adam_eps)
        self.sgd_steps = 0  # also the version of the published weights
        self.env_steps_trained = 0
        self.learning_rate = cfg.learning_rate
        self.place_in_population: dict[str, Any] = {}  # what the weights were learned with, saved beside them
        if cfg.with_pbt:
            self.configure()
        if resume_from is not None:
            self.load_state_dict(checkpoint.load_checkpoint(resume_from))
        else:
            # of a run that ended before it could be resumed
            checkpoint.prune_checkpoints(self.folder, 0, "snapshot")
            (self.folder / checkpoint.BEST).unlink(missing_ok=True)
        # env_steps of the policy; the first opponent is its beginning, a resumed run has some already
        self.next_snapshot = self.snapshot_after() if self.shared.weights.num_snapshots else 0
        self.take_snapshot()
        self.shuffle = torch.Generator().manual_seed(derive_seed(cfg.seed, SHUFFLE, buffers.start, policy))
        self.filling, self.spare = (  # the first is owned by the batcher
            Batch(specs, cfg.trajectories_per_dataset, pinned=device.type == "cuda") for _ in range(2))
        self.next_batch: queue.Queue[Batch] = queue.Queue()  # from training to the batcher
        self.work: queue.Queue[Batch | Message | BaseException] = queue.Queue()  # from the batcher to training

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint holds; the tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "sgd_steps": self.sgd_steps, "env_steps": int(self.buffers.env_steps.sum()),
                "policy_steps": self.policy_steps, "env_steps_trained": self.env_steps_trained,
                "learning_rate": self.learning_rate, "initial_learning_rate": self.cfg.learning_rate,
                "population": self.place_in_population}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; the weights come from `SharedWeights`.

        Settings stay those of the configuration, since the command line may have changed them.
        """
        self.load_moments(state["optimizer"])
        self.sgd_steps, self.env_steps_trained = state["sgd_steps"], state["env_steps_trained"]
        if self.cfg.lr_schedule != "constant" and state["initial_learning_rate"] == self.cfg.learning_rate:
            self.learning_rate = state["learning_rate"]
        elif self.cfg.lr_schedule == "linear_decay":
            self.learning_rate = self.linear_rate()

    def load_moments(self, state: dict[str, Any]) -> None:
        """Take over Adam's moments from the state of an optimizer, which holds its settings too."""
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group |= {"betas": (self.cfg.adam_beta1, self.cfg.adam_beta2), "eps": self.cfg.adam_eps}

    @property
    def policy_steps(self) -> int:
        """Count the decisions of all agents that have played this policy."""
        return int(self.buffers.policy_steps[:, self.policy].sum())

    def save(self, kind: int) -> None:
        """Write a checkpoint: periodic (the newest few are kept), milestone (all are kept), or one that is replaced.

        These are the best one and, for population-based training, the one that another policy is to copy.
        """
        started = time.monotonic()
        state = self.state_dict()
        if kind == SAVE_BEST:
            state["score"] = float(self.buffers.best_score[self.policy])
            state["sort_of_score"] = int(self.buffers.best_sort[self.policy])
        prefix = "milestone" if kind == SAVE_MILESTONE else "checkpoint"
        name = checkpoint.checkpoint_name(prefix, state["sgd_steps"], state["env_steps"])
        path = self.folder / {SAVE_BEST: checkpoint.BEST, SAVE_DONOR: checkpoint.DONOR}.get(kind, name)
        checkpoint.save_checkpoint(state, path)
        checkpoint.prune_checkpoints(self.folder, self.cfg.keep_checkpoints)
        self.report(("saved", self.policy, kind, path.name, time.monotonic() - started))

    # ---- population ----------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Take over this policy's settings from the supervisor (population-based training)."""
        names = hyperparameters(self.cfg)
        values = dict(zip(names, self.buffers.settings[self.policy].tolist(), strict=True))
        shaping = self.buffers.shaping[self.policy].tolist()
        names_of_shaping = flatten_shaping(self.buffers.info.shaping) if shaping else ()
        self.place_in_population = {
            "settings": values, "shaping": dict(zip(names_of_shaping, shaping, strict=True)),
            "last_update": int(self.buffers.last_update[self.policy])}
        is_new = values["learning_rate"] != self.cfg.learning_rate
        self.cfg = dataclasses.replace(self.cfg, **values)
        if is_new:
            decays = self.cfg.lr_schedule == "linear_decay"
            self.learning_rate = self.linear_rate() if decays else self.cfg.learning_rate

    def copy_policy(self, donor: int) -> None:
        """Take over the weights and the optimizer that another policy has saved.

        The counters and the learning rate stay this policy's own. What its former weights have acted is not learned
        from any more.
        """
        path = checkpoint.policy_dir(self.cfg.run_dir, donor) / checkpoint.DONOR
        state = checkpoint.load_checkpoint(path)
        checkpoint.load_weights(self.model, state, path)
        self.load_moments(state["optimizer"])
        self.sgd_steps += 1  # a new version, from which on experience counts
        self.shared.weights.first_version = self.sgd_steps  # first, so that who acts with it knows it is another's
        self.shared.weights.publish(self.model, self.sgd_steps)

    def take_snapshot(self) -> None:
        """Keep the weights as an opponent for self-play when it is time."""
        if not self.cfg.self_play_past_fraction or self.policy_steps < self.next_snapshot:
            return
        self.next_snapshot = self.snapshot_after()
        self.shared.weights.add_snapshot(self.model, self.sgd_steps)
        state = self.state_dict()
        checkpoint.save_checkpoint(state, self.folder / checkpoint.checkpoint_name(
            "snapshot", state["sgd_steps"], state["env_steps"]))
        checkpoint.prune_checkpoints(self.folder, self.cfg.self_play_snapshots, "snapshot")

    def snapshot_after(self) -> int:
        """Return the env_steps of the policy at which the next snapshot is due."""
        period = self.cfg.self_play_snapshot_every_env_steps
        return (self.policy_steps // period + 1) * period

    # ---- batcher -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train on datasets as they come until told to stop."""
        threading.Thread(target=self.run_batcher, daemon=True, name="batcher").start()
        while True:
            work = self.work.get()
            if isinstance(work, BaseException):
                raise work
            if isinstance(work, Batch):
                self.train(work)
            elif work[0] == STOP:
                return
            else:
                self.obey(*work)

    def obey(self, kind: int, index: int) -> None:
        """Act on a message of the supervisor."""
        if kind == SAVE:
            self.save(index)
        elif kind == COPY:
            self.copy_policy(index)
        else:
            assert kind == CONFIGURE, kind
            self.configure()

    def run_batcher(self) -> None:
        """Copy trajectories into batches, pass other messages on, until told to stop."""
        try:
            while (message := self.shared.trajectories_done.get())[0] != STOP:
                if message[0] != SLOTS:
                    self.work.put(message)
                    continue
                for dataset in self.collect(message[1:]):
                    self.work.put(dataset)
                    self.filling = self.next_batch.get()  # back-pressure
            self.work.put(message)
        except BaseException as error:  # noqa: BLE001  raised again by the training thread
            self.work.put(error)

    def collect(self, slots: Sequence[int]) -> Iterator[Batch]:
        """Copy trajectories of one rollout worker into the batch being filled; yield it whenever it is complete.

        Whoever takes it replaces `filling` before going on. In synchronous mode slots stay taken until the dataset is
        trained on, so that nothing is sampled meanwhile.
        """
        while slots and not self.buffers.stopping:
            fitting, slots = slots[: self.filling.num_free], slots[self.filling.num_free:]
            self.copy(fitting)
            if self.cfg.async_rl:
                self.free_slots(fitting)
            if not self.filling.num_free:
                yield self.filling

    def copy(self, slots: Sequence[int]) -> None:
        """Copy trajectories into the batch being filled."""
        begin = len(self.filling.slots)
        index = torch.tensor(slots) - self.shared.first_slot
        for name, tensor in self.filling.tensors.items():
            torch.index_select(self.trajectories[name], 0, index, out=tensor[begin : begin + len(slots)])
        self.filling.slots += slots

    def free_slots(self, slots: Sequence[int]) -> None:
        """Give slots of one rollout worker back to it."""
        self.buffers.inboxes[self.buffers.worker_of_slot(slots[0])].put((SLOTS, *slots))

    def handle(self, kind: int, *indices: int) -> None:
        """Act on one message in this thread (serial mode)."""
        if kind != SLOTS:
            self.obey(kind, *indices)
            return
        for dataset in self.collect(indices):
            self.train(dataset)
            self.filling = self.next_batch.get()

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, batch: Batch) -> None:
        """Run all SGD steps on a dataset, publish after each, then free what the dataset holds."""
        # no copy on a CPU; a GPU has read the batch when the first number is asked for, before it is filled again
        data = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.tensors.items()}
        lag = self.sgd_steps - data["policy_version"]
        fresh = (lag <= self.cfg.max_policy_lag) & (data["policy_version"] >= self.shared.weights.first_version)
        data["valid"] = data["valid"] & fresh
        data["rewards"] = (data["rewards"] * self.cfg.reward_scale).clamp(-self.cfg.reward_clip, self.cfg.reward_clip)
        if not self.cfg.with_vtrace:
            data["targets"], data["advantages"] = self.gae_targets(data)
        self.env_steps_trained += int(data["valid"].sum())
        steps = [indices for _ in range(self.cfg.num_epochs) for indices in self.minibatches()]
        stats = []
        for step, indices in enumerate(steps, 1):
            last = step == len(steps) or bool(self.buffers.stopping)
            if last:
                self.next_batch.put(self.spare)
            stats.append(self.sgd_step({name: tensor.index_select(0, indices) for name, tensor in data.items()}))
            if step % self.cfg.num_batches_per_epoch == 0:
                self.update_learning_rate(stats[-self.cfg.num_batches_per_epoch:])
            if last:  # within a dataset all its observations are normalized alike
                self.update_normalizers(data)
            self.shared.weights.publish(self.model, self.sgd_steps)
            if last:
                break
        self.take_snapshot()
        self.report(("trained", self.policy, self.summarize(stats, lag[data["valid"]], data["valid"])))
        if not self.cfg.async_rl:
            for _, slots in itertools.groupby(sorted(batch.slots), self.buffers.worker_of_slot):
                self.free_slots(list(slots))
        batch.slots.clear()
        self.spare = batch

    def minibatches(self) -> Iterator[Tensor]:
        """Draw the dataset's trajectories in random order, as one index tensor for each minibatch."""
        order = torch.randperm(self.cfg.trajectories_per_dataset, generator=self.shuffle).to(self.device)
        return iter(order.split(self.cfg.trajectories_per_minibatch))

    def sgd_step(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take one gradient step on a minibatch of trajectories [B, T(+1), ...], return statistics."""
        self.optimizer.zero_grad(set_to_none=True)
        stats = self.backward(data)
        max_norm = self.cfg.max_grad_norm or float("inf")
        stats["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm,
                                                            error_if_nonfinite=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.sgd_steps += 1
        return stats

    def backward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the gradient of the loss of a minibatch to the weights' `.grad`, return statistics.

        The network is evaluated in parts, by `learner_threads` threads; the loss needs all outputs at once (it
        normalizes advantages); its gradient with respect to them is then carried back through each part. One thread
        per part waits for no other within a pass. The operators' own threads meet in spinning barriers several times
        in each layer, and stand still there whenever one of them loses its core to another process.
        """
        groups = self.sequences(data)
        outputs = list(self.map(self.evaluate, [part for group in groups for part in self.split(group)]))
        leaves = [tuple(output.detach().requires_grad_() for output in part) for part in outputs]
        steps = [group["new_episode"].numel() for group in groups]
        parameters, values = (join_groups(torch.cat(rows), steps, len(data["valid"]))
                              for rows in zip(*leaves, strict=True))
        loss, stats = self.loss(parameters.transpose(0, 1), values.T, data)
        loss.backward()
        list(self.map(self.carry_back, outputs, leaves))
        return stats

    def sequences(self, data: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Cut trajectories [B, T+1, ...] into the sequences [N, L, ...] that the core is unrolled over.

        Every sequence begins with the hidden state stored when acting. A feed-forward policy has sequences of one step;
        backpropagation through the whole rollout has the trajectories themselves; through R < T steps there are two
        groups of sequences, of R steps, and of one step each for the bootstrap observations.
        """
        length = self.cfg.bptt_steps if self.model.state_size else 1
        data = {name: data[name] for name in (*self.obs_names, "rnn_states", "new_episode")}
        if length == 1:
            return [{name: tensor.flatten(0, 1)[:, None] for name, tensor in data.items()}]
        if length == self.cfg.rollout:
            return [data]
        return [{name: tensor[:, :-1].unflatten(1, (-1, length)).flatten(0, 1) for name, tensor in data.items()},
                {name: tensor[:, -1:] for name, tensor in data.items()}]

    def split(self, sequences: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Split sequences [N, L, ...] into parts of about equally many steps."""
        num_sequences, total = len(sequences["new_episode"]), sequences["new_episode"].numel()
        num_parts = 1
        if self.device.type == "cpu":
            num_parts = self.num_threads * math.ceil(total / (self.num_threads * self.steps_per_pass))
        size = math.ceil(num_sequences / num_parts)
        return [{name: tensor[start : start + size] for name, tensor in sequences.items()}
                for start in range(0, num_sequences, size)]

    def evaluate(self, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Evaluate sequences [N, L, ...]: action parameters [N * L, D], values in units of the value head [N * L]."""
        obs = {name.removeprefix("obs/"): part[name].flatten(0, 1) for name in self.obs_names}
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(self.model.normalize(obs, self.dtype), part["rnn_states"][:, 0], part["new_episode"])[:2]

    def carry_back(self, outputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> None:
        """Carry the gradients that the loss has given to one part's detached outputs back through the network."""
        torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])

    def loss(self, parameters: Tensor, values: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the APPO loss of a minibatch, and statistics.

        Args:
            parameters, values: what the network says of its observations, [T+1, B, D] and [T+1, B]; the values in
                units of the value head. V-trace works in units of the rewards, the value loss in those of the head.
            data: the trajectories, {name: [B, T(+1), ...]}.
        """
        cfg = self.cfg
        data = {name: tensor.transpose(0, 1) for name, tensor in data.items()}  # [T, B, ...] from here on
        returns = self.model.returns
        policy = self.model.distribution(parameters[:-1])
        behavior_policy = self.model.distribution(data["action_parameters"])
        log_ratios = policy.log_prob(data["actions"]) - data["log_probs"]
        valid = data["valid"]
        if cfg.with_vtrace:
            targets, advantages = vtrace(
                log_ratios.detach().clamp(-20, 20), data["rewards"], returns.denormalize(values.detach()),
                data["terminated"], data["truncated"], cfg.gamma, cfg.gae_lambda, cfg.vtrace_rho, cfg.vtrace_c)
        else:
            targets, advantages = data["targets"], data["advantages"]
        if cfg.normalize_returns:  # before the targets are used, so that the first ones are not far outside
            returns.update(targets, valid)
        kl = masked_mean(behavior_policy.kl(policy), valid)
        entropy = masked_mean(policy.entropy(), valid)
        exploration = entropy if cfg.exploration_loss == "entropy" else -masked_mean(
            policy.symmetric_kl_to_uniform().clamp(max=30), valid)
        normalized_advantages = normalize_advantages(advantages, targets, valid)
        policy_term = ppo_policy_loss(log_ratios, normalized_advantages, valid, cfg.ppo_clip_ratio)
        normalized_targets = returns.normalize(targets)
        if cfg.normalize_returns:  # what is far outside the statistics would drown everything else
            normalized_targets = normalized_targets.clamp(-MAX_NORMALIZED_TARGET, MAX_NORMALIZED_TARGET)
        value_term = clipped_value_loss(values[:-1], returns.normalize(data["values"]), normalized_targets, valid,
                                        cfg.ppo_clip_value)
        loss = (policy_term + cfg.value_loss_coeff * value_term - self.exploration_loss_coeff * exploration
                + cfg.kl_loss_coeff * kl)
        with torch.no_grad():
            ratios = torch.where(valid, log_ratios, masked_mean(log_ratios, valid)).exp()
            stats = {
                "loss": loss, "policy_loss": policy_term, "value_loss": value_term, "entropy": entropy, "kl": kl,
                "ratio_min": ratios.min(), "ratio_max": ratios.max(),
                "advantage_mean": masked_mean(advantages, valid),
                "advantage_std": masked_std(advantages, valid),
                "value_mean": masked_mean(returns.denormalize(values[:-1]), valid),
                "explained_variance": explained_variance(values[:-1], normalized_targets, valid),
            }
        return loss, {name: value.detach() for name, value in stats.items()}

    @torch.no_grad()
    def gae_targets(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute GAE targets and advantages [B, T] from the values predicted when acting.

        Only the last value of a trajectory was not predicted then; the current network does it here.
        """
        last = {name: data[name][:, -1:] for name in (*self.obs_names, "rnn_states", "new_episode")}
        last_values = self.model.returns.denormalize(self.evaluate(last)[1])
        values = torch.cat([data["values"], last_values[:, None]], 1)
        targets, advantages = gae(data["rewards"].T, values.T, data["terminated"].T, data["truncated"].T,
                                  self.cfg.gamma, self.cfg.gae_lambda)
        return targets.T, advantages.T

    def update_normalizers(self, data: dict[str, Tensor]) -> None:
        """Move the observation statistics by the valid rows of a dataset; of images by a random sample of them.

        Neighboring images are nearly equal: the others would add cost and little information. The sample is random
        since any regular choice would meet the episodes of some length always in the same steps.
        """
        trajectory, t = data["valid"].nonzero(as_tuple=True)
        size = max(MIN_NORMALIZER_ROWS, self.steps_per_pass)
        if len(t) > size:
            chosen = torch.randperm(len(t), generator=self.shuffle)[:size].to(self.device)
            trajectory, t = trajectory[chosen], t[chosen]
        rows = trajectory * (self.cfg.rollout + 1) + t
        obs = {name.removeprefix("obs/"): data[name].flatten(0, 1).index_select(0, rows) for name in self.obs_names}
        self.model.update_normalizers(obs, torch.ones_like(t, dtype=torch.bool))

    def update_learning_rate(self, stats: list[dict[str, Tensor]]) -> None:
        """Set the rate of the next epoch from the progress of the whole run, or from the last epoch's mean KL."""
        cfg = self.cfg
        if cfg.lr_schedule == "linear_decay":
            self.learning_rate = self.linear_rate()
        elif cfg.lr_schedule == "kl_adaptive":
            kl = float(torch.stack([minibatch["kl"] for minibatch in stats]).mean())
            self.learning_rate = kl_adaptive_rate(self.learning_rate, kl, cfg.lr_schedule_kl_threshold,
                                                  cfg.lr_adaptive_min, cfg.lr_adaptive_max)

    @property
    def exploration_loss_coeff(self) -> float:
        """Return the weight of the exploration loss, which may fall to 0 over the env_steps of the whole run."""
        decay = self.cfg.exploration_loss_decay_env_steps
        left = max(0.0, 1 - int(self.buffers.env_steps.sum()) / decay) if decay else 1.0
        return self.cfg.exploration_loss_coeff * left

    def linear_rate(self) -> float:
        """Return the rate that falls from its initial value to 0 over the env_steps of the whole run."""
        return self.cfg.learning_rate * max(0.0, 1 - int(self.buffers.env_steps.sum()) / self.cfg.train_for_env_steps)

    def summarize(self, stats: list[dict[str, Tensor]], lag: Tensor, valid: Tensor) -> dict[str, float]:
        """Average the statistics of a dataset's SGD steps; the lag is in SGD steps, before the first of them."""
        summary = {name: float(torch.stack([s[name] for s in stats]).mean()) for name in stats[0]}
        summary["ratio_min"] = float(torch.stack([s["ratio_min"] for s in stats]).min())
        summary["ratio_max"] = float(torch.stack([s["ratio_max"] for s in stats]).max())
        return summary | {
            "policy_lag_mean": float(lag.double().mean()) if len(lag) else 0.0,
            "policy_lag_max": int(lag.max()) if len(lag) else 0,
            "valid_fraction": float(valid.double().mean()),
            "learning_rate": self.learning_rate,
            "sgd_steps": self.sgd_steps,
            "env_steps_trained": self.env_steps_trained,
        }


# ---- pure functions ----------------------------------------------------------------------------------------------


def steps_per_pass(obs_space: dict[str, spaces.Space]) -> int:
    """Return how many observations are evaluated at once on a CPU."""
    return max(1, int(CPU_BYTES_PER_PASS / sum(math.prod(space.shape) * obs_dtype(space).itemsize
                                               for space in obs_space.values())))


def join_groups(rows: Tensor, steps: list[int], num_trajectories: int) -> Tensor:
    """Join the outputs of groups of sequences, [sum of steps, ...], group by group, into trajectories [B, T+1, ...]."""
    return torch.cat([group.unflatten(0, (num_trajectories, -1)) for group in rows.split(steps)], 1)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Average x over the valid entries; 0 when there are none. Invalid entries may hold anything, also nan."""
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def masked_std(x: Tensor, valid: Tensor) -> Tensor:
    """Return the standard deviation of x over the valid entries."""
    return masked_mean((x - masked_mean(x, valid)).square(), valid).sqrt()


def normalize_advantages(advantages: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Shift and scale advantages to mean 0 and deviation 1 over the valid entries, but blow no noise up.

    A deviation below 1 % of the root mean square of targets and advantages counts as that. Once a task is solved, all
    advantages are errors of the value estimates: scaled to 1 they would let the policy walk at random until it fails
    (CartPole: values of 100, a deviation of 0.001, returns of 500 that fell to 160; `docs/performance.md`). The price:
    where the same large reward comes in every step whatever is done, all else counts as noise; take it away.
    """
    size = masked_mean(targets.square() + advantages.square(), valid).sqrt()
    deviation = torch.maximum(masked_std(advantages, valid), ADVANTAGE_FLOOR * size).clamp(min=1e-30)  # of zeros: 0
    return (advantages - masked_mean(advantages, valid)) / deviation


def ppo_policy_loss(log_ratios: Tensor, advantages: Tensor, valid: Tensor, clip_ratio: float) -> Tensor:
    """Compute -mean(min(ratio * A, clip(ratio, 1/(1+eps), 1+eps) * A)) over the valid entries of [T, B] tensors.

    The ratio itself is held within [0.05, 20] against overflow, as in Sample Factory. clip_ratio = 0: no clipping.
    """
    ratios = torch.where(valid, log_ratios, 0.0).clamp(math.log(0.05), math.log(20.0)).exp()
    objective = ratios * advantages
    if clip_ratio:
        objective = torch.minimum(objective, ratios.clamp(1 / (1 + clip_ratio), 1 + clip_ratio) * advantages)
    return -masked_mean(objective, valid)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, valid: Tensor, clip: float) -> Tensor:
    """Compute mean(max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2)); clip = 0: no clipping."""
    targets = torch.where(valid, targets, 0.0)  # 0 x nan would be nan in the gradient
    error = (values - targets).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return masked_mean(error, valid)


def explained_variance(values: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Return 1 - Var(R - V) / Var(R): 1 for perfect values, 0 for useless ones."""
    return 1 - masked_std(targets - values, valid).square() / (masked_std(targets, valid).square() + 1e-8)


def kl_adaptive_rate(rate: float, kl: float, threshold: float, smallest: float, largest: float) -> float:
    """Divide the rate by 1.5 when the KL is above twice the threshold, multiply it by 1.5 when below half of it."""
    if kl > 2 * threshold:
        rate /= 1.5
    elif kl < threshold / 2:
        rate *= 1.5
    return min(max(rate, smallest), largest)
