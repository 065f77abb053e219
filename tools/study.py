"""Ask which settings reach a score first: `python -m tools.study docs/studies/pong.toml train_dir/pong_study`.

A study is a TOML file: one task, a goal, settings to compare as flags of `train.py`, seeds:

    flags = "--env PongNoFrameskip-v4"      # of every run
    goal = 18.0                             # --stop_at_return of every run; left out: each run takes its time
    max_minutes = 8.0                       # of training; a run that has not come so far has failed
    seeds = [0, 1, 2]
    key = "eval_return"                     # what the picture shows; left out: the mean return of 100 episodes
    [settings]
    default = ""
    "two epochs" = "--num_epochs 2"

Runs follow one another, all settings with the first seed first, since two at once would measure each other. Each is a
command of its own, whose minutes count from its start to its end. What is finished stands in `results.jsonl`, so the
same command goes on with the rest. `table.md` and `curves.png` are written at the end.
"""

import json
import math
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from runtime.checkpoint import add_line, read_lines
from runtime.command_line import OneLineParser
from runtime.utils import UserError, Values, exit_status, run_command
from tools.plot import draw

ROOT = Path(__file__).resolve().parent.parent


class Study(NamedTuple):
    """What a study's file says."""

    flags: str
    max_minutes: float
    seeds: list[int]
    settings: dict[str, str]
    goal: float = math.inf
    key: str = "mean_return"


def run(study: Study, flags: str, seed: int, run_dir: Path) -> Values:
    """Train once, to the goal or for the time there is; return what came of it. Raises `UserError` when it failed."""
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(flags), f"--train_dir={run_dir.parent}",
               f"--experiment={run_dir.name}", f"--seed={seed}", f"--stop_at_return={study.goal}",
               f"--train_for_seconds={60 * study.max_minutes}", "--report_interval_sec=1",
               "--restart_behavior=overwrite"]  # of a study that was interrupted
    begun = time.monotonic()
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise UserError(f"{run_dir} failed")
    minutes = (time.monotonic() - begun) / 60
    summary = json.loads((run_dir / "summary.json").read_text())
    score = max(-math.inf if score is None else score for score in summary["reached_return"])
    return {"flags": flags, "seed": seed, "reached": score >= study.goal, "minutes": minutes,
            "env_steps": summary["env_steps"], "score": score}


def show(values: list[float]) -> str:
    """Write the median and the range of some values."""
    return f"{statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def make_table(study: Study, results: list[Values]) -> str:
    """Write the table of a study in Markdown, the settings in their order; inf: a run did not reach the goal."""
    lines = [f"Until {study.goal:g}, for at most {study.max_minutes:g} minutes: median and range of the seeds. "
             f"`{study.flags}`", "", "| setting | reached | minutes | thousand env_steps | last score |",
             "| --- | --- | --- | --- | --- |"]
    for setting, flags in study.settings.items():
        runs = [result for result in results if result["flags"] == f"{study.flags} {flags}"]
        minutes = [run["minutes"] if run["reached"] else math.inf for run in runs]
        env_steps = [run["env_steps"] / 1000 if run["reached"] else math.inf for run in runs]
        lines.append(f"| {setting} | {sum(run['reached'] for run in runs)} of {len(runs)} | {show(minutes)} | "
                     f"{show(env_steps)} | {show([run['score'] for run in runs])} |")
    return "\n".join(lines) + "\n"


@exit_status
def main(argv: list[str]) -> None:
    """Run what is not finished yet; write the table and the picture at the end."""
    parser = OneLineParser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY.toml", help="the settings to compare")
    parser.add_argument("folder", type=Path, help="where the runs, the table and the picture lie")
    args = parser.parse(argv)
    study = Study(**tomllib.loads(args.study.read_text()))
    results, run_dirs = args.folder / "results.jsonl", []
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in study.seeds:
        for setting, own_flags in study.settings.items():
            flags = f"{study.flags} {own_flags}"
            run_dirs.append(args.folder / f"{setting}_seed_{seed}")
            finished = [(result["flags"], result["seed"]) for result in read_lines(results)]
            if (flags, seed) not in finished:
                add_line(results, json.dumps(run(study, flags, seed, run_dirs[-1])))
    table = make_table(study, read_lines(results))
    (args.folder / "table.md").write_text(table)
    print(table)
    draw(run_dirs, args.folder / "curves.png", study.goal, study.key)


if __name__ == "__main__":
    run_command(main)
