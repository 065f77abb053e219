"""Draw learning curves of one run or several: `python -m tools.plot train_dir/PongNoFrameskip-v4 curve.png`.

Reads each run's `metrics.jsonl`: the true mean return of the last 100 episodes (or another key) over the time of
training and env_steps, each policy of a population as a thin line, and the scores of evaluations during training as
dots. Runs whose settings differ in the seed alone, and their names in a number at the end (or that of the folder around
seed_0, seed_1, ... is one), are drawn together: a thick line is their mean as far as all of them reach, the band around
it its 95 % interval (bootstrap), thin lines are the runs. With `--population`
it reads the `population.jsonl` of one run: the objective of each policy and all that was mutated over the policy's
env_steps, with a circle wherever a policy became a copy of another, in the color of that one.
"""

import argparse
import contextlib
import itertools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.files import load_saved, read_lines
from runtime.user_error import UserError, nearest
from tools.figures import COLORS, GRAY, drawing

POINTS = 200  # of a mean curve
RESAMPLES = 1000  # of the bootstrap
# from how many on, the size of the unit, its name
TIME = ((0, 1, "seconds"), (180, 60, "minutes"), (3 * 3600, 3600, "hours"))
STEPS = ((0, 1, "env_steps"), (1e3, 1e3, "thousand env_steps"), (1e6, 1e6, "million env_steps"))
OF_ONE_RUN = {"seed", "experiment", "train_dir", "restart_behavior", "trust_run"}  # what runs of one setting differ in
OF_AN_EVENT = {"policy", "policy_steps", "env_steps", "objective", "donor", "words"}  # the rest was mutated


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics. Raises `UserError` when there are none."""
    rows = [row for row in read_lines(run_dir / "metrics.jsonl") if {"wall_sec", "env_steps"} <= row.keys()]
    if not rows:
        raise UserError(f"{run_dir} holds no metrics.jsonl")
    return rows


def read_curves(run_dir: Path, key: str) -> list[np.ndarray]:
    """Read a key of the whole run, then of each policy of a population: seconds, env_steps, values, [N, 3]."""
    rows, curves = read_rows(run_dir), []
    try:
        for policy in range(-1, len(rows[0].get("policies", ()))):
            parts = [(row, row if policy < 0 else row["policies"][policy]) for row in rows]
            points = [(row["wall_sec"], row["env_steps"], own[key]) for row, own in parts if own.get(key) is not None]
            curves.append(np.array(points, float).reshape(-1, 3))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{run_dir}/metrics.jsonl holds other things than numbers ({error})") from error
    return curves


def mean_curve(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Average curves [N, 2] of places and values over the places that all reach, interpolated in between.

    Returns the places, the mean, and the ends of its 95 % interval (bootstrap over the curves, percentiles), [POINTS]
    each; nothing where the curves share no place.
    """
    begin, end = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    if begin >= end:
        return (np.empty(0),) * 4
    places = np.linspace(begin, end, POINTS)
    values = np.array([np.interp(places, *curve.T) for curve in curves])
    drawn = np.random.default_rng(0).integers(len(curves), size=(RESAMPLES, len(curves)))
    low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5], axis=0)
    return places, values.mean(0), low, high


def without_number(run_dir: Path) -> Path:
    """Return a run's folder without the number of its seed; the one around it where nothing is left."""
    path = run_dir.resolve()
    name = re.sub(r"([_.-](s|seed)?[_.-]?)?(?<![-_.]v)(?<!\d)\d+$", "", path.name)
    return path.parent if name in ("", "s", "seed") else path.with_name(name)


def group_runs(run_dirs: Sequence[Path]) -> dict[str, list[Path]]:
    """Put runs together that differ in their seed alone; return the groups by their names."""
    groups: dict[str, dict[Any, Path]] = {}  # of each the runs by their seeds
    for run_dir in run_dirs:
        settings = {"run": str(run_dir)}  # without its settings it is alone
        with contextlib.suppress(UserError):
            settings = load_saved(run_dir / "config.json")
        common = [setting for setting in sorted(settings.items()) if setting[0] not in OF_ONE_RUN]
        group, seed = f"{without_number(run_dir)} {common}", settings.get("seed")
        groups.setdefault(str(run_dir) if seed in groups.get(group, ()) else group, {})[seed] = run_dir
    members = [[*group.values()] for group in groups.values()]
    names = [without_number(each[0]).name if len(each) > 1 else each[0].resolve().name for each in members]
    return {name if names.count(name) == 1 else str(each[0]): each for name, each in zip(names, members, strict=True)}


def choose_unit(largest: float, units: Sequence[tuple[float, float, str]]) -> tuple[float, str]:
    """Return the size and the name of the unit in which a reader would count so many."""
    return max(unit for unit in units if largest >= unit[0])[1:]


