"""The supervisor: starts the components, watches them, keeps the records, stops everything.

It lives in the main process and does no work on the hot path. It allocates what is shared, starts one process for each
rollout worker, policy worker and learner (and an evaluator if asked), and then reads their reports: finished episodes,
training statistics, errors. With `serial_mode` the same components run in this process (`runtime/crew.py`): the same
seed gives the same numbers there (on a CPU). Read next: `config.py`.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

from envs.families import profile
from learner import Learner
from pbt import Decision
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime import ranks
from runtime.banner import describe_run, explain, precision_of
from runtime.by_name import reference
from runtime.children import start_server
from runtime.crew import Component, ComponentError, OneProcess, Processes, Stalls
from runtime.evaluator import Evaluator
from runtime.machine import choose_niceness, this_machine
from runtime.plan import Plan, make_plan, restore
from runtime.population import Population
from runtime.records import Records
from runtime.run_folder import configure, count_start, prepare_run_dir
from runtime.stop import STOP_SIGNAL
from runtime.user_error import UserError
from shared_buffers import (
    EVALUATE,
    PAUSE,
    RESUME,
    SAVE,
    SAVE_DONOR,
    SAVE_PERIODIC,
    STOP,
    SharedBuffers,
)

STOP_GRACE_SEC = 5.0  # a component that was told to stop may take so long before it is killed


class Supervisor:
    """A system that trains: make it, `train()` as often as you like, `save()`, `close()`.

        with APPO("CartPole-v1", num_workers=2) as appo:
            appo.train(100_000)

    Between calls of `train` the workers wait; several ranks train only once. Raises `UserError` for impossible settings
    and `ComponentError` when a component dies; both leave no process behind. A subclass may replace components.
    """

    algo = ""  # of a subclass for one algorithm
    rollout_worker_class = RolloutWorker
    policy_worker_class = PolicyWorker
    learner_class = Learner

    def __init__(self, env: str | Callable, **settings: Any) -> None:
        """Make the system for an environment id, with settings of `Config` that differ from its defaults.

        `env`, `encoder`, `core`, `model`, `policy_mapping` and `algo` may also be functions (classes) at the top level
        of a file.
        """
        own = {"algo": self.algo} if self.algo else {}
        given = {name: reference(value) if callable(value) else value
                 for name, value in ({"env": env} | own | settings).items()}
        ranks.take_share_of_cores()
        run_cfg = configure(given)
        context = None if run_cfg.serial_mode else start_server()  # first, since it takes seconds
        store_prefix = ranks.join_torchrun()
        ranks.check_settings(run_cfg, store_prefix)
        cfg = self.cfg = ranks.own_settings(run_cfg)
        self.crew = Processes(context) if context else OneProcess()
        plan = make_plan(cfg, run_cfg, given, store_prefix)
        self.devices, is_resumed = plan.devices, any(plan.states)
        self.buffers = SharedBuffers(cfg, plan.info, plan.kinds, plan.models, plan.devices, context)
        self.buffers.store_prefix = store_prefix
        self.pending_saves = self.num_ready = 0
        self.evaluating = self.ended = False
        self.next_evaluation = 0  # env_steps
        self.trained_until = 0  # ns of `time.perf_counter_ns`
        # after everything that may be refused, since it may move or delete an old run
        self._meet("allocated")
        with contextlib.ExitStack() as undo:
            lock = prepare_run_dir(cfg)
            undo.callback(os.close, lock)
            undo.callback(self._kill)
            start = ranks.from_rank_0(f"{store_prefix}/start", count_start(cfg.run_dir))
            self.buffers.start = ranks.number_of_start(int(start))
            restore(run_cfg, self.buffers, plan)
            self.population = Population(cfg, self.buffers, plan.places) if cfg.with_pbt else None
            components = self._components(plan)
            self.crew.start(components, self._receive, cfg.seed, self.buffers.start, trace=cfg.trace_sec > 0)
            self.records = Records(cfg, self.buffers, resumed_at=self.env_steps if is_resumed else None,
                                   sgd_steps=self.versions)
            self._wait_until(lambda: self.num_ready == len(components), "the components did not start",
                             cfg.decorrelate_experience_max_seconds)
            self._meet("ready")
            undo.pop_all()
            self.run_dir_lock = lock
        chosen = (f"resumed at env_steps={self.env_steps:,} sgd_steps={sum(self.versions):,}\n"
                  + plan.describe_resume() if is_resumed else
                  explain(this_machine(cfg.device), profile(cfg.env, given), given,
                          precision_of(cfg, plan.info, plan.devices)))
        self.records.log(describe_run(cfg, plan.info, plan.devices, plan.models[0], self.buffers.num_bytes,
                                      plan.num_bytes, plan.replay_bytes) + "\n" + chosen)
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

        Returns earlier when should_stop() becomes true. Ctrl-C, SIGTERM and SIGHUP stop it too: it saves, and raises
        `KeyboardInterrupt`. With --eval_every_env_steps the last weights are scored too.
        """
        self._check_alive()
        if self.buffers.training_over:
            raise UserError("several ranks train together only once; make a new system, it resumes the run")
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
        with STOP_SIGNAL.deferred():
            self._train(goal, lambda: STOP_SIGNAL() or should_stop())
            if STOP_SIGNAL() and STOP_SIGNAL.is_outermost:
                self._save()

    def _train(self, goal: int, should_stop: Callable[[], bool]) -> None:
        """Train until there are so many env_steps, or the time is over, or should_stop() becomes true."""
        self._send_workers((RESUME, 0))
        self.stalls = Stalls(self.cfg.stall_timeout_sec)
        try:
            while (self.env_steps < goal and self.records.wall_sec < self.cfg.train_for_seconds
                   and not should_stop() and not self.buffers.training_over):
                self.crew.advance(self._receive)
                self._check_progress(sampling=True)
                self._request_evaluation()
                for policy, kind in self.records.tick(self.env_steps, sum(self.versions)):
                    self._request_save(policy, kind)
                self._update_population()
            if ranks.this_rank().world_size > 1:  # the learners tell the other ranks, and all end after the same step
                self.buffers.training_over.fill_(True)
            self.trained_until = time.perf_counter_ns()
            self._send_workers((PAUSE, 0))
            self.records.end(self.env_steps)
            for policy, kind in self.records.find_best(at_end=True):
                self._request_save(policy, kind)
            while not should_stop() and self._evaluates_at_end():
                self.crew.advance(self._receive)
                self._check_progress(sampling=False)
        except BaseException as error:
            self._kill()
            self.records.log_failure(error)
            raise
        self.records.flush(self.env_steps)

    def save(self) -> None:
        """Write a checkpoint of what has been learned so far. Raises `ComponentError` when it cannot be written."""
        self._check_alive()
        self._save()
        self.records.check_saved()

    def _save(self) -> None:
        if self.population is not None:  # a replacement is not half done in the checkpoints
            self._wait_until(lambda: not self.population.is_copying, "a donor did not save")
        for policy in range(self.cfg.num_policies):
            self._request_save(policy, SAVE_PERIODIC)
        self._wait_until(lambda: self.pending_saves == 0, "a learner did not save")

    def _check_alive(self) -> None:
        if self.ended:
            raise ComponentError("this system has ended; make a new one, it resumes the run")

    def close(self) -> None:
        """Save, stop every component, and write the final records. Raises `ComponentError` when it cannot save."""
        if self.records.closed:
            return
        in_order = not self.ended  # else there is a failure to tell of
        with STOP_SIGNAL.deferred(), contextlib.ExitStack() as at_last:
            at_last.callback(os.close, self.run_dir_lock)
            at_last.callback(lambda: self.records.close(self.env_steps))
            at_last.callback(self._kill)
            if in_order:
                if ranks.this_rank().world_size > 1 or len(self.cfg.learners) > 1:
                    self.buffers.training_over.fill_(True)  # no learner begins another dataset: all ranks save the same
                self.buffers.stopping.fill_(True)
                self._save()
                self._stop()
                self._draw()
        if in_order:
            self.records.check_saved()

    def _draw(self) -> None:
        with contextlib.suppress(OSError, UserError):  # the disk is full, or the folder has gone away
            if self.population is not None:
                self.population.draw()
            if self.cfg.trace_sec:
                from tools import timeline  # noqa: PLC0415  nothing that trains needs it

                begin = self.trained_until - int(self.cfg.trace_sec * 1e9)
                self.records.log(timeline.write_run(self.cfg.run_dir, self.crew.spans, begin, self.trained_until))

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is not None:
            self._kill()  # whatever failed, there is no time to save
        self.close()

    # ---- start and stop ------------------------------------------------------------------------------------------

    def _components(self, plan: Plan) -> list[Component]:
        """List the components, in the order of their turns in serial mode."""
        cfg, buffers = self.cfg, self.buffers
        sampler = buffers.without_weights()
        rollout_niceness, policy_niceness = choose_niceness(cfg, self.devices[0])
        workers = [Component(f"rollout_worker_{worker}", self.rollout_worker_class, (cfg, sampler, worker),
                             niceness=rollout_niceness, core=plan.cores[worker % len(plan.cores)])
                   for worker in range(cfg.num_workers)]
        learners = [Component(self._learner_name(policy, learner), self.learner_class,
                              (cfg, buffers, policy, learner, device, plan.paths[policy]))
                    for policy, device in enumerate(self.devices) for learner in range(len(cfg.learners))]
        evaluators = [Component("evaluator", Evaluator, (cfg, buffers, self.devices), niceness=10)]
        policy_workers = [Component(f"policy_worker_{self._number(policy)}{worker}", self.policy_worker_class,
                                    (cfg, buffers, policy, device), reports=False, niceness=policy_niceness)
                          for policy, device in enumerate(self.devices)
                          for worker in range(1 if cfg.serial_mode else cfg.policy_workers_per_policy)]
        return [*workers, *learners, *(evaluators if cfg.eval_every_env_steps else ()), *policy_workers]

    def _number(self, policy: int) -> str:
        return f"{policy}_" if self.cfg.num_policies > 1 else ""

    def _learner_name(self, policy: int, learner: int = 0) -> str:
        return f"learner_{self._number(policy)}{self.cfg.learners[learner]}".rstrip("_")

    def _send_workers(self, message: tuple[int, int]) -> None:
        for inbox in self.buffers.worker_inboxes:
            inbox.put(message)

    def _stop(self) -> None:
        """Ask every component to leave, wait, and pass on what they report meanwhile."""
        self._send_workers((STOP, 0))
        for policy in self.buffers.policies:
            for _ in range(self.cfg.policy_workers_per_policy):
                policy.requests.put((STOP, 0))
            for commands in policy.commands:
                commands.put((STOP, 0))
        self.buffers.evaluations.put((STOP, 0))
        late = self.crew.leave(self._receive, STOP_GRACE_SEC)
        if late:
            self.records.log(f"did not stop within {STOP_GRACE_SEC:.0f} s, killed: {', '.join(late)}")

    def _kill(self) -> None:
        """End every process that is still there, whatever its state."""
        self.ended = True
        self.crew.kill()
        with contextlib.suppress(OSError):
            for unfinished in self.cfg.run_dir.rglob("*.tmp"):
                unfinished.unlink(missing_ok=True)

    # ---- supervision ---------------------------------------------------------------------------------------------

    def _receive(self, report: tuple) -> None:
        """Act on one report of a component: its kind, then its content."""
        kind, *content = report
        if kind == "ready":
            self.num_ready += 1
            return
        if kind == "saved" and content[1] == SAVE_DONOR:
            self.population.donor_saved()
        elif kind == "unsaved" and content[1] == SAVE_DONOR:
            self.population.donor_unsaved()
        elif kind == "saved" or (kind == "unsaved" and content[1] is not None):
            self.pending_saves -= 1
        elif kind == "evaluated":
            self.evaluating = content[0] < self.cfg.num_policies - 1  # the policies take turns
        self.records.add(kind, content, self.env_steps)

    def _check_progress(self, *, sampling: bool) -> None:
        """Raise `ComponentError` when a component that has something to do has done nothing for too long."""
        counters = {}
        if sampling:
            counters = {f"rollout_worker_{i}": steps for i, steps in enumerate(self.buffers.env_steps[:-1].tolist())}
            for number, policy in enumerate(self.buffers.policies):
                training = policy.shared_training
                steps = training.counts[0].tolist() if training else [policy.weights.version]
                if not policy.trajectories_done.empty():  # else it has nothing to do: its policy may seldom be drawn
                    counters |= {self._learner_name(number, learner): count for learner, count in enumerate(steps)}
        if self.evaluating:
            counters["evaluator"] = int(self.buffers.evaluation_steps)
        self.stalls.check(counters)

    def _wait_until(self, condition: Callable[[], bool], complaint: str, more_seconds: float = 0.0) -> None:
        # for another rank, until that has sampled its dataset; for a replay, until it is written
        waits = ranks.this_rank().world_size > 1 or getattr(self.cfg, "save_replay", False)
        seconds = min(self.cfg.stall_timeout_sec, math.inf if waits or not self.buffers.stopping else 30) + more_seconds
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise ComponentError(f"{complaint} within {seconds:.0f} s")
            self.crew.advance(self._receive)

    def _meet(self, place: str) -> None:
        """Wait until all ranks have come so far."""
        self._wait_until(ranks.arrive(f"{self.buffers.store_prefix}/{place}"), f"not all ranks were {place}")

    def _request_save(self, policy: int, reason: int) -> None:
        self.pending_saves += 1
        self.buffers.policies[policy].commands[0].put((SAVE, reason))

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
