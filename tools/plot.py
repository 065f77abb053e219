"""Draw learning curves: `python -m tools.plot train_dir/PongNoFrameskip-v4 curve.png` (several runs: one curve each).

Reads each run's `metrics.jsonl`: the true mean return of the last 100 episodes (or another key) over minutes of
training and env_steps, each policy of a population as a thin line, and the scores of evaluations during training as
dots. With `--by_folder` the runs that lie in one folder are seeds of one setting: a thick line is their mean as far as
all of them reach, the band around it its 95 % interval, thin lines are the runs. With `--population` it reads the
`population.jsonl` of one run: the objective of each policy and all that was mutated over the policy's env_steps, with
an arrow from the donor wherever a policy was replaced.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from runtime.files import read_lines
from runtime.records import read_history
from runtime.user_error import UserError, nearest

FORMATS = (".png", ".svg", ".pdf", ".jpg")
LABELS = {"mean_return": "mean return of the last 100 episodes",
          "true_objective": "mean true objective of the last 100 episodes",
          "win_rate_vs_past": "share of the last 100 games won against the past"}
POINTS = 200  # of a mean curve


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics. Raises `UserError` when there are none."""
    path = run_dir / "metrics.jsonl"
    rows = [row for row in read_lines(path) if is_whole(row)]
    if not rows:
        raise UserError(f"{run_dir} holds no metrics.jsonl")
    return [row for row in rows if len(row.get("policies", ())) == len(rows[0].get("policies", ()))]


def is_whole(row: dict[str, Any]) -> bool:
    """Tell whether a row holds what `records.py` writes: numbers, also of each policy."""
    policies = row.get("policies", [])
    return isinstance(policies, list) and all(
        isinstance(part, dict) and all(isinstance(value, int | float | None) for name, value in part.items()
                                       if name != "policies") for part in (row, *policies)
    ) and None not in (row.get("wall_sec"), row.get("env_steps"))


def read_curves(run_dir: Path, key: str) -> list[tuple[list[float], list[float], list[float]]]:
    """Read minutes, millions of env_steps and a key's values: of the whole run, then of each policy of a population."""
    rows = read_rows(run_dir)
    curves = []
    for policy in range(-1, len(rows[0].get("policies", ()))):
        values = [(row, row if policy < 0 else row["policies"][policy]) for row in rows]
        values = [(row, part[key]) for row, part in values if part.get(key) is not None]
        curves.append(([row["wall_sec"] / 60 for row, _ in values], [row["env_steps"] / 1e6 for row, _ in values],
                       [value for _, value in values]))
    return curves


def read_evaluations(run_dir: Path) -> list[tuple[float, float]]:
    """Read the million env_steps and the mean return of each evaluation during training (`--eval_every_env_steps`)."""
    parts = [part for row in read_rows(run_dir) for part in (row, *row.get("policies", ())) if "eval_return" in part]
    return [(part["eval_env_steps"] / 1e6, part["eval_return"]) for part in parts]


