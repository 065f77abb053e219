"""Measure the speed: `python benchmark.py throughput --env PongNoFrameskip-v4`. All flags of `train.py` work here too.

    components   what one sample costs in each part of the system, alone, and the bound that follows for this machine
    throughput   the real system after its warm-up, as a share of that bound, and the CPU time of one sample in each
                 kind of process; --modes: with and without double buffering and asynchrony; --sampler_only: without
                 learning; --random_actions: without networks
    scaling      throughput and memory over workers, environments, splits and policy workers; a table and a picture
    compare      the real system beside other programs, or their recorded figures, in turns in one sitting
    report       all of the first three, one after another

Runs go into a temporary folder that is deleted, whatever --train_dir says, and last as long as --seconds asks for.
Machines are shared and drift: figures from one call can be compared with each other, those of two sittings hardly.
A bound counts nothing but the work itself, each part measured with the machine's caches to itself: no system reaches
100 % of it.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from appo import APPO, ComponentError, configure, keep_freed_memory, probe
from children import start_server
from config import Config, UserError, cpu_cores, make_parser, parse_bool
from distributions import ActionDistribution
from envs import describe_profiles, make_vector_env
from flat_spaces import num_action_parameters
from learner import Batch, Learner
from model import choose_device, make_model
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from shared_buffers import RESUME, SLOTS, SPLIT, SharedBuffers

ENDLESS = 10**15  # env_steps
PATIENCE_SEC = 120.0  # another program may take so long to print its first figure
PREPARED_ACTIONS = 64  # batches of random actions, drawn before the clock runs


# ---- systems without one of their parts --------------------------------------------------------------------------


class NoLearner(Learner):
    """Frees every trajectory at once."""

    def collect(self, slots: Sequence[int]) -> Iterator[Batch]:
        self.free_slots(slots)
        return iter(())


class RandomPolicyWorker(PolicyWorker):
    """Draws actions without looking."""

    def gather(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"row": row}

    def forward(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters = torch.zeros(len(batch["row"]), num_action_parameters(self.action_space))
        return {"actions": model.distribution(parameters).sample(),
                "rnn_states": torch.zeros(len(parameters), model.state_size)}


class Sampler(APPO):
    """The system without learning."""

    learner_class = NoLearner


class RandomSampler(Sampler):
    """The system without learning and networks."""

    policy_worker_class = RandomPolicyWorker


# ---- components --------------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """What one sample costs each part, alone, in us. Training: of one pass."""

    simulation: float
    inference: float
    training: float
    message: float  # between two processes that wait for each other

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
    prepared = []
    for kind in env.kinds:
        parameters = torch.zeros(PREPARED_ACTIONS, len(kind.index), num_action_parameters(kind.action_space))
        prepared.append(ActionDistribution(kind.action_space, parameters).sample().numpy())
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        env.step([actions[count % PREPARED_ACTIONS] for actions in prepared])

    return step, env.num_envs


def measure_components(cfg: Config, seconds: float) -> Costs:
    """Measure each part alone, on one core (or on the GPU), with data from the real environments."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(cfg.seed)
    step, num_envs = random_steps(cfg)
    simulation = time_of(step, seconds) / num_envs

    device = choose_device(cfg.device)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        alone = dataclasses.replace(cfg, train_dir=folder, serial_mode=True, async_rl=True, learner_threads=1,
                                    num_policies=1, with_pbt=False, self_play_past_fraction=0.0, policy_mapping="",
                                    num_workers=max(2, min(cfg.num_workers, 4)))
        alone.run_dir.mkdir(parents=True)
        info = probe(alone)
        if len(info.kinds) > 1:
            raise UserError(f"{cfg.env} has agents with different spaces; components are measured only where all have "
                            "the same")
        model = make_model(alone, *info.kinds[0])
        buffers = SharedBuffers(alone, info, [0], [model], [device], None)
        workers = [RolloutWorker(alone, buffers, worker, lambda report: None) for worker in range(alone.num_workers)]
        server = PolicyWorker(alone, buffers, 0, device)
        learner = Learner(alone, buffers, 0, device, lambda report: None)
        fill_slots(buffers, workers, server)
        # one batch: while one half of the environments is stepped, the policy workers share the other's requests
        requests = [(SPLIT, split) for split in range(0, alone.num_splits, max(2, alone.worker_num_splits))]
        servers = cfg.policy_workers_per_policy * cfg.num_policies
        count = max(1, round(len(requests) * cfg.num_workers / alone.num_workers / servers))
        requests = list(itertools.islice(itertools.cycle(requests), count))
        agents = alone.envs_per_split * len(info.agents)
        buffers.agent_policy.fill_(0)
        buffers.agent_t.fill_(0)
        buffers.agent_slot.copy_(torch.arange(buffers.agent_slot.numel()).view_as(buffers.agent_slot))
        inference = time_of(lambda: serve(buffers, server, requests), seconds) / (len(requests) * agents)
        training = time_of(lambda: train(buffers, learner), seconds) / (
            alone.trajectories_per_dataset * alone.rollout * alone.num_epochs)
    return Costs(simulation * 1e6, inference * 1e6, training * 1e6, measure_message() * 1e6)


