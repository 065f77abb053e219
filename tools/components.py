"""What one sample costs in each part of the system, alone, and the bound that follows. Used by `tools/benchmark.py`."""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from config import Config, algorithm_class
from distributions import ActionDistribution
from envs.families import make_vector_env, probe
from envs.flat_spaces import num_action_parameters
from learner import Learner
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime.children import start_server
from runtime.container import cpu_cores
from runtime.crew import keep_freed_memory, kill_all
from runtime.inbox import RESUME, SLOTS, SPLIT
from runtime.machine import choose_device
from runtime.user_error import UserError
from shared_buffers import SharedBuffers
from weights import CURRENT

PROCESSES_PER_CORE = 2  # while parts are measured: in a run a rollout worker shares its core with the others
PREPARED_ACTIONS = 64  # batches of random actions, drawn before the clock runs


class Costs(NamedTuple):
    """What one sample costs each part, alone, in us. Training: of one pass."""

    simulation: float
    inference: float
    training: float

    def bound(self, cfg: Config, *, sampler_only: bool = False) -> tuple[float, str]:
        """Return the most env_steps/s that this machine allows, and how that was computed."""
        cores, passes = cpu_cores(), cfg.num_epochs
        if choose_device(cfg.device).type == "cpu":
            work = self.simulation + self.inference + (0 if sampler_only else passes * self.training)
            formula = f"{self.inference:.1f}" + ("" if sampler_only else f" + {passes} x {self.training:.1f}")
            return cores / work * 1e6, f"{cores} cores / ({self.simulation:.1f} + {formula}) us"
        # each kind of process by itself: what they take from each other on the GPU is not counted
        workers, learners = cfg.policy_workers_per_policy * cfg.num_policies, cfg.num_policies
        limits = {f"{cores} cores / {self.simulation:.1f} us": cores / self.simulation,
                  f"{workers} policy worker(s) / {self.inference:.1f} us": workers / self.inference}
        if not sampler_only:
            limits[f"{learners} learner(s) / ({passes} x {self.training:.1f}) us"] = learners / (passes * self.training)
        return min(limits.values()) * 1e6, "the least of " + ", ".join(limits)


def time_of(function: Callable[[], Any], seconds: float) -> float:
    """Return the seconds that one call takes: the median of five series, after a warm-up."""
    function()
    series = []
    for _ in range(5):
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + seconds / 5 or not calls:
            function()
            calls += 1
        series.append((time.perf_counter() - begin) / calls)
    return statistics.median(series)


def random_steps(cfg: Config) -> tuple[Callable[[], Any], int]:
    """Make one split's environments; return a function that steps them at random, and how many there are."""
    env = make_vector_env(cfg, cfg.envs_per_split)
    env.reset(0)
    actions = []  # of each kind of agents: batches for one step after another
    for kind in env.kinds:
        parameters = torch.zeros(PREPARED_ACTIONS, len(kind.index), num_action_parameters(kind.action_space))
        actions.append(ActionDistribution(kind.action_space, parameters).sample().numpy())
    steps = itertools.cycle(zip(*actions, strict=True))
    return lambda: env.step(list(next(steps))), env.num_envs


def measure_components(cfg: Config, seconds: float) -> Costs:
    """Measure each part alone, on one core (or on the GPU), with data from the real environments."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(cfg.seed)
    step, num_envs = random_steps(cfg)
    simulation = time_of(step, seconds) / num_envs

    with serial_system(cfg, choose_device(cfg.device)) as (alone, buffers, workers, server, learners):
        fill_slots(buffers, workers, server)
        # one batch: while one half of the environments is stepped, the policy workers share the other's requests; those
        # of four workers at most are made here, so it holds half of these at most
        requests = [(SPLIT, split) for split in range(0, alone.num_splits, max(2, alone.worker_num_splits))]
        servers = cfg.policy_workers_per_policy * cfg.num_policies
        count = max(1, round(len(requests) * cfg.num_workers / alone.num_workers / servers))
        requests = requests[:count]
        agents = alone.envs_per_split * len(buffers.info.agents)
        buffers.awaited_policy.fill_(0)
        buffers.agent_t.fill_(0)
        buffers.agent_slot.copy_(torch.arange(buffers.agent_slot.numel()).view_as(buffers.agent_slot))
        inference = time_of(lambda: serve(buffers, server, requests), seconds) / (len(requests) * agents)
        warm_up(buffers, learners)
        training = time_of(lambda: train(buffers, learners), seconds) / (
            trajectories_at_once(alone) * alone.rollout * alone.num_epochs)
    return Costs(simulation * 1e6, inference * 1e6, training * 1e6)


@contextlib.contextmanager
def serial_system(cfg: Config, device: torch.device, **settings: Any) -> Iterator[tuple[Any, ...]]:
    """Make the components of one policy in this process: (settings, buffers, rollout workers, policy worker, learners).

    settings: what differs from the configuration.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        few = {"num_workers": max(2, min(cfg.num_workers, 4))} | settings
        alone = dataclasses.replace(cfg, train_dir=folder, serial_mode=True, async_rl=True, learner_threads=1,
                                    num_learners=1, num_policies=1, with_pbt=False, self_play_past_fraction=0.0,
                                    policy_mapping="", **few)
        alone.run_dir.mkdir(parents=True)
        info = probe(alone)
        if len(info.kinds) > 1:
            raise UserError(f"{cfg.env} has agents with different spaces; components are measured only where all have "
                            "the same")
        model = algorithm_class(alone.algo)(alone).make_model(*info.kinds[0])
        buffers = SharedBuffers(alone, info, [0], [model], [device], None)
        workers = [RolloutWorker(alone, buffers, worker, lambda report: None) for worker in range(alone.num_workers)]
        server = PolicyWorker(alone, buffers, 0, device)
        learners = [Learner(alone, buffers, 0, number, device, None, lambda report: None)
                    for number in range(len(alone.learners))]
        yield alone, buffers, workers, server, learners