def mean_curve(curves: list[tuple[list[float], list[float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Average curves, each given as places and values, over the places that all reach, interpolated in between.

    Returns the places, the mean, and the ends of its 95 % interval (bootstrap over the curves, percentiles), [POINTS]
    each; nothing where the curves share no place.
    """
    begin, end = max(places[0] for places, _ in curves), min(places[-1] for places, _ in curves)
    if begin >= end:
        return (np.empty(0),) * 4
    places = np.linspace(begin, end, POINTS)
    values = np.array([np.interp(places, *curve) for curve in curves])
    interval = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(0),
                               n_resamples=1000).confidence_interval
    return places, values.mean(0), interval.low, interval.high


def draw_group(panels: Sequence[Axes], run_dirs: list[Path], key: str, color: str, label: str) -> None:
    """Draw runs in one color over minutes and over env_steps, and their mean when there are several."""
    is_alone = len(run_dirs) == 1
    runs = [read_curves(run_dir, key) for run_dir in run_dirs]
    for panel, axis in zip(panels, (0, 1), strict=True):
        for whole, *policies in runs:
            panel.plot(whole[axis], whole[2], color=color, linewidth=1.5 if is_alone else 0.5,
                       label=label if is_alone else None)
            for policy in policies:
                panel.plot(policy[axis], policy[2], color=color, linewidth=0.5)
        curves = [(run[0][axis], run[0][2]) for run in runs if run[0][2]]
        if len(curves) > 1:
            places, mean, low, high = mean_curve(curves)
            panel.plot(places, mean, color=color, linewidth=2, label=f"{label}, mean of {len(curves)}")
            panel.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    evaluations = [evaluation for run_dir in run_dirs for evaluation in read_evaluations(run_dir)]
    if evaluations and key == "mean_return":
        panels[1].plot(*zip(*evaluations, strict=True), "o", markersize=3, color=color, label=f"{label}, evaluation")


def draw(run_dirs: list[Path], output: Path, goal: float | None, key: str = "mean_return", *,
         by_folder: bool = False) -> None:
    """Draw the curves of some runs into a picture file; a dashed line marks the goal."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    groups: dict[Path, list[Path]] = {}
    for run_dir in run_dirs:
        groups.setdefault(run_dir.resolve().parent if by_folder else run_dir, []).append(run_dir)
    for number, (group, members) in enumerate(groups.items()):
        draw_group(panels, members, key, f"C{number}", group.name)
    panels[0].set(xlabel="minutes", ylabel=LABELS.get(key, key))
    panels[1].set(xlabel="million env_steps")
    for panel in panels:
        panel.grid(alpha=0.3)
        if goal is not None:
            panel.axhline(goal, color="gray", linestyle="--", linewidth=1)
    panels[1].legend(loc="lower right")
    figure.savefig(output, dpi=120)


def draw_population(run_dir: Path, output: Path) -> None:
    """Draw the history of a population into a picture file. Raises `UserError` when there is none."""
    events = read_history(run_dir)
    if not events:
        raise UserError(f"{run_dir} holds no population.jsonl")
    described = {"policy", "policy_steps", "env_steps", "objective", "donor", "words"}
    names = ["objective", *(name for name in events[0]
                            if name not in described and len({event[name] for event in events}) > 1)]
    latest: dict[int, dict[str, Any]] = {}  # event of each policy
    copies = []  # events that replaced a policy, and the latest event of its donor
    for event in events:
        if event["donor"] in latest:
            copies.append((event, latest[event["donor"]]))
        latest[event["policy"]] = event
    columns = min(4, len(names))
    num_rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4 * columns, 3 * num_rows), layout="constrained")
    for place, name in enumerate(names, 1):
        panel = figure.add_subplot(num_rows, columns, place)
        for policy in sorted(latest):
            own = [event for event in events if event["policy"] == policy and event[name] is not None]
            panel.plot([event["policy_steps"] / 1e6 for event in own], [float(event[name]) for event in own],
                       drawstyle="default" if name == "objective" else "steps-post", marker=".",
                       label=f"policy {policy}", color=f"C{policy}")
        for event, donor in copies:
            if donor[name] is not None:
                steps = event["policy_steps"] / 1e6
                panel.annotate("", (steps, float(event[name])), (steps, float(donor[name])),
                               arrowprops={"arrowstyle": "->", "color": f"C{event['policy']}", "alpha": 0.6})
        panel.set(title=name, xlabel="million env_steps of the policy")
        panel.grid(alpha=0.3)
        numbers = [abs(float(event[name])) for event in events if event[name]]
        if name != "objective" and numbers and max(numbers) > 3 * min(numbers):
            panel.set_yscale("log")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(output, dpi=100)


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("output", type=Path, help="picture to write, for example curve.png")
    parser.add_argument("--goal", type=float, help="mark this value with a dashed line")
    parser.add_argument("--key", default="mean_return", help="what to draw: a key of metrics.jsonl [mean_return]")
    parser.add_argument("--by_folder", action="store_true",
                        help="draw the mean, with its interval, of the runs that lie in one folder")
    parser.add_argument("--population", action="store_true",
                        help="draw what population-based training did in one run instead")
    args = parser.parse_args(argv)
    try:
        check(args)
        if args.population:
            draw_population(args.run_dirs[0], args.output)
        else:
            draw(args.run_dirs, args.output, args.goal, args.key, by_folder=args.by_folder)
    except UserError as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` when nothing of that key was recorded, or there is no place for the picture."""
    if args.output.suffix not in FORMATS or not args.output.parent.is_dir():
        raise UserError(f"{args.output} cannot be written; choose a file in a folder that exists, ending in "
                        + ", ".join(FORMATS))
    if args.population and len(args.run_dirs) > 1:
        raise UserError("--population draws one run; name one")
    if not args.population:
        rows = [row for run_dir in args.run_dirs for row in read_rows(run_dir)]
        parts = [part for row in rows for part in (row, *row.get("policies", ()))]
        keys = {key for part in parts for key, value in part.items() if isinstance(value, (int, float))}
        if args.key not in keys:
            raise UserError(f"--key={args.key} is in no row of the metrics{nearest(args.key, keys)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
