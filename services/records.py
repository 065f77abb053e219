"""The records of a run: progress line, TensorBoard, metrics.jsonl, summary.json, log.txt.

In serial mode a row is due after each dataset instead of every few seconds, so that two runs with one seed write the
same rows. What cannot be written, since the disk is full or the folder is gone, is lost, which is told once.

    metrics.jsonl   one JSON object per report: a row
    summary.json    totals, and the figures of each policy; replaced atomically at each report
    episodes.json   the last episodes of each policy, beside a checkpoint
    trace.json      with --trace_sec: what each process did in the last seconds (`tools/timeline.py` draws it)

With several policies a row holds means over them, and what each one reports in the list "policies".
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.checkpoint import add_line, fill_run_dir, read_lines, save_settings, write_atomically
from runtime.processes import Service, write_trace
from runtime.utils import UserError, Values, combine, say, show_progress, this_rank
from services.progress import (
    PolicyProgress,
    TensorBoard,
    describe_end,
    describe_evaluation,
    describe_finished,
    describe_progress,
    describe_run,
    mean,
)
from shared_buffers import LOAD, SAVE_PERIODIC

OF_ALL = ("mean_return", "return_min", "return_max", "mean_length", "true_objective", "win_rate_vs_past",
          "policy_lag_mean", "policy_lag_max")  # of a row, what is said of several policies together


class Records(Service):
    """Counts, averages and writes what a run reports."""

    def start(self, trainer: Any) -> None:
        """Begin, with what earlier starts of the run have left."""
        super().start(trainer)
        self.files = Files(trainer)
        run_dir, steps = trainer.cfg.run_dir, trainer.env_steps
        rows, kept = cut_lines(run_dir / "metrics.jsonl", lambda row: row.get("env_steps", math.inf) <= steps)
        trainer.trained_sec = max((row.get("wall_sec", 0) for row in rows), default=0)
        trainer.num_episodes = kept[-1].get("num_episodes", 0) if kept else 0
        self.before = trainer.totals()
        self.policies = [PolicyProgress(version) for version in trainer.versions]
        load_windows(run_dir / "episodes.json", self.policies, steps)
        self.first_step_sec: float | None = None
        self.num_replaced = 0
        if lost := len(rows) - len(kept):
            trainer.log(f"left out {lost} reports of what came after the checkpoint, env_steps={steps:,}")

    def on(self, report: tuple) -> None:
        """Take a report into the records."""
        trainer, policies = self.trainer, self.policies
        match report:
            case ("log", text, to_console):
                self.files.log(text, to_console=to_console)
            case ("episodes", episodes):
                for policy, *episode in episodes:
                    policies[policy].add_episode(*episode)
            case ("matches", matches):
                for policy, result in matches:
                    policies[policy].matches.append(result)
            case ("answered", (policy, _, kind, source)) if kind == LOAD and source == policy:  # the user's parameters
                policies[policy].forget_episodes()
            case ("trained", policy, stats):
                policies[policy].add_training(stats)
                if number := sum(value for name, value in stats.items() if name.endswith("skipped_sgd_steps")):
                    trainer.log(f"skipped {number} SGD steps{trainer.of(policy)}: their gradients were not finite")
            case ("evaluated", policy, result):
                if policies[policy].evaluation:  # each is in a row of its own
                    self.write_row()
                policies[policy].evaluation = policies[policy].last_evaluation = result
                trainer.log(describe_evaluation(trainer.of(policy), result))
            case ("saved", _, kind, name, _) if kind == SAVE_PERIODIC:
                env_steps = int(name.removesuffix(".pt").rpartition("_")[2])
                windows = {"env_steps": env_steps, "policies": [policy.window() for policy in policies]}
                self.files.write("episodes.json", write_atomically, json.dumps(windows) + "\n")
            case ("replaced", _):
                self.num_replaced += 1
            case ("starting",):  # meanwhile: it is slow
                hidden = trainer.env_steps + 1  # what came after the checkpoint
                self.boards = [TensorBoard(trainer.cfg.run_dir / "tensorboard" / f"policy_{policy:02}", hidden,
                                           trainer.log) for policy in range(len(policies))]
                self.boards[0].add_settings(trainer.cfg)
            case ("ready_to_train",):
                trainer.log(trainer.news + describe_run(trainer))
            case ("nothing_to_do",) if trainer.cfg.trace_sec:  # the trace would be empty
                raise UserError(describe_finished(trainer, policies))
            case ("nothing_to_do",):
                trainer.log(describe_finished(trainer, policies))
            case ("begun",):
                trainer.row = {"mean_return": None}
                self.at_row = trainer.totals()
                self.last_row = time.monotonic()
            case ("ended",):
                if "env_steps" not in trainer.row or any(policy.training or policy.evaluation for policy in policies):
                    self.write_row()
        if report[0] in ("begun", "changed"):
            self.files.write("config.json", save_settings, vars(trainer.cfg))
        trainer.is_good_enough = any(policy.is_good_enough(trainer.cfg) for policy in policies)

    def tick(self) -> None:
        """Write a row if one is due."""
        trainer = self.trainer
        if not trainer.commands.are_told_to_sample():
            return
        if self.first_step_sec is None and sum(trainer.versions) > self.before["sgd_steps"]:
            self.first_step_sec = time.time() - trainer.since
            trainer.log(f"first SGD step {self.first_step_sec:.1f} s after the start")
        is_due = time.monotonic() - self.last_row >= trainer.cfg.report_interval_sec
        if any(policy.training for policy in self.policies) if trainer.cfg.serial_mode else is_due:
            self.write_row()

    def write_row(self) -> None:
        """Write a row, and the summary; show the progress."""
        trainer, now = self.trainer, self.trainer.totals()
        row = describe_totals(trainer, now, self.at_row)
        self.at_row, self.last_row = now, time.monotonic()
        parts = [policy.take_row() for policy in self.policies]
        for number, part in enumerate(parts):  # the first page shows the run too
            self.boards[number].add_row(row | part if number == 0 else part, now["env_steps"])
        trainer.row = row | (parts[0] if len(parts) == 1 else join_rows(parts))
        self.files.write("metrics.jsonl", add_line, json.dumps(trainer.row))
        summary = summarize(self)
        self.files.write_summary(summary)
        self.files.show(describe_progress(trainer, self.policies, summary))

    def close(self) -> None:
        """Write the last summary, and close the files."""
        trainer, summary = self.trainer, summarize(self)
        trainer.log(describe_end(trainer.cfg, summary, self.policies))
        if trainer.env_steps > self.before["env_steps"] or not self.before["env_steps"]:  # else the one before is true
            self.files.write_summary(summary)
        for board in self.boards:
            board.write("close")
        if trainer.cfg.trace_sec and trainer.trained_until:
            begin = int(max(0.0, trainer.trained_until - trainer.cfg.trace_sec * 1e9))  # infinite: all of it
            self.files.write("trace.json", write_trace, trainer.crew.spans, begin, trainer.trained_until)
            trainer.log(f"what each process did: python -m tools.timeline {trainer.cfg.run_dir}")


class Files:
    """The files of a run, and its console. What cannot be written is lost, which is told once; training goes on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.run_dir = trainer, trainer.cfg.run_dir
        self.is_losing_lines = self.is_line_open = False

    def write(self, name: str, write: Callable[..., None], *args: Any) -> None:
        """Call write(path, *args) for a file of the folder."""
        try:
            fill_run_dir(self.run_dir, vars(self.trainer.cfg), self.trainer.buffers.start)
            write(self.run_dir / name, *args)
        except OSError as error:
            if not self.is_losing_lines:
                self.is_losing_lines = True
                self.log(f"records are lost, {self.run_dir} cannot be written: {error.strerror or error}")

    def log(self, text: str, *, to_console: bool = True) -> None:
        """Write lines to log.txt, with the time, and to the console."""
        if self.is_line_open:
            say("")
            self.is_line_open = False
        for line in text.splitlines():
            if to_console and this_rank().rank == 0:  # it speaks for all
                say(line)
            self.write("log.txt", add_line, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    def show(self, progress: str) -> None:
        """Show a line of progress; in a terminal each takes the place of the one before."""
        if this_rank().rank == 0:
            self.is_line_open = show_progress(progress)

    def write_summary(self, summary: Values) -> None:
        self.write("summary.json", write_atomically, json.dumps(summary, indent=2) + "\n")


def describe_totals(trainer: Any, now: Values, before: Values) -> Values:
    """Return what a run has done, and its speed between two `Trainer.totals`, for a row or a summary."""
    frameskip, steps = trainer.cfg.env_frameskip, now["env_steps"]
    frames_per_sec = (steps - before["env_steps"]) * frameskip / max(now["train_sec"] - before["train_sec"], 1e-9)
    return {"env_steps": steps, "env_frames": steps * frameskip, "wall_sec": now["train_sec"], "fps": frames_per_sec,
            "num_episodes": now["num_episodes"]}


def summarize(records: Records) -> Values:
    """Return what summary.json holds."""
    trainer, policies = records.trainer, records.policies
    return {
        "env": trainer.cfg.env, **describe_totals(trainer, trainer.totals(), records.before),
        "sgd_steps": sum(trainer.versions),
        "mean_return": [policy.mean_return for policy in policies],
        "best_score": finite(trainer.buffers.best_score.tolist()),
        "reached_return": finite(policy.reached for policy in policies),
        "true_objective": [policy.objective if policy.has_objective else None for policy in policies],
        "win_rate_vs_past": [mean(policy.matches) for policy in policies],
        "evaluation": [policy.last_evaluation or None for policy in policies],
        "policy_lag_mean": (sum(policy.lag_sum for policy in policies)
                            / max(sum(policy.num_datasets for policy in policies), 1)),
        "policy_lag_max": max(policy.lag_max for policy in policies), "num_replaced": records.num_replaced,
        "first_sgd_step_sec": records.first_step_sec,
    }


def finite(numbers: Any) -> list[float | None]:
    """Return numbers as JSON has them: None for those that are not finite."""
    return [number if math.isfinite(number) else None for number in numbers]


def join_rows(parts: list[Values]) -> Values:
    """Summarize the rows of several policies: means, but the sum of sgd_steps and the extremes of returns and lag."""
    known = [{name: part[name] for name in OF_ALL if part.get(name) is not None} for part in parts]
    row = dict.fromkeys(name for name in OF_ALL if name in parts[0]) | combine(known)
    return row | {"sgd_steps": sum(part["sgd_steps"] for part in parts), "policies": parts}


# ---- what earlier starts of a run have left ----------------------------------------------------------------------


def cut_lines(path: Path, is_kept: Callable[[Values], bool]) -> tuple[list, list]:
    """Cut out of a file of JSON objects what came after a checkpoint; return all that were there, and those kept.

    After a crash the reports are newer than the weights, and the last one may be cut off. A reader must find one
    history, in which env_steps never decrease.
    """
    rows = read_lines(path)
    kept = [row for row in rows if is_kept(row)]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
    return rows, kept


def load_windows(path: Path, policies: Sequence[PolicyProgress], resumed_at: int) -> None:
    """Give a run that goes on after so many env_steps its last episodes, but not those of lost weights.

    Policies save one after another: the run goes on with the largest count of theirs, which need not come last.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        windows = json.loads(path.read_text())
        if windows["env_steps"] <= resumed_at:
            for policy, window in zip(policies, windows["policies"], strict=True):
                policy.restore_window(window)