def fill_slots(buffers: SharedBuffers, workers: list[RolloutWorker], server: PolicyWorker) -> None:
    """Let the real workers fill every trajectory once."""
    for worker in workers:
        worker.handle(RESUME, 0)
    while not server.requests.empty():
        server.turn()
        for worker in workers:
            worker.turn()


def serve(buffers: SharedBuffers, server: PolicyWorker, requests: list[tuple[int, int]]) -> None:
    """Serve requests as if they were new, and throw the answers away."""
    buffers.asked[[split for _, split in requests]] += 1
    server.serve(requests)
    empty_inboxes(buffers)


def trajectories_at_once(cfg: Config) -> int:
    """Return for how many trajectories the training is measured: a dataset, or what a replay asks one for."""
    return max(1, round(cfg.trajectories_per_dataset / getattr(cfg, "replay_ratio", 1.0)))


def warm_up(buffers: SharedBuffers, learners: list[Learner]) -> None:
    """Fill a replay until training begins."""
    while not learners[0].state.sgd_steps:
        train(buffers, learners)


def train(buffers: SharedBuffers, learners: list[Learner]) -> None:
    """Train on the first worker's trajectories, over and over: on one dataset, or as often as a replay says."""
    missing = trajectories_at_once(learners[0].cfg)
    while missing:
        slots = range(min(buffers.slots_per_worker, missing))
        learners[0].feed.insert(SLOTS, *slots)
        missing -= len(slots)
        for learner in learners[1:]:  # with a role of its own
            learner.feed.turn()
    empty_inboxes(buffers)


def empty_inboxes(buffers: SharedBuffers) -> None:
    """Throw away what was sent to the rollout workers."""
    for inbox in buffers.worker_inboxes:
        while not inbox.empty():
            inbox.get()


def measure_simulation(cfg: Config, seconds: float) -> float:
    """Return the env_steps/s of `num_workers` processes that do nothing but step environments."""
    context = start_server()
    start, counts = context.Barrier(cfg.num_workers), context.SimpleQueue()
    processes = [context.Process(target=simulate, args=(cfg, seconds, start, counts), daemon=True)
                 for _ in range(cfg.num_workers)]
    try:
        for process in processes:
            process.start()
        return sum(counts.get() for _ in processes)
    finally:
        kill_all(processes)  # they ignore the signals that stop the program


def simulate(cfg: Config, seconds: float, start: Any, counts: Any) -> None:
    """Step environments for a while, beginning with the other processes; send the env_steps/s."""
    step, num_envs = random_steps(cfg)
    start.wait()
    counts.put(num_envs / time_of(step, seconds))


# ---- the parts beside each other ---------------------------------------------------------------------------------


class Parts(NamedTuple):
    """CPU time of the parts of a system while all of them run, on all cores at once; in us."""

    simulation: float  # of an env_step, stepping alone
    step: float  # of an env_step, all that a rollout worker does
    batch: float  # of a batch of actions, beside its rows
    row: float  # of each row of it
    handing_batch: float  # of both without the network
    handing_row: float
    refresh: float  # of new weights
    copy: float  # of an env_step, for the dataset
    serial: float  # of an SGD step, beside
    parallel: float  # the passes through the network


