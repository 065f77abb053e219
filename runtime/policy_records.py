"""What one policy of a run reports: its last episodes, its training since the last row. Used by `records.py`."""

import collections
import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import Config
from runtime.files import write_atomically

EVALUATION = ("eval_return", "eval_env_steps", "eval_sgd_steps")
TOTALS = ("sgd_steps", "env_steps_trained")  # of all learners of the policy
EPISODES = "episodes.json"
WINDOWS = ("returns", "lengths", "objectives", "matches")  # of `PolicyRecords`
RETURN_WINDOW = 100  # mean_return is over the last so many finished episodes
MIN_BEST_SEC = 1.0  # between two saves of a new best score
BEST_SHARE = 0.02  # of the learner's time that these saves may take


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of no values."""
    return sum(values) / len(values) if values else None


class PolicyRecords:
    """What one policy reports, since the last row and over its last episodes."""

    def __init__(self, policy: int, earlier: dict[str, Any], sgd_steps: int, min_episodes: int,
                 resumed_at: int | None) -> None:
        """Begin; earlier: the run's last summary; min_episodes: so many must finish before the policy is ranked."""
        self.min_episodes = min_episodes
        self.returns: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)
        self.lengths: collections.deque[int] = collections.deque(maxlen=RETURN_WINDOW)
        self.objectives: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)
        self.has_objective = False  # the environment has told a true objective; until then returns stand for it
        self.matches: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)  # against earlier policies
        self.num_episodes = 0
        self.training: list[dict[str, float]] = []  # statistics of the datasets since the last row
        self.latest: dict[str, float] = {"sgd_steps": sgd_steps}
        self.evaluation: dict[str, float] = {}  # the one since the last row, if any
        self.last_evaluation: dict[str, float] = {}
        with contextlib.suppress(LookupError, TypeError, OverflowError):  # there was none
            evaluation = earlier["evaluation"][policy]
            if all(math.isfinite(evaluation[name]) for name in EVALUATION) and (
                    evaluation["eval_env_steps"] <= (resumed_at or 0)):  # else of weights that were lost in a crash
                self.last_evaluation = evaluation
        self.reached = -math.inf  # what was compared with `stop_at_return` last; once high enough it stays
        with contextlib.suppress(LookupError, TypeError, ValueError):
            if earlier["env_steps"] == resumed_at:
                self.reached = float(earlier["reached_return"][policy])
        self.last_best = self.last_best_line = -math.inf  # when the best was saved; when a line said so
        self.best_every_sec, self.is_saving_best = MIN_BEST_SEC, False
        self.lag_sum = 0.0
        self.lag_max = 0
        self.num_datasets = 0
        self.score_before = (-math.inf, 0)  # of the best checkpoint, and its sort, while another one is saved

    @property
    def mean_return(self) -> float | None:
        return mean(self.returns)

    @property
    def objective(self) -> float | None:
        """Return the mean true objective where the environment tells one, or else return; None at first."""
        return mean(self.objectives)

    @property
    def win_rate(self) -> float | None:
        return mean(self.matches)

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
        totals = {name: max(stats[name], self.latest.get(name, 0)) for name in TOTALS}  # of whichever learner
        self.latest = stats | totals
        self.training.append(self.latest)
        self.lag_sum += stats["policy_lag_mean"]
        self.lag_max = max(self.lag_max, stats["policy_lag_max"])
        self.num_datasets += 1

    def window(self) -> dict[str, list[float]]:
        """Return the last episodes, to be saved."""
        return {name: list(getattr(self, name)) for name in WINDOWS} | {"objectives_told": self.has_objective}

    def restore_window(self, saved: dict[str, Any]) -> None:
        """Take over what `window` returned. Raises `LookupError`, `TypeError` or `ValueError` for anything else."""
        values = {name: [float(value) for value in saved[name]] for name in WINDOWS}
        self.has_objective = bool(saved["objectives_told"])
        for name in WINDOWS:
            getattr(self, name).extend(value for value in values[name] if math.isfinite(value))

    def forget_episodes(self) -> None:
        """Begin a new window of episodes: the parameters are others."""
        for name in WINDOWS:
            getattr(self, name).clear()
        self.last_evaluation, self.reached = {}, -math.inf

    def is_good_enough(self, cfg: Config) -> bool:
        """Return whether its last evaluation, or else a full window of episodes, has reached `stop_at_return`."""
        if self.reached < cfg.stop_at_return < math.inf:
            of_window = self.mean_return if len(self.returns) == RETURN_WINDOW else -math.inf
            self.reached = self.last_evaluation.get("eval_return", -math.inf) if cfg.eval_every_env_steps else of_window
        return self.reached >= cfg.stop_at_return

    def saved_best(self, seconds: float) -> None:
        """Note that the best checkpoint was saved, and how long that took."""
        self.is_saving_best = False
        self.best_every_sec = max(MIN_BEST_SEC, seconds / BEST_SHARE)

    def take_row(self) -> dict[str, Any]:
        """Return this policy's part of a row, and begin the next one.

        What was not finite is None, also of an extreme, whose order would else decide: JSON has no such numbers.
        """
        row: dict[str, Any] = {
            "mean_return": self.mean_return, "return_min": min(self.returns, default=None),
            "return_max": max(self.returns, default=None), "mean_length": mean(self.lengths)}
        if self.has_objective:
            row["true_objective"] = self.objective
        if self.matches:
            row["win_rate_vs_past"] = self.win_rate
        for name in dict.fromkeys(name for stats in self.training for name in stats):
            values = [stats[name] for stats in self.training if name in stats]  # some are of one learner alone
            row[name] = values[-1] if name in (*TOTALS, "learning_rate") else (
                max(values) if name.endswith("_max") else min(values) if name.endswith("_min") else mean(values))
            if not all(map(math.isfinite, values)):
                row[name] = None
        row.setdefault("sgd_steps", self.latest["sgd_steps"])
        row |= self.evaluation
        self.training.clear()
        self.evaluation = {}
        return row


