"""Ask which settings reach a score first: `python -m tools.study docs/studies/pong.toml train_dir/pong_study`.

A study is a TOML file: one task, a goal, settings to compare as flags of `train.py`, seeds:

    flags = "--env PongNoFrameskip-v4"      # of every run
    goal = 18.0                             # mean true return of 100 episodes; left out: each run takes its time
    max_minutes = 8.0                       # a run that has not come so far is counted as failed
    seeds = [0, 1, 2]
    eval_episodes = 20                      # then score best.pt; left out: do not
    by_evaluation = true                    # the goal is one of evaluations during training (--eval_every_env_steps in
                                            # the flags), for algorithms that explore; left out: of training itself
    [settings]
    default = ""
    "two epochs" = "--num_epochs 2"

Runs follow one another, all settings with the first seed first, since two at once would measure each other. Each is a
command of its own, stopped when it has reached the goal; its minutes count from the start of the command. What is
finished is kept in `results.jsonl`, so that a study that was interrupted goes on where it was. At the end of each run
`table.md` and `curves.png` are written anew: median minutes and env_steps with their intervals, and mean curves.
"""

import argparse
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scipy import stats

from runtime.files import LineFile, read_lines
from runtime.policy_records import RETURN_WINDOW
from runtime.user_error import UserError, nearest
from tools.plot import draw, read_rows

ROOT = Path(__file__).resolve().parent.parent
NEVER = 1e12  # minutes or env_steps of a run that has not reached the goal
BUSY_PERCENT = 10.0  # of one core, taken by other programs before a run begins
SETTLE_SEC = 2.0  # what the run before has left to do takes so long
STOP_SEC = 120.0  # a run that was told to stop may take so long


class RunFailed(RuntimeError):
    """A run of the study failed; the text names its log."""


@dataclass(frozen=True)
class Study:
    """What a study's file says."""

    flags: str
    max_minutes: float
    seeds: list[int]
    settings: dict[str, str]
    goal: float = math.inf
    eval_episodes: int = 0
    by_evaluation: bool = False

    def score(self, row: dict[str, Any]) -> float | None:
        """Return the score in a row of metrics: a mean over a full window of episodes, or an evaluation; None."""
        if self.by_evaluation:
            return row.get("eval_return")
        return row["mean_return"] if row["num_episodes"] >= RETURN_WINDOW else None

    def is_reached(self, row: dict[str, Any]) -> bool:
        """Tell whether the score of a row is at the goal."""
        score = self.score(row)
        return score is not None and score >= self.goal


@dataclass(frozen=True)
class Result:
    """What one run has come to. Minutes count from the start of the command."""

    setting: str
    flags: str
    seed: int
    reached: bool
    minutes: float  # to the goal, or to the end
    train_minutes: float  # of these, without the start of the processes
    env_steps: int
    mean_return: float | None  # of the last 100 episodes, or the last evaluation; None when there were fewer
    others_percent: float  # what other programs took before it began, percent of one core
    evaluation: dict[str, float] = field(default_factory=dict)


def read_study(path: Path) -> Study:
    """Read a study. Raises `UserError`, naming what is wrong."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is no study: {error}") from error
    known = Study.__dataclass_fields__
    for name in content:
        if name not in known:
            raise UserError(f"{path}: unknown key {name}{nearest(name, known)}")
    missing = {"flags", "max_minutes", "seeds", "settings"} - content.keys()
    if missing:
        raise UserError(f"{path}: {', '.join(sorted(missing))} is missing")
    study = Study(**content)
    if not study.seeds or not study.settings:
        raise UserError(f"{path}: give at least one seed and one setting")
    if any("/" in name for name in study.settings):
        raise UserError(f"{path}: the name of a setting is also that of a folder, without '/'")
    return study


# ---- running -----------------------------------------------------------------------------------------------------


def run_study(study: Study, folder: Path) -> None:
    """Run what is not finished yet. Raises `UserError` when settings have changed since, `RunFailed`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    lines = LineFile(path)
    results = [Result(**result) for result in read_lines(path)]
    for result in results:
        if result.setting in study.settings and result.flags != flags_of(study, result.setting):
            raise UserError(f"{folder} holds runs of '{result.setting}' with other flags ({result.flags}); choose "
                            "another name or folder")
    finished = {(result.setting, result.seed) for result in results}
    for seed in study.seeds:
        for setting in study.settings:
            if (setting, seed) in finished:
                continue
            result = run(study, setting, folder / setting / f"seed_{seed}", seed)
            lines.add(json.dumps(asdict(result)))
            lines.flush()
            results.append(result)
            print(describe(result), flush=True)
            write_report(study, results, folder)
    write_report(study, results, folder)  # also of runs that were copied here


