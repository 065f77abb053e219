"""The learner: turns trajectories into better weights.

Its feed hands out datasets of finished trajectories (`feed.py`). The learner runs `num_epochs` x
`num_batches_per_epoch` SGD steps on each and publishes the weights after every one (off-policy: after the last one).
Between two datasets it obeys the supervisor's commands. The algorithm says what the loss is (`algorithm.py`), the
reducer how several learners agree (`reducer.py`).

Rows that are not valid (the reset between two episodes, acted by too old a policy) change no loss, no gradient and no
statistic. Read next: `algorithm.py`.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from gymnasium import spaces
from torch import Tensor, nn

from algorithm import MaskedMean
from algorithms import algorithm_class
from config import Config
from envs.flat_spaces import obs_dtype
from feed import Batch, join, join_groups, select, upload
from normalizers import hold_units
from reducer import make_reducer
from runtime.checkpoint import load_checkpoint, load_newest
from runtime.heartbeat import SAVES
from runtime.machine import body_dtype, prepare
from runtime.ranks import this_rank
from runtime.seeding import SHUFFLE, derive_seed
from runtime.training_state import TrainingState
from runtime.user_error import UserError
from shared_buffers import COPY, FINISH, LOAD, SAVE, STOP, SharedBuffers

# observations evaluated at once on a CPU, about 260 of Atari: the activations of more would fall out of its cache
CPU_BYTES_PER_PASS = 7_400_000
MIN_NORMALIZER_ROWS = 512  # of one dataset, however large the observations are
COMMAND_SEC = 0.05  # a learner without data looks for commands so often


class Learner:
    """Trains one policy. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("feed.next", "wait for a dataset"), ("feed.inbox.get", "wait for trajectories"),
        ("feed.next_batch.get", "wait for the learner"), ("feed.copy", "batch"), ("evaluate", "forward"),
        ("loss", "loss"), ("carry_back", "backward"), ("reducer.step", "optimizer step"), ("sgd_step", "SGD"),
        ("update_normalizers", "normalizers"), ("state.publish", "publish"), ("state.save", "save"))

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, learner: int, device: torch.device,
                 resume_from: Path | None, report: Callable[[tuple], None]) -> None:
        """Begin with the published weights and, when resuming, the rest of a checkpoint.

        learner: which of the policy's learners. The first one publishes, saves and moves the observation statistics.
        All move the statistics of the returns, but only the first one's are published.

        report(("trained", policy, {name: number})) is called after each dataset, report(("saved", policy, reason, name,
        seconds)) after each file, report(("loaded", policy, reset, why not)) and report(("finished", policy, learner,
        number)) in answer to LOAD and FINISH.
        """
        self.buffers, self.policy, self.device, self.report = buffers, policy, device, report
        saved = None
        if buffers.restarts:  # there is a newer one, perhaps
            with contextlib.suppress(UserError):  # all are damaged: the moments of the optimizer begin anew
                saved = load_newest(cfg.run_dir, policy)[1]
        elif resume_from is not None:
            saved = load_checkpoint(resume_from)
        self.commands = buffers.policies[policy].commands[learner]
        self.weights = buffers.policies[policy].weights
        self.number = learner
        self.is_first = learner == 0
        self.finishing = 0
        obs_space, action_space = buffers.spaces_of(policy)
        self.obs_names = [f"obs/{name}" for name in obs_space]
        self.steps_per_pass = steps_per_pass(obs_space)
        self.num_threads = 1 if cfg.serial_mode or cfg.torch_compile or device.type != "cpu" else cfg.learner_threads
        self.map = ThreadPoolExecutor(self.num_threads, "part").map if self.num_threads > 1 else map
        self.algorithm = algorithm_class(cfg.algo)(cfg, cfg.learners[learner])
        if self.algorithm.update is not None and this_rank().world_size > 1:
            raise UserError(f"--algo={cfg.algo} takes its SGD steps itself, and cannot be used with several ranks")
        self.model = self.algorithm.make_model(obs_space, action_space).to(device)
        self.model.arithmetic = body_dtype(cfg, device, obs_space)
        self.reducer = make_reducer(buffers.policies[policy].shared_training, learner, buffers.store_prefix,
                                    cfg.stall_timeout_sec)
        optimizer = self.reducer.make_optimizer(self.model, self.algorithm.make_optimizer)
        version = self.weights.refresh(self.model)
        if self.reducer.begin(self.model):
            self.weights.publish(self.model, version)
        self.state = TrainingState(cfg, buffers, policy, self.model, optimizer, report, saved, self.is_first)
        self.shuffle = torch.Generator().manual_seed(derive_seed(cfg.seed, SHUFFLE, buffers.start, policy, learner))
        prepare(cfg, self.model)
        self.priorities: Tensor | None = None  # of the last minibatch, where the algorithm has some
        self.take_over_settings()
        self.feed = self.algorithm.make_feed(buffers, policy, learner, pinned=device.type != "cpu",
                                             deliver=self.train if cfg.serial_mode else None)
        self.feed.resume(saved or {})

    def take_over_settings(self) -> None:
        """Use the settings of the state, which population-based training may have changed."""
        self.cfg = self.algorithm.cfg = self.state.cfg

    # ---- datasets and commands -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Train on datasets as they come until told to stop."""
        self.feed.start()
        while self.obey_commands():
            self.commands.beat()
            dataset = self.feed.next(COMMAND_SEC)
            if dataset is not None:
                self.train(dataset)
            elif self.buffers.training_over:
                self.state.agree(self.reducer)
            else:
                self.tell_finished()

    def turn(self) -> None:
        """Do all there is to do, in this thread (serial mode)."""
        self.feed.turn()
        self.obey_commands()
        self.tell_finished()

    def tell_finished(self) -> None:
        """Answer a FINISH command as soon as there is nothing left to train on; publish what all learners have done."""
        if self.finishing and self.feed.is_idle():
            if self.is_first and len(self.cfg.learners) > 1:
                self.state.take_over(self.reducer)
                self.state.publish()
            self.report(("finished", self.policy, self.number, self.finishing))
            self.finishing = 0

    def obey_commands(self) -> bool:
        """Act on the messages of the supervisor; return False when told to stop."""
        if self.commands.empty():
            return True
        commands = self.commands.get()
        if self.buffers.training_over:  # first, so that all ranks save the same
            self.state.agree(self.reducer)
        for command, index in commands:
            if command == STOP:
                return False
            if command == SAVE:
                self.commands.beat(SAVES)
                with self.feed.saving() as kept:
                    self.state.save(index, kept, self.reducer)
            elif command == COPY:
                self.state.copy_policy(index, self.reducer)
            elif command == LOAD:
                self.state.load_given(self.reducer, reset_optimizer=bool(index))
            elif command == FINISH:
                self.finishing = index
            else:  # CONFIGURE
                self.state.configure()
            if command not in (SAVE, FINISH):
                self.take_over_settings()
        return True

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, batch: Batch) -> None:
        """Train on a dataset, unless all ranks end or none has a valid row; then give it back to the feed."""
        if not (self.state.agree(self.reducer) and self.run_sgd(batch)):
            self.feed.allow_next()
        hold_units(self.model, hold=False)
        self.feed.release(batch)

    def run_sgd(self, batch: Batch) -> bool:
        """Take all SGD steps on a dataset, and publish; return False when no row of it is valid."""
        cfg, state = self.cfg, self.state
        state.take_over(self.reducer)
        lag = self.feed.admit(batch.tensors, state.sgd_steps)
        valid = batch.tensors["valid"]  # on the CPU, where nothing waits for the GPU
        num_valid = int(valid.sum())
        state.decisions_trained = self.reducer.add_decisions(state.decisions_trained, num_valid)
        self.buffers.decisions_trained[self.policy] = state.decisions_trained
        if not self.reducer.any(num_valid > 0):  # all rows are too old, or acted by weights that were replaced since
            return False
        data = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.tensors.items()}
        self.algorithm.env_steps = int(state.sampled[0])
        with torch.no_grad():
            data |= self.algorithm.prepare(self.model, data, self.ask)
        if cfg.normalize_returns:  # before targets are normalized: the first ones would be far outside
            columns = (data[name].T for name in ("rewards", "terminated", "truncated", "valid"))
            self.model.returns.update(*columns, cfg.gamma, self.reducer)
        hold_units(self.model, hold=True)
        steps = upload([rows for _ in range(cfg.num_epochs) for rows in self.feed.split(self.shuffle)], self.device)
        stats, priorities = [], []
        for step, rows in enumerate(steps, 1):
            last = self.reducer.any(step == len(steps) or bool(self.buffers.stopping))
            if last:
                self.feed.allow_next()
            stats.append(self.sgd_step({name: select(tensor, rows) for name, tensor in data.items()}))
            priorities += [self.priorities] if self.priorities is not None else []
            if step % cfg.num_batches_per_epoch == 0:
                state.update_learning_rate(stats[-cfg.num_batches_per_epoch:])
            if last and self.is_first:  # within a dataset all its observations are normalized alike
                self.update_normalizers(data | {"valid": valid})
            if self.is_first and (last or (cfg.async_rl and self.algorithm.datasets_at_once == 1)):
                state.publish(wait=False)
            if last:
                break
        if self.is_first:
            state.take_snapshot()
        summary, priorities = state.read_statistics(stats, priorities)  # on a GPU the only wait for a dataset
        state.weights.finish_publishing()  # it has copied them
        for rows, part in zip(steps, priorities, strict=False):
            batch.set_priorities(rows, part)
        self.report(("trained", self.policy, self.summarize(summary, lag[valid], valid)))
        return True

    def sgd_step(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take an SGD step on a minibatch of trajectories [B, T(+1), ...], return statistics."""
        self.commands.beat()
        self.buffers.sgd_steps_begun[self.policy] += 1
        for group in self.state.optimizer.param_groups:
            group["lr"] = self.state.learning_rate
        if self.algorithm.update is not None:
            norms: list[Tensor] = []
            stats = self.algorithm.update(self.model, {name: tensor.transpose(0, 1) for name, tensor in data.items()},
                                          lambda loss, parameters: norms.append(self.descend(loss, parameters)))
            stats = {name: value.detach() for name, value in stats.items()} | {"grad_norm": torch.stack(norms).norm()}
        else:
            self.model.zero_grad(set_to_none=True)
            stats = self.backward(data)
            stats["grad_norm"] = self.clip_and_step()
        self.state.sgd_steps = self.reducer.add_sgd_step(self.state.sgd_steps)
        self.algorithm.after_sgd_step(self.model, self.state.sgd_steps)
        return stats

    def descend(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Take a step of these parameters alone that lowers a loss; return the norm of its gradient."""
        self.model.zero_grad(set_to_none=True)
        loss.backward(inputs=list(parameters))
        return self.clip_and_step()

    def clip_and_step(self) -> Tensor:
        """Take a step along the gradients there are, at most as long as they allow; return their norm."""
        return self.reducer.step(self.model, self.state.optimizer, self.cfg.max_grad_norm or math.inf)

    def backward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the gradient of the loss of a minibatch to the weights' `.grad`, return statistics.

        The network is evaluated in parts, by `learner_threads` threads; the loss needs all outputs at once (it
        normalizes advantages); its gradient with respect to them is then carried back through each part. One thread
        per part waits for no other within a pass. The operators' own threads meet in spinning barriers several times
        in each layer, and stall there whenever another process takes the core of one of them.
        """
        groups = self.sequences(data)
        outputs = list(self.map(self.evaluate, [part for group in groups for part in self.parts(group)]))
        leaves = [tuple(output.detach().requires_grad_() for output in part) for part in outputs]
        steps = [group["new_episode"].numel() for group in groups]
        joined = tuple(join_groups(join(rows), steps, len(data["valid"])).transpose(0, 1)
                       for rows in zip(*leaves, strict=True))
        total, stats = self.loss(joined, {name: tensor.transpose(0, 1) for name, tensor in data.items()})
        total.backward()
        list(self.map(self.carry_back, outputs, leaves))
        return stats

    def loss(self, outputs: tuple[Tensor, ...], data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a minibatch [T(+1), B, ...] and statistics."""
        with torch.no_grad():
            data = data | self.algorithm.targets(self.model, outputs, data)
        loss = self.algorithm.loss(self.model, outputs, data, MaskedMean(data["valid"], self.reducer))
        self.priorities = loss.priorities
        statistics = {"loss": loss.total} | loss.statistics
        return loss.total, {name: torch.as_tensor(value).detach() for name, value in statistics.items()}

    def ask(self, data: dict[str, Tensor], function: Callable[..., tuple] | None = None) -> tuple[Tensor, ...]:
        """Evaluate sequences without gradient, [N, L, ...], by `Algorithm.evaluate` or another such function."""
        evaluate = torch.no_grad()(lambda part: self.evaluate(part, function))  # in each thread
        rows = zip(*self.map(evaluate, self.parts(data)), strict=True)
        return tuple(torch.cat(parts).unflatten(0, data["new_episode"].shape) for parts in rows)

    def sequences(self, data: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Cut trajectories [B, T+1, ...] into the sequences [N, L, ...] that the core is unrolled over.

        Every sequence begins with the hidden state stored when acting. A feed-forward policy has sequences of one step;
        backpropagation through the whole rollout has the trajectories themselves; through R < T steps there are two
        groups of sequences, of R steps, and of one step each for the bootstrap observations.
        """
        length = self.cfg.bptt_steps if self.model.state_size else 1
        data = {name: data[name] for name in (*self.obs_names, "rnn_states", "new_episode", *self.algorithm.inputs)}
        if length == 1:
            return [{name: tensor.flatten(0, 1)[:, None] for name, tensor in data.items()}]
        if length == self.cfg.rollout:
            return [data]
        return [{name: tensor[:, :-1].unflatten(1, (-1, length)).flatten(0, 1) for name, tensor in data.items()},
                {name: tensor[:, -1:] for name, tensor in data.items()}]

    def parts(self, sequences: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Split sequences [N, L, ...] into parts of about equally many steps."""
        num_sequences = len(sequences["new_episode"])
        total = sequences["new_episode"].numel()
        num_parts = 1
        if self.device.type == "cpu":
            num_parts = self.num_threads * math.ceil(total / (self.num_threads * self.steps_per_pass))
        size = math.ceil(num_sequences / num_parts)
        return [{name: tensor[start : start + size] for name, tensor in sequences.items()}
                for start in range(0, num_sequences, size)]

    def evaluate(self, part: dict[str, Tensor], function: Callable[..., tuple] | None = None) -> tuple[Tensor, ...]:
        """Ask the network about sequences [N, L, ...]: what the algorithm needs of it, [N * L, ...]."""
        obs = {name.removeprefix("obs/"): part[name].flatten(0, 1) for name in self.obs_names}
        more = (part[name].flatten(0, 1) for name in self.algorithm.inputs if name in part)
        dtype = self.model.arithmetic
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            arguments = self.model, obs, part["rnn_states"][:, 0], part["new_episode"], *more
            return (function or self.algorithm.evaluate)(*arguments)

    def carry_back(self, outputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> None:
        """Carry the gradients that the loss has given to one part's detached outputs back through the network."""
        used = [(output, leaf.grad) for output, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward(*zip(*used, strict=True))

    def update_normalizers(self, data: dict[str, Tensor]) -> None:
        """Move the observation statistics by the valid rows of a dataset; of images by a random sample of them.

        Neighboring images are nearly equal: the others would add cost and little information. The sample is random
        since any regular choice would meet the episodes of some length always in the same steps. `valid` is on the CPU.
        """
        trajectory, t = data["valid"].nonzero(as_tuple=True)
        size = max(MIN_NORMALIZER_ROWS, self.steps_per_pass) // self.algorithm.datasets_at_once
        if len(t) > size:
            chosen = torch.randperm(len(t), generator=self.shuffle)[:size]
            trajectory, t = trajectory[chosen], t[chosen]
        rows, = upload([trajectory * data[self.obs_names[0]].shape[1] + t], self.device)
        obs = {name.removeprefix("obs/"): data[name].flatten(0, 1).index_select(0, rows) for name in self.obs_names}
        self.model.update_normalizers(obs, self.reducer)

    def summarize(self, statistics: dict[str, float], lag: Tensor, valid: Tensor) -> dict[str, float]:
        """Join what there is to say of a dataset; the lag is in SGD steps, before the first of them."""
        rate = statistics.pop("learning_rate")
        prefix = "" if self.is_first or not self.algorithm.role else f"{self.algorithm.role}_"
        return {f"{prefix}{name}": value for name, value in (statistics | self.feed.statistics()).items()} | {
            "policy_lag_mean": float(lag.double().mean()) if len(lag) else 0.0,
            "policy_lag_max": int(lag.max()) if len(lag) else 0,
            "valid_fraction": float(valid.double().mean()),
            "learning_rate": rate,
            "sgd_steps": self.state.sgd_steps,
            "env_steps_trained": self.state.decisions_trained,
        }


def steps_per_pass(obs_space: dict[str, spaces.Space]) -> int:
    """Return how many observations are evaluated at once on a CPU."""
    return max(1, int(CPU_BYTES_PER_PASS / sum(math.prod(space.shape) * obs_dtype(space).itemsize
                                               for space in obs_space.values())))
