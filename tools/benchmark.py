"""Measure the speed: `python benchmark.py throughput --env PongNoFrameskip-v4`. All flags of `train.py` work here too.

    components   what one sample costs in each part of the system, alone, and the bound that follows for this machine
    throughput   the real system after its warm-up, as a share of that bound, and the CPU time of one sample in each
                 kind of process; --modes: with and without double buffering and asynchrony; --sampler_only: without
                 learning; --random_actions: without networks
    scaling      throughput and memory over workers, environments, splits and policy workers; a table and a picture
    compare      the real system beside other programs, in turns in one sitting
    predict      what limits the speed and how fast that is, also on machines that are not here: --cores, --gpu,
                 --num_gpus; --check: is it true for several settings, or that of --env, here
    report       all that a real GPU can show, written to report.md: components, throughput, what was predicted, each
                 option for a GPU off and on in turns, --minutes of learning; half an hour

Runs go into a temporary folder that is deleted, whatever --train_dir says, and last as long as --seconds asks for.
Machines are shared and their speed drifts: compare the figures of one call, not those of two sittings.
A bound counts only the work itself. Each part is measured alone, with all caches to itself, so no system reaches
100 % of it.
"""

import argparse
import contextlib
import io
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
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from appo import APPO
from config import Config
from envs.flat_spaces import num_action_parameters
from learner import Learner
from policy_worker import PolicyWorker
from runtime.command_line import parse_bool
from runtime.container import cpu_cores
from runtime.defaults import make_full_parser
from runtime.machine import choose_device
from runtime.run_folder import configure
from runtime.user_error import ComponentError, UserError
from tools import predict, report
from tools.components import measure_components, measure_simulation
from tools.gpu_costs import gpu_named

ENDLESS = 10**15  # env_steps
WARM_UP_SEC = 2.0  # at least
PATIENCE_SEC = 120.0  # another program may take so long to print its first figure
GRACE_SEC = 10.0  # for another program to end when it is interrupted


# ---- systems without one of their parts --------------------------------------------------------------------------


class NoLearner(Learner):
    """Frees every trajectory at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.feed.insert = lambda kind, *slots: self.feed.free_slots(slots)


class RandomPolicyWorker(PolicyWorker):
    """Draws actions without looking."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sources, self.packing = {"rank": self.sources["rank"]}, None  # nothing is gathered

    def forward(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters = torch.zeros(len(batch["rank"]), num_action_parameters(self.action_space))
        return {"actions": model.distribution(parameters).sample(),
                "rnn_states": torch.zeros(len(parameters), model.state_size)}


class Sampler(APPO):
    """The system without learning."""

    learner_class = NoLearner


class RandomSampler(Sampler):
    """The system without learning and networks."""

    policy_worker_class = RandomPolicyWorker


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
    for process in appo.crew.processes:
        kind = process.name.rstrip("_0123456789")
        with contextlib.suppress(psutil.Error):  # it has died; the supervisor will say so
            seconds[kind] = seconds.get(kind, 0.0) + sum(psutil.Process(process.pid).cpu_times()[:2])
    own = psutil.Process().cpu_affinity()
    idle = [core.idle for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in own]
    return seconds | {"idle": statistics.mean(idle)}


def measure_throughput(settings: dict[str, Any], seconds: float, system: type[APPO] = APPO) -> Throughput:
    """Run a system; measure for some seconds after a warm-up of a third as long, at least until it learns."""
    begin, marks = time.perf_counter(), []  # marks: it runs, is warm, was measured
    waits = max(seconds / 3, WARM_UP_SEC), seconds  # between two of them

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
    first_width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(first_width), *(cell.rjust(width) for cell, width in zip(others, widths, strict=True))]
        print("  ".join(cells).rstrip(), flush=True)


def rates(cfg: Config, env_steps_per_sec: float) -> list[str]:
    return [f"{env_steps_per_sec:,.0f}", f"{env_steps_per_sec * cfg.env_frameskip:,.0f}"]


