"""Draw learning curves: `python plot.py train_dir/PongNoFrameskip-v4 curve.png` (several runs: one curve each).

Reads each run's `metrics.jsonl`; the true mean return of the last 100 episodes over minutes of training and env_steps,
and the scores of evaluations during training as dots.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # a backend without a window

from matplotlib import pyplot as plt


def read_curve(run_dir: Path) -> tuple[list[float], list[float], list[float]]:
    """Read minutes, millions of env_steps and mean returns of the rows that have a return."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["mean_return"] is not None]
    return ([row["wall_sec"] / 60 for row in rows], [row["env_steps"] / 1e6 for row in rows],
            [row["mean_return"] for row in rows])


def read_evaluations(run_dir: Path) -> tuple[list[float], list[float]]:
    """Read the millions of env_steps and the mean returns of evaluations during training (`--eval_every_env_steps`)."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "eval_return" in row]
    return [row["eval_env_steps"] / 1e6 for row in rows], [row["eval_return"] for row in rows]


def draw(run_dirs: list[Path], output: Path, goal: float | None) -> None:
    """Draw the curves of some runs into a picture file; a dashed line marks the goal."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for run_dir in run_dirs:
        minutes, env_steps, returns = read_curve(run_dir)
        color = panels[0].plot(minutes, returns, label=run_dir.name)[0].get_color()
        panels[1].plot(env_steps, returns, color=color, label=run_dir.name)
        evaluated_at, scores = read_evaluations(run_dir)
        if scores:
            panels[1].plot(evaluated_at, scores, "o", markersize=3, color=color, label=f"{run_dir.name}, evaluation")
    panels[0].set(xlabel="minutes", ylabel="mean return of the last 100 episodes")
    panels[1].set(xlabel="million env_steps")
    for panel in panels:
        panel.grid(alpha=0.3)
        if goal is not None:
            panel.axhline(goal, color="gray", linestyle="--", linewidth=1)
    panels[1].legend(loc="lower right")
    figure.savefig(output, dpi=120)


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("output", type=Path, help="picture to write, for example curve.png")
    parser.add_argument("--goal", type=float, help="mark this return with a dashed line")
    args = parser.parse_args(argv)
    missing = [run_dir for run_dir in args.run_dirs if not (run_dir / "metrics.jsonl").is_file()]
    if missing:
        print(f"plot.py: {missing[0]} holds no metrics.jsonl", file=sys.stderr)
        return 2
    draw(args.run_dirs, args.output, args.goal)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
