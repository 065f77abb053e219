"""What one policy of a run reports: its last episodes, its training since the last row. Used by `records.py`."""

import collections
import math
from typing import Any

from config import Config

RETURN_WINDOW = 100  # mean_return is over the last so many finished episodes
MIN_BEST_SEC = 1.0  # a new best mean return is saved at most this often, and takes at most
BEST_SHARE = 0.02  # of the learner's time


class PolicyRecords:
    """What one policy reports, since the last row and over its last episodes."""

    def __init__(self, cfg: Config, policy: int, earlier: dict[str, Any], sgd_steps: int, min_episodes: int,
                 resumed_at: int | None) -> None:
        """Begin; min_episodes: that must have finished before the policy is ranked."""
        self.min_episodes = min_episodes
        self.returns: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)
        self.lengths: collections.deque[int] = collections.deque(maxlen=RETURN_WINDOW)
        self.objectives: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)
        self.has_objective = False  # the environment tells one; else it is the return
        self.matches: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)  # against earlier policies
        self.num_episodes = 0
        self.training: list[dict[str, float]] = []  # statistics of the datasets since the last row
        self.latest: dict[str, float] = {"sgd_steps": sgd_steps}
        self.evaluation: dict[str, float] = {}  # the one since the last row, if any
        last_evaluation = _entry(earlier, "evaluation", policy) or {}
        is_lost = resumed_at is None or last_evaluation.get("eval_env_steps", 0) > resumed_at
        self.last_evaluation: dict[str, float] = {} if is_lost else last_evaluation
        self.last_best = self.last_best_line = -math.inf  # when the best checkpoint was saved, when a line said so
        self.best_every_sec, self.is_saving_best = MIN_BEST_SEC, False
        self.lag_sum, self.lag_max, self.num_datasets = 0.0, 0, 0
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  slow to import; the children start meanwhile

        self.tensorboard = SummaryWriter(
            cfg.run_dir / "tensorboard" / f"policy_{policy:02}", max_queue=1000, flush_secs=10,
            purge_step=0 if resumed_at is None else resumed_at + 1)  # hides what came after the checkpoint

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns) if self.returns else math.nan

    @property
    def objective(self) -> float | None:
        """Return the mean true objective where the environment tells one, or else return; None at first."""
        return sum(self.objectives) / len(self.objectives) if self.objectives else None

    @property
    def win_rate(self) -> float | None:
        return sum(self.matches) / len(self.matches) if self.matches else None

    def add_episode(self, episode_return: float, length: int, objective: float) -> None:
        self.returns.append(episode_return)
        self.lengths.append(length)
        if not math.isnan(objective) and not self.has_objective:  # what came before were returns
            self.has_objective = True
            self.objectives.clear()
        if self.has_objective != math.isnan(objective):  # an episode without an objective says nothing about it
            self.objectives.append(objective if self.has_objective else episode_return)
        self.num_episodes += 1

    def add_training(self, stats: dict[str, float]) -> None:
        self.training.append(stats)
        self.latest = stats
        self.lag_sum += stats["policy_lag_mean"]
        self.lag_max = max(self.lag_max, stats["policy_lag_max"])
        self.num_datasets += 1

    def saved_best(self, seconds: float) -> None:
        """Note that the best checkpoint was saved, and how long that took."""
        self.is_saving_best = False
        self.best_every_sec = max(MIN_BEST_SEC, seconds / BEST_SHARE)

    def take_row(self) -> dict[str, Any]:
        """Return this policy's part of a row, and begin the next one."""
        row: dict[str, Any] = {
            "mean_return": self.mean_return if self.returns else None,
            "mean_length": sum(self.lengths) / len(self.lengths) if self.lengths else None,
        }
        if self.has_objective:
            row["true_objective"] = self.objective
        if self.matches:
            row["win_rate_vs_past"] = self.win_rate
        for name in self.latest:
            values = [stats[name] for stats in self.training]
            if values:
                row[name] = values[-1] if name in ("sgd_steps", "env_steps_trained", "learning_rate") else (
                    max(values) if name.endswith("_max") else min(values) if name.endswith("_min")
                    else sum(values) / len(values))
        row.setdefault("sgd_steps", self.latest["sgd_steps"])
        row |= self.evaluation
        self.training.clear()
        self.evaluation = {}
        return row


def _entry(summary: dict[str, Any], name: str, policy: int) -> Any:
    """Return what a summary says of one policy; None when it says nothing."""
    values = summary.get(name)
    return values[policy] if isinstance(values, list) and policy < len(values) else None