def flags_of(study: Study, setting: str) -> str:
    """Join the flags of every run and those of a setting."""
    return f"{study.flags} {study.settings[setting]}".strip()


def run(study: Study, setting: str, run_dir: Path, seed: int) -> Result:
    """Train once, to the goal or for the time there is, and score what came of it."""
    others = busy_percent()
    if others > BUSY_PERCENT:
        print(f"other programs take {others:.0f} % of a core: times will be too long", flush=True)
    flags, where = flags_of(study, setting), ["--train_dir", str(run_dir.parent), "--experiment", run_dir.name]
    log, metrics = run_dir.with_suffix(".txt"), run_dir / "metrics.jsonl"
    run_dir.parent.mkdir(exist_ok=True)
    restart = "overwrite" if (run_dir / "config.json").exists() else "resume"
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(flags), *where, "--seed", str(seed),
               "--report_interval_sec", "1", "--restart_behavior", restart]
    begun_at = time.time()
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            row, minutes = follow(process, metrics, study, begun_at)
        finally:
            stop(process)
    if process.returncode or row is None:
        raise RunFailed(f"'{setting}' with seed {seed} failed, see {log}")
    mean_return = next(filter(None, map(study.score, [row, *reversed(read_rows(run_dir))])), None)
    evaluation = evaluate(study.eval_episodes, run_dir, where, log) if study.eval_episodes else {}
    return Result(setting, flags, seed, study.is_reached(row), minutes, row["wall_sec"] / 60, row["env_steps"],
                  mean_return, others, evaluation)


def follow(process: subprocess.Popen, metrics: Path, study: Study, begun_at: float
           ) -> tuple[dict[str, Any] | None, float]:
    """Wait until a run has reached the goal, or its time is over, or it has ended; return its last row and minutes."""
    begun = time.monotonic()
    while True:
        is_over = process.poll() is not None
        minutes, row = (time.monotonic() - begun) / 60, last_row(metrics, begun_at)
        if is_over or minutes >= study.max_minutes or (row and study.is_reached(row)):
            return row, minutes
        time.sleep(0.2)


def last_row(metrics: Path, begun_at: float) -> dict[str, Any] | None:
    """Read the last whole row of a run's metrics; None before there is one (an older run's do not count)."""
    if not metrics.exists() or metrics.stat().st_mtime < begun_at:
        return None
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1]) if lines else None


