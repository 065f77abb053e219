"""What the progress line and the last line of a run say, and how the time left is found. Used by `records.py`."""

import math
from collections.abc import Sequence
from typing import Any

from config import Config
from runtime.policy_records import PolicyRecords, mean

PACE_SEC = 120.0  # what came before the last so many seconds hardly counts for the time left


class Pace:
    """How fast env_steps are sampled: their number over the time they took, in which the past fades away."""

    def __init__(self) -> None:
        self.env_steps = self.seconds = 0.0

    def add(self, env_steps: int, seconds: float) -> None:
        kept = math.exp(-seconds / PACE_SEC)
        self.env_steps, self.seconds = kept * self.env_steps + env_steps, kept * self.seconds + seconds

    def seconds_for(self, env_steps: int) -> float:
        """Tell how long so many env_steps take; infinity: nothing is known yet."""
        return env_steps * self.seconds / self.env_steps if self.env_steps else math.inf


def describe_progress(cfg: Config, row: dict[str, Any], policies: Sequence[PolicyRecords], goal: int, pace: Pace,
                      return_so_far: float, trouble: Sequence[str]) -> tuple[str, str]:
    """Say how far the run has come, from a row of metrics.jsonl: in full, and so that it fits into 80 columns.

    return_so_far: that of the episodes under way, for as long as none has finished.
    """
    fraction = min(max(row["env_steps"] / goal, row["wall_sec"] / cfg.train_for_seconds), 1.0)
    seconds_left = max(0.0, min(pace.seconds_for(goal - row["env_steps"]), cfg.train_for_seconds - row["wall_sec"]))
    left = f"{format_roughly(seconds_left)} left"
    fps, steps = f"{row['fps']:,.0f}", f"{row['env_steps']:,} env_steps"
    if cfg.env_frameskip > 1:
        steps, per_sec = f"{steps} ({row['env_frames']:,} frames)", (f"{fps} frames/s", f"{fps} fps")
    else:
        per_sec = (f"{fps}/s",) * 2
    parts = [(part, part) for part in (f"{fraction:.1%}", *trouble)]
    parts += [(f"{format_duration(row['wall_sec'])} gone, {left}", left),
              (steps, f"{shorten(row['env_steps'])} env_steps"), per_sec,
              *((part, part) for part in describe_scores(row, policies, return_so_far))]
    if "policy_lag_mean" in row:
        lag = f"lag {row['policy_lag_mean']:.1f}"
        parts.append((f"{lag} (max {row['policy_lag_max']:.0f})", lag))
    in_full, in_short = (" | ".join(forms) for forms in zip(*parts, strict=True))
    return in_full, in_short


def describe_scores(row: dict[str, Any], policies: Sequence[PolicyRecords], return_so_far: float) -> list[str]:
    """Say what the policies have reached."""
    if row["mean_return"] is None:
        parts = [f"return so far {return_so_far:.2f}"]
    else:
        spread = [policy.mean_return for policy in policies if policy.returns]
        of_all = f" ({min(spread):.2f} to {max(spread):.2f})" if len(policies) > 1 else ""
        parts = [f"return {row['mean_return']:.2f}{of_all}"]
    if row.get("true_objective") is not None:
        parts.append(f"objective {row['true_objective']:.2f}")
    if row.get("win_rate_vs_past") is not None:
        parts.append(f"wins against the past {row['win_rate_vs_past']:.0%}")
    evaluations = [policy.last_evaluation["eval_return"] for policy in policies if policy.last_evaluation]
    if evaluations:
        parts.append(f"eval {mean(evaluations):.2f}")
    return parts


def describe_finished(cfg: Config, env_steps: int, goal: int, wall_sec: float) -> str:
    """Say in one line that a run has trained as long as it should, and what would let it train on."""
    done = (f"the run has {env_steps:,} of {goal:,} env_steps; train on with --train_for_env_steps="
            f"{goal * (env_steps // max(goal, 1) + 1)}" if env_steps >= goal else
            f"the run has trained for {wall_sec:.0f} of {cfg.train_for_seconds:g} s; train on with --train_for_seconds="
            f"{math.ceil(wall_sec + cfg.train_for_seconds)}")
    return f"nothing to do: {done}, or begin anew with --restart_behavior=restart"


def show_scores(scores: list[float | None]) -> str:
    """Write the score of each policy."""
    return ", ".join("none" if score is None else f"{score:.2f}" for score in scores)


def shorten(number: int) -> str:
    """Write a count in few characters: 12,345, 123k, 1.23M."""
    if number < 1_000_000:
        return f"{number:,}" if number < 100_000 else f"{number // 1000}k"
    return f"{number / 1e6:.2f}M"


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def format_roughly(seconds: float) -> str:
    """Format an estimate of seconds: 95s, 12m, 3h05m."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 100:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 100 else f"{minutes // 60}h{minutes % 60:02}m"
