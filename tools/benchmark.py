"""Measure the speed of real runs: `python -m tools.benchmark throughput --env PongNoFrameskip-v4 --seconds 30`.

    throughput   one run: env_steps and frames a second, CPU time of an env_step
    compare      two checkouts or two settings in turns, such as --base "../before" --new ". --num_epochs 2": the ratio
                 of each pair, and its median

All other flags are those of `train.py`. It is run as everybody runs it, in a temporary folder, and watched from outside
(the rows of its metrics, the CPU time of its processes): so checkouts of any age can be compared. Machines are shared
and their speed drifts: compare the figures of one call, not those of two sittings.
"""

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from runtime.checkpoint import read_lines
from runtime.command_line import OneLineParser
from runtime.utils import UserError, Values, exit_status, run_command

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_SEC = 2.0  # at least, after the first SGD step


class Speed(NamedTuple):
    """What a run did in the time that was measured."""

    env_steps: float  # a second
    frames: float  # of the simulator, a second
    cpu_us: float  # CPU time of one env_step, of all processes


def measure(flags: Sequence[str], seconds: float, checkout: Path = ROOT) -> Speed:
    """Train with a checkout; measure for some seconds after its first SGD step and a warm-up of a third as long.

    Raises `UserError` when it ends by itself, which it has explained.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(checkout / "train.py"), *flags, "--report_interval_sec=1",
                   "--train_for_env_steps=1e15", "--experiment=run", f"--train_dir={folder}"]
        with subprocess.Popen(command, cwd=checkout, stdout=subprocess.DEVNULL) as process:
            try:
                return watch(process, Path(folder, "run"), seconds)
            finally:
                process.terminate()


def watch(process: subprocess.Popen, run_dir: Path, seconds: float) -> Speed:
    """Measure a run that has just been started."""
    while not next_row(process, run_dir)[0]["sgd_steps"]:
        pass
    time.sleep(max(seconds / 3, WARM_UP_SEC))
    before, cpu_before = next_row(process, run_dir)
    time.sleep(seconds)
    after, cpu_after = next_row(process, run_dir)
    steps = after["env_steps"] - before["env_steps"]
    speed = steps / (after["wall_sec"] - before["wall_sec"])
    frameskip = json.loads((run_dir / "config.json").read_text())["env_frameskip"]
    return Speed(speed, speed * frameskip, (cpu_after - cpu_before) / steps * 1e6)


def next_row(process: subprocess.Popen, run_dir: Path) -> tuple[Values, float]:
    """Wait for the next row of a run's metrics; return it, and the CPU seconds of all its processes so far."""
    known = rows = read_lines(run_dir / "metrics.jsonl")
    while len(rows) == len(known):
        if process.poll() is not None:
            raise UserError("train.py has ended")
        time.sleep(0.02)
        rows = read_lines(run_dir / "metrics.jsonl")
    cpu_sec = 0.0
    main = psutil.Process(process.pid)
    for member in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just died
            cpu_sec += sum(member.cpu_times()[:2])
    return rows[-1], cpu_sec


def compare(sides: Sequence[str], pairs: int, flags: list[str], seconds: float) -> None:
    """Measure two checkouts or settings in turns; after each pair print the medians so far, and those of the ratios."""
    speeds: tuple[list[Speed], list[Speed]] = ([], [])
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):  # neither is always the first
            checkout, *own_flags = shlex.split(sides[side])
            speeds[side].append(measure([*flags, *own_flags], seconds, Path(checkout).resolve()))
        ratios = [new.env_steps / base.env_steps for base, new in zip(*speeds, strict=True)]
        base, new = (median(speed.env_steps for speed in side) for side in speeds)
        print(f"pair {number + 1}: ratio {ratios[-1]:.3f}; medians so far {base:,.0f} -> {new:,.0f} env_steps/s, ratio "
              f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = OneLineParser(__doc__)
    parser.add_argument("command", choices=["throughput", "compare"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement [30]")
    parser.add_argument("--pairs", type=int, default=9, help="compare: measurements of each side [9]")
    parser.add_argument("--base", default=".", help="compare: folder of a checkout, and flags that it alone gets [.]")
    parser.add_argument("--new", default=".", help="compare: the same of the other side [.]")
    args, flags = parser.parse_known_args(argv)
    if args.command == "compare":
        compare((args.base, args.new), args.pairs, flags, args.seconds)
    else:
        speed = measure(flags, args.seconds)
        print(f"{speed.env_steps:,.0f} env_steps/s, {speed.frames:,.0f} frames/s, {speed.cpu_us:.1f} CPU us an "
              "env_step")


if __name__ == "__main__":
    run_command(main)
