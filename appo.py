"""The supervisor: starts the components, watches them, keeps the records, stops everything.

`APPO` is the public class. It lives in the main process, which does no work on the hot path: it allocates what is
shared, starts one process for each rollout worker, policy worker and learner (and an evaluator if asked), and then
reads their reports (finished episodes, training statistics, errors). Every child reports through a pipe of its own: it
shares no lock with any other process, so the death of one, at whatever moment, is seen as the end of its pipe and
cannot block the supervisor.

With `serial_mode` the same components run in this process, in a fixed order, without threads: slow, but a debugger can
step through all of it, and the same seed gives the same numbers (on a CPU). Read next: `train.py`.
"""

import contextlib
import ctypes
import fcntl
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.multiprocessing
from gymnasium import spaces

import checkpoint
import timeline
from children import start_server
from config import Config, UserError, cpu_cores, load_saved, make_config, reference, run_dir_of, write_atomically
from envs import make_vector_env, profile
from evaluator import Evaluator
from flat_spaces import ACTION_MASK, num_options
from learner import CPU_BYTES_PER_PASS, Learner
from machine import explain, this_machine
from model import body_dtype, choose_device, make_model, one_hot_bytes
from pbt import Decision, assign_kinds
from policy_worker import PolicyWorker
from population import Population
from records import Records
from rollout_worker import RolloutWorker
from seeding import ENVIRONMENT, NETWORK, PROCESS, derive_seed
from shared_buffers import (
    EVALUATE,
    PAUSE,
    RESUME,
    SAVE,
    SAVE_DONOR,
    SAVE_PERIODIC,
    STOP,
    SharedBuffers,
    check_num_slots,
    num_bytes,
    take_all,
    trajectory_specs,
)
from vector_env import EnvInfo, describe

PROBED = 2**20  # the environment that only tells the spaces: no worker has so many
STOP_GRACE_SEC = 5.0  # a component that was told to stop may take so long before it is killed


class ComponentError(RuntimeError):
    """A component failed; the text names it and holds its traceback."""