class Stopwatch:
    """Adds up the CPU time of functions of this process."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def time(self, name: str, function: Callable, *args: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args)
        finally:
            self.seconds[name] += time.process_time() - begin

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """Time a method from now on."""
        setattr(owner, attribute, functools.partial(self.time, name, getattr(owner, attribute)))


def measure_parts(cfg: Config, seconds: float, *, learns: bool = True) -> Parts:
    """Measure all parts while they take turns, in several processes on each core at once; return the mean.

    So caches and memory are as busy as in the real system, and processes take the cores from each other as there.
    learns: with SGD steps.
    """
    context, count = start_server(), cpu_cores() * PROCESSES_PER_CORE
    start, parts = context.Barrier(count), context.SimpleQueue()
    processes = [context.Process(target=take_turns, args=(cfg, seconds, learns, start, parts), daemon=True)
                 for _ in range(count)]
    try:
        for process in processes:
            process.start()
        return Parts(*map(statistics.mean, zip(*(parts.get() for _ in processes), strict=True)))
    finally:
        kill_all(processes)


def take_turns(cfg: Config, seconds: float, learns: bool, start: Any, parts: Any) -> None:
    """Run a whole system in this process, beginning with the other processes; send its `Parts`."""
    torch.set_num_threads(1)
    keep_freed_memory()
    watch = Stopwatch()
    with serial_system(cfg, torch.device("cpu")) as (alone, buffers, workers, server, (learner, *_)):
        feed = learner.feed
        if not learns:
            feed.deliver = lambda batch: (feed.allow_next(), feed.release(batch))
        for name, owner, attribute in (("network", server, "forward"), ("copy", feed, "copy"),
                                       ("parallel", learner, "evaluate"), ("parallel", learner, "carry_back"),
                                       *(("simulation", split.env, "step")
                                         for worker in workers for split in worker.splits.values())):
            watch.watch(name, owner, attribute)
        for worker in workers:
            worker.handle(RESUME, 0)
        start.wait()
        counts = run_turns(watch, workers, server, learner, seconds)
        env_steps = counts["env_steps"] * 1e-6
        agents = alone.envs_per_split * len(buffers.info.agents)
        passed = watch.seconds
        lines = [fit_line(*((agents * requests, (passed[f"{what} {kind}"] / counts[kind]) * 1e6)
                            for kind, requests in (("alone", 1), ("together", alone.num_splits))))
                 for what in ("serve", "handing")]
        sgd_steps = max(counts["sgd_steps"], 1) * 1e-6
        parts.put(Parts(passed["simulation"] / env_steps, passed["step"] / env_steps, *lines[0], *lines[1],
                        passed["refresh"] / counts["rounds"] * 1e6, passed["copy"] / env_steps,
                        (passed["learn"] - passed["copy"] - passed["parallel"]) / sgd_steps,
                        passed["parallel"] / sgd_steps))


def run_turns(watch: Stopwatch, workers: list[RolloutWorker], server: PolicyWorker, learner: Learner,
              seconds: float) -> Counter[str]:
    """Let everybody take turns until whole datasets have passed for so long; return how often what was done."""
    counts, end, env_steps, first_sgd_step = Counter(), math.inf, 0, 0
    while True:
        sgd_steps, num_copied = learner.state.sgd_steps, watch.seconds["copy"]
        watch.time("learn", learner.turn)
        is_new = learner.state.sgd_steps > sgd_steps or (learner.feed.deliver != learner.train
                                                         and watch.seconds["copy"] > num_copied)
        now = time.perf_counter()
        if is_new and now > end:
            counts["env_steps"] = int(sum(worker.env_steps.sum() for worker in workers)) - env_steps
            counts["sgd_steps"] = learner.state.sgd_steps - first_sgd_step
            return counts
        if is_new and end == math.inf:  # the first dataset was the warm-up
            end, env_steps = now + seconds, int(sum(worker.env_steps.sum() for worker in workers))
            first_sgd_step = learner.state.sgd_steps
            watch.seconds.clear()
            counts.clear()
        watch.time("refresh", server.weights.refresh, server.fetch(CURRENT)[0])
        serve_all(watch, server, counts)
        for worker in workers:
            watch.time("step", worker.turn)


def serve_all(watch: Stopwatch, server: PolicyWorker, counts: Counter[str]) -> None:
    """Serve all requests, in turn together and one by one."""
    requests = server.requests.get() if not server.requests.empty() else []
    counts["rounds"] += 1
    is_alone = counts["rounds"] % 2
    kind = "alone" if is_alone else "together"
    for batch in ([request] for request in requests) if is_alone else [requests]:
        network = watch.seconds["network"]
        begin = watch.seconds["serve"]
        watch.time("serve", server.serve, batch)
        passed = watch.seconds["serve"] - begin
        counts[kind] += 1
        watch.seconds[f"serve {kind}"] += passed
        watch.seconds[f"handing {kind}"] += passed - (watch.seconds["network"] - network)


def fit_line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Return the line through two points, (value at 0, slope), both at least 0."""
    slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
    slope = min(slope, first[1] / first[0], second[1] / second[0])
    return (second[1] - slope * second[0], slope)