def run_components(cfg: Config, args: argparse.Namespace) -> None:
    """Print the cost of each part and the bound."""
    costs = measure_components(cfg, args.seconds)
    simulation = measure_simulation(cfg, args.seconds)
    device = choose_device(cfg.device)
    where = "one core" if device.type == "cpu" else device
    print(f"{cfg.env} on {describe_machine(cfg)}\n")
    print_table([
        ["cost of one sample, alone, us", ""],
        [f"simulation, one core ({cfg.envs_per_split} environments)", f"{costs.simulation:.1f}"],
        [f"inference, {where} (one policy worker, half of the environments)", f"{costs.inference:.1f}"],
        [f"training pass, {where} ({cfg.batch_size} samples)", f"{costs.training:.1f}"]])
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
    sizes = {"num_workers": cfg.num_workers, "num_envs_per_worker": num_envs}
    synchronous = {"async_rl": False, "batch_size": batch, "num_batches_per_epoch": samples // batch}
    return [(f"{mode}, {splitting}", {**sizes, **settings, "worker_num_splits": splits})
            for mode, settings in (("synchronous", synchronous), ("asynchronous", {"async_rl": True}))
            for splits, splitting in ((1, "1 split"), (2, "double-buffered"))]


def run_scaling(cfg: Config, args: argparse.Namespace) -> None:
    """Print and draw the throughput over the sizes of the system, each changed alone."""
    cores, splits = cpu_cores(), cfg.worker_num_splits
    sweeps = {
        "num_workers": sorted({1, 2, max(cores // 2, 1), cores, 2 * cores}),
        "num_envs_per_worker": sorted({math.ceil(n / splits) * splits for n in (2, 4, 8, 16, 32, 64)}),
        "worker_num_splits": [n for n in (1, 2, 4) if cfg.num_envs_per_worker % n == 0],
        "policy_workers_per_policy": [1, 2],
    }
    print(f"{cfg.env} on {describe_machine(cfg)}, {cfg.num_workers} rollout workers x "
          f"{cfg.num_envs_per_worker} environments in {splits} split(s) unless said\n")
    base = args.settings | {"num_workers": cfg.num_workers, "num_envs_per_worker": cfg.num_envs_per_worker}
    speeds: dict[str, dict[int, float]] = {name: {} for name in sweeps}
    table = [["", "env_steps/s", "frames/s", "lag mean", "memory, GB", "start, s"]]
    for name, values in sweeps.items():
        for value in values:
            run = measure_throughput(base | {name: value}, args.seconds)
            speeds[name][value] = run.env_steps_per_sec
            print(f"{name}={value}: {run.env_steps_per_sec:,.0f} env_steps/s", flush=True)  # lest it be lost
            table.append([f"{name}={value}", *rates(cfg, run.env_steps_per_sec), f"{run.lag_mean:.1f}",
                          f"{run.peak_memory_bytes / 1e9:.2f}", f"{run.start_sec:.1f}"])
    print()
    print_table(table)
    draw_scaling(speeds, args.output or Path("scaling.png"), f"{cfg.env}, {describe_machine(cfg)}")


def draw_scaling(speeds: dict[str, dict[int, float]], output: Path, title: str) -> None:
    """Draw the throughput over each size."""
    import matplotlib as mpl  # noqa: PLC0415  slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    from tools import style  # noqa: PLC0415

    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(style.WIDTH, 3), layout="constrained")
        panels = figure.subplots(1, len(speeds), sharey=True, squeeze=False)[0]
        for panel, (name, by_size) in zip(panels, speeds.items(), strict=True):
            panel.plot([str(size) for size in by_size], list(by_size.values()), "o-")
            panel.set_xlabel(name)
            panel.set_ylim(bottom=0)
        panels[0].set_ylabel("env_steps/s")
        figure.suptitle(title)
        figure.savefig(output, dpi=style.DPI)
    print(f"\n{output}")


def run_compare(cfg: Config, args: argparse.Namespace) -> None:
    """Print our throughput beside that of other programs, measured in turns."""
    if not args.other:
        raise UserError("compare needs --other NAME COMMAND PATTERN")
    commands = {name: (command, pattern) for name, command, pattern in args.other}
    measured: dict[str, list[float]] = {name: [] for name in ("this system", *commands)}
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
    print_table(table)


def run_predict(cfg: Config | None, args: argparse.Namespace) -> None:
    """Print what is predicted, and how that was computed; or check it."""
    if args.check:
        check_predictions(args)
        return
    machine, gpu = predict.machine_of(args.cores, args.gpu, args.num_gpus)
    cfg = predict.settings_for(args.settings, machine)
    found = predict.predict(cfg, machine, gpu, args.seconds / 2)
    speed = found.played.env_steps_per_sec
    print("\n".join(predict.describe(found, machine, gpu)))
    print()
    rows = [[limit.name, *rates(cfg, limit.env_steps_per_sec), f"{speed / limit.env_steps_per_sec:.0%}", limit.formula]
            for limit in found.limits]
    print_table([["what each allows", "env_steps/s", "frames/s", "load", "computed as"], *rows])
    print()
    print_table([["", "env_steps/s", "frames/s", "of simulation", "lag", "limited by"],
                 ["predicted", *rates(cfg, speed), f"{speed / found.simulation:.0%}", f"{found.played.lag:.1f}",
                  found.limit]])


def run_report(cfg: Config, args: argparse.Namespace) -> None:
    """Measure everything, and write a report."""
    cuda = choose_device(cfg.device).type == "cuda"
    args.cores = args.num_gpus = 0
    args.gpu = gpu_named(torch.cuda.get_device_name()) if cuda else ""
    sections = {"Components": lambda: run_components(cfg, args)}
    if args.gpu or not cuda:  # the figures of this one are known
        sections["Predicted"] = lambda: run_predict(cfg, args)
    report.write_report(cfg, args, describe_machine(cfg), measure_throughput, sections)


def check_predictions(args: argparse.Namespace) -> None:
    """Print what is predicted beside what is measured, for the settings given or for several."""
    table = [["", "predicted", "measured", "ratio", "lag predicted", "measured", "limited by"]]
    for name, settings in {args.settings["env"]: {}}.items() if args.settings.get("env") else predict.CHECKS.items():
        row, notes = predict.check(name, settings | args.settings, args.seconds, args.repeats, measure_throughput)
        print("\n".join(notes), flush=True)
        table.append(row)
    print("\nenv_steps/s, medians; measured: divided by the share of the cores that was left to it")
    print_table(table)


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
        deadline = time.monotonic() + GRACE_SEC
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # else it would stay as a zombie
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def describe_machine(cfg: Config) -> str:
    """Name the processor, its cores and the GPU."""
    device = choose_device(cfg.device)
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{cpu_cores()} cores of {names[0] if names else 'unknown CPU'}{gpu}"


COMMANDS = {"components": run_components, "throughput": run_throughput, "scaling": run_scaling, "compare": run_compare,
            "predict": run_predict, "report": run_report}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `settings` holds the flags of train.py that were given."""
    description, _, epilog = __doc__.partition("\n\n")
    parser = make_full_parser(description, f"{epilog}\n")
    parser.usage = "%(prog)s COMMAND --env ID [--setting VALUE ...]"
    own = parser.add_argument_group("benchmark")
    own.add_argument("command", choices=COMMANDS, help="see below")
    own.add_argument("--seconds", type=float, default=20.0, help="measure each for so long, after a warm-up [20]")
    own.add_argument("--repeats", type=int, default=1, help="throughput, compare: take the median of so many runs [1]")
    switch = {"type": parse_bool, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}
    own.add_argument("--modes", help="throughput: synchronous and asynchronous, one split and two [False]", **switch)
    own.add_argument("--sampler_only", help="throughput: sample with the policy's network, learn nothing [False]",
                     **switch)
    own.add_argument("--random_actions", help="throughput: no networks at all [False]", **switch)
    own.add_argument("--other", nargs=3, action="append", default=[], metavar=("NAME", "COMMAND", "PATTERN"),
                     help="compare: another program; PATTERN is a regular expression whose group matches the frames/s"
                     " that COMMAND prints; may be repeated")
    own.add_argument("--cores", type=int, default=0, help="predict: cores of the machine [0: as here]")
    own.add_argument("--gpu", default="", help=f"predict: its GPU, one of {', '.join(predict.GPUS)}")
    own.add_argument("--num_gpus", type=int, default=0, help="predict: how many of them [0: one, with --gpu]")
    own.add_argument("--check", help="predict: measure too, and compare [False]", **switch)
    own.add_argument("--minutes", type=float, default=5.0, help="report: of learning; 0: none [5]")
    own.add_argument("--output", type=Path, default=None, help="scaling, report: file [scaling.png, report.md]")
    names = {action.dest for action in own._group_actions}
    given = vars(parser.parse(argv))
    args = argparse.Namespace(**{name: given.pop(name) for name in names})
    args.settings, args.command_line = given, " ".join(["benchmark.py", *argv])
    for name in ("seconds", "repeats"):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name}={getattr(args, name)} must be greater than 0")
    return args


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    try:
        args = parse(argv)
        checks = args.command == "predict" and args.check
        cfg = None if checks else configure({"env": "", **args.settings, "restart_behavior": "overwrite"})
        COMMANDS[args.command](cfg, args)
    except UserError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    except (ComponentError, KeyboardInterrupt) as error:
        print(f"benchmark.py: {str(error) or 'ended'}", file=sys.stderr)
        return 1
    return 0
