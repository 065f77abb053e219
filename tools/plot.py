"""Draw learning curves of one run or several: `python -m tools.plot train_dir/PongNoFrameskip-v4 curve.png`.

Reads each run's `metrics.jsonl`: the true mean return of the last 100 episodes (or another key) over minutes of
training and env_steps, each policy of a population as a thin line, and the scores of evaluations during training as
dots. Runs whose settings differ in nothing but the seed and the name are drawn together: a thick line is their mean as
far as all of them reach, the band around it its 95 % interval, thin lines are the runs; with `--by_folder` those are
the runs that lie in one folder. With `--population` it reads the `population.jsonl` of one run: the objective of each
policy and all that was mutated over the policy's env_steps, with a circle wherever a policy was replaced.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy
from scipy import stats

from runtime.files import read_lines
from runtime.records import read_history
from runtime.user_error import UserError, nearest
from tools import style

FORMATS = (".png", ".svg", ".pdf", ".jpg")
LABELS = {"mean_return": "mean return of the last 100 episodes",
          "true_objective": "mean true objective of the last 100 episodes",
          "win_rate_vs_past": "share of the last 100 games won against the past"}
POINTS = 200  # of a mean curve
SIDE_BY_SIDE = 3.0  # points between equal lines
OF_ONE_RUN = {"seed", "experiment", "train_dir", "restart_behavior", "trust_run"}  # what runs of one setting differ in


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
                       marker="." if len(whole[2]) == 1 else None,
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


def read_setting(run_dir: Path) -> str:
    """Read what a run has in common with those of other seeds; without its settings it is alone."""
    try:
        settings = json.loads((run_dir / "config.json").read_text())
        return json.dumps({name: value for name, value in settings.items() if name not in OF_ONE_RUN}, sort_keys=True)
    except (OSError, ValueError, AttributeError):
        return str(run_dir)


def name_group(run_dirs: list[Path], *, by_folder: bool) -> str:
    """Name a group of runs: by what their names have in common, or by their folder."""
    names, folder = [run_dir.resolve().name for run_dir in run_dirs], run_dirs[0].resolve().parent.name
    if by_folder or len(names) == 1:
        return folder if by_folder else names[0]
    in_common = os.path.commonprefix(names).rstrip("_-.0123456789")  # noqa: RUF071  characters are meant
    return folder if in_common in ("", "s", "seed") else in_common


@mpl.rc_context(style.SETTINGS)
def draw(run_dirs: list[Path], output: Path, goal: float | None, key: str = "mean_return", *,
         by_folder: bool = False) -> None:
    """Draw the curves of some runs into a picture file; a dashed line marks the goal."""
    figure = Figure(figsize=(style.WIDTH, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    groups: dict[str, list[Path]] = {}
    for run_dir in run_dirs:
        groups.setdefault(str(run_dir.resolve().parent) if by_folder else read_setting(run_dir), []).append(run_dir)
    for number, members in enumerate(groups.values()):
        draw_group(panels, members, key, f"C{number}", name_group(members, by_folder=by_folder))
    panels[0].set(xlabel="minutes", ylabel=LABELS.get(key, key))
    panels[1].set(xlabel="million env_steps")
    for panel in panels:
        if goal is not None:
            panel.axhline(goal, color=style.SOFT, linestyle="--", linewidth=1)
    panels[1].legend(loc="lower right")
    figure.savefig(output, dpi=style.DPI)


@mpl.rc_context(style.SETTINGS)
def draw_population(run_dir: Path, output: Path) -> None:
    """Draw the history of a population into a picture file. Raises `UserError` when there is none."""
    events = read_history(run_dir)
    if not events:
        raise UserError(f"{run_dir} holds no population.jsonl")
    described = {"policy", "policy_steps", "env_steps", "objective", "donor", "words"}
    names = ["objective", *(name for name in events[0]
                            if name not in described and len({event[name] for event in events}) > 1)]
    columns = min(3, len(names))
    figure = Figure(figsize=(style.WIDTH, 0.4 + 2.4 * math.ceil(len(names) / columns)), layout="constrained")
    panels = list(figure.subplots(math.ceil(len(names) / columns), columns, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        draw_setting(panel, name, events)
    for panel in panels[len(names):]:
        panel.remove()
    copied = any(event["donor"] is not None for event in events)
    circle = Line2D([], [], color=style.SOFT, marker="o", fillstyle="none", linestyle="", label="became a copy")
    figure.legend(handles=[*figure.axes[0].lines, *([circle] if copied else [])], loc="outside upper center", ncols=5)
    figure.savefig(output, dpi=style.DPI)


def draw_setting(panel: Axes, name: str, events: list[dict[str, Any]]) -> None:
    """Draw how one setting, or the objective, went in each policy of a population.

    Lines of equal settings lie side by side: each policy's is a few points above that of the one before. A circle shows
    where a policy became a copy of another, which has the color of the circle.
    """
    policies = sorted({event["policy"] for event in events})
    scale, unit = (1e6, "million") if max(event["policy_steps"] for event in events) >= 1e6 else (1e3, "thousand")
    for place, policy in enumerate(policies):
        own = [event for event in events if event["policy"] == policy and event[name] is not None]
        places = [(event["policy_steps"] / scale, float(event[name])) for event in own]
        rise = SIDE_BY_SIDE * (place - (len(policies) - 1) / 2) if name != "objective" else 0.0
        copies = [(x, y, f"C{event['donor']}") for (x, y), event in zip(places, own, strict=True)
                  if event["donor"] is not None]
        (line,) = panel.plot([x for x, _ in places], [y for _, y in places], marker=".", markersize=4,
                             linewidth=1.2, color=f"C{policy}", label=f"policy {policy}",
                             drawstyle="default" if name == "objective" else "steps-post")
        circles = panel.scatter([x for x, _, _ in copies], [y for _, y, _ in copies], s=28, facecolors="none",
                                edgecolors=[color for _, _, color in copies], linewidths=1.2, zorder=3)
        # after the limits of the panel were found in the values themselves
        line.set_transform(offset_copy(panel.transData, panel.figure, 0, rise, "points"))
        circles.set_offset_transform(line.get_transform())
    panel.set(title=name, xlabel=f"{unit} env_steps of the policy")
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.margins(y=0.12)  # lines that lie side by side stay inside
    numbers = [abs(float(event[name])) for event in events if event[name]]
    if name != "objective" and numbers and max(numbers) > 3 * min(numbers):
        panel.set_yscale("log")


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
    print(args.output)
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