def fill_slots(buffers: SharedBuffers, workers: list[RolloutWorker], server: PolicyWorker) -> None:
    """Let the real workers fill every trajectory once."""
    for worker in workers:
        worker.handle(RESUME, 0)
    while not server.shared.requests.empty():
        server.serve([server.shared.requests.get()])
        for inbox, worker in zip(buffers.inboxes, workers, strict=True):
            while not inbox.empty():
                worker.handle(*inbox.get())


def serve(buffers: SharedBuffers, server: PolicyWorker, requests: list[tuple[int, int]]) -> None:
    """Serve requests and throw the answers away."""
    server.serve(requests)
    empty_inboxes(buffers)


def train(buffers: SharedBuffers, learner: Learner) -> None:
    """Train on one dataset, made of the first worker's trajectories over and over."""
    missing = learner.cfg.trajectories_per_dataset
    while missing:
        slots = range(min(buffers.slots_per_worker, missing))
        learner.handle(SLOTS, *slots)
        missing -= len(slots)
    empty_inboxes(buffers)


def empty_inboxes(buffers: SharedBuffers) -> None:
    """Throw away what was sent to the rollout workers."""
    for inbox in buffers.inboxes:
        while not inbox.empty():
            inbox.get()


def measure_message() -> float:
    """Return the seconds from a put to the end of the get in another process that waits for it."""
    context = start_server()
    there, back = context.SimpleQueue(), context.SimpleQueue()
    with running([context.Process(target=echo, args=(there, back), daemon=True)]):
        for rounds in (1, 3000):  # the first one waits for the process's start
            begin = time.perf_counter()
            for _ in range(rounds):
                there.put((SPLIT, 0))
                back.get()
        seconds = time.perf_counter() - begin
    return seconds / rounds / 2


