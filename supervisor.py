"""The supervisor: starts the components, watches them, keeps the records, stops everything.

It lives in the main process and does no work on the hot path. It allocates what is shared, starts one process for each
rollout worker, policy worker and learner (and an evaluator if asked), and then reads their reports: finished episodes,
training statistics, errors. With `serial_mode` the same components run in this process (`runtime/crew.py`): the same
seed gives the same numbers there (on a CPU). Read next: `shared_buffers.py`.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

from learner import Learner
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime import ranks
from runtime.by_name import reference
from runtime.cast import list_components
from runtime.children import start_server
from runtime.commands import Commands, Sampling
from runtime.crew import OneProcess, Processes
from runtime.evaluations import Evaluations
from runtime.files import remove_unfinished
from runtime.heartbeat import START_SEC
from runtime.plan import make_plan, restore
from runtime.population import Population
from runtime.progress import describe_finished, draw, introduce
from runtime.records import Records
from runtime.recovery import Failure, Recovery
from runtime.run_folder import configure, count_start, prepare_run_dir, refusing_files
from runtime.stop import STOP_SIGNAL
from runtime.training_state import save_published
from runtime.user_error import ComponentError, UserError
from shared_buffers import COPY, FINISH, LOAD, SAVE, SAVE_PERIODIC, STOP, SharedBuffers

STOP_GRACE_SEC = 5.0  # a component that was told to stop may take so long before it is killed


class Supervisor:
    """A system that trains: make it, `train()` as often as you like, `save()`, `close()`.

    Between calls of `train` the workers wait; several ranks train only once. Raises `UserError` for impossible settings
    and `ComponentError` when a component dies; both leave no process behind. A subclass may replace components.
    `trainer.py` adds what is comfortable in Python.
    """

    algo = ""  # of a subclass for one algorithm
    rollout_worker_class = RolloutWorker
    policy_worker_class = PolicyWorker
    learner_class = Learner

    def __init__(self, env: str | Callable, **settings: Any) -> None:
        """Make the system for an environment id, with settings of `Config` that differ from its defaults.

        `env`, `encoder`, `core`, `model`, `policy_mapping` and `algo` may also be functions or classes.
        """
        since = time.time()
        own = {"algo": self.algo} if self.algo else {}
        given = {name: reference(value) if callable(value) or name == "env" else value
                 for name, value in ({"env": env} | own | settings).items()}
        ranks.take_share_of_cores()
        run_cfg = configure(given)
        context = None if run_cfg.serial_mode else start_server()  # first, since it takes seconds
        store_prefix = ranks.join_torchrun()
        ranks.check_settings(run_cfg, store_prefix)
        cfg = self.cfg = ranks.own_settings(run_cfg)
        self.crew = Processes(context) if context else OneProcess()
        plan = make_plan(cfg, run_cfg)
        self.devices, self.models, is_resumed = plan.devices, plan.models, any(plan.states)
        self.buffers = SharedBuffers(cfg, plan.algorithm, plan.info, plan.kinds, plan.models, plan.devices, context)
        self.buffers.store_prefix = store_prefix
        self.commands = Commands(self.buffers)
        self.sampling, self.refused = Sampling(self.buffers), ""  # why parameters could not be taken over
        self.recovery: Recovery | None = None  # who was never made is not replaced
        self.evaluations = Evaluations(cfg, self.buffers)
        self.ended = False
        self.process = os.getpid()  # one that is forked by hand has no part in all this
        self.trained_until = 0  # ns of `time.perf_counter_ns`
        # after everything that may be refused, since it may move or delete an old run
        self._meet("allocated")
        with contextlib.ExitStack() as undo:
            lock, news = prepare_run_dir(cfg, given)
            undo.callback(lock.close)
            undo.callback(self._kill)
            with refusing_files(cfg):
                start = ranks.from_rank_0(f"{store_prefix}/start", count_start(cfg.run_dir))
            self.buffers.start = int(start) + ranks.MAX_STARTS * ranks.this_rank().rank  # no two play the same episodes
            restore(run_cfg, self.buffers, plan)
            self.population = Population(cfg, self.buffers, self.commands, plan.states) if cfg.with_pbt else None
            classes = self.rollout_worker_class, self.learner_class, self.policy_worker_class
            components = self.components = list_components(cfg, self.buffers, plan, *classes)
            self.unready = {index: component.name for index, component in enumerate(components)}
            self.crew.start(components, self._receive, cfg.seed, self.buffers.start, trace=cfg.trace_sec > 0)
            with refusing_files(cfg):
                self.records = Records(cfg, self.buffers, resumed_at=self.env_steps if is_resumed else None,
                                       sgd_steps=self.versions, since=since)
            self._wait_until(lambda: not self.unready, lambda: f"{', '.join(self.unready.values())} did not start "
                             "(--stall_timeout_sec)", START_SEC)
            self._meet("ready")
            if context is not None:
                self.recovery = Recovery(cfg, self.buffers, self.crew, components, self.sampling, self.records.log)
            undo.pop_all()
            self.run_dir_lock = lock
        self.steps_promised = self.env_steps  # those of all calls of train()
        introduce(self, plan, news)

    # ---- public --------------------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        """Count the env_steps sampled so far, resumes included."""
        return int(self.buffers.env_steps.sum())

    @property
    def versions(self) -> list[int]:
        """Return the SGD steps of each policy."""
        return [policy.weights.version for policy in self.buffers.policies]

    def train(self, train_for_env_steps: int | None = None, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Train for so many more env_steps, by default until a limit of the settings: env_steps, seconds, a return.

        It takes at most one step of each environment more than asked for; the next call takes so many fewer. At the end
        the workers pause, and all complete datasets of what they have finished are trained on. Returns earlier when
        should_stop() becomes true. Ctrl-C, SIGTERM and SIGHUP stop it too: it saves, and raises `KeyboardInterrupt`.
        With --eval_every_env_steps the last weights are scored too.
        """
        self._check_alive()
        if self.buffers.training_over:
            raise UserError("several ranks train together only once; make a new system, it resumes the run")
        goal = self.cfg.train_for_env_steps
        if train_for_env_steps is not None:
            goal = self.steps_promised + train_for_env_steps
            if self.env_steps >= goal:  # the call before has taken them
                self.steps_promised = goal
                return
        if self.records.is_over(self.env_steps, goal):
            told = describe_finished(self.cfg, self.env_steps, goal, self.records.wall_sec, self.records.policies)
            if self.cfg.trace_sec:  # which would be empty
                raise UserError(told)
            self.records.log(told)
            return
        self.records.save_config()
        self.records.begin(self.env_steps, goal)
        self.evaluations.begin(self.env_steps)
        with STOP_SIGNAL.deferred():
            self._train(goal, lambda: STOP_SIGNAL() or should_stop())
            self.steps_promised = goal if self.env_steps >= goal else self.env_steps
            if STOP_SIGNAL() and STOP_SIGNAL.is_outermost:
                self._save()

    def _train(self, goal: int, should_stop: Callable[[], bool]) -> None:
        """Train until there are so many env_steps, or another limit is reached, or should_stop() becomes true."""
        self.sampling.resume(goal)
        try:
            while not (self.records.is_over(self.env_steps, goal) or should_stop() or self.buffers.training_over):
                self._advance()
                self.evaluations.ask(self.env_steps)
                for policy, kind in self.records.tick(self.env_steps, sum(self.versions)):
                    if (policy, 0, SAVE, kind) not in self.commands.open:  # the learner is busy
                        self.commands.send(policy, SAVE, kind)
                self._update_population()
            if ranks.this_rank().world_size > 1:  # the learners tell the other ranks, and all end after the same step
                self.buffers.training_over.fill_(True)
            self.trained_until = time.perf_counter_ns()
            self.sampling.pause()
            self._finish()
            self.records.end(self.env_steps)
            for policy, kind in self.records.find_best(at_end=True):
                self.commands.send(policy, SAVE, kind)
            scored = self.records.scored_versions
            while not should_stop() and self.evaluations.ask_for_last(self.env_steps, scored(), self.versions):
                self._advance()
        except BaseException as error:
            self.records.log(str(error) or type(error).__name__, to_console=False)  # whoever handles it tells it
            self._give_up(save=not isinstance(error, KeyboardInterrupt | UserError))  # not what has diverged
            raise
        self.records.flush(self.env_steps)

    def _finish(self) -> None:
        """Wait until the workers have paused and the learners have trained on all that was handed in to them."""
        if ranks.this_rank().world_size > 1 or self.buffers.training_over:
            return
        self._wait_until(lambda: STOP_SIGNAL() or self.sampling.is_paused(),
                         lambda: "not all rollout workers have paused")
        for learner in self.commands.turns():
            for policy in range(self.cfg.num_policies):
                self.commands.send(policy, FINISH, self.sampling.num_pauses, learner)
            self._wait_for_answers(FINISH, "finish", unless=STOP_SIGNAL)
            self.commands.forget(FINISH)  # where a signal has interrupted

    def _wait_for_answers(self, kind: int, what: str, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until the learners have answered all commands of a kind."""
        self._wait_until(lambda: unless() or all(command[2] != kind for command in self.commands.open),
                         lambda: f"{self.commands.describe(kind)} did not {what}")

    def _save(self) -> None:
        try:
            if self.population is not None:  # a replacement is not half done in the checkpoints
                self._wait_until(lambda: not self.population.copying, lambda: "a donor did not save")
                self._wait_for_answers(COPY, "copy")
            for _ in range(2):  # once more if it could not be written: the folder may be made anew now
                for policy in range(self.cfg.num_policies):
                    self.commands.send(policy, SAVE, SAVE_PERIODIC)
                self._wait_for_answers(SAVE, "save")
                if not any(kind == SAVE_PERIODIC for _, kind in self.records.unsaved):
                    break
        except ComponentError:
            self._give_up(save=True)
            raise

    def _give_up(self, *, save: bool) -> None:
        """End everything, whatever its state; save the weights that were published last."""
        self.recovery = None
        self._kill()
        if not save or ranks.this_rank().world_size > 1:  # ranks save together or not at all
            return
        for policy in range(self.cfg.num_policies):
            try:
                name = save_published(self.cfg, self.buffers, policy)
                self.records.add("saved", [policy, SAVE_PERIODIC, name, 0.0], self.env_steps)
            except (OSError, RuntimeError, UserError) as error:  # a full disk, a broken GPU, weights that diverged
                self.records.log(f"the last weights of policy {policy} are not saved: {error}")

    def _check_alive(self) -> None:
        if self.ended or self.process != os.getpid():
            raise ComponentError("this system has ended; make a new one, it resumes the run")

    def close(self) -> None:
        """Save, stop every component, and write the final records. Raises `ComponentError` when it cannot save."""
        if self.records.closed or self.process != os.getpid():
            return
        in_order = not self.ended  # else there is a failure to tell of
        with STOP_SIGNAL.deferred(), contextlib.ExitStack() as at_last:
            at_last.callback(self.run_dir_lock.close)
            at_last.callback(lambda: self.records.close(self.env_steps))
            at_last.callback(self._kill)
            if in_order:
                if ranks.this_rank().world_size > 1 or len(self.cfg.learners) > 1:
                    self.buffers.training_over.fill_(True)  # no learner begins another dataset: all ranks save the same
                self.buffers.stopping.fill_(True)
                self._save()
                self._stop()
                draw(self)
        if in_order:
            self.records.check_saved()

    # ---- start and stop ------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Ask every component to leave, wait, and pass on what they report meanwhile."""
        for component in self.components:
            component.inbox.put((STOP, 0))
        late = self.crew.leave(self._receive, STOP_GRACE_SEC)
        if late:
            self.records.log(f"did not stop within {STOP_GRACE_SEC:.0f} s, killed: {', '.join(late)}")

    def _kill(self) -> None:
        """End every process that is still there, whatever its state."""
        self.ended = True
        self.crew.kill()
        remove_unfinished(self.cfg.run_dir)

    # ---- supervision ---------------------------------------------------------------------------------------------

    def _receive(self, report: tuple) -> None:
        """Act on one report of a component: its kind, then its content."""
        kind, *content = report
        if kind == "ready":
            if self.unready.pop(content[0], None) and not self.unready:
                self.sampling.repeat()
        elif kind == "died":
            if not self.buffers.stopping or self.components[content[0]].role == "learner":  # else: no loss
                self._replace(Failure(*content))
        elif kind == "copied":
            self.commands.answered(content[0], COPY, content[1])
        elif kind == "saved" or (kind == "unsaved" and content[1] is not None):
            self.commands.answered(content[0], SAVE, content[1])
            if self.population is not None and content[1] == SAVE_PERIODIC:
                self.population.saved(content[0])
        elif kind == "paused":
            self.sampling.confirmed(*content)
        elif kind == "loaded":
            self.commands.answered(content[0], LOAD, content[1])
            self.refused = self.refused or content[2]
            if not content[2]:
                self.records.policies[content[0]].forget_episodes()
        elif kind == "finished":
            self.commands.answered(content[0], FINISH, content[2], learner=content[1])
        elif kind == "evaluated":
            self.evaluations.scored(content[0])
        if kind not in ("ready", "died", "paused", "loaded", "copied", "finished"):
            self.records.add(kind, content, self.env_steps)

    def _advance(self) -> None:
        """Take what the components report; replace one that hangs."""
        self.crew.advance(self._receive)
        for failure in self.recovery.find_hung()[:1] if self.recovery is not None else ():
            self._replace(failure)  # which may replace others that hang

    def _replace(self, failure: Failure) -> None:
        """Replace a component that died or hangs. Raises `ComponentError` when that is not possible."""
        if self.recovery is None:
            raise ComponentError(failure.traceback or failure.why)
        all_begin_again = self.recovery.handle(failure)
        self.records.num_replaced = self.recovery.count
        if all_begin_again:
            self.unready = {index: component.name for index, component in enumerate(self.components)}
            self.commands.send_again()
        if all_begin_again or self.components[failure.index].role == "evaluator":
            self.evaluations.lost(self.env_steps)

    def _wait_until(self, condition: Callable[[], bool], complaint: Callable[[], str],
                    more_seconds: float = 0.0) -> None:
        # for another rank, until that has sampled its dataset; for a replay, until it is written
        waits = ranks.this_rank().world_size > 1 or getattr(self.cfg, "save_replay", False)
        seconds = min(self.cfg.stall_timeout_sec, math.inf if waits or not self.buffers.stopping else 30) + more_seconds
        deadline, before = time.monotonic() + seconds, None
        while not condition():
            done = [*self.buffers.sgd_steps_begun.tolist(), *self.buffers.generation.tolist(), *self.sampling.paused]
            if done != before:  # somebody has gone on
                deadline, before = time.monotonic() + seconds, done
            if time.monotonic() > deadline:
                raise ComponentError(f"{complaint()} within {seconds:.0f} s")
            self._advance()

    def _meet(self, place: str) -> None:
        """Wait until all ranks have come so far."""
        self._wait_until(ranks.arrive(f"{self.buffers.store_prefix}/{place}"), lambda: f"not all ranks were {place}")

    def _update_population(self) -> None:
        """Let population-based training decide about the policies that are due."""
        if self.population is not None:
            steps = self.buffers.policy_steps.sum(0).tolist()
            decisions = self.population.update(self.records.objectives(self.buffers.kind_of_policy), steps)
            if decisions:
                self.records.add_population(decisions, self.population.all_numbers(), self.env_steps)
