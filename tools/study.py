"""Ask which settings reach a score first: `python -m tools.study docs/studies/pong.toml train_dir/pong_study`.

A study is a TOML file: one task, a goal, settings to compare as flags of `train.py`, seeds:

    flags = "--env PongNoFrameskip-v4"      # of every run
    goal = 18.0                             # left out: each run takes its time
    max_minutes = 8.0                       # a run that has not come so far has failed
    seeds = [0, 1, 2]
    key = "eval_return"                     # what shall reach the goal: evaluations during training; left out: the
                                            # mean true return of 100 episodes of training
    [settings]
    default = ""
    "two epochs" = "--num_epochs 2"

Runs follow one another, all settings with the first seed first, since two at once would measure each other. Each is a
command of its own, stopped at the goal; its minutes count from the start of the command. What is finished stands in
`results.jsonl`, so the same command goes on with the rest. `table.md` is written after each run, `curves.png` at the
end.
"""

import argparse
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from runtime.files import read_lines
from runtime.guard import take_programs_along
from runtime.user_error import UserError, exit_status
from tools.plot import draw, read_curves

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 100  # episodes that mean_return is over


class Study(NamedTuple):
    """What a study's file says."""

    flags: str
    max_minutes: float
    seeds: list[int]
    settings: dict[str, str]
    goal: float = math.inf
    key: str = "mean_return"

    def is_reached(self, row: dict[str, Any]) -> bool:
        """Return whether a row of metrics is at the goal."""
        is_full = self.key != "mean_return" or row.get("num_episodes", 0) >= WINDOW
        return is_full and row.get(self.key) is not None and row[self.key] >= self.goal


def run(study: Study, flags: str, seed: int, run_dir: Path) -> dict[str, Any]:
    """Train once, to the goal or for the time there is; return what came of it. Raises `UserError` when it failed."""
    shutil.rmtree(run_dir, ignore_errors=True)  # of a study that was interrupted
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(flags), "--train_dir", str(run_dir.parent),
               "--experiment", run_dir.name, "--seed", str(seed), "--report_interval_sec", "1"]
    log = Path(f"{run_dir}.txt")
    begun = time.monotonic()
    minutes = 0.0
    row = {}
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        while process.poll() is None and minutes < study.max_minutes and not study.is_reached(row):
            time.sleep(0.2)
            minutes = (time.monotonic() - begun) / 60
            row = last_row(run_dir / "metrics.jsonl")
        process.terminate()
    if process.returncode or not row:
        raise UserError(f"a run failed, see {log}")
    scores = read_curves(run_dir, study.key)[0][:, 2]
    return {"flags": flags, "seed": seed, "reached": study.is_reached(row), "minutes": minutes,
            "env_steps": row["env_steps"], "score": scores[-1] if len(scores) else None}


def last_row(metrics: Path) -> dict[str, Any]:
    """Read the last whole row of a run's metrics; empty before there is one."""
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return json.loads(lines[-1]) if lines else {}


def show(values: Iterable[float | None]) -> str:
    """Write the median and the range of some values, of which None stands for never."""
    values = sorted(math.inf if value is None else value for value in values)
    median, *ends = (f"{value:,.4g}" if value < math.inf else "never"
                     for value in (statistics.median(values), values[0], values[-1]))
    return median if {median} == {*ends} else f"{median} ({ends[0]} to {ends[1]})"


def make_table(study: Study, results: list[dict[str, Any]]) -> str:
    """Write the table of a study in Markdown, the settings in their order."""
    lines = [f"Until {study.key} is {study.goal:g}, for at most {study.max_minutes:g} minutes: median and range of the "
             f"seeds. `{study.flags}`", "", "| setting | reached | minutes | thousand env_steps | last score |",
             "| --- | --- | --- | --- | --- |"]
    for setting, flags in study.settings.items():
        runs = [result for result in results if result["flags"] == f"{study.flags} {flags}"]
        reached = [run["reached"] for run in runs]
        if runs:
            cells = [setting, f"{sum(reached)} of {len(runs)}",
                     show(run["minutes"] if run["reached"] else None for run in runs),
                     show(run["env_steps"] / 1000 if run["reached"] else None for run in runs),
                     show(run["score"] for run in runs)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@exit_status
def main(argv: list[str]) -> None:
    """Run what is not finished yet; write the table after each run, and the picture at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="STUDY.toml", help="the settings to compare")
    parser.add_argument("folder", type=Path, help="where the runs, the table and the picture lie")
    args = parser.parse_args(argv)
    study = Study(**tomllib.loads(args.study.read_text()))
    table = args.folder / "table.md"
    path, run_dirs = args.folder / "results.jsonl", []
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in study.seeds:
        for setting, own_flags in study.settings.items():
            flags = f"{study.flags} {own_flags}"
            run_dir = args.folder / f"{setting}_seed_{seed}"
            if not any((result["flags"], result["seed"]) == (flags, seed) for result in read_lines(path)):
                result = run(study, flags, seed, run_dir)
                with path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            run_dirs.append(run_dir)
            table.write_text(make_table(study, read_lines(path)))
    print(table.read_text())
    draw(run_dirs, args.folder / "curves.png", study.goal if math.isfinite(study.goal) else None, study.key)


if __name__ == "__main__":
    take_programs_along()
    sys.exit(main(sys.argv[1:]))