@contextlib.contextmanager
def running(processes: list[Any]) -> Iterator[None]:
    """Start processes; end them in any case, since children ignore the signals that stop the program."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:  # it was started
                process.kill()
                process.join()


def echo(there: Any, back: Any) -> None:
    """Send back what comes."""
    while True:
        back.put(there.get())


def measure_simulation(cfg: Config, seconds: float) -> float:
    """Return the env_steps/s of `num_workers` processes that do nothing but step environments."""
    context = start_server()
    ready, counts, go = context.Semaphore(0), context.SimpleQueue(), context.Event()
    processes = [context.Process(target=simulate, args=(cfg, seconds, ready, go, counts), daemon=True)
                 for _ in range(cfg.num_workers)]
    with running(processes):
        for _ in processes:
            ready.acquire()
        go.set()
        return sum(counts.get() for _ in processes)


def simulate(cfg: Config, seconds: float, ready: Any, go: Any, counts: Any) -> None:
    """Step environments for a while; send the env_steps/s."""
    step, num_envs = random_steps(cfg)
    step()
    ready.release()
    go.wait()
    calls, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        step()
        calls += 1
    counts.put(calls * num_envs / elapsed)


# ---- the real system ---------------------------------------------------------------------------------------------


class Throughput(NamedTuple):
    """What the real system did after its warm-up."""

    env_steps_per_sec: float
    lag_mean: float  # of the whole run, in SGD steps
    lag_max: int
    start_sec: float  # from making the system to the first SGD step (or env_step)
    peak_memory_bytes: int
    cpu_us: dict[str, float]  # CPU time of one sample in each kind of process
    idle: float  # share of the cores, whoever else used them


def cpu_seconds(appo: APPO) -> dict[str, float]:
    """Return the CPU time that each kind of process has taken so far, and for how long a core was idle."""
    seconds = {"supervisor": sum(psutil.Process().cpu_times()[:2])}
    for process in appo.processes:
        kind = process.name.rstrip("_0123456789")
        with contextlib.suppress(psutil.Error):  # it has died; the supervisor will say so
            seconds[kind] = seconds.get(kind, 0.0) + sum(psutil.Process(process.pid).cpu_times()[:2])
    cores = psutil.cpu_times(percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    idle = [cores[core].idle for core in own if core < len(cores)]
    return seconds | {"idle": sum(idle) / len(idle)}


def measure_throughput(settings: dict[str, Any], seconds: float, system: type[APPO] = APPO) -> Throughput:
    """Run a system; measure for some seconds after a warm-up of a third as long, at least until it learns."""
    begin, marks = time.perf_counter(), []  # marks: it runs, is warm, was measured
    waits = max(seconds / 3, 2.0), seconds  # between two of them

    def is_over() -> bool:
        now, steps = time.perf_counter(), appo.env_steps
        if len(marks) == 3:  # asked once more while an evaluation ends
            return True
        is_running = steps and (issubclass(system, Sampler) or all(appo.versions))
        if (now > marks[-1][0] + waits[len(marks) - 1]) if marks else is_running:
            marks.append((now, steps, cpu_seconds(appo)))
        return len(marks) == 3

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        given = settings | {"train_dir": folder, "train_for_env_steps": ENDLESS, "train_for_seconds": float("inf")}
        with system(**given) as appo:
            appo.train(should_stop=is_over)
            policies, peak = appo.records.policies, appo.records.peak_memory_bytes
    datasets = max(sum(policy.num_datasets for policy in policies), 1)
    (begin_sec, begin_steps, cpu_before), (end_sec, end_steps, cpu_after) = marks[1:]
    steps, elapsed = end_steps - begin_steps, end_sec - begin_sec
    cpu = {kind: cpu_after[kind] - cpu_before[kind] for kind in cpu_after}
    idle = cpu.pop("idle") / elapsed
    return Throughput(steps / elapsed, sum(policy.lag_sum for policy in policies) / datasets,
                      max(policy.lag_max for policy in policies), marks[0][0] - begin, peak,
                      {kind: seconds / steps * 1e6 for kind, seconds in cpu.items()}, idle)


# ---- commands ----------------------------------------------------------------------------------------------------


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells in aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = [cell.ljust(width) if i == 0 else cell.rjust(width)
                          for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        print("  ".join([first, *others]).rstrip(), flush=True)


def rates(cfg: Config, env_steps_per_sec: float) -> list[str]:
    return [f"{env_steps_per_sec:,.0f}", f"{env_steps_per_sec * cfg.env_frameskip:,.0f}"]


def run_components(cfg: Config, args: argparse.Namespace) -> None:
    """Print the cost of each part and the bound."""
    costs = measure_components(cfg, args.seconds)
    simulation = measure_simulation(cfg, args.seconds)
    device = choose_device(cfg.device)
    print(f"{cfg.env} on {describe_machine(cfg)}\n")
    print_table([
        ["cost of one sample, alone, us", ""],
        [f"simulation, one core ({cfg.envs_per_split} environments)", f"{costs.simulation:.1f}"],
        [f"inference, {'one core' if device.type == 'cpu' else device} (one policy worker, half of the environments)",
         f"{costs.inference:.1f}"],
        [f"training pass, {'one core' if device.type == 'cpu' else device} ({cfg.batch_size} samples)",
         f"{costs.training:.1f}"],
        ["message between two waiting processes", f"{costs.message:.1f}"]])
    print()
    table = [["", "env_steps/s", "frames/s", "computed as"]]
    for name, sampler_only in (("bound", False), ("bound without learning", True)):
        bound, formula = costs.bound(cfg, sampler_only=sampler_only)
        table.append([name, *rates(cfg, bound), formula])
    table.append(["pure simulation", *rates(cfg, simulation), f"measured, {cfg.num_workers} processes"])
    print_table(table)


def run_throughput(cfg: Config, args: argparse.Namespace) -> None:
    """Print what the real system does, as a share of the bound and of pure simulation."""
    without_learning = args.sampler_only or args.random_actions
    system = RandomSampler if args.random_actions else Sampler if args.sampler_only else APPO
    costs, simulation = measure_components(cfg, args.seconds / 6), measure_simulation(cfg, args.seconds / 4)
    bound, formula = costs.bound(cfg, sampler_only=without_learning)
    what = "random actions" if args.random_actions else "sampling only" if args.sampler_only else "learning"
    print(f"{cfg.env} on {describe_machine(cfg)}, {what}; {cfg.num_workers} rollout workers x "
          f"{cfg.num_envs_per_worker} environments, batch {cfg.batch_size} x {cfg.num_batches_per_epoch}, "
          f"{cfg.num_epochs} epoch(s)")
    print(f"bound: {bound:,.0f} env_steps/s = {formula}; pure simulation in {cfg.num_workers} processes: "
          f"{simulation:,.0f}\n")
    table = [["", "env_steps/s", "frames/s", "of bound", "of simulation", "lag mean", "max", "start, s", "memory, GB"]]
    cpu_table = []
    for name, settings in modes(cfg) if args.modes else [("as configured", {})]:
        runs = sorted(measure_throughput(args.settings | settings, args.seconds, system) for _ in range(args.repeats))
        run = runs[len(runs) // 2]
        of_bound = "-" if args.random_actions else f"{run.env_steps_per_sec / bound:.0%}"
        lag = ["-", "-"] if without_learning else [f"{run.lag_mean:.1f}", f"{run.lag_max}"]
        table.append([name, *rates(cfg, run.env_steps_per_sec), of_bound, f"{run.env_steps_per_sec / simulation:.0%}",
                      *lag, f"{run.start_sec:.1f}", f"{run.peak_memory_bytes / 1e9:.2f}"])
        cpu_table.append([name, *(f"{us:.1f}" for us in run.cpu_us.values()), f"{sum(run.cpu_us.values()):.1f}",
                          f"{run.idle:.0%}"])
    print_table(table)
    print()
    print_table([["CPU time of one sample, us", *run.cpu_us, "together", "cores idle"], *cpu_table])


def modes(cfg: Config) -> list[tuple[str, dict[str, Any]]]:
    """List the four ways to run: synchronous datasets hold one trajectory of each environment."""
    num_envs = cfg.num_envs_per_worker + cfg.num_envs_per_worker % 2
    samples = cfg.num_workers * num_envs * cfg.rollout
    batch = cfg.batch_size if samples % cfg.batch_size == 0 else samples
    rows = []
    for is_async in (False, True):
        for splits in (1, 2):
            settings = {"async_rl": is_async, "worker_num_splits": splits,
                        "num_envs_per_worker": num_envs, "num_workers": cfg.num_workers}
            if not is_async:
                settings |= {"batch_size": batch, "num_batches_per_epoch": samples // batch}
            name = f"{'asynchronous' if is_async else 'synchronous'}, {'double-buffered' if splits == 2 else '1 split'}"
            rows.append((name, settings))
    return rows


def run_scaling(cfg: Config, args: argparse.Namespace) -> None:
    """Print and draw the throughput over the sizes of the system, each changed alone."""
    cores, splits = cpu_cores(), cfg.worker_num_splits
    sweeps = {
        "num_workers": sorted({1, 2, max(cores // 2, 1), cores, 2 * cores}),
        "num_envs_per_worker": [math.ceil(n / splits) * splits for n in (2, 4, 8, 16, 32, 64)],
        "worker_num_splits": [n for n in (1, 2, 4) if cfg.num_envs_per_worker % n == 0],
        "policy_workers_per_policy": [1, 2],
    }
    print(f"{cfg.env} on {describe_machine(cfg)}, {cfg.num_workers} rollout workers x "
          f"{cfg.num_envs_per_worker} environments in {splits} split(s) unless said\n")
    base = args.settings | {"num_workers": cfg.num_workers, "num_envs_per_worker": cfg.num_envs_per_worker}
    results: dict[str, list[tuple[int, Throughput]]] = {}
    table = [["", "env_steps/s", "frames/s", "lag mean", "memory, GB", "start, s"]]
    for name, values in sweeps.items():
        results[name] = []
        for value in dict.fromkeys(values):
            run = measure_throughput(base | {name: value}, args.seconds)
            results[name].append((value, run))
            print(f"{name}={value}: {run.env_steps_per_sec:,.0f} env_steps/s", flush=True)  # lest it be lost
            table.append([f"{name}={value}", *rates(cfg, run.env_steps_per_sec), f"{run.lag_mean:.1f}",
                          f"{run.peak_memory_bytes / 1e9:.2f}", f"{run.start_sec:.1f}"])
    print()
    print_table(table)
    draw_scaling(results, args.output, f"{cfg.env}, {describe_machine(cfg)}")


def draw_scaling(results: dict[str, list[tuple[int, Throughput]]], output: Path, title: str) -> None:
    """Draw the throughput, and the memory beside it, over each size."""
    import matplotlib as mpl  # noqa: PLC0415  slow to import

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    all_runs = [run for part in results.values() for _, run in part]
    fastest = max(run.env_steps_per_sec for run in all_runs)
    largest = max(run.peak_memory_bytes for run in all_runs) / 1e9
    figure, panels = plt.subplots(1, len(results), figsize=(3.4 * len(results), 3.2), sharey=True, layout="constrained")
    for panel, (name, runs) in zip(panels, results.items(), strict=True):
        positions = range(len(runs))
        panel.plot(positions, [run.env_steps_per_sec for _, run in runs], "o-")
        panel.set_xticks(positions, [str(value) for value, _ in runs])
        panel.set_xlabel(name)
        panel.set_ylim(0, 1.1 * fastest)
        panel.grid(alpha=0.3)
        memory = panel.twinx()
        memory.plot(positions, [run.peak_memory_bytes / 1e9 for _, run in runs], "s--", color="tab:gray", alpha=0.6)
        memory.set_ylim(0, 1.2 * largest)
        is_last = panel is panels[-1]
        memory.tick_params(right=is_last, labelright=is_last)
    panels[0].set_ylabel("env_steps/s")
    memory.set_ylabel("memory, GB (dashed)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(output, dpi=110)
    print(f"\n{output}")


def run_compare(cfg: Config, args: argparse.Namespace) -> None:
    """Print our throughput beside that of other programs, measured in turns, and beside recorded figures."""
    if not args.other:
        raise UserError("compare needs --other NAME COMMAND PATTERN, or --other NAME FRAMES_PER_SECOND")
    measured: dict[str, list[float]] = {"this system": []}
    commands, recorded = {}, {}
    for name, what, *pattern in args.other:
        if pattern:
            commands[name] = what, pattern[0]
            measured[name] = []
        else:
            recorded[name] = float(what)
    print(f"{cfg.env} on {describe_machine(cfg)}, {args.seconds:.0f} s each, in turns", flush=True)
    for _ in range(args.repeats):
        for name, runs in measured.items():
            if name in commands:
                figure = run_other(name, *commands[name], args.seconds)
            else:
                figure = measure_throughput(args.settings, args.seconds).env_steps_per_sec * cfg.env_frameskip
            print(f"{name}: {figure:,.0f} frames/s", flush=True)  # nothing is lost if a later one fails
            runs.append(figure)
    print()
    ours = statistics.median(measured["this system"])
    table = [["", "frames/s, median", "all runs", "ours / this"]]
    for name, runs in measured.items():
        table.append([name, f"{statistics.median(runs):,.0f}", " ".join(f"{run:,.0f}" for run in runs),
                      f"{ours / statistics.median(runs):.2f}"])
    for name, figure in recorded.items():
        table.append([f"{name} (recorded)", f"{figure:,.0f}", "", f"{ours / figure:.2f}"])
    print_table(table)


def run_report(cfg: Config, args: argparse.Namespace) -> None:
    """Measure everything there is to say of a machine."""
    values = vars(args)
    run_components(cfg, args)
    for flags in ({"modes": True}, {"sampler_only": True}, {"random_actions": True}):
        print(f"\n\n## throughput --{next(iter(flags))}\n")
        run_throughput(cfg, argparse.Namespace(**values | flags))
    print("\n\n## scaling\n")
    run_scaling(cfg, args)


def run_other(name: str, command: str, pattern: str, seconds: float) -> float:
    """Run another program until it has printed its speed for some seconds; return the last figure it printed.

    The clock starts with its first figure above 0. It may end by itself; else it is interrupted, and then killed.
    """
    figure, first = None, None
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", start_new_session=True)
    hopeless = threading.Timer(PATIENCE_SEC + seconds, end_group, (process,))  # ends the output below
    hopeless.start()
    try:
        for line in process.stdout:
            for match in re.finditer(pattern, line):
                with contextlib.suppress(ValueError):
                    figure = float(match.group(1).replace(",", "")) or figure  # 0: it has not begun, or has ended
                    first = first or (figure and time.monotonic())
            if first is not None and time.monotonic() > first + seconds:
                break
    finally:
        hopeless.cancel()
        end_group(process)
        process.stdout.close()
    if figure is None:
        raise UserError(f"--other {name}: the command printed nothing above 0 that matches '{pattern}'; run it alone")
    return figure


def end_group(process: subprocess.Popen) -> None:
    """Interrupt a process with all its children; give them time to clean up, then kill those that are left."""
    for number in (signal.SIGINT, signal.SIGKILL):
        deadline = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # else it would stay as a zombie
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def describe_machine(cfg: Config) -> str:
    """Name the processor, its cores and the GPU."""
    cpu, device = "unknown CPU", choose_device(cfg.device)
    with contextlib.suppress(OSError):
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{cpu_cores()} cores of {cpu}{gpu}"


COMMANDS = {"components": run_components, "throughput": run_throughput, "scaling": run_scaling, "compare": run_compare,
            "report": run_report}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `settings` holds the flags of train.py that were given."""
    description, _, epilog = __doc__.partition("\n\n")
    parser = make_parser(description, f"{epilog}\n{describe_profiles()}")
    own = parser.add_argument_group("benchmark")
    own.add_argument("command", choices=COMMANDS, help="see below")
    own.add_argument("--seconds", type=float, default=20.0, help="measure each for so long, after a warm-up [20]")
    own.add_argument("--repeats", type=int, default=1, help="throughput, compare: take the median of so many runs [1]")
    own.add_argument("--modes", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                     help="throughput: synchronous and asynchronous, one split and two [False]")
    own.add_argument("--sampler_only", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                     help="throughput: sample with the policy's network, learn nothing [False]")
    own.add_argument("--random_actions", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                     help="throughput: no networks at all [False]")
    own.add_argument("--other", nargs="+", action="append", default=[], metavar="WORD",
                     help="compare: NAME FRAMES_PER_SECOND, or NAME COMMAND PATTERN, a regular expression whose group "
                     "matches the frames/s that the command prints; may be repeated")
    own.add_argument("--output", type=Path, default=Path("scaling.png"), help="scaling: picture file [scaling.png]")
    names = {action.dest for action in own._group_actions}
    given = vars(parser.parse(argv))
    args = argparse.Namespace(**{name: given.pop(name) for name in names})
    args.settings = given
    for name in ("seconds", "repeats"):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name}={getattr(args, name)} must be greater than 0")
    for words in args.other:
        if len(words) not in (2, 3) or (len(words) == 2 and not words[1].replace(".", "", 1).isdigit()):
            raise UserError(f"--other {' '.join(words)}: give NAME FRAMES_PER_SECOND, or NAME COMMAND PATTERN")
    return args


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    try:
        args = parse(argv)
        COMMANDS[args.command](configure({"env": "", **args.settings, "restart_behavior": "overwrite"}), args)
    except UserError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmark.py: ended", file=sys.stderr)
        return 1
    except ComponentError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its processes would wait for it for ever
    sys.exit(main(sys.argv[1:]))
