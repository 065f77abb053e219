"""The records of a run: progress line, TensorBoard, metrics.jsonl, summary.json, log.txt; and when to save.

Owned by the supervisor. `add` takes what the components report, `tick` writes a row when one is due. In serial mode a
row is due after each dataset instead of every few seconds, so that two runs with one seed write the same rows.

    metrics.jsonl   one JSON object per report, the keys of `row`
    summary.json    the last row and totals; replaced atomically at each report
"""

import collections
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from config import Config
from shared_buffers import SAVE_BEST, SAVE_MILESTONE, SAVE_PERIODIC

RETURN_WINDOW = 100  # mean_return is over the last so many finished episodes
BEST_EVERY_SEC = 20.0  # a new best mean return is saved at most this often


class Records:
    """Counts, averages and writes what a run reports. Lives in the supervisor's process."""

    def __init__(self, cfg: Config, *, resumed: bool, sgd_steps: int) -> None:
        self.cfg, self.run_dir, self.resumed = cfg, cfg.run_dir, resumed
        self.last_row = time.monotonic()
        earlier = read_summary(self.run_dir) if resumed else {}
        self.wall_before: float = earlier.get("wall_sec", 0.0)  # seconds of training before this process
        self.best_return: float = earlier.get("best_return", [-math.inf])[0]
        self.returns: collections.deque[float] = collections.deque(maxlen=RETURN_WINDOW)
        self.lengths: collections.deque[int] = collections.deque(maxlen=RETURN_WINDOW)
        self.num_episodes: int = earlier.get("num_episodes", 0)
        self.training: list[dict[str, float]] = []  # statistics of the datasets since the last row
        self.latest: dict[str, float] = {"sgd_steps": sgd_steps}
        self.evaluation: dict[str, float] = {}  # the one since the last row, if any
        self.last_evaluation: dict[str, float] = earlier.get("evaluation") or {}
        self.last_saved = {SAVE_PERIODIC: time.monotonic(), SAVE_BEST: -math.inf, SAVE_MILESTONE: time.monotonic()}
        self.goal = cfg.train_for_env_steps
        self.train_sec = 0.0  # in earlier calls of train()
        self.begun: float | None = None  # when the running call of train() began
        self.steps_before_train = self.steps_at_row = 0
        self.sgd_steps_before = sgd_steps
        self.steps_trained = 0  # env_steps sampled inside train(), by this process
        self.first_step_sec: float | None = None
        self.peak_memory_bytes = 0
        self.lag_sum, self.lag_max, self.num_datasets = 0.0, 0, 0

        self.logger = make_logger(self.run_dir / "log.txt")
        self.metrics = (self.run_dir / "metrics.jsonl").open("a" if resumed else "w", buffering=1)
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  slow to import; the children start meanwhile

        self.tensorboard = SummaryWriter(self.run_dir / "tensorboard" / "policy_00", max_queue=1000, flush_secs=10)
        config_table = "\n".join(f"| {name} | {value} |" for name, value in vars(cfg).items())
        self.tensorboard.add_text("config", "| setting | value |\n|---|---|\n" + config_table)
        self.line_open = False

    # ---- input ---------------------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """Write lines to the console and to log.txt."""
        self._end_line()
        for line in text.splitlines():
            self.logger.info(line)

    def log_failure(self, error: BaseException) -> None:
        """Write why the run failed to log.txt; the console gets it from whoever handles the error."""
        self._end_line()
        record = self.logger.makeRecord(self.logger.name, logging.ERROR, "", 0, str(error), (), None)
        self.logger.handlers[0].handle(record)

    def add(self, kind: str, content: list[Any], env_steps: int) -> None:
        """Take one report of a component.

        ("episodes", [(return, length), ...]), ("trained", {...}), ("evaluated", {...}) or ("saved", kind, name).
        """
        if kind == "episodes":
            for episode_return, length in content[0]:
                self.returns.append(episode_return)
                self.lengths.append(length)
                self.num_episodes += 1
        elif kind == "trained":
            self.training.append(content[0])
            self.latest = content[0]
            self.lag_sum += content[0]["policy_lag_mean"]
            self.lag_max = max(self.lag_max, content[0]["policy_lag_max"])
            self.num_datasets += 1
        elif kind == "evaluated":
            if self.evaluation:  # each is in a row of its own
                self._write_row(env_steps)
            self.evaluation = self.last_evaluation = content[0]
            self.log("evaluation at env_steps={eval_env_steps:,}: return {eval_return:.2f} +- {eval_return_std:.2f}, "
                     "length {eval_length:.1f}".format(**content[0]))
        elif kind == "saved" and content[0] != SAVE_PERIODIC:
            self.log(f"saved {content[1]} at env_steps={env_steps:,}, mean return {self.mean_return:.2f}")

    @property
    def closed(self) -> bool:
        return self.metrics.closed

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns) if self.returns else math.nan

    @property
    def wall_sec(self) -> float:
        """Count the seconds spent in train(), earlier processes of this run included."""
        running = time.monotonic() - self.begun if self.begun is not None else 0.0
        return self.wall_before + self.train_sec + running

    # ---- output --------------------------------------------------------------------------------------------------

    def begin(self, env_steps: int, goal: int) -> None:
        """Start the clock of a call of train() that is to reach `goal` env_steps."""
        self.goal = goal
        self.begun = self.last_row = time.monotonic()
        self.steps_before_train = self.steps_at_row = env_steps

    def end(self, env_steps: int) -> None:
        """Stop the clock of a call of train(), after a last row of what was learned since the one before."""
        if self.training:
            self._write_row(env_steps)
        self.train_sec += time.monotonic() - self.begun
        self.begun = None
        self.steps_trained += env_steps - self.steps_before_train
        self.steps_before_train = env_steps

    def flush(self, env_steps: int) -> None:
        """Write a row for an evaluation that ended after the training."""
        if self.evaluation:
            self._write_row(env_steps)

    def tick(self, env_steps: int, sgd_steps: int) -> list[int]:
        """Write a row if one is due; return the kinds of checkpoints that are due."""
        now = time.monotonic()
        if self.first_step_sec is None and sgd_steps > self.sgd_steps_before:
            self.first_step_sec = time.time() - psutil.Process().create_time()
            self.log(f"first SGD step {self.first_step_sec:.1f} s after the start")
        elapsed = now - self.last_row
        due = bool(self.training) if self.cfg.serial_mode else elapsed >= self.cfg.report_interval_sec
        if not due:
            return []
        self._write_row(env_steps)
        saves = []
        if now - self.last_saved[SAVE_PERIODIC] >= self.cfg.save_every_sec:
            saves.append(SAVE_PERIODIC)
        if now - self.last_saved[SAVE_MILESTONE] >= self.cfg.save_milestones_sec:
            saves.append(SAVE_MILESTONE)
        full = len(self.returns) == RETURN_WINDOW
        if full and self.mean_return > self.best_return and now - self.last_saved[SAVE_BEST] >= BEST_EVERY_SEC:
            self.best_return = self.mean_return
            saves.append(SAVE_BEST)
        self.last_saved |= dict.fromkeys(saves, now)
        return saves

    def _write_row(self, env_steps: int) -> None:
        now = time.monotonic()
        seconds = max(now - self.last_row, 1e-9)
        fps = (env_steps - self.steps_at_row) * self.cfg.env_frameskip / seconds
        self.last_row, self.steps_at_row = now, env_steps
        row: dict[str, Any] = {
            "env_steps": env_steps, "env_frames": env_steps * self.cfg.env_frameskip,
            "wall_sec": self.wall_sec, "fps": fps, "num_episodes": self.num_episodes,
            "mean_return": self.mean_return if self.returns else None,
            "mean_length": sum(self.lengths) / len(self.lengths) if self.lengths else None,
        }
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
        if not self.cfg.serial_mode:
            row["memory_mb"] = self._measure_memory() / 1e6
        self.metrics.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if value is not None:
                step = row["eval_env_steps"] if name.startswith("eval_") else env_steps
                self.tensorboard.add_scalar(TENSORBOARD_GROUP.get(name, "train") + "/" + name, value, step)
        self._write_summary(env_steps)
        if self.begun is not None:
            self._show_progress(row)

    def _measure_memory(self) -> int:
        """Return the bytes of memory of all processes of the run, shared pages counted once."""
        total = 0
        process = psutil.Process()
        for member in [process, *process.children(recursive=True)]:
            try:
                info = member.memory_full_info()
                total += getattr(info, "pss", info.uss)
            except psutil.Error:  # it ended meanwhile, or may not be looked at
                continue
        self.peak_memory_bytes = max(self.peak_memory_bytes, total)
        return total

    def _write_summary(self, env_steps: int) -> None:
        running = env_steps - self.steps_before_train
        seconds = self.wall_sec - self.wall_before
        summary = {
            "env": self.cfg.env, "env_steps": env_steps, "env_frames": env_steps * self.cfg.env_frameskip,
            "sgd_steps": self.latest["sgd_steps"], "wall_sec": self.wall_sec,
            "fps": (self.steps_trained + running) * self.cfg.env_frameskip / max(seconds, 1e-9),
            "num_episodes": self.num_episodes,
            "mean_return": [self.mean_return if self.returns else None],
            "best_return": [self.best_return if math.isfinite(self.best_return) else None],
            "evaluation": self.last_evaluation or None,
            "policy_lag_mean": self.lag_sum / max(self.num_datasets, 1), "policy_lag_max": self.lag_max,
            "first_sgd_step_sec": self.first_step_sec, "peak_memory_mb": self.peak_memory_bytes / 1e6,
        }
        temporary = self.run_dir / "summary.tmp"
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(temporary, self.run_dir / "summary.json")

    def _show_progress(self, row: dict[str, Any]) -> None:
        steps_left = (self.goal - row["env_steps"]) * self.cfg.env_frameskip / max(row["fps"], 1e-9)
        seconds_left = min(max(steps_left, 0), self.cfg.train_for_seconds - self.wall_sec)
        percent = 100 * max(row["env_steps"] / self.goal, self.wall_sec / self.cfg.train_for_seconds)
        parts = [f"{percent:5.1f} %", f"{row['env_frames']:,} frames", f"{row['fps']:,.0f} frames/s"]
        if row["mean_return"] is not None:
            parts.append(f"return {row['mean_return']:.2f}")
        if self.last_evaluation:
            parts.append(f"eval {self.last_evaluation['eval_return']:.2f}")
        if "policy_lag_mean" in row:
            parts.append(f"lag {row['policy_lag_mean']:.1f} (max {row['policy_lag_max']:.0f})")
        parts.append(f"{format_duration(self.wall_sec)} gone, {format_duration(seconds_left)} left")
        line = " | ".join(parts)
        if sys.stdout.isatty():
            width = os.get_terminal_size().columns - 1
            sys.stdout.write("\r" + line[:width].ljust(width))
            self.line_open = True
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _end_line(self) -> None:
        if self.line_open:
            sys.stdout.write("\n")
            self.line_open = False

    def close(self, env_steps: int) -> None:
        """Write the last summary and close every file."""
        if self.closed:
            return
        if self.begun is not None:
            self.end(env_steps)
        if self.steps_trained or not self.resumed:  # else the summary of the run so far stays true
            self._write_summary(env_steps)
        mean = f"{self.mean_return:.2f}" if self.returns else "none"
        self.log(f"{env_steps:,} env_steps in {format_duration(self.wall_sec)}, mean return {mean}, "
                 f"peak memory {self.peak_memory_bytes / 1e9:.2f} GB; records in {self.run_dir}")
        self.metrics.close()
        self.tensorboard.close()
        for handler in list(self.logger.handlers):
            handler.close()
            self.logger.removeHandler(handler)


TENSORBOARD_GROUP = {
    "mean_return": "episode", "mean_length": "episode", "num_episodes": "episode",
    "eval_return": "eval", "eval_return_std": "eval", "eval_length": "eval", "eval_env_steps": "eval",
    "eval_sgd_steps": "eval",
    "fps": "speed", "wall_sec": "speed", "memory_mb": "speed", "env_steps": "speed", "env_frames": "speed",
    "policy_lag_mean": "lag", "policy_lag_max": "lag", "valid_fraction": "lag",
}


def make_logger(path: Path) -> logging.Logger:
    """Make a logger that writes to the console, and with times to a file."""
    logger = logging.getLogger(f"nano_sample_factory.{path}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [file, console]
    return logger


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read the summary of a run's earlier part; empty when there is none."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    if summary.get("best_return") == [None]:
        del summary["best_return"]
    return summary


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
