"""The schedule of the pipeline, played with the costs of its parts: who works when, and what it waits for.

It knows what the system does (`rollout_worker.py`, `policy_worker.py`, `feed.py`, `learner.py`), but no data: a split
asks, waits for its actions and steps; a policy worker serves all requests that are there as one batch; trajectories
wait in their slots until the batcher copies them; a learner allows the next dataset when its last SGD step begins.
Processes share the cores as on Linux: by the weights of their niceness. Used by `tools/predict.py`.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from config import Config

SPREAD = 0.2  # an assumption: one step of a split takes up to so much more or less than its mean


class Times(NamedTuple):
    """Seconds of a core. Of a GPU: `launching` and `row_gpu` pass at the same time, the longer one counts."""

    step: float  # rollout worker: one env_step, with all that is stored and sent
    batch: float  # policy worker: a batch of actions, beside its rows
    row: float  # and each row of it
    refresh: float  # new weights
    copy: float  # batcher: the rows of one env_step
    serial: float  # learner: an SGD step, as far as one thread does it
    parallel: float  # as far as `learner_threads` threads share it
    launching: float = 0.0  # policy worker: handing a batch to the GPU
    row_gpu: float = 0.0  # the GPU: a row of it
    batch_gpu: float = 0.0  # the least it takes for a batch
    step_gpu: float = 0.0  # of an SGD step

    def act(self, rows: float) -> float:
        """Return how long a batch takes."""
        return self.batch + rows * self.row + max(self.launching, rows * self.row_gpu)


class Place(NamedTuple):
    """Where it is played."""

    cores: int
    num_gpus: int
    niceness: tuple[int, int]  # of rollout workers, of policy workers


class Played(NamedTuple):
    """What came out."""

    env_steps_per_sec: float
    lag: float  # mean, in SGD steps
    rows: float  # of a batch of actions, mean
    busy: dict[str, float]  # cores that each kind of process used


class Task:
    """Work that a thread of a process does, or several."""

    def __init__(self, kind: str, work: float | Callable[[], float], threads: int, niceness: int,
                 done: Callable[[], None]) -> None:
        """work: in seconds of a core, or what returns it when the task begins to run; done() is called at its end."""
        self.kind, self.work, self.threads, self.niceness, self.done = kind, work, threads, niceness, done
        self.weight = threads * 1.25 ** -niceness  # as Linux weighs


class Cores:
    """Cores and the tasks that share them."""

    def __init__(self, cores: int) -> None:
        self.cores, self.now, self.tasks = cores, 0.0, []
        self.busy: Counter[str] = Counter()

    def start(self, kind: str, work: float | Callable[[], float], done: Callable[[], None], threads: int = 1,
              niceness: int = 0) -> None:
        self.tasks.append(Task(kind, work, threads, niceness, done))

    def rates(self) -> list[float]:
        """Return how many cores each task gets, at most one for each of its threads.

        Tasks of different niceness share by weight. Of equal ones the first to come runs until it is done: most are
        shorter than the time slice, 3 ms, for which Linux lets one run.
        """
        if sum(task.threads for task in self.tasks) <= self.cores:
            return [task.threads for task in self.tasks]
        given: Counter[int] = Counter()  # to all tasks of a niceness
        left, weight = self.cores, sum(task.weight for task in self.tasks)
        for task in sorted(self.tasks, key=lambda task: task.threads / task.weight):
            rate = min(task.threads, left * task.weight / weight)
            given[task.niceness] += rate
            left, weight = left - rate, weight - task.weight
        rates = []
        for task in self.tasks:
            rates.append(min(task.threads, given[task.niceness]))
            given[task.niceness] -= rates[-1]
        return rates

    def advance(self) -> None:
        """Let time pass until a task is done."""
        rates = self.rates()
        for task, rate in zip(self.tasks, rates, strict=True):
            if rate > 1e-9 and callable(task.work):
                task.work = task.work()
        passed = min(task.work / rate for task, rate in zip(self.tasks, rates, strict=True) if rate > 1e-9)
        self.now += passed
        for task, rate in zip(self.tasks, rates, strict=True):
            if not callable(task.work):
                task.work -= passed * rate
                self.busy[task.kind] += passed * rate
        over = [task for task in self.tasks if not callable(task.work) and task.work <= 1e-12]
        self.tasks = [task for task in self.tasks if callable(task.work) or task.work > 1e-12]
        for task in over:
            task.done()


class Split:
    """A vector environment."""

    def __init__(self, worker: int, num_policies: int) -> None:
        self.worker, self.t, self.awaited = worker, 0, 0
        self.versions = [0] * num_policies  # sums over the rows of the trajectories


class Trajectories(NamedTuple):
    """Full trajectories of a split, of one policy."""

    worker: int
    number: float
    version: float  # mean


class Trainer:
    """The feed and the learner of one policy, and its policy workers."""

    def __init__(self, num_policy_workers: int) -> None:
        self.version, self.requests, self.full = 0, [], deque()  # full: Trajectories that nobody has copied
        self.idle_workers = [-1] * num_policy_workers  # the versions that they hold
        self.filled, self.version_sum = 0.0, 0.0  # of the dataset that is filled
        self.may_fill, self.copies, self.trains = True, False, False
        self.dataset: float | None = None  # the mean version of one that waits for the learner
        self.lags: list[float] = []


class Schedule:
    """A run, without its data."""

    def __init__(self, cfg: Config, num_agents: int, times: Times, place: Place) -> None:
        self.cfg, self.times, self.place = cfg, times, place
        self.cores, self.rng = Cores(place.cores), random.Random(0)
        self.rows = cfg.envs_per_split * num_agents / cfg.num_policies  # of a split, of each policy
        self.num_agents, self.sgd_steps = num_agents, cfg.num_batches_per_epoch * cfg.num_epochs  # of a dataset
        self.trainers = [Trainer(cfg.policy_workers_per_policy) for _ in range(cfg.num_policies)]
        self.ready: list[deque[Split]] = [deque() for _ in range(cfg.num_workers)]
        self.idle = [True] * cfg.num_workers
        self.waiting: list[deque[Split]] = [deque() for _ in range(cfg.num_workers)]  # for slots
        of_all = cfg.num_envs_per_worker * num_agents
        self.free = [[of_all] * cfg.num_policies for _ in range(cfg.num_workers)]  # slots
        self.env_steps = self.num_batches = self.num_rows = 0
        for worker in range(cfg.num_workers):
            self.waiting[worker].extend(Split(worker, cfg.num_policies) for _ in range(cfg.worker_num_splits))
            self.take_slots(worker)

    # ---- sampling ------------------------------------------------------------------------------------------------

    def take_slots(self, worker: int) -> None:
        """Let the splits go on for which there are slots."""
        free = self.free[worker]
        while self.waiting[worker] and min(free) >= self.rows - 1e-6:
            self.free[worker] = free = [number - self.rows for number in free]
            self.ask(self.waiting[worker].popleft())

    def ask(self, split: Split) -> None:
        split.awaited = self.cfg.num_policies
        for policy, trainer in enumerate(self.trainers):
            trainer.requests.append(split)
            self.serve(policy)

    def serve(self, policy: int) -> None:
        """Let an idle policy worker take all requests."""
        trainer = self.trainers[policy]
        if not (trainer.requests and trainer.idle_workers):
            return
        old_version, version, batch = trainer.idle_workers.pop(), 0, []

        def begin() -> float:  # it runs now, and takes what is there by now
            nonlocal version, batch
            batch, trainer.requests, version = trainer.requests, [], trainer.version
            rows = self.rows * len(batch)
            self.num_batches, self.num_rows = self.num_batches + bool(batch), self.num_rows + rows
            return self.times.act(rows) + (version != old_version) * self.times.refresh if batch else 0.0

        def done() -> None:
            trainer.idle_workers.append(version if batch else old_version)
            self.serve(policy)
            for split in batch:
                split.versions[policy] += version
                split.awaited -= 1
                if not split.awaited:
                    self.ready[split.worker].append(split)
                    self.step(split.worker)

        self.cores.start("policy workers", begin, done, niceness=self.place.niceness[1])

    def step(self, worker: int) -> None:
        """Let an idle worker step the split whose actions came first."""
        if not (self.idle[worker] and self.ready[worker]):
            return
        self.idle[worker], split = False, self.ready[worker].popleft()

        def done() -> None:
            self.idle[worker] = True
            self.env_steps += self.cfg.envs_per_split
            split.t += 1
            if split.t < self.cfg.rollout:
                self.ask(split)
            else:
                self.hand_in(split)
            self.step(worker)

        work = self.cfg.envs_per_split * self.times.step * self.rng.uniform(1 - SPREAD, 1 + SPREAD)
        self.cores.start("rollout workers", work, done, niceness=self.place.niceness[0])

    # ---- learning ------------------------------------------------------------------------------------------------

    def hand_in(self, split: Split) -> None:
        for policy, trainer in enumerate(self.trainers):
            trainer.full.append(Trajectories(split.worker, self.rows, split.versions[policy] / split.t))
            split.versions[policy] = 0
            self.copy(trainer)
        split.t = 0
        self.waiting[split.worker].append(split)
        self.take_slots(split.worker)

    def copy(self, trainer: Trainer) -> None:
        """Let the batcher copy trajectories, as many as still fit."""
        if trainer.copies or not (trainer.may_fill and trainer.full):
            return
        trainer.copies, oldest = True, trainer.full.popleft()
        number = min(oldest.number, self.cfg.trajectories_per_dataset - trainer.filled)
        if number < oldest.number - 1e-6:
            trainer.full.appendleft(oldest._replace(number=oldest.number - number))

        def done() -> None:
            trainer.copies = False
            trainer.filled += number
            trainer.version_sum += number * oldest.version
            self.free[oldest.worker] = [  # all policies but this one as before
                free + (number if other is trainer else 0)
                for free, other in zip(self.free[oldest.worker], self.trainers, strict=True)]
            self.take_slots(oldest.worker)
            if trainer.filled >= self.cfg.trajectories_per_dataset - 1e-6:
                trainer.dataset, trainer.may_fill = trainer.version_sum / trainer.filled, False
                trainer.filled = trainer.version_sum = 0.0
                self.train(trainer)
            self.copy(trainer)

        self.cores.start("learners", number * self.cfg.rollout / self.num_agents * self.times.copy, done)

    def train(self, trainer: Trainer) -> None:
        """Let an idle learner train on the dataset that waits."""
        if trainer.trains or trainer.dataset is None:
            return
        trainer.lags.append(trainer.version - trainer.dataset)
        trainer.trains, trainer.dataset = True, None
        self.sgd_step(trainer, 1)

    def sgd_step(self, trainer: Trainer, number: int) -> None:
        if number == self.sgd_steps:
            trainer.may_fill = True
            self.copy(trainer)

        def done() -> None:
            trainer.version += 1
            if number < self.sgd_steps:
                self.sgd_step(trainer, number + 1)
            else:
                trainer.trains = False
                self.train(trainer)

        threads = self.cfg.learner_threads
        self.cores.start("learners", self.times.serial, lambda: self.cores.start(
            "learners", self.times.parallel, done, threads) if self.times.parallel else done())

    # ---- a run ---------------------------------------------------------------------------------------------------

    def play(self) -> Played:
        """Play until datasets come regularly, and then as long again."""
        dataset = self.cfg.trajectories_per_dataset * self.cfg.rollout / self.num_agents * self.cfg.num_policies
        all_once = self.cfg.num_workers * self.cfg.num_envs_per_worker * self.cfg.rollout
        amount = math.ceil(max(6 * dataset, 4 * all_once))
        while self.env_steps < amount:
            self.cores.advance()
        begin, steps, batches, rows = self.cores.now, self.env_steps, self.num_batches, self.num_rows
        busy, told = self.cores.busy.copy(), [len(trainer.lags) for trainer in self.trainers]
        while self.env_steps < steps + 2 * amount:
            self.cores.advance()
        seconds = self.cores.now - begin
        lags = [lag for trainer, number in zip(self.trainers, told, strict=True) for lag in trainer.lags[number:]]
        return Played((self.env_steps - steps) / seconds, sum(lags) / max(len(lags), 1),
                      (self.num_rows - rows) / (self.num_batches - batches),
                      {kind: (self.cores.busy[kind] - busy[kind]) / seconds for kind in self.cores.busy})
