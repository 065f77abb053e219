"""What the progress line and the last line of a run say. Used by `records.py`."""

import math
from collections.abc import Sequence
from typing import Any

from config import Config
from runtime.policy_records import PolicyRecords, mean


def describe_row(row: dict[str, Any], policies: Sequence[PolicyRecords]) -> list[str]:
    """Say what stands in a row of metrics.jsonl, in the words of the progress line."""
    parts = [f"{row['env_frames']:,} frames", f"{row['fps']:,.0f} frames/s"]
    if row["mean_return"] is not None:
        spread = [policy.mean_return for policy in policies if policy.returns]
        of_all = f" ({min(spread):.2f} to {max(spread):.2f})" if len(policies) > 1 else ""
        parts.append(f"return {row['mean_return']:.2f}{of_all}")
    if row.get("true_objective") is not None:
        parts.append(f"objective {row['true_objective']:.2f}")
    if row.get("win_rate_vs_past") is not None:
        parts.append(f"wins against the past {row['win_rate_vs_past']:.0%}")
    evaluations = [policy.last_evaluation["eval_return"] for policy in policies if policy.last_evaluation]
    if evaluations:
        parts.append(f"eval {mean(evaluations):.2f}")
    if "policy_lag_mean" in row:
        parts.append(f"lag {row['policy_lag_mean']:.1f} (max {row['policy_lag_max']:.0f})")
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


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
