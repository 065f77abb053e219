"""Measure all that only a real machine can show, and write it down: `python benchmark.py report --env ID`.

The report is a Markdown file that can be sent as it is: the machine, the cost of each part, the speed beside pure
simulation and beside what was predicted, each option of `runtime/acceleration.py` off and on in turns, memory, and a
learning run. An option that a machine refuses is there with its line. Used by `tools/benchmark.py`.
"""

import argparse
import contextlib
import io
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from appo import APPO
from config import Config
from runtime.machine import choose_device
from runtime.user_error import ComponentError, UserError
from tools.components import measure_simulation

OPTIONS = ("tf32", "half_precision_copies", "cuda_graphs", "torch_compile")
Measure = Callable[[dict[str, Any], float], Any]  # `benchmark.measure_throughput`


def table(rows: list[list[str]]) -> str:
    """Write rows of cells as a Markdown table; the first row is the header."""
    header, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *body]) + "\n"


def describe_everything(cfg: Config, machine: str) -> str:
    """Describe the machine and what runs on it."""
    device = choose_device(cfg.device)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, check=False,
                            capture_output=True, text=True).stdout.strip() or "unknown"
    rows = [["what", ""], ["machine", machine], ["memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"],
            ["load of others", f"{os.getloadavg()[0]:.1f} processes in the last minute"],
            ["system", platform.platform()], ["Python, PyTorch", f"{platform.python_version()}, {torch.__version__}"],
            ["commit", commit]]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        rows += [["GPUs", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, "
                          f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"],
                 ["CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}"]]
    return table(rows)


def compare_options(settings: dict[str, Any], seconds: float, repeats: int, measure: Measure) -> Iterator[list[str]]:
    """Measure each option on, in turns with all of them off; yield the rows of a table."""
    for option in OPTIONS:
        try:
            pairs = [(measure(settings, seconds).env_steps_per_sec,
                      measure(settings | {option: True}, seconds).env_steps_per_sec) for _ in range(repeats)]
        except (UserError, ComponentError) as error:
            yield [f"`--{option}`", "-", "-", str(error).splitlines()[0]]
            continue
        off, on = zip(*pairs, strict=True)
        ratios = sorted(after / before for before, after in pairs)
        yield [f"`--{option}`", f"{statistics.median(off):,.0f}", f"{statistics.median(on):,.0f}",
               f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]


def learn(settings: dict[str, Any], minutes: float) -> list[list[str]]:
    """Train for some minutes; return the mean return after each tenth of them."""
    rows, begin = [["minutes", "env_steps", "mean return", "best"]], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        given = settings | {"train_dir": folder, "train_for_seconds": minutes * 60, "train_for_env_steps": 10**12}
        with APPO(**given) as appo:
            best = float("-inf")

            def note() -> bool:
                nonlocal best
                passed = (time.monotonic() - begin) / 60
                score = appo.records.policies[0].mean_return
                best = best if score is None else max(best, score)
                if passed >= len(rows) * minutes / 10:
                    rows.append([f"{passed:.1f}", f"{appo.env_steps:,}", "none" if score is None else f"{score:.2f}",
                                 f"{best:.2f}"])
                return False

            appo.train(should_stop=note)
    return rows


def write_report(cfg: Config, args: argparse.Namespace, machine: str, measure: Measure,
                 sections: dict[str, Callable[[], None]]) -> None:
    """Measure and write; what each of the sections prints is a part of it."""
    output = args.output or Path("report.md")
    if not output.parent.is_dir():
        raise UserError(f"--output={output}: there is no folder {output.parent}")
    parts = [f"# {cfg.env} on {machine}\n", f"`{args.command_line}`, {time.strftime('%Y-%m-%d')}\n",
             describe_everything(cfg, machine)]

    def add(title: str, text: str) -> None:
        print(f"## {title}\n\n{text}", flush=True)
        parts.append(f"## {title}\n\n{text}")
        output.write_text("\n".join(parts))  # nothing is lost if a later part fails

    for title, section in sections.items():
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                section()
        except UserError as error:
            printed.write(f"{error}\n")
        add(title, f"```\n{printed.getvalue()}```\n")
    simulations = [measure_simulation(cfg, args.seconds / 2) for _ in range(args.repeats)]
    runs = [measure(args.settings, args.seconds) for _ in range(args.repeats)]
    share = statistics.median(run.env_steps_per_sec for run in runs) / statistics.median(simulations)
    add("Speed", table([["", "env_steps/s"],
                        ["pure simulation", ", ".join(f"{figure:,.0f}" for figure in simulations)],
                        ["learning", ", ".join(f"{run.env_steps_per_sec:,.0f}" for run in runs)],
                        ["share", f"{share:.0%}"]]))
    options = list(compare_options(args.settings, args.seconds, args.repeats, measure))
    add("Options", table([["option", "off, env_steps/s", "on", "on / off, median (all)"], *options]))
    if args.minutes:
        add(f"Learning for {args.minutes:g} minutes", table(learn(args.settings, args.minutes)))
    print(f"\n{output}")