def stop(process: subprocess.Popen) -> None:
    """Stop a run in an orderly way, so that it saves; kill it when it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SEC)
    except subprocess.TimeoutExpired:
        process.kill()


def evaluate(num_episodes: int, run_dir: Path, where: Sequence[str], log: Path) -> dict[str, float]:
    """Score a run's best checkpoint with `evaluate.py`; return its mean and standard deviation."""
    env = json.loads((run_dir / "config.json").read_text())["env"]
    command = [sys.executable, str(ROOT / "evaluate.py"), "--env", env, *where, "--episodes", str(num_episodes)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    with log.open("a") as file:
        file.write(finished.stdout + finished.stderr)
    if finished.returncode:
        raise RunFailed(f"evaluate.py failed, see {log}")
    mean, _, deviation = finished.stdout.split("episodes: return", 1)[1].split()[:3]
    return {"mean": float(mean), "deviation": float(deviation)}


def busy_percent() -> float:
    """Measure what other programs take of the processor, in percent of one core."""
    time.sleep(SETTLE_SEC)
    return psutil.cpu_percent(1.0) * psutil.cpu_count()


# ---- reporting ---------------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of its 95 % interval by the bootstrap (percentiles), of values without order.

    Of three values the interval reaches from the smallest to the largest; of one it is that value.
    """
    median = statistics.median(values)
    if len(set(values)) == 1:
        return median, median, median
    interval = stats.bootstrap((np.array(values),), np.median, method="percentile",
                               rng=np.random.default_rng(0)).confidence_interval
    return median, float(interval.low), float(interval.high)


def show(values: Iterable[float], digits: int) -> str:
    """Write a median and its interval; never: more than half of the runs have not reached the goal."""
    texts = [f"{value:,.{digits}f}" if value < NEVER / 100 else "never" for value in median_interval(list(values))]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def describe(result: Result) -> str:
    """Say in one line what a run has come to."""
    score = "too few episodes" if result.mean_return is None else f"mean return {result.mean_return:.2f}"
    evaluated = f", evaluated {result.evaluation['mean']:.2f}" if result.evaluation else ""
    return (f"{result.setting}, seed {result.seed}: {score} after {result.minutes:.2f} min and "
            f"{result.env_steps:,} env_steps{evaluated}")


def make_table(study: Study, results: Sequence[Result]) -> str:
    """Write the table of a study in Markdown, the settings in their order."""
    has_goal = math.isfinite(study.goal)
    head = ["setting", "reached", "minutes", "thousand env_steps"] if has_goal else ["setting", "runs", "mean return"]
    head += ["evaluated"] * bool(study.eval_episodes)
    rows = [head, ["---"] * len(head)]
    for setting in study.settings:
        runs = [result for result in results if result.setting == setting]
        if not runs:
            continue
        if has_goal:
            reached = sum(run.reached for run in runs)
            rows.append([setting, f"{reached} of {len(runs)}",
                         show((run.minutes if run.reached else NEVER for run in runs), 2),
                         show((run.env_steps / 1000 if run.reached else NEVER for run in runs), 0)])
        else:
            returns = [run.mean_return for run in runs if run.mean_return is not None]
            rows.append([setting, str(len(runs)), show(returns, 1) if returns else "fewer than 100 episodes"])
        if study.eval_episodes:
            rows[-1].append(", ".join(f"{run.evaluation['mean']:.1f}" if run.evaluation else "-" for run in runs))
    of = " in an evaluation" if study.by_evaluation else ""
    goal = f"Until a mean return of {study.goal:g}{of}" if has_goal else f"After {study.max_minutes:g} minutes"
    lines = [f"{goal}; median of the seeds and its 95 % interval (bootstrap). `{study.flags}`", ""]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_report(study: Study, results: Sequence[Result], folder: Path) -> None:
    """Write the table and the picture."""
    (folder / "table.md").write_text(make_table(study, results))
    run_dirs = [folder / setting / f"seed_{result.seed}" for setting in study.settings
                for result in results if result.setting == setting]
    key = "eval_return" if study.by_evaluation else "mean_return"
    drawn = [run_dir for run_dir in run_dirs if any(row.get(key) is not None for row in read_rows(run_dir))]
    if drawn:
        draw(drawn, folder / "curves.png", study.goal if math.isfinite(study.goal) else None, key, by_folder=True)


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, metavar="STUDY.toml", help="the settings to compare")
    parser.add_argument("folder", type=Path, help="where the runs, the table and the picture lie")
    args = parser.parse_args(argv)
    try:
        study = read_study(args.study)
        run_study(study, args.folder)
        print((args.folder / "table.md").read_text())
    except UserError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2
    except (RunFailed, KeyboardInterrupt) as error:
        print(f"study.py: {str(error) or 'stopped; the same command goes on'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