def objectives_of(policies: list[PolicyRecords], kind_of_policy: list[int]) -> list[float | None]:
    """Return what population-based training ranks each policy by; None: too few episodes have finished.

    Among policies of one kind of agents, true objectives are not compared with returns: as soon as one policy has
    an objective, the others need one, and those that have none in a full window of episodes are the worst (-inf).
    """
    with_objective = {kind for kind, policy in zip(kind_of_policy, policies, strict=True)
                      if policy.has_objective}
    objectives: list[float | None] = []
    for kind, policy in zip(kind_of_policy, policies, strict=True):
        if policy.has_objective or kind not in with_objective:
            objectives.append(policy.objective if len(policy.objectives) >= policy.min_episodes else None)
        else:
            objectives.append(-math.inf if len(policy.returns) == RETURN_WINDOW else None)
    return objectives


def save_windows(path: Path, policies: Sequence[PolicyRecords], checkpoint: str) -> None:
    """Write the last episodes of each policy, beside a checkpoint of this name. Raises `OSError`."""
    env_steps = int(checkpoint.removesuffix(".pt").rpartition("_")[2])
    windows = {"env_steps": env_steps, "policies": [policy.window() for policy in policies]}
    write_atomically(path, json.dumps(windows) + "\n")


def load_windows(path: Path, policies: Sequence[PolicyRecords], resumed_at: int | None) -> None:
    """Let a run that goes on after so many env_steps have its last episodes, but not those of lost weights.

    Policies save one after another: the run goes on with the largest count of theirs, which need not come last.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        windows = json.loads(path.read_text())
        if windows["env_steps"] <= resumed_at:
            for policy, window in zip(policies, windows["policies"], strict=True):
                policy.restore_window(window)
