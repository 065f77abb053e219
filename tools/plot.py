"""Draw learning curves of one run or several: `python -m tools.plot train_dir/PongNoFrameskip-v4 curve.png`.

Reads each run's `metrics.jsonl`: the true mean return of the last 100 episodes (or another key) over the time of
training and env_steps, each policy of a population as a thin line, and the scores of evaluations during training as
dots. Runs whose settings differ in the seed alone, and their names in a number at the end (`pong_0`, `pong_1`, ...),
are drawn together: a thick line is their mean as far as all of them reach, the band around it its 95 % interval
(1.96 standard errors), thin lines are the runs. `draw_population` draws the `population.jsonl` of a run when that ends.
"""

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.files import load_saved, read_lines
from runtime.user_error import UserError, exit_status
from tools.figures import COLORS, drawing

POINTS = 500  # of a mean curve
OF_ONE_RUN = {"seed", "experiment", "train_dir", "restart_behavior", "trust_run"}  # what runs of one setting differ in
OF_AN_EVENT = {"policy", "policy_steps", "env_steps", "objective", "donor", "words"}  # the rest was mutated


def read_curves(run_dir: Path, key: str) -> list[np.ndarray]:
    """Read a key of the whole run, then of each policy of a population: minutes, env_steps, values, [N, 3]."""
    rows, curves = read_lines(run_dir / "metrics.jsonl"), []
    if not rows:
        raise UserError(f"{run_dir} holds no metrics.jsonl")
    for part in (rows, *zip(*(row.get("policies", ()) for row in rows), strict=False)):
        points = [(row["wall_sec"] / 60, row["env_steps"], own[key])
                  for row, own in zip(rows, part, strict=True) if own.get(key) is not None]
        curves.append(np.array(points, float).reshape(-1, 3))
    return curves


def mean_curve(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average curves [N, 2] of places and values over the places that all reach, interpolated in between.

    Returns the places, the mean, and half of its 95 % interval, [POINTS] each.
    """
    begin = max(curve[0, 0] for curve in curves)
    end = min(curve[-1, 0] for curve in curves)
    places = np.linspace(begin, max(begin, end), POINTS)
    values = np.array([np.interp(places, *curve.T) for curve in curves])
    return places, values.mean(0), 1.96 * values.std(0) / np.sqrt(max(len(curves) - 1, 1))


def group_runs(run_dirs: Sequence[Path]) -> dict[str, list[Path]]:
    """Put runs together that differ in their seed, and a number at the end of their names, alone; name each group."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for run_dir in run_dirs:
        settings = load_saved(run_dir / "config.json")
        common = {name: settings[name] for name in sorted(settings.keys() - OF_ONE_RUN)}
        name = re.sub(r"[_.-](seed|s)?[_.-]?\d+$", "", str(run_dir))
        groups.setdefault((name, json.dumps(common)), []).append(run_dir)
    top = os.path.commonpath([run_dir.absolute().parent for run_dir in run_dirs])
    named = {}
    for (name, _), members in groups.items():
        label = os.path.relpath(members[0], top)
        if len(members) > 1:
            label = f"{os.path.relpath(name, top)}, mean of {len(members)}"
        named[label] = members
    return named


def draw(run_dirs: Sequence[Path], output: Path, goal: float | None, key: str = "mean_return") -> None:
    """Draw the curves of some runs into a picture file; a dashed line marks the goal. Raises `UserError`."""
    curves = {run_dir: read_curves(run_dir, key) for run_dir in run_dirs}
    if not any(len(curve) for run in curves.values() for curve in run):
        raise UserError(f"metrics.jsonl of {', '.join(map(str, run_dirs))} holds no {key}")
    with drawing(output, 3.4) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for color, (label, members) in zip(itertools.cycle(COLORS), group_runs(run_dirs).items(), strict=False):
            for axis, panel in enumerate(panels):
                draw_group(panel, [[curve[:, [axis, 2]] for curve in curves[run]] for run in members], color, label)
                for run in members if key == "mean_return" else ():
                    panel.plot(*read_curves(run, "eval_return")[0][:, [axis, 2]].T, "o", markersize=3, color=color)
        for panel, unit in zip(panels, ("minutes", "env_steps"), strict=True):
            panel.set(xlabel=unit)
            if goal is not None:
                panel.axhline(goal, color="gray", linestyle="--", linewidth=1)
        panels[0].set(ylabel=key)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)


def draw_group(panel: Any, runs: Sequence[Sequence[np.ndarray]], color: str, label: str) -> None:
    """Draw runs in one color, each a curve [N, 2] of the whole and those of its policies, and their mean."""
    for curve in itertools.chain(*runs):
        panel.plot(*curve.T, color=color, linewidth=0.5)
    if wholes := [run[0] for run in runs if len(run[0])]:
        places, mean, error = mean_curve(wholes)
        panel.plot(places, mean, color=color, linewidth=2, label=label)
        panel.fill_between(places, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)


def draw_population(run_dir: Path, output: Path) -> None:
    """Draw the objective of each policy and all that was mutated, over the policy's env_steps, into a picture file.

    A circle is where a policy became a copy of another, in the color of that one.
    """
    events = read_lines(run_dir / "population.jsonl")
    changed = [name for name in set().union(*events) - OF_AN_EVENT if len({event[name] for event in events}) > 1]
    names = ["objective", *sorted(changed)]
    with drawing(output, 0.6 + 1.8 * len(names)) as figure:
        panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=True):
            for policy in sorted({event["policy"] for event in events}):
                own = [event for event in events if event["policy"] == policy and event[name] is not None]
                points = np.array([(event["policy_steps"], event[name]) for event in own], float).reshape(-1, 2).T
                copies = ["none" if event["donor"] is None else COLORS[event["donor"] % len(COLORS)] for event in own]
                panel.plot(*points, marker=".", label=f"policy {policy}", color=COLORS[policy % len(COLORS)],
                           drawstyle="default" if name == "objective" else "steps-post")
                panel.scatter(*points, s=28, facecolors="none", edgecolors=copies, zorder=3)
            panel.set_title(name, loc="left")  # of whatever length
        panels[-1].set(xlabel="env_steps of the policy")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("output", type=Path, help="picture to write, for example curve.png")
    parser.add_argument("--goal", type=float, help="mark this value with a dashed line")
    parser.add_argument("--key", default="mean_return", help="what to draw: a key of metrics.jsonl [mean_return]")
    args = parser.parse_args(argv)
    draw(args.run_dirs, args.output, args.goal, args.key)
    print(args.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
