"""Draw learning curves of one run or several: `python -m tools.plot train_dir/PongNoFrameskip-v4 curve.png`.

Reads each run's `metrics.jsonl`: the true mean return of the last 100 episodes (or another key, such as eval_return)
over the time of training and env_steps. Runs whose names differ only in a number at the end (`pong_0`, `pong_1`, ...;
`pong_seed_0`, ...) are drawn together: a thick line is their mean as far as all of them reach, the band around it its
95 % interval (1.96 standard errors), thin lines are the runs.

`python -m tools.plot --population RUN` draws what population-based training did, RUN/population.jsonl, into
RUN/population.png: the objective of each policy and all that was mutated.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from runtime.checkpoint import read_lines
from runtime.command_line import OneLineParser
from runtime.utils import UserError, exit_status, run_command

# of Okabe and Ito ("Color Universal Design", 2008), which the color-blind can tell apart
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d1f", "#1f2933")
POINTS = 500  # of a mean curve
NOT_MUTATED = {"policy", "policy_steps", "env_steps", "objective", "donor", "words"}  # of an event


@contextmanager
def drawing(output: Path, height: float) -> Iterator[Figure]:
    """Yield a figure of this height (inches), then save it."""
    figure = Figure(figsize=(8.6, height), layout="constrained")
    yield figure
    figure.savefig(output, dpi=200)


def read_curve(run_dir: Path, key: str) -> np.ndarray:
    """Read a key of a run: minutes, million env_steps, values, [N, 3]. Raises `UserError` where there is none."""
    points = [(row["wall_sec"] / 60, row["env_steps"] / 1e6, row[key])
              for row in read_lines(run_dir / "metrics.jsonl") if row.get(key) is not None]
    if not points:
        raise UserError(f"{run_dir}/metrics.jsonl holds no {key}")
    return np.array(points)


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
    """Put runs together whose names differ only in a number at the end, by that name."""
    groups = defaultdict(list)
    for run_dir in run_dirs:
        groups[re.sub(r"_(seed_)?\d+$", "", str(run_dir))].append(run_dir)
    return groups


def draw(run_dirs: Sequence[Path], output: Path, goal: float, key: str) -> None:
    """Draw the curves of some runs into a picture file; a dashed line marks the goal, unless that is infinite."""
    with drawing(output, 3.4) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        panels[0].set(xlabel="minutes", ylabel=key)
        panels[1].set(xlabel="million env_steps")
        for color, (name, members) in zip(cycle(COLORS), group_runs(run_dirs).items(), strict=False):
            curves = [read_curve(run_dir, key) for run_dir in members]
            label = f"{name}, mean of {len(curves)}" if len(curves) > 1 else name
            for axis, panel in enumerate(panels):
                shown = [curve[:, [axis, 2]] for curve in curves]
                for curve in shown:
                    panel.plot(*curve.T, color=color, linewidth=0.5)
                places, mean, error = mean_curve(shown)
                panel.plot(places, mean, color=color, linewidth=2, label=label)
                panel.fill_between(places, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)
        for panel in panels:
            panel.axhline(goal, color="gray", linestyle="--", linewidth=1)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)


def draw_population(run_dir: Path) -> Path:
    """Draw the objective of each policy and all that was mutated, over the policy's env_steps; return the picture."""
    events = read_lines(run_dir / "population.jsonl")
    if not events:
        raise UserError(f"{run_dir} holds no population.jsonl: train with --with_pbt")
    changed = [name for name in events[0].keys() - NOT_MUTATED if len({event[name] for event in events}) > 1]
    names = ["objective", *sorted(changed)]
    output = run_dir / "population.png"
    with drawing(output, 0.6 + 1.8 * len(names)) as figure:
        panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=True):
            for policy in sorted({event["policy"] for event in events}):
                own = [event for event in events if event["policy"] == policy and event[name] is not None]
                panel.plot([event["policy_steps"] for event in own], [event[name] for event in own], marker=".",
                           label=f"policy {policy}", color=COLORS[policy % len(COLORS)], drawstyle="steps-post")
            panel.set_title(name, loc="left")
        panels[-1].set(xlabel="env_steps of the policy")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return output


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = OneLineParser(__doc__)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH",
                        help="folders of runs, then the picture to write, for example curve.png")
    parser.add_argument("--goal", type=float, default=math.inf, help="mark this value with a dashed line")
    parser.add_argument("--key", default="mean_return", help="what to draw: a key of metrics.jsonl [mean_return]")
    parser.add_argument("--population", action="store_true", help="draw RUN/population.png; RUN is the only path")
    args = parser.parse(argv)
    *run_dirs, output = args.paths
    if args.population:
        output = draw_population(output)
    elif output.is_dir():
        raise UserError(f"{output} is a folder; name the picture last, for example curve.png")
    else:
        draw(run_dirs, output, args.goal, args.key)
    print(output)


if __name__ == "__main__":
    run_command(main)
