"""Measure the speed of real runs: `python -m tools.benchmark throughput --env PongNoFrameskip-v4 --seconds 30`.

    throughput   one run: env_steps and frames a second, CPU time of an env_step in each kind of process, policy lag
    scaling      the same over numbers of cores, and over numbers of rollout workers on all cores; also as a picture
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
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from runtime.files import read_lines
from runtime.guard import take_programs_along
from runtime.user_error import UserError
from tools.figures import drawing

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

    def cells(self) -> list[str]:
        """Return its numbers for a table."""
        return [f"{self.env_steps:,.0f}", f"{self.frames:,.0f}", f"{self.cpu_us['together']:.1f}",
                f"{self.policy_lag:.1f}", f"{self.idle:.0%}"]


HEADER = ["env_steps/s", "frames/s", "CPU us an env_step", "policy lag", "cores idle"]


class Watched:
    """A run of train.py, watched from outside."""

    def __init__(self, checkout: Path, flags: Sequence[str], folder: Path, output: IO[str]) -> None:
        self.output, self.run_dir = output, folder / "run"
        command = [sys.executable, str(checkout / "train.py"), *flags, *ENDLESS, f"--train_dir={folder}"]
        self.process = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=output)
        self.main = psutil.Process(self.process.pid)

    def next_row(self) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Wait for the next row of its metrics; return all rows, and CPU seconds so far by kind of process."""
        known = rows = self.read_rows()
        while len(rows) == len(known):
            if self.process.poll() is not None:
                self.output.seek(0)
                raise UserError((self.output.read().splitlines() or ["train.py has ended"])[-1])
            time.sleep(0.02)
            rows = self.read_rows()
        return rows, self.cpu_seconds()

    def read_rows(self) -> list[dict[str, Any]]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def cpu_seconds(self) -> Counter[str]:
        seconds = Counter()
        for process in [self.main, *self.main.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has just died
                kind = re.match("rollout|policy|learner|evaluator|", process.name())[0] or "main"
                seconds[kind] += sum(process.cpu_times()[:2])
        return seconds

    def stop(self) -> None:
        """Stop it in an orderly way, or else kill it."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SEC)
        self.process.kill()


def measure(flags: Sequence[str], seconds: float, checkout: Path = ROOT, cores: Sequence[int] = ()) -> Speed:
    """Train with a checkout; measure for some seconds after its first SGD step and a warm-up of a third as long.

    cores: those that it may use; all by default. Raises `UserError` when it ends by itself.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        run = Watched(checkout, flags, Path(folder), output)
        try:
            if cores:
                run.main.cpu_affinity(cores)
            while not run.next_row()[0][-1]["sgd_steps"]:
                pass
            time.sleep(max(seconds / 3, WARM_UP_SEC))
            before, cpu_before = run.next_row()
            idle, begin = psutil.cpu_times().idle, time.monotonic()
            time.sleep(seconds)
            rows, cpu = run.next_row()
            idle = (psutil.cpu_times().idle - idle) / (time.monotonic() - begin) / psutil.cpu_count()
            frameskip = json.loads((run.run_dir / "config.json").read_text())["env_frameskip"]
        finally:
            run.stop()
    steps = rows[-1]["env_steps"] - before[-1]["env_steps"]
    speed = steps / (rows[-1]["wall_sec"] - before[-1]["wall_sec"])
    cpu_us = {kind: (cpu[kind] - cpu_before[kind]) / steps * 1e6 for kind in cpu}
    lags = [row["policy_lag_mean"] for row in rows[len(before):] if row.get("policy_lag_mean") is not None]
    cpu_us["together"] = sum(cpu_us.values())
    return Speed(speed, speed * frameskip, cpu_us, statistics.fmean(lags or [0]), idle)


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells in aligned columns; the first row is the header."""
    first_width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(first_width), *map(str.rjust, others, widths)]).rstrip(), flush=True)


def run_throughput(args: argparse.Namespace, flags: list[str]) -> None:
    """Print what one run does."""
    speed = measure(flags, args.seconds)
    print_table([["", *HEADER], [shlex.join(flags), *speed.cells()]])
    print("\nCPU time of one env_step, us:")
    print("  ".join(f"{kind} {us:.1f}" for kind, us in speed.cpu_us.items()))


def run_scaling(args: argparse.Namespace, flags: list[str]) -> None:
    """Print and draw the speed over the number of cores, and over the number of rollout workers on all of them."""
    cores = psutil.Process().cpu_affinity()
    powers = [2**power for power in range(12)]
    speeds: dict[str, dict[int, float]] = {"cores": {}, "num_workers": {}}
    table = [["", *HEADER]]
    for name, by_number in speeds.items():
        most = len(cores) if name == "cores" else 2 * len(cores)
        for number in sorted({most, *(power for power in powers if power < most)}):
            if name == "cores":
                speed = measure(flags, args.seconds, cores=cores[:number])
            else:
                speed = measure([*flags, f"--num_workers={number}"], args.seconds)
            by_number[number] = speed.env_steps
            table.append([f"{name}={number}", *speed.cells()])
            print(" ".join(table[-1]), flush=True)  # lest it be lost
    print()
    print_table(table)
    with drawing(args.output, 3.0) as figure:
        panels = figure.subplots(1, len(speeds), sharey=True)
        for panel, (name, by_number) in zip(panels, speeds.items(), strict=True):
            panel.plot([str(number) for number in by_number], [*by_number.values()], "o-")
            panel.set(xlabel=name, ylabel="env_steps/s")
            panel.set_ylim(bottom=0)
    print(args.output)


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


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=description, epilog=epilog, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement [30]")
    parser.add_argument("--pairs", type=int, default=9, help="compare: measurements of each side [9]")
    parser.add_argument("--base", default=".", help="compare: folder of a checkout, and flags that it alone gets [.]")
    parser.add_argument("--new", default=".", help="compare: the same of the other side [.]")
    parser.add_argument("--output", type=Path, default=Path("scaling.png"), help="scaling: the picture [scaling.png]")
    args, flags = parser.parse_known_args(argv)
    try:
        COMMANDS[args.command](args, flags)
    except UserError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the run that it measures
    take_programs_along()
    sys.exit(main(sys.argv[1:]))
