"""The trainer: makes the processes of a run, and runs THE LOOP (`Trainer.train`) that hears what they report.

    from trainer import APPO, load

    with APPO("CartPole-v1", experiment="first", learning_rate=1e-3) as appo:
        print(appo.train(50_000)["mean_return"])
        parameters = appo.get_parameters()          # {policy: {name: tensor}}
        appo.set_parameters(parameters)
        action, _ = appo.predict([0.0, 0.1, 0.0, 0.1])
    policy = load("train_dir/first")                # plays without starting a process

It lives in the main process and does no work on the hot path. It allocates what is shared, starts one process for each
rollout worker, policy worker and learner, and then reads their reports. Whatever a training can do without is a service
(`services/`): records, checkpoints, evaluations, a population, recovery. With `serial_mode` the same components run in
this process, and the same seed gives the same numbers (on a CPU). Read next: `shared_buffers.py`.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from algorithms import algorithm_class
from config import Config, Values, changes, configure
from envs.families import probe
from evaluate import Policy, load
from learner import Learner
from pbt import assign_kinds
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime import several
from runtime.checkpoint import count_start, prepare_run_dir, refusing_files, remove_unfinished
from runtime.machine import choose_device, choose_niceness
from runtime.processes import START_SEC, Component, OneProcess, Processes, Service, call_in_child, start_server
from runtime.utils import STOP_SIGNAL, ComponentError, UserError, left_alone, remember, take_share_of_cores, this_rank
from services import parameters
from services.records import Records
from services.recovery import Recovery
from services.saving import Saving, describe_resume, find_policy, restore
from shared_buffers import FINISH, PAUSE, RESUME, STOP, Commands, SharedBuffers

__all__ = ["A3C", "APEX", "APPO", "IMPALA", "PQL", "Trainer", "load"]

STOP_GRACE_SEC = 5.0  # a component that was told to stop may take so long before it is killed


def default_services(cfg: Config) -> list[Service]:
    """Return the services of a run; each hears a report after those before it."""
    kinds = [Records, Saving] if cfg.serial_mode else [Records, Saving, Recovery]
    if cfg.with_pbt:
        from services.population import Population

        kinds.insert(1, Population)
    if cfg.eval_every_env_steps > 0:
        from services.evaluation import Evaluation

        kinds.insert(0, Evaluation)
    return [kind() for kind in kinds]


class Trainer:
    """A system that trains: make it, `train()` as often as you like, `save()`, `close()`.

    Between calls of `train` the workers wait; several ranks train only once. Raises `UserError` for impossible settings
    and `ComponentError` when a component dies that nobody replaces; both leave no process behind. A subclass may
    replace components.
    """

    algo: str | None = None  # of a subclass for one algorithm
    rollout_worker_class, policy_worker_class, learner_class = RolloutWorker, PolicyWorker, Learner

    # what Python is for, in `services/parameters.py`; `load` takes parameters over, `evaluate.load` makes a policy
    change = parameters.change
    predict = parameters.predict
    save = parameters.save
    load = parameters.load_parameters
    get_parameters = parameters.get_parameters
    set_parameters = parameters.set_parameters

    def __init__(self, env: str | Callable, encoder: str | Callable = "", encodersubtype: str = "",
                 num_envs_per_worker: int | None = None, num_workers: int | None = None, device: Any = None,
                 policy_kwargs: Values | None = None, *, env_kwargs: Values | None = None,
                 services: Sequence[Service] | None = None, **settings: Any) -> None:
        """Make the system; it starts its processes and waits.

        Args:
            env: an environment id, or a function or class that makes one environment, of one agent or several.
            encoder: a function or class, or "module:name"; or with `encodersubtype` AsynRL's names (`ENCODERS`).
            num_envs_per_worker, num_workers: None: what fits the machine.
            device: auto (None), cpu, cuda, cuda:1, ..., or a torch.device; gpu is cuda.
            policy_kwargs: more settings, as in AsynRL.
            env_kwargs: arguments for the maker of the environment; what JSON can hold.
            services: None: `default_services`.
            settings: of `Config` and the algorithm (`train.py --help`); None: the default. `core`, `model`,
                `policy_mapping` and `algo` may be functions or classes.

        Raises `UserError` for impossible settings.
        """
        self.since, self.process = time.time(), os.getpid()  # a process that is forked by hand has no part in all this
        self.is_ready = self.ended = self.closed = self.has_failed = self.is_good_enough = False
        self.trouble = self.besides = ""  # what the progress line warns of; what it says in place of the frames
        self.row: Values = {}  # the last one of metrics.jsonl
        self.num_episodes = self.trained_until = 0  # trained_until: ns of `time.perf_counter_ns`
        self.trained_sec = 0.0  # in earlier calls of train(), and in earlier processes of the run
        self.begun: float | None = None  # when the running call began to sample
        self.asks: Callable[[], bool] | None = None  # returns whether the running call is to stop
        self.policies: dict[int, Policy] = {}  # for predict()
        given = {"env": env, "num_envs_per_worker": num_envs_per_worker, "num_workers": num_workers, "device": device,
                 "env_kwargs": env_kwargs, "algo": self.algo, **settings}
        of_encoder = parameters.encoder_settings(encoder or "", encodersubtype or "")
        take_share_of_cores()
        store_prefix, given = several.join_ranks(parameters.as_settings(given, of_encoder, policy_kwargs or {}))
        # those that have begun; several ranks hear of each other from now on
        self.services: list[Service] = [several.Ranks(self, store_prefix)] if this_rank().world_size > 1 else []
        self.cfg = configure(given)
        several.tell_settings(store_prefix, vars(self.cfg))
        context = None if self.cfg.serial_mode else start_server()
        self.crew = Processes() if context else OneProcess()
        self._allocate(store_prefix)
        changed = ", ".join(changes(self.cfg).values())
        self.news = f"changed: {changed}\n" if changed else ""
        with refusing_files(self.cfg.train_dir):  # after all that may be refused: it may move or delete an old run
            at_last = prepare_run_dir(self.cfg.run_dir, vars(self.cfg))  # unlocks the folder
        with at_last:
            at_last.callback(self._kill)
            self._start(default_services(self.cfg) if services is None else services)
            self.at_last = at_last.pop_all()
        self.is_ready = True
        self.steps_promised = self.env_steps  # those of all calls of train()
        self.tell("ready_to_train")
        remember(self.cfg.run_dir, vars(self.cfg))

    def _allocate(self, store_prefix: str) -> None:
        """Look at the environment, make the models, and allocate all that is shared."""
        cfg = self.cfg
        with left_alone():
            self.devices = [choose_device(cfg.device, policy) for policy in range(cfg.num_policies)]
            info = probe(cfg) if cfg.serial_mode else call_in_child(
                f"probe of {cfg.env}", lambda: probe(cfg), cfg.seed, cfg.stall_timeout_sec + START_SEC)
            if cfg.self_play_past_fraction and len(info.agents) < 2:
                raise UserError(f"--self_play_past_fraction={cfg.self_play_past_fraction} needs opponents, {cfg.env} "
                                "has one agent")
            kinds = assign_kinds(cfg, info)
            # what the policies begin with: in a resumed run its checkpoints
            self.found = [find_policy(cfg, policy, info.kinds[kind], store_prefix) for policy, kind in enumerate(kinds)]
            self.models = [found.model for found in self.found]
            algorithm = algorithm_class(cfg.algo)(cfg)
        self.buffers = SharedBuffers(cfg, algorithm, info, kinds, self.models, self.devices)
        self.buffers.store_prefix = store_prefix
        self.commands = Commands(self.buffers)
        self.tell("allocated")

    def _start(self, services: Sequence[Service]) -> None:
        """Start the processes and the services; wait until all are ready."""
        with refusing_files(self.cfg.train_dir):
            start = count_start(self.cfg.run_dir)
            self.buffers.start = start + several.MAX_STARTS * this_rank().rank  # no two play the same episodes
            restore(self.cfg, self.buffers, self.found)
            self.news += describe_resume(self)
            for service in services:
                self.services.append(service)
                service.start(self)
        self.components = [*list_components(self),
                           *(component for service in services for component in service.components())]
        self.unready = {index: component.name for index, component in enumerate(self.components)}
        self.crew.start(self.components, self.receive, self.cfg.seed, self.buffers.start, trace=self.cfg.trace_sec > 0)
        self.tell("starting")
        self.wait_until(lambda: not self.unready, lambda: f"{', '.join(self.unready.values())} did not start "
                        "(--stall_timeout_sec)", START_SEC)
        self.tell("made")

    # ---- the loop ------------------------------------------------------------------------------------------------

    def train(self, train_for_env_steps: int | None = None, callback: Callable[[Values], Any] | None = None,
              should_stop: Callable[[], bool] = lambda: False) -> Values:
        """Train for so many more env_steps, or until `train_for_env_steps`, `train_for_seconds` or `stop_at_return`.

        It takes at most one step of each environment more than asked for, and the next call so many fewer. It returns
        when the workers have paused and all complete datasets are trained on; in between no process is busy.

        Args:
            callback: is called with each report, a row of metrics.jsonl; it may `change` settings, and stops the
                training by returning False.
            should_stop: is asked all the time, and stops the training by returning True. An error of either is raised
                when the training has stopped; the system can be used on.

        Returns what this call has done: env_steps, sgd_steps, num_episodes, train_sec, fps (env_frames per second), and
        the last row of metrics.jsonl, with the totals of the run as total_env_steps and total_sgd_steps. Ctrl-C saves
        and raises `KeyboardInterrupt`; afterwards the system can be used as before.
        """
        goal, before = self._goal(train_for_env_steps), self.totals()
        with (STOP_SIGNAL.watching(deferring=True) as is_outermost,
              parameters.asking(self, callback, should_stop) as asks):
            if self._begin(goal):
                try:
                    while not (self.is_over() or asks()):
                        self.turn()
                    self._pause()
                except BaseException as error:
                    self.log(str(error) or type(error).__name__, to_console=False)  # whoever handles it says it
                    self.give_up(save=not isinstance(error, KeyboardInterrupt | UserError))  # not what has diverged
                    raise
            self.steps_promised = goal if self.env_steps >= goal else 0  # 0: interrupted, what it has sampled counts
            if STOP_SIGNAL() and is_outermost:
                self.tell("save")
        done = {name: total - before[name] for name, total in self.totals().items()}
        return {**self.row, **done, "total_env_steps": self.env_steps, "total_sgd_steps": sum(self.versions),
                "fps": done["env_steps"] * self.cfg.env_frameskip / max(done["train_sec"], 1e-9)}

    def turn(self) -> None:
        """Hear what the components report; let each service do what is due."""
        self.crew.advance(self.receive)
        for service in self.services:
            service.tick()

    def receive(self, report: tuple) -> None:
        """Act on one report: its kind, then its content. Raises `ComponentError` for a death that no service mends."""
        match report:
            case ("died", index, *_) if self.buffers.stopping and self.components[index].role != "learner":
                return  # no loss
            case ("ready", index):
                self.unready.pop(index, None)
            case ("replaced", indices) if len(indices) == len(self.components):
                self.commands.repeat()
            case ("episodes", episodes):
                self.num_episodes += len(episodes)
        self.commands.hear(report)
        are_mended = [service.on(report) for service in self.services]
        if report[0] == "died" and True not in are_mended:
            _, _, why, traceback = report
            raise ComponentError(traceback or why)

    def tell(self, *report: Any) -> None:
        """Report something of the trainer itself, or ask the services for something: ("save",), ("log", text, ...)."""
        self.receive(report)

    def log(self, text: str, *, to_console: bool = True) -> None:
        """Write lines into the records, if there are any."""
        self.tell("log", text, to_console)

    def is_over(self) -> bool:
        """Return whether the run has trained as long as it should, or is good enough."""
        return (self.env_steps >= self.goal or self.wall_sec >= self.cfg.train_for_seconds or self.is_good_enough
                or bool(self.buffers.training_over))

    @property
    def env_steps(self) -> int:
        """Count the env_steps sampled so far, resumes included."""
        return int(self.buffers.env_steps.sum())

    @property
    def versions(self) -> list[int]:
        """Return the SGD steps of each policy."""
        return [policy.weights.version for policy in self.buffers.policies]

    @property
    def wall_sec(self) -> float:
        """Count the seconds spent in train(), earlier processes of the run included."""
        return self.trained_sec + (time.monotonic() - self.begun if self.begun is not None else 0.0)

    def totals(self) -> Values:
        """Return what the run has done so far."""
        return {"env_steps": self.env_steps, "sgd_steps": sum(self.versions), "num_episodes": self.num_episodes,
                "train_sec": self.wall_sec}

    def of(self, policy: int) -> str:
        """Name a policy in a line, where there are several."""
        return f" of policy {policy}" if len(self.models) > 1 else ""

    def find(self, kind: type[Service]) -> Any:
        """Return the service of a class, or None."""
        return next((service for service in self.services if isinstance(service, kind)), None)

    # ---- a call of train() ---------------------------------------------------------------------------------------

    def _goal(self, train_for_env_steps: int | None) -> int:
        """Return after how many env_steps of the run a call of train() is to end."""
        self.check_alive()
        if self.asks:
            raise UserError("train() is running already; a callback stops it by returning False")
        if self.buffers.training_over:
            raise UserError("several ranks train together only once; make a new system, it resumes the run")
        if train_for_env_steps is None:
            return self.cfg.train_for_env_steps
        if train_for_env_steps <= 0:
            raise UserError(f"train_for_env_steps={train_for_env_steps} must be above 0")
        return (self.steps_promised or self.env_steps) + math.ceil(train_for_env_steps)

    def _begin(self, goal: int) -> bool:
        """Let all workers sample until there are `goal` env_steps; return whether there is anything to do."""
        self.goal = goal
        if self.is_over():
            if goal == self.cfg.train_for_env_steps or self.env_steps < goal:  # else the call before has taken them
                self.tell("nothing_to_do")
            return False
        self.begun = time.monotonic()
        self.tell("begun")
        self.buffers.goal.fill_(goal)
        self.commands.tell(RESUME)
        return True

    def _pause(self) -> None:
        """Wait until the workers have paused and the learners have trained on all that was handed in to them."""
        self.trained_until = time.perf_counter_ns()
        self.commands.tell(PAUSE)
        if this_rank().world_size > 1:  # the learners tell the other ranks, and all end after the same step
            self.buffers.training_over.fill_(True)
        else:
            self.wait_until(lambda: STOP_SIGNAL() or self.commands.are_paused(),
                            lambda: "not all rollout workers have paused")
            num_learners = len(self.cfg.learners)  # the first one once more at the end: it publishes for all
            for learner in [*range(num_learners), 0] if num_learners > 1 else [0]:
                for policy in range(self.cfg.num_policies):
                    self.commands.send(policy, FINISH, 0, learner)
                self.wait_for_answers(FINISH, "finish", unless=STOP_SIGNAL)
        self.trained_sec, self.begun = self.wall_sec, None
        self.tell("ended")

    def wait_for_answers(self, kind: int, what: str, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until the learners have answered all commands of a kind."""
        self.wait_until(lambda: unless() or not self.commands.not_answered(kind),
                        lambda: f"the learner of {self.commands.not_answered(kind)} did not {what}")

    def wait_until(self, condition: Callable[[], bool], complaint: Callable[[], str], more_sec: float = 0.0) -> None:
        """Go on with the loop until a condition holds. Raises `ComponentError` when nobody goes on for too long."""
        waits = this_rank().world_size > 1  # for another rank, until that has sampled its dataset
        seconds = min(self.cfg.stall_timeout_sec, math.inf if waits or not self.buffers.stopping else 30) + more_sec
        deadline, before = time.monotonic() + seconds, None
        while not condition():
            done = [*self.buffers.sgd_steps_begun.tolist(), *self.buffers.generation.tolist(), *self.commands.paused]
            if done != before:  # somebody has gone on
                deadline, before = time.monotonic() + seconds, done
            if time.monotonic() > deadline:
                raise ComponentError(f"{complaint()} within {seconds:.0f} s")
            self.turn()

    # ---- between calls -------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise `ComponentError` when the system has ended."""
        if self.ended or self.process != os.getpid():
            raise ComponentError("this system has ended; make a new one, it resumes the run")

    def check_paused(self, what: str) -> None:
        """Raise `UserError` in a callback, for what is done between two calls of `train`."""
        if self.asks is not None:
            raise UserError(f"{what}() is for between two calls of train(); a callback stops one by returning False")

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save, stop every component, and write the final records. Raises `ComponentError` when it cannot save."""
        self.check_paused("close")
        if self.closed or self.process != os.getpid():
            return
        self.closed = True
        with STOP_SIGNAL.watching(deferring=True), self.at_last as at_last:
            for service in self.services:
                at_last.callback(service.close)
            at_last.callback(self._kill)  # first, since the last one is called first: no process lives meanwhile
            if not self.ended:
                self.buffers.training_over.fill_(True)  # no learner begins another dataset: all ranks save the same
                self.buffers.stopping.fill_(True)
                self.tell("save")
                for component in self.components:
                    component.inbox.put((STOP, 0))
                if late := self.crew.leave(self.receive, STOP_GRACE_SEC):
                    self.log(f"did not stop within {STOP_GRACE_SEC:.0f} s, killed: {', '.join(late)}")

    def give_up(self, *, save: bool) -> None:
        """End everything, whatever its state; save the weights that were published last."""
        self.has_failed, self.is_ready = True, False
        self._kill()
        if save and this_rank().world_size == 1:  # ranks save together or not at all
            self.tell("save_published")

    def _kill(self) -> None:
        """End every process that is still there, whatever its state."""
        self.ended = True
        self.crew.kill()
        remove_unfinished(self.cfg.run_dir)

    def __enter__(self) -> "Trainer":
        self.check_alive()
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is not None and issubclass(kind, ComponentError) and not self.ended and self.process == os.getpid():
            self.give_up(save=True)
        try:
            self.close()
        except ComponentError:
            if kind is None:  # else the first error counts
                raise


# ---- what it is made of ------------------------------------------------------------------------------------------


def list_components(trainer: Trainer) -> list[Component]:
    """List the components of the pipeline, in the order of their turns in serial mode."""
    cfg, buffers, found = trainer.cfg, trainer.buffers, trainer.found
    rollout_niceness, policy_niceness = choose_niceness(cfg.num_epochs, trainer.devices[0])
    heartbeats = iter(buffers.heartbeats)

    def component(name: str, role: str, number: int, make: Callable, inbox: Any, *args: Any, **more: Any) -> Component:
        return Component(name, make, (cfg, buffers.seen_by(role, number), *args), role, number, inbox,
                         next(heartbeats), **more)

    workers = [component(f"rollout_worker_{worker}", "rollout_worker", worker, trainer.rollout_worker_class,
                         buffers.worker_inboxes[worker], worker, niceness=rollout_niceness,
                         core=worker if cfg.set_workers_cpu_affinity else None) for worker in range(cfg.num_workers)]
    suffix = [f"_{policy}" if cfg.num_policies > 1 else "" for policy in range(cfg.num_policies)]
    learners = [component(f"learner{suffix[policy]}_{role}".rstrip("_"), "learner", policy, trainer.learner_class,
                          buffers.policies[policy].commands[learner], policy, learner, device, found[policy].path)
                for policy, device in enumerate(trainer.devices) for learner, role in enumerate(cfg.learners)]
    policy_workers = [component(f"policy_worker{suffix[policy]}_{worker}", "policy_worker", policy,
                                trainer.policy_worker_class, buffers.policies[policy].requests, policy, device,
                                reports=False, niceness=policy_niceness)
                      for policy, device in enumerate(trainer.devices)
                      for worker in range(1 if cfg.serial_mode else cfg.policy_workers_per_policy)]
    return [*workers, *learners, *policy_workers]


# ---- the system with each algorithm ------------------------------------------------------------------------------


class APPO(Trainer):
    """With asynchronous PPO (`appo.py`)."""

    algo = "appo"


class IMPALA(Trainer):
    """With IMPALA (`algorithms/impala.py`)."""

    algo = "impala"


class A3C(Trainer):
    """With A3C (`algorithms/a3c.py`)."""

    algo = "a3c"


class APEX(Trainer):
    """With Ape-X (`algorithms/apex.py`)."""

    algo = "apex"


class PQL(Trainer):
    """With PQL (`algorithms/pql.py`)."""

    algo = "pql"