class APPO:
    """Asynchronous PPO on one machine: make it, `train()` as often as you like, `save()`, `close()`.

        with APPO("CartPole-v1", num_workers=2) as appo:
            appo.train(100_000)

    Between calls of `train` the workers stay alive and wait. Raises `UserError` for impossible settings and
    `ComponentError` when a component dies; both leave no process behind. A subclass may replace components.
    """

    rollout_worker_class = RolloutWorker
    policy_worker_class = PolicyWorker
    learner_class = Learner

    def __init__(self, env: str | Callable, **settings: Any) -> None:
        """Make the system for an environment id, with settings of `Config` that differ from its defaults.

        `env`, `encoder`, `core`, `model` and `policy_mapping` may also be functions at the top level of a file.
        """
        given = {name: reference(value) if callable(value) else value
                 for name, value in ({"env": env} | settings).items()}
        cfg = self.cfg = configure(given)
        context = None if cfg.serial_mode else start_server()  # first, since it takes seconds
        self.devices = [choose_device(cfg.device, policy) for policy in range(cfg.num_policies)]
        self.info = probe(cfg, must_play_ahead=given.get("decorrelate_experience_max_seconds", 0) > 0)
        check_opponents(cfg, self.info)
        check_one_hot(cfg, self.info)
        kind_of_policy = assign_kinds(cfg, self.info)
        models, paths, states = zip(*(load_policy(cfg, policy, *self.info.kinds[kind])
                                      for policy, kind in enumerate(kind_of_policy)), strict=True)
        check_num_slots(cfg, len(self.info.agents))
        self.cores = choose_cores(cfg)
        self.estimated_bytes = estimate_memory(cfg, self.info, kind_of_policy, models, self.devices)
        check_memory(cfg, self.estimated_bytes, lambda count: estimate_memory(
            cfg, self.info, kind_of_policy[:count], models[:count], self.devices[:count]))
        self.buffers = SharedBuffers(cfg, self.info, kind_of_policy, models, self.devices, context)
        # after everything that may be refused, since it may move or delete an old run
        self.run_dir_lock = prepare_run_dir(cfg)
        resumed = any(states)
        self.processes: list[Any] = []
        # also when nobody calls close(): multiprocessing would wait for ever for children that ignore SIGTERM
        self.finalizer = weakref.finalize(self, kill_all, self.processes)
        self.pipes: dict[Connection, str] = {}
        self.pending_saves = self.num_ready = 0
        self.evaluating = False
        self.next_evaluation = 0  # env_steps
        self.moved: dict[str, tuple[int, float]] = {}  # each counter's value and when it last changed
        self.ended = False
        self.spans: dict[str, Iterable[timeline.Span]] = {}  # of each component, in the order in which they were made
        self.trained_until = 0  # ns of `time.perf_counter_ns`
        self.records: Records | None = None
        try:
            self.buffers.start = count_start(cfg.run_dir)
            for policy, (model, state) in enumerate(zip(models, states, strict=True)):
                if state is not None:
                    self.buffers.env_steps[0] = max(int(self.buffers.env_steps[0]), state["env_steps"])
                    self.buffers.policy_steps[0, policy] = state.get("policy_steps", state["env_steps"])
                    score, sort = checkpoint.best_score(cfg.run_dir, policy)
                    self.buffers.best_score[policy], self.buffers.best_sort[policy] = score, sort
                    self.restore_weights(policy, model, state)
            saved = [state.get("population", {}) if state else {} for state in states]
            self.population = Population(cfg, self.buffers, saved) if cfg.with_pbt else None
            self._start(context, paths)
            self.records = Records(cfg, self.buffers, resumed_at=self.env_steps if resumed else None,
                                   sgd_steps=[state["sgd_steps"] if state else 0 for state in states])
            self._wait_until(lambda: self.num_ready == len(self.processes), "the components did not start",
                             cfg.decorrelate_experience_max_seconds)
        except BaseException:
            self._kill()
            if self.records is not None:
                self.records.close_files()
            os.close(self.run_dir_lock)
            raise
        self.records.log(self._describe(models[0]) + "\n" + (
            f"resumed at env_steps={self.env_steps:,} sgd_steps={sum(self.versions):,}" if resumed else
            explain(this_machine(cfg.device), profile(cfg.env, given), given, self._precision())))
        if self.population is not None:
            self._record_population([])

    # ---- public --------------------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        """Count the env_steps sampled so far, resumes included."""
        return int(self.buffers.env_steps.sum())

    @property
    def versions(self) -> list[int]:
        """Return the SGD steps of each policy."""
        return [policy.weights.version for policy in self.buffers.policies]

    def train(self, env_steps: int | None = None, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Train for so many more env_steps, by default until `train_for_env_steps` or `train_for_seconds`.

        Returns earlier when should_stop() becomes true. With --eval_every_env_steps the last weights are scored too.
        """
        if self.ended:
            raise ComponentError("this APPO has ended; make a new one, it resumes the run")
        goal = self.cfg.train_for_env_steps if env_steps is None else self.env_steps + env_steps
        if self.env_steps >= goal or self.records.wall_sec >= self.cfg.train_for_seconds:
            self.records.log(
                f"nothing to do: the run has {self.env_steps:,} of {goal:,} env_steps (--train_for_env_steps) and "
                f"{self.records.wall_sec:.0f} of {self.cfg.train_for_seconds:.0f} s (--train_for_seconds)")
            return
        if self.cfg.lr_schedule == "linear_decay" and goal > self.cfg.train_for_env_steps:
            self.records.log(f"the learning rate is 0 after {self.cfg.train_for_env_steps:,} env_steps, raise "
                             "train_for_env_steps to learn on")
        self.records.begin(self.env_steps, goal)
        if self.cfg.eval_every_env_steps:
            self.next_evaluation = (self.env_steps // self.cfg.eval_every_env_steps + 1) * self.cfg.eval_every_env_steps
        self._send_all(self.buffers.inboxes, (RESUME, 0))
        self.moved.clear()
        try:
            while (self.env_steps < goal and self.records.wall_sec < self.cfg.train_for_seconds
                   and not should_stop()):
                self._advance()
                self._check_progress(sampling=True)
                self._request_evaluation()
                for policy, kind in self.records.tick(self.env_steps, sum(self.versions)):
                    self._request_save(policy, kind)
                self._update_population()
            self.trained_until = time.perf_counter_ns()
            self._send_all(self.buffers.inboxes, (PAUSE, 0))
            self.records.end(self.env_steps)
            for policy, kind in self.records.find_best(at_end=True):
                self._request_save(policy, kind)
            while not should_stop() and self._evaluates_at_end():
                self._advance()
                self._check_progress(sampling=False)
        except BaseException as error:
            self._kill()
            self.records.log_failure(error)
            raise
        self.records.flush(self.env_steps)

    def save(self) -> None:
        """Write a checkpoint of what has been learned from all trajectories finished so far."""
        if self.population is not None:  # a replacement is not half done in the checkpoints
            self._wait_until(lambda: not self.population.copying, "a donor did not save")
        for policy in range(self.cfg.num_policies):
            self._request_save(policy, SAVE_PERIODIC)
        self._wait_until(lambda: self.pending_saves == 0, "a learner did not save")

    def close(self) -> None:
        """Save, stop every component, and write the final records."""
        if self.records.closed:
            return
        try:
            if not self.ended:
                self.buffers.stopping.fill_(True)
                self.save()
                self._stop()
                if self.population is not None:
                    self.population.draw()
                if self.cfg.trace_sec:
                    self._write_trace()
        finally:
            self._kill()
            self.records.close(self.env_steps)
            os.close(self.run_dir_lock)

    def __enter__(self) -> "APPO":
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is not None:
            self._kill()  # whatever failed, there is no time to save
        self.close()

    # ---- start and stop ------------------------------------------------------------------------------------------

    def restore_weights(self, policy: int, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Publish the weights of a checkpoint, and the snapshots that lie beside it."""
        weights = self.buffers.policies[policy].weights
        if self.cfg.self_play_past_fraction:
            folder = checkpoint.policy_dir(self.cfg.run_dir, policy)
            for path in list(folder.glob("snapshot_*.pt")):
                if int(path.name.split("_")[1]) > state["sgd_steps"]:  # it came after the checkpoint, before a crash
                    path.unlink()
            for path in sorted(folder.glob("snapshot_*.pt"))[-self.cfg.self_play_snapshots:]:
                snapshot = checkpoint.load_checkpoint(path)
                checkpoint.load_weights(model, snapshot, path)
                weights.add_snapshot(model, snapshot["sgd_steps"])
            model.load_state_dict(state["model"])
        weights.publish(model, state["sgd_steps"])

    def _start(self, context: Any, resume_from: Sequence[Path | None]) -> None:
        cfg, buffers = self.cfg, self.buffers
        if context is None:
            torch.set_num_threads(1)  # as in every process of the other modes
            torch.manual_seed(derive_seed(cfg.seed, PROCESS, buffers.start))
            self.rollout_workers = [self.rollout_worker_class(cfg, buffers, worker, self._receive)
                                    for worker in range(cfg.num_workers)]
            self.policy_workers = [self.policy_worker_class(cfg, buffers, policy, device)
                                   for policy, device in enumerate(self.devices)]
            self.learners = [self.learner_class(cfg, buffers, policy, device, self._receive, path)
                             for policy, (device, path) in enumerate(zip(self.devices, resume_from, strict=True))]
            if cfg.eval_every_env_steps:
                self.evaluator = Evaluator(cfg, buffers, self.devices, self._receive)
            if cfg.trace_sec:
                self._record_components()
            return
        sampler = buffers.without_weights()
        rollout_niceness, policy_niceness = choose_niceness(cfg, self.devices[0])
        for worker in range(cfg.num_workers):
            self._spawn(context, f"rollout_worker_{worker}", self.rollout_worker_class, (cfg, sampler, worker),
                        rollout_niceness, self.cores[worker % len(self.cores)])
        for policy, device in enumerate(self.devices):
            for worker in range(cfg.policy_workers_per_policy):
                self._spawn(context, f"policy_worker_{self._number(policy)}{worker}", self.policy_worker_class,
                            (cfg, buffers, policy, device), policy_niceness)
            self._spawn(context, self._learner_name(policy), self.learner_class, (cfg, buffers, policy, device),
                        resume_from=resume_from[policy])
        if cfg.eval_every_env_steps:
            self._spawn(context, "evaluator", Evaluator, (cfg, buffers, self.devices), niceness=10)

    def _number(self, policy: int) -> str:
        return f"{policy}_" if self.cfg.num_policies > 1 else ""

    def _learner_name(self, policy: int) -> str:
        return f"learner_{self._number(policy)}".rstrip("_")

    def _spawn(self, context: Any, name: str, component: type, args: tuple, niceness: int = 0,
               core: int | None = None, **kwargs: Any) -> None:
        pipe, child_pipe = context.Pipe(duplex=False)
        self.pipes[pipe] = name
        seed = derive_seed(self.cfg.seed, PROCESS, self.buffers.start, len(self.processes))
        process = context.Process(target=run_component, name=name, daemon=True,
                                  args=(component, args, kwargs, child_pipe, niceness, core, seed,
                                        self.cfg.trace_sec > 0))
        self.processes.append(process)
        self.spans[name] = []
        process.start()
        child_pipe.close()  # now the child holds the only writing end: its death is the end of the pipe

    def _stop(self) -> None:
        """Ask every component to leave, wait, and pass on what they report meanwhile."""
        cfg, buffers = self.cfg, self.buffers
        if cfg.serial_mode:
            for worker in self.rollout_workers:
                worker.close()
            if cfg.eval_every_env_steps:
                self.evaluator.close()
            return
        self._send_all(buffers.inboxes, (STOP, 0))
        for policy in buffers.policies:
            self._send_all([policy.requests] * cfg.policy_workers_per_policy, (STOP, 0))
        self._send_all([*(policy.trajectories_done for policy in buffers.policies), buffers.evaluations], (STOP, 0))
        deadline = time.monotonic() + STOP_GRACE_SEC
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            self._read_reports(0.05, expect_death=True)
        late = [process.name for process in self.processes if process.is_alive()]
        if late:
            self.records.log(f"did not stop within {STOP_GRACE_SEC:.0f} s, killed: {', '.join(late)}")

    def _kill(self) -> None:
        """End every process that is still there, whatever its state."""
        self.ended = True
        kill_all(self.processes)
        for unfinished in self.cfg.run_dir.rglob("*.tmp"):
            unfinished.unlink(missing_ok=True)

    # ---- timeline ------------------------------------------------------------------------------------------------

    def _record_components(self) -> None:
        """Record what the components do, in serial mode; elsewhere each process does it for itself."""
        components = {f"rollout_worker_{i}": worker for i, worker in enumerate(self.rollout_workers)}
        for policy, (worker, learner) in enumerate(zip(self.policy_workers, self.learners, strict=True)):
            components |= {f"policy_worker_{self._number(policy)}0": worker, self._learner_name(policy): learner}
        if self.cfg.eval_every_env_steps:
            components["evaluator"] = self.evaluator
        for name, component in components.items():
            recorder = timeline.Recorder()
            recorder.attach(component, waits=False)
            self.spans[name] = recorder.spans

    def _write_trace(self) -> None:
        """Write what all components did in the last seconds of training, and draw it."""
        path = self.cfg.run_dir / "trace.json"
        timeline.write_trace(path, self.spans, self.trained_until - int(self.cfg.trace_sec * 1e9), self.trained_until)
        picture = timeline.draw_last(path, path.with_name("timeline.png"), seconds=0.5)
        self.records.log(f"{path}: open it in https://ui.perfetto.dev" + (f"; {picture}" if picture else ""))

    # ---- supervision ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let some time pass: read the children's reports, or in serial mode give each component one turn."""
        if not self.cfg.serial_mode:
            self._read_reports(0.1)
            return
        for worker in self.rollout_workers:
            while not worker.inbox.empty():
                worker.handle(*worker.inbox.get())
        for learner, policy in zip(self.learners, self.buffers.policies, strict=True):
            while not policy.trajectories_done.empty():
                learner.handle(*policy.trajectories_done.get())
        while not self.buffers.evaluations.empty():
            self.evaluator.handle(*self.buffers.evaluations.get())
        for worker, policy in zip(self.policy_workers, self.buffers.policies, strict=True):
            if not policy.requests.empty():
                worker.serve(take_all(policy.requests, policy.requests_lock))

    def _read_reports(self, timeout_sec: float, *, expect_death: bool = False) -> None:
        for pipe in wait(list(self.pipes), timeout_sec):
            try:
                self._receive(pipe.recv())
            except (EOFError, OSError):
                name = self.pipes.pop(pipe)
                if not expect_death:
                    raise ComponentError(self._obituary(name)) from None

    def _receive(self, report: tuple) -> None:
        """Act on one report of a component: its kind, then its content."""
        kind, *content = report
        if kind == "error":
            raise ComponentError(*content)
        if kind == "refused":
            raise UserError(*content)
        if kind == "ready":
            self.num_ready += 1
            return
        if kind == "spans":
            self.spans[content[0]] = content[1]
            return
        if kind == "saved" and content[1] == SAVE_DONOR:
            self.population.donor_saved()
        elif kind == "saved":
            self.pending_saves -= 1
        elif kind == "evaluated":
            self.evaluating = content[0] < self.cfg.num_policies - 1  # the policies take turns
        self.records.add(kind, content, self.env_steps)

    def _obituary(self, name: str) -> str:
        process = next(process for process in self.processes if process.name == name)
        process.join(5)
        code = process.exitcode
        if code is None or code >= 0:
            return f"{name} left with status {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {signal.Signals(-code).name}{hint}"

    def _check_progress(self, *, sampling: bool) -> None:
        """Raise `ComponentError` when a component that has something to do has done nothing for too long."""
        now = time.monotonic()
        counters = {}
        if sampling:
            counters = {f"rollout_worker_{i}": steps for i, steps in enumerate(self.buffers.env_steps.tolist())}
            for number, policy in enumerate(self.buffers.policies):
                name = self._learner_name(number)
                if policy.trajectories_done.empty():  # it has nothing to do: its policy may seldom be drawn
                    self.moved.pop(name, None)
                else:
                    counters[name] = policy.weights.version
        if self.evaluating:
            counters["evaluator"] = int(self.buffers.evaluation_steps)
        for name, value in counters.items():
            seen, since = self.moved.get(name, (None, now))
            if value != seen:
                self.moved[name] = (value, now)
            elif now - since > self.cfg.stall_timeout_sec:
                raise ComponentError(f"{name} has done nothing for {now - since:.0f} s (--stall_timeout_sec), at "
                                     + ", ".join(f"{other}={count:,}" for other, count in counters.items()))

    def _wait_until(self, condition: Callable[[], bool], complaint: str, more_seconds: float = 0.0) -> None:
        seconds = min(self.cfg.stall_timeout_sec, 30.0 if self.buffers.stopping else math.inf) + more_seconds
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise ComponentError(f"{complaint} within {seconds:.0f} s")
            self._advance()

    def _request_save(self, policy: int, kind: int) -> None:
        self.pending_saves += 1
        self.buffers.policies[policy].trajectories_done.put((SAVE, kind))

    def _update_population(self) -> None:
        """Let population-based training decide about the policies that are due."""
        if self.population is not None:
            steps = self.buffers.policy_steps.sum(0).tolist()
            decisions = self.population.update(self.records.objectives(self.buffers.kind_of_policy), steps)
            if decisions:
                self._record_population(decisions)

    def _record_population(self, decisions: list[Decision]) -> None:
        numbers = [self.population.numbers(policy) for policy in range(self.cfg.num_policies)]
        self.records.add_population(decisions, numbers, self.env_steps)

    def _request_evaluation(self) -> None:
        """Ask for an evaluation when one is due and none is under way."""
        period = self.cfg.eval_every_env_steps
        if period and not self.evaluating and self.env_steps >= self.next_evaluation:
            self.evaluating = True
            self.moved.pop("evaluator", None)  # it was idle until now
            self.next_evaluation = (self.env_steps // period + 1) * period
            self.buffers.evaluations.put((EVALUATE, 0))

    def _evaluates_at_end(self) -> bool:
        """Score the weights with which the training ends, unless it was done; tell whether that is under way."""
        if not self.cfg.eval_every_env_steps:
            return False
        scored = [policy.last_evaluation.get("eval_sgd_steps") for policy in self.records.policies]
        if not self.evaluating and scored != self.versions:
            self.next_evaluation = self.env_steps
            self._request_evaluation()
        return self.evaluating

    def _send_all(self, queues: list[Any], message: tuple[int, int]) -> None:
        for destination in queues:
            destination.put(message)

    def _precision(self) -> str:
        return str(body_dtype(self.cfg, self.devices[0], self.info.kinds[0][0])).removeprefix("torch.")

    def _describe(self, model: torch.nn.Module) -> str:
        cfg, info = self.cfg, self.info
        lines = []
        for kind, (obs_space, action_space) in enumerate(info.kinds):
            observations = ", ".join(f"{name} {describe_space(space)}" for name, space in obs_space.items())
            names = [name for name, of in zip(info.agents, info.kind_of_agent, strict=True) if of == kind]
            agents = f" ({', '.join(names)})" if len(info.agents) > 1 else ""
            lines.append(f"{cfg.env}{agents}: {observations} -> {action_space}")
        mode = "serial" if cfg.serial_mode else "asynchronous" if cfg.async_rl else "synchronous"
        policies = f"{cfg.num_policies} policies, each with " if cfg.num_policies > 1 else ""
        devices = ", ".join(dict.fromkeys(map(str, self.devices)))
        lines += [
            f"{mode}: {cfg.num_workers} rollout workers x {cfg.num_envs_per_worker} environments in "
            f"{cfg.worker_num_splits} split(s), {policies}{cfg.policy_workers_per_policy} policy worker(s), 1 learner; "
            f"{cpu_description()}, networks on {devices} in {self._precision()}",
            f"trajectories of {cfg.rollout} steps, datasets of {cfg.batch_size} x {cfg.num_batches_per_epoch} samples, "
            f"{cfg.num_epochs} epoch(s); {sum(p.numel() for p in model.parameters()):,} parameters; "
            f"about {self.estimated_bytes / 1e9:.1f} GB of memory, {self.buffers.num_bytes / 1e6:.1f} MB of it "
            "trajectories in shared memory",
            f"records in {cfg.run_dir}",
        ]
        return "\n".join(lines)


def kill_all(processes: list[Any]) -> None:
    """End every process that was started and is still there, whatever its state, and wait for its end."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.kill()
    for process in started:
        process.join()


# ---- the life of a child process ---------------------------------------------------------------------------------


def choose_niceness(cfg: Config, device: torch.device) -> tuple[int, int]:
    """Choose the niceness of rollout workers and policy workers: who goes first on busy cores. A learner has 0.

    Several epochs on a CPU: the learner has most of the work, and the later the others sample, the newer is the policy
    that acts. One epoch: it would only wait for them the longer, so rollout workers are as urgent; policy workers come
    last, since requests gather meanwhile, and larger batches are cheaper. `docs/performance.md` has the figures.
    On a GPU policy workers only hand work on, and everybody waits for that (this was not measured).
    """
    if device.type != "cpu":
        return 10, 0
    return (0, 10) if cfg.num_epochs == 1 else (10, 10)


def choose_cores(cfg: Config) -> list[int | None]:
    """Return the cores that rollout workers are bound to, in turns; None: to none.

    Sample Factory binds them by default. Here it costs 1 to 4 % while learning, and gains 3 to 5 % when only sampling.
    Raises `UserError` where it cannot be done.
    """
    if not cfg.set_workers_cpu_affinity:
        return [None]
    if cfg.serial_mode or not hasattr(os, "sched_setaffinity"):
        why = "there are none with --serial_mode" if cfg.serial_mode else "this system cannot do it"
        raise UserError(f"--set_workers_cpu_affinity binds rollout workers to cores, but {why}; set it to False")
    return sorted(os.sched_getaffinity(0))


def run_component(component: type, args: tuple, kwargs: dict[str, Any], pipe: Connection,
                  niceness: int, core: int | None, seed: int, trace: bool) -> None:
    """Run one component in this process until it is told to stop; report its traceback if it fails."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    os.nice(niceness)
    if core is not None:
        os.sched_setaffinity(0, {core})
    keep_freed_memory()
    torch.set_num_threads(1)  # cores are shared between processes instead
    torch.manual_seed(seed)
    if not issubclass(component, PolicyWorker):
        kwargs = {**kwargs, "report": pipe.send}
    try:
        running, recorder = component(*args, **kwargs), timeline.Recorder()
        if trace:
            recorder.attach(running)
        pipe.send(("ready",))
        running.run()
        if trace:
            pipe.send(("spans", multiprocessing.current_process().name, list(recorder.spans)))
    except UserError as error:
        with contextlib.suppress(OSError):
            pipe.send(("refused", str(error)))
        sys.exit(1)
    except BaseException:  # noqa: BLE001  whatever it is, the supervisor must hear of it
        name = multiprocessing.current_process().name
        with contextlib.suppress(OSError):
            pipe.send(("error", f"{name} failed\n{traceback.format_exc()}"))
        sys.exit(1)


def leave_with_parent() -> None:
    """End this process at once when the supervisor dies, however it dies."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks.

    A training pass allocates and frees the same large activations again and again; giving them back to the system each
    time costs a page fault per 4 KB.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap and trim thresholds, top pad
            mallopt(parameter, size)


# measured: the supervisor with its server of processes, and a component without its model and its batches
SUPERVISOR_BYTES, COMPONENT_BYTES = 340_000_000, 100_000_000
ACTIVATIONS = 20  # bytes that a convolutional network keeps of each byte of a pass, of the Nature CNN in bfloat16


def estimate_memory(cfg: Config, info: EnvInfo, kind_of_policy: list[int], models: Sequence[torch.nn.Module],
                    devices: Sequence[torch.device]) -> int:
    """Estimate the bytes of memory of all processes, without what the environments take."""
    total = SUPERVISOR_BYTES
    slots = cfg.num_workers * cfg.num_envs_per_worker * len(info.agents)
    for kind, model, device in zip(kind_of_policy, models, devices, strict=True):
        specs = trajectory_specs(cfg, *info.kinds[kind], model.state_size)
        total += num_bytes(specs, slots + 2 * cfg.trajectories_per_dataset)
        # weights: published, of each worker, of the learner with gradients and both moments of Adam; snapshots
        copies = 5 + cfg.policy_workers_per_policy
        if cfg.self_play_past_fraction:
            copies += cfg.self_play_snapshots * (1 + cfg.policy_workers_per_policy)
        if device.type == "cpu":
            total += copies * 4 * sum(tensor.numel() for tensor in model.state_dict().values())
            if any(len(space.shape) == 3 for space in info.kinds[kind][0].values()):
                total += ACTIVATIONS * CPU_BYTES_PER_PASS * cfg.learner_threads
            # one-hot vectors of a minibatch, which the learner keeps until its gradient is there, and of all agents
            rows = cfg.trajectories_per_minibatch * (cfg.rollout + 1) + slots
            total += one_hot_bytes(info.kinds[kind][0]) * rows
    if not cfg.serial_mode:
        total += (cfg.num_workers + len(models) * (1 + cfg.policy_workers_per_policy)) * COMPONENT_BYTES
    return total


def check_memory(cfg: Config, needed: int, needed_by: Callable[[int], int]) -> None:
    """Raise `UserError` when a run needs more memory than the machine has left; needed_by(P): with P policies."""
    available = psutil.virtual_memory().available
    if needed > available:
        fewer = [count for count in range(1, cfg.num_policies) if needed_by(count) <= available]
        cure = f"use --num_policies={fewer[-1]}, or lower" if fewer else "lower"
        raise UserError(f"--num_policies={cfg.num_policies} needs about {needed / 1e9:.1f} GB of memory ({needed:,} "
                        f"bytes), {available / 1e9:.1f} GB are free; {cure} --num_envs_per_worker, --rollout or "
                        "--batch_size")


def check_one_hot(cfg: Config, info: EnvInfo) -> None:
    """Raise `UserError` when the first layer of the network for a large Discrete observation alone is too large."""
    available = psutil.virtual_memory().available
    for obs_space, _ in info.kinds:
        for name, space in obs_space.items():
            size = sum(num_options(space)) * (cfg.encoder_mlp_layers[0] if cfg.encoder_mlp_layers else 1)
            needed = 4 * size * (5 + cfg.policy_workers_per_policy)  # as in `estimate_memory`
            if name != ACTION_MASK and needed > available:
                raise UserError(f"observation '{name}' has {sum(num_options(space)):,} options; as one-hot vectors "
                                f"they need a network of {needed / 1e9:,.0f} GB, {available / 1e9:.0f} GB are free; "
                                "let the environment give numbers or bits instead")


def describe_space(space: Any) -> str:
    """Show a space in a few characters: a Box by its shape."""
    return "x".join(map(str, space.shape)) if isinstance(space, spaces.Box) else str(space)


def cpu_description() -> str:
    """Name the cores and the memory of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu_cores()} cores, {memory:.0f} GiB"


# ---- the run's folder --------------------------------------------------------------------------------------------


def probe(cfg: Config, *, must_play_ahead: bool = False) -> EnvInfo:
    """Make and reset one environment to learn about it (an action mask may only show in the info of a reset).

    Raises `UserError` when decorrelated starts were asked for (not only the family's default) and cannot be.
    """
    env = make_vector_env(cfg, 1)
    env.reset([derive_seed(cfg.seed, ENVIRONMENT, part=PROBED)])
    env.close()
    if must_play_ahead and not env.plays_ahead:
        raise UserError(f"--decorrelate_experience_max_seconds: the environments of {cfg.env} are stepped together, in "
                        "C++ or NumPy, and cannot begin apart; leave it at 0")
    return describe(env)


def check_opponents(cfg: Config, info: EnvInfo) -> None:
    """Raise `UserError` when there is nobody to play against."""
    if cfg.self_play_past_fraction and len(info.agents) < 2:
        raise UserError(f"--self_play_past_fraction={cfg.self_play_past_fraction} needs opponents, {cfg.env} has one "
                        "agent")


def load_policy(cfg: Config, policy: int, obs_space: dict[str, Any],
                action_space: Any) -> tuple[torch.nn.Module, Path | None, dict[str, Any] | None]:
    """Make a policy's model, with the weights of its last checkpoint if the run is resumed and has one."""
    torch.manual_seed(derive_seed(cfg.seed, NETWORK, index=policy))
    model = make_model(cfg, obs_space, action_space)
    path = checkpoint.find_checkpoint(cfg.run_dir, policy=policy) if cfg.restart_behavior == "resume" else None
    state = checkpoint.load_checkpoint(path) if path else None
    if state is not None:
        checkpoint.load_weights(model, state, path)
    return model, path, state


def configure(given: Mapping[str, Any]) -> Config:
    """Complete the settings that were given: from the run that is resumed, or else from the family's profile.

    Raises `UserError` for impossible settings, an unknown environment, or a folder with a run of another one.
    """
    defaults = {"env": "", "train_dir": Config.train_dir, "experiment": "", "restart_behavior": "resume"}
    here = {name: given.get(name, default) for name, default in defaults.items()}
    env_profile = profile(here["env"], given)  # also finds out whether the environment exists
    run_dir = run_dir_of(here["train_dir"], here["experiment"], here["env"])
    has_checkpoint = any(run_dir.glob("checkpoints/policy_*/checkpoint_*.pt"))
    if here["restart_behavior"] != "resume" or not has_checkpoint:
        return make_config(env_profile, given)
    saved = load_saved(run_dir / "config.json")
    if saved["env"] != here["env"]:
        raise UserError(f"{run_dir} holds a run of {saved['env']}; use another --experiment, or "
                        "--restart_behavior=restart")
    return make_config(saved, here, given)


def prepare_run_dir(cfg: Config) -> int:
    """Make the run's folder and save the settings; return the open folder, locked for this process.

    Raises `UserError` when the folder cannot be written, or another process trains in it.
    """
    run_dir = cfg.run_dir
    try:
        if run_dir.exists() and cfg.restart_behavior != "resume":
            os.close(lock_folder(run_dir))  # refuse to take a folder away from a running process
            if not (run_dir / "config.json").exists():
                raise UserError(f"{run_dir} holds no run; move it away or use another --experiment")
            if cfg.restart_behavior == "overwrite":
                shutil.rmtree(run_dir)
            else:
                run_dir.rename(unused_name(run_dir))
        for policy in range(cfg.num_policies):
            checkpoint.policy_dir(run_dir, policy).mkdir(parents=True, exist_ok=True)
        lock = lock_folder(run_dir)
        cfg.save(run_dir / "config.json")
    except OSError as error:
        raise UserError(f"--train_dir={cfg.train_dir} cannot be written ({error.strerror}: {error.filename}); "
                        "choose another") from error
    return lock


def count_start(run_dir: Path) -> int:
    """Return how often a run was started before, and write down that it was started once more.

    It is written before anything is sampled: whatever becomes of this start, the next one plays other episodes.
    """
    path = run_dir / "starts.json"
    try:
        start = int(json.loads(path.read_text()))
    except FileNotFoundError:
        start = 0
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged; write into it how often the run was started") from error
    write_atomically(path, f"{start + 1}\n")
    return start


def lock_folder(folder: Path) -> int:
    """Open a folder and lock it until it is closed or the process ends. Raises `UserError` when it is locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f"another process trains in {folder}; stop it, or use another --experiment") from error
    return descriptor


def unused_name(path: Path) -> Path:
    """Return path_old, or path_old2, ... whichever does not exist yet."""
    number, old = 1, path.with_name(f"{path.name}_old")
    while old.exists():
        number += 1
        old = path.with_name(f"{path.name}_old{number}")
    return old
