"""Measure the speed of real runs: `python -m tools.benchmark throughput --env PongNoFrameskip-v4 --seconds 30`.

    throughput   one run: env_steps and frames a second, CPU time of an env_step in each kind of process, policy lag
    scaling      the same over numbers of cores, and over numbers of rollout workers on all cores
    compare      two checkouts or two settings in turns, such as --base "../before" --new ". --num_epochs 2": the ratio
                 of each pair, and its median

All other flags are those of `train.py`. It is run as everybody runs it, in a temporary folder, and watched from outside
(the rows of its metrics, the CPU time of its processes): so checkouts of any age can be compared. Machines are shared
and their speed drifts: compare the figures of one call, not those of two sittings.
"""

import argparse
import contextlib
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from runtime.files import read_lines
from runtime.guard import take_programs_along
from runtime.user_error import UserError, exit_status

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_SEC = 2.0  # at least, after the first SGD step
STOP_SEC = 60.0  # a run that was told to stop may take so long
ENDLESS = ("--report_interval_sec=1", "--train_for_env_steps=1e15", "--experiment=run")


class Speed(NamedTuple):
    """What a run did in the time that was measured."""

    env_steps: float  # a second
    frames: float  # of the simulator, a second
    cpu_us: dict[str, float]  # CPU time of one env_step, by kind of process, and together
    policy_lag: float  # SGD steps, mean
    idle: float  # share of all cores, whoever else used them

    def __str__(self) -> str:
        return (f"{self.env_steps:9,.0f} env_steps/s, {self.frames:9,.0f} frames/s, {self.cpu_us['together']:7.1f} CPU "
                f"us an env_step, policy lag {self.policy_lag:.1f}, cores idle {self.idle:.0%}")


@contextlib.contextmanager
def running(checkout: Path, flags: Sequence[str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Run train.py of a checkout; yield its process and the folder of its run; stop it in the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(checkout / "train.py"), *flags, *ENDLESS, f"--train_dir={folder}"]
        process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.DEVNULL)
        try:
            yield process, Path(folder, "run")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SEC)
            process.kill()


def next_row(process: subprocess.Popen, run_dir: Path) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Wait for the next row of a run's metrics; return all rows, and CPU seconds so far by kind of process."""
    known = rows = read_lines(run_dir / "metrics.jsonl")
    while len(rows) == len(known):
        if process.poll() is not None:
            raise UserError("train.py has ended")
        time.sleep(0.02)
        rows = read_lines(run_dir / "metrics.jsonl")
    seconds: Counter[str] = Counter()
    main = psutil.Process(process.pid)
    for member in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just died
            kind = re.match("rollout|policy|learner|evaluator|", member.name())[0] or "main"
            seconds[kind] += sum(member.cpu_times()[:2])
    return rows, seconds


def measure(flags: Sequence[str], seconds: float, checkout: Path = ROOT, cores: Sequence[int] = ()) -> Speed:
    """Train with a checkout; measure for some seconds after its first SGD step and a warm-up of a third as long.

    cores: those that it may use; all by default. Raises `UserError` when it ends by itself, which it has explained.
    """
    with running(checkout, flags) as (process, run_dir):
        if cores:
            psutil.Process(process.pid).cpu_affinity(cores)
        while not next_row(process, run_dir)[0][-1]["sgd_steps"]:
            pass
        time.sleep(max(seconds / 3, WARM_UP_SEC))
        before, cpu_before = next_row(process, run_dir)
        idle, begin = psutil.cpu_times().idle, time.monotonic()
        time.sleep(seconds)
        rows, cpu = next_row(process, run_dir)
        idle = (psutil.cpu_times().idle - idle) / (time.monotonic() - begin) / psutil.cpu_count()
        frameskip = json.loads((run_dir / "config.json").read_text())["env_frameskip"]
    steps = rows[-1]["env_steps"] - before[-1]["env_steps"]
    speed = steps / (rows[-1]["wall_sec"] - before[-1]["wall_sec"])
    cpu_us = {kind: (cpu[kind] - cpu_before[kind]) / steps * 1e6 for kind in cpu}
    lags = [row["policy_lag_mean"] for row in rows[len(before):] if row.get("policy_lag_mean") is not None]
    cpu_us["together"] = sum(cpu_us.values())
    return Speed(speed, speed * frameskip, cpu_us, statistics.fmean(lags or [0]), idle)


def run_throughput(args: argparse.Namespace, flags: list[str]) -> None:
    """Print what one run does."""
    speed = measure(flags, args.seconds)
    print(speed)
    print("CPU us an env_step:", ", ".join(f"{kind} {us:.1f}" for kind, us in speed.cpu_us.items()))


def run_scaling(args: argparse.Namespace, flags: list[str]) -> None:
    """Print the speed over the number of cores, and over the number of rollout workers on all of them."""
    cores = psutil.Process().cpu_affinity()
    powers = [2**power for power in range(12)]
    for number in sorted({len(cores), *(power for power in powers if power < len(cores))}):
        print(f"cores={number:<12}", measure(flags, args.seconds, cores=cores[:number]), flush=True)
    for number in [power for power in powers if power <= 2 * len(cores)]:
        print(f"num_workers={number:<6}", measure([*flags, f"--num_workers={number}"], args.seconds), flush=True)


def run_compare(args: argparse.Namespace, flags: list[str]) -> None:
    """Measure two checkouts or settings in turns; print each pair, and the medians."""
    sides = [shlex.split(args.base), shlex.split(args.new)]
    speeds: tuple[list[Speed], list[Speed]] = ([], [])
    for number in range(args.pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):  # neither is always the first
            checkout, *own_flags = sides[side]
            speeds[side].append(measure([*flags, *own_flags], args.seconds, Path(checkout).resolve()))
        report(f"pair {number + 1}", speeds[0][-1:], speeds[1][-1:])
    report(f"median of {args.pairs}", *speeds)


def report(name: str, base: list[Speed], new: list[Speed]) -> None:
    """Print how two sides compare: medians of each, and of the ratios of their pairs."""
    ratios = [after.env_steps / before.env_steps for before, after in zip(base, new, strict=True)]
    steps = [statistics.median(speed.env_steps for speed in side) for side in (base, new)]
    cpu_us = [statistics.median(speed.cpu_us["together"] for speed in side) for side in (base, new)]
    print(f"{name}: {steps[0]:,.0f} -> {steps[1]:,.0f} env_steps/s, {cpu_us[0]:.1f} -> {cpu_us[1]:.1f} CPU us a step, "
          f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


COMMANDS = {"throughput": run_throughput, "scaling": run_scaling, "compare": run_compare}


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement [30]")
    parser.add_argument("--pairs", type=int, default=9, help="compare: measurements of each side [9]")
    parser.add_argument("--base", default=".", help="compare: folder of a checkout, and flags that it alone gets [.]")
    parser.add_argument("--new", default=".", help="compare: the same of the other side [.]")
    args, flags = parser.parse_known_args(argv)
    COMMANDS[args.command](args, flags)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the run that it measures
    take_programs_along()
    sys.exit(main(sys.argv[1:]))