def add_legend(figure: Any, panel: Any) -> None:
    """Explain the lines of a panel above all panels, in as many rows as that takes."""
    handles, labels = panel.get_legend_handles_labels()
    columns = max(1, 110 // (8 + max(map(len, labels))))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))


def draw(run_dirs: Sequence[Path], output: Path, goal: float | None, key: str = "mean_return") -> None:
    """Draw the curves of some runs into a picture file; a dashed line marks the goal. Raises `UserError`."""
    last = {run_dir: read_rows(run_dir)[-1] for run_dir in run_dirs}
    for run_dir, row in last.items():
        if not any(map(len, read_curves(run_dir, key))):
            raise UserError(f"{run_dir} holds no {key}{nearest(key, row)}")
    with drawing(output, 3.4) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axis, (panel, name, units) in enumerate(zip(panels, ("wall_sec", "env_steps"), (TIME, STEPS), strict=True)):
            size, unit = choose_unit(max(row[name] for row in last.values()), units)
            for color, (label, members) in zip(itertools.cycle(COLORS), group_runs(run_dirs).items(), strict=False):
                runs = [[curve[:, [axis, 2]] / (size, 1) for curve in read_curves(run_dir, key)] for run_dir in members]
                draw_group(panel, runs, color, label)
                for run_dir in members if key == "mean_return" else ():
                    evaluations = read_curves(run_dir, "eval_return")[0]
                    panel.plot(evaluations[:, axis] / size, evaluations[:, 2], "o", markersize=3, color=color)
            panel.set(xlabel=unit)
            if goal is not None:
                panel.axhline(goal, color=GRAY, linestyle="--", linewidth=1)
        panels[0].set(ylabel=key)
        add_legend(figure, panels[1])


def draw_group(panel: Any, runs: Sequence[Sequence[np.ndarray]], color: str, label: str) -> None:
    """Draw runs in one color, each a curve [N, 2] of the whole and those of its policies, and their mean."""
    wholes = [run[0] for run in runs if len(run[0])]
    for curve in itertools.chain(*(run[1:] for run in runs)):
        panel.plot(*curve.T, color=color, linewidth=0.5)
    for curve in wholes:
        panel.plot(*curve.T, color=color, linewidth=1.5 if len(wholes) == 1 else 0.5, marker="." * (len(curve) == 1),
                   label=label if len(wholes) == 1 else None)
    if len(wholes) > 1:
        places, mean, low, high = mean_curve(wholes)
        panel.plot(places, mean, color=color, linewidth=2, label=f"{label}, mean of {len(wholes)}")
        panel.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)


def draw_population(run_dir: Path, output: Path) -> None:
    """Draw the history of a population into a picture file. Raises `UserError` when there is none."""
    events = [event for event in read_lines(run_dir / "population.jsonl") if event.keys() >= OF_AN_EVENT]
    if not events:
        raise UserError(f"{run_dir} holds no population.jsonl")
    changed = [name for name in events[0].keys() - OF_AN_EVENT if len({event[name] for event in events}) > 1]
    names = ["objective", *sorted(changed)]
    size, unit = choose_unit(max(event["policy_steps"] for event in events), STEPS)
    with drawing(output, 0.6 + 1.8 * len(names)) as figure:
        panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=True):
            for policy in sorted({event["policy"] for event in events}):
                own = [event for event in events if event["policy"] == policy and event[name] is not None]
                steps, values = [event["policy_steps"] / size for event in own], [float(event[name]) for event in own]
                copies = ["none" if event["donor"] is None else COLORS[event["donor"] % len(COLORS)] for event in own]
                panel.plot(steps, values, marker=".", label=f"policy {policy}", color=COLORS[policy % len(COLORS)],
                           drawstyle="default" if name == "objective" else "steps-post")
                panel.scatter(steps, values, s=28, facecolors="none", edgecolors=copies, zorder=3)
            panel.set_title(name, loc="left")  # of whatever length
        panels[-1].set(xlabel=f"{unit} of the policy")
        add_legend(figure, panels[0])


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("output", type=Path, help="picture to write, for example curve.png")
    parser.add_argument("--goal", type=float, help="mark this value with a dashed line")
    parser.add_argument("--key", default="mean_return", help="what to draw: a key of metrics.jsonl [mean_return]")
    parser.add_argument("--population", action="store_true",
                        help="draw what population-based training did in the first run instead")
    args = parser.parse_args(argv)
    try:
        if args.population:
            draw_population(args.run_dirs[0], args.output)
        else:
            draw(args.run_dirs, args.output, args.goal, args.key)
    except UserError as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
