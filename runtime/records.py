"""The records of a run: progress line, TensorBoard, metrics.jsonl, summary.json, log.txt; and when to save.

Owned by the supervisor. `add` takes what the components report, `tick` writes a row when one is due. In serial mode a
row is due after each dataset instead of every few seconds, so that two runs with one seed write the same rows.

When nothing can be written, since the disk is full or the folder is gone, training goes on. Lines that cannot be
written are lost, which is told once; a checkpoint is tried again at the next period, and the progress line says so.

    metrics.jsonl   one JSON object per report, the keys of `row`
    summary.json    the last row and totals; replaced atomically at each report

With several policies a row holds means over them, and what each one reports in the list "policies".
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from config import Config
from runtime import checkpoint
from runtime.console import say, show_progress
from runtime.files import add_line, read_lines, write_atomically
from runtime.policy_records import (
    EPISODES,
    RETURN_WINDOW,
    PolicyRecords,
    load_windows,
    mean,
    objectives_of,
    save_windows,
)
from runtime.progress import describe_end, describe_progress
from runtime.ranks import this_rank
from runtime.run_folder import mend_run_dir
from runtime.user_error import ComponentError
from shared_buffers import SAVE_BEST, SAVE_MILESTONE, SAVE_PERIODIC, SharedBuffers

BEST_LINE_SEC = 20.0  # a new best checkpoint is told in a line at most this often
SAVE_SHARE = 0.01  # of the time, at most, goes into periodic checkpoints
MEMORY_EVERY_SEC = 20.0  # reports in between repeat the last figure


class Records:
    """Counts, averages and writes what a run reports. Lives in the supervisor's process."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, *, resumed_at: int | None, sgd_steps: list[int],
                 since: float) -> None:
        """Open the files.

        Args:
            since: when the making of the system began, `time.time()`.
            resumed_at: the env_steps of the resumed checkpoint; None: a new run.
            sgd_steps: of each policy so far.
        """
        self.buffers = buffers  # for the scores of the best checkpoints
        self.cfg, self.run_dir, self.resumed = cfg, cfg.run_dir, resumed_at is not None
        earlier = read_summary(self.run_dir) if self.resumed else {}
        num_lost, last = cut_lost_rows(self.run_dir / "metrics.jsonl", resumed_at) if self.resumed else (0, {})
        # seconds of training before this process
        self.wall_before = max(earlier.get("wall_sec", 0), last.get("wall_sec", 0))
        self.episodes_before = last.get("num_episodes", 0)
        self.steps_before, self.sgd_steps_before = resumed_at or 0, sum(sgd_steps)
        # a resumed policy waits for a full window: it would else be ranked by a single episode
        self.policies = [PolicyRecords(policy, earlier, steps, RETURN_WINDOW if steps else 1, resumed_at)
                         for policy, steps in enumerate(sgd_steps)]
        load_windows(self.run_dir / EPISODES, self.policies, resumed_at)
        self.saved_cfg: Config | None = None
        self.last_saved = dict.fromkeys((SAVE_PERIODIC, SAVE_MILESTONE), time.monotonic())
        self.save_sec = 0.0  # that a checkpoint takes
        self.train_sec = 0.0  # in earlier calls of train()
        self.begun: float | None = None  # when the running call of train() began
        self.since, self.resting_since = since, time.time()  # since when no call of train() goes on
        self.first_step_sec: float | None = None
        self.memory_bytes = self.peak_memory_bytes = 0
        self.last_memory = -math.inf  # when it was measured
        self.unsaved: dict[tuple[int, int], str] = {}  # (policy, kind of checkpoint): why it could not be written
        self.is_losing_lines = self.closed = self.line_open = False
        self.num_replaced = 0  # components that died or hung
        self.row: dict[str, Any] = {"mean_return": None}  # the last one that was written

        if num_lost:
            self.log(f"left out {num_lost} reports of what came after the checkpoint, env_steps={resumed_at:,}")
        from runtime.tensorboard import TensorBoard  # noqa: PLC0415  slow; the processes start meanwhile

        purge_step = 0 if resumed_at is None else resumed_at + 1  # what came after the checkpoint
        self.boards = [TensorBoard(self.run_dir / "tensorboard" / f"policy_{policy:02}", purge_step, self.log)
                       for policy in range(len(sgd_steps))]
        self.boards[0].add_settings(cfg)

    # ---- input ---------------------------------------------------------------------------------------------------

    def log(self, text: str, *, to_console: bool = True) -> None:
        """Write lines to log.txt, with the time, and to the console."""
        if self.line_open:
            say("")
            self.line_open = False
        for line in text.splitlines():
            if to_console and this_rank().rank == 0:  # it speaks for all
                say(line)
            self._write(add_line, self.run_dir / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    def add(self, kind: str, content: list[Any], env_steps: int) -> None:
        """Take one report of a component.

        ("episodes", [(policy, return, length, objective), ...]), ("matches", [(policy, result), ...]),
        ("trained", policy, {...}), ("evaluated", policy, {...}), ("best", policy),
        ("saved", policy, kind, name, seconds) or ("unsaved", policy, kind, why).
        """
        if kind == "unsaved" and content[1] is None:  # not what a run goes on with
            self.log(f"not saved{self._of(content[0])}: {content[2]}")
        elif kind == "unsaved":
            if not self.unsaved:
                self.log(f"cannot save in {self.run_dir}: {content[2]}; training goes on, and tries again")
            self.unsaved[content[0], content[1]] = content[2]
        if kind == "saved":
            if self.unsaved.pop((content[0], content[1]), "") and not self.unsaved:
                self.log(f"can save in {self.run_dir} again")
            self.save_sec = max(content[3], self.save_sec / 2)  # policies save at the same time
        if kind == "episodes":
            for policy, *episode in content[0]:
                self.policies[policy].add_episode(*episode)
        elif kind == "matches":
            for policy, result in content[0]:
                self.policies[policy].matches.append(result)
        elif kind == "trained":
            self.policies[content[0]].add_training(content[1])
            if number := sum(value for name, value in content[1].items() if name.endswith("skipped_sgd_steps")):
                self.log(f"skipped {number} SGD steps{self._of(content[0])}: their gradients were not finite")
        elif kind == "evaluated":
            policy = self.policies[content[0]]
            if policy.evaluation:  # each is in a row of its own
                self._write_row(env_steps)
            policy.evaluation = policy.last_evaluation = content[1]
            self.log(f"evaluation{self._of(content[0])} at " + "env_steps={eval_env_steps:,}: return {eval_return:.2f} "
                     "+- {eval_return_std:.2f}, length {eval_length:.1f}".format(**content[1]))
        elif kind == "best":
            self._tell_best(content[0])
        elif kind == "unsaved" and content[1] == SAVE_BEST:  # the one before is still there
            policy = self.policies[content[0]]
            self.buffers.best_score[content[0]], self.buffers.best_sort[content[0]] = policy.score_before
            policy.is_saving_best = False
        elif kind == "saved" and content[1] == SAVE_PERIODIC:
            self._write(save_windows, self.run_dir / EPISODES, self.policies, content[2])
        elif kind == "saved" and content[1] == SAVE_MILESTONE:
            self.log(f"saved {content[2]}{self._of(content[0])} at env_steps={env_steps:,}")
        elif kind == "saved" and content[1] == SAVE_BEST:
            policy = self.policies[content[0]]
            policy.saved_best(content[3])
            if time.monotonic() - policy.last_best_line >= BEST_LINE_SEC:
                policy.last_best_line = time.monotonic()
                self._tell_best(content[0])

    def _tell_best(self, policy: int) -> None:
        self.log(f"saved best.pt{self._of(policy)}, score {float(self.buffers.best_score[policy]):.2f}")

    def _of(self, policy: int) -> str:
        return f" of policy {policy}" if len(self.policies) > 1 else ""

    def add_population(self, decisions: list[Any], numbers: list[dict[str, float]], env_steps: int) -> None:
        """Record the settings of all policies, and in words what population-based training has decided."""
        for decision in decisions:
            self.log(f"PBT: {decision.words}")
            self.boards[decision.policy].add_text("pbt", decision.words, env_steps)
        for policy, board, values in zip(self.policies, self.boards, numbers, strict=True):
            for name, value in values.items():
                board.add_scalar(f"pbt/{name}", float(value), env_steps)
            if policy.objective is not None:
                board.add_scalar("pbt/objective", policy.objective, env_steps)

    @property
    def num_episodes(self) -> int:
        return self.episodes_before + sum(policy.num_episodes for policy in self.policies)

    def objectives(self, kind_of_policy: list[int]) -> list[float | None]:
        """Return what population-based training ranks each policy by; None: too few episodes have finished."""
        return objectives_of(self.policies, kind_of_policy)

    @property
    def wall_sec(self) -> float:
        """Count the seconds spent in train(), earlier processes of this run included."""
        running = time.monotonic() - self.begun if self.begun is not None else 0.0
        return self.wall_before + self.train_sec + running

    def is_over(self, env_steps: int, goal: int) -> bool:
        """Return whether a run has trained as long as it should, or is good enough."""
        return (env_steps >= goal or self.wall_sec >= self.cfg.train_for_seconds
                or any(policy.is_good_enough(self.cfg) for policy in self.policies))

    # ---- output --------------------------------------------------------------------------------------------------

    def begin(self, env_steps: int, goal: int) -> None:
        """Start the clock of a call of train() that is to reach `goal` env_steps."""
        if self.cfg.lr_schedule == "linear_decay" and goal > self.cfg.train_for_env_steps:
            self.log(f"the learning rate is 0 after {self.cfg.train_for_env_steps:,} env_steps, raise "
                     "train_for_env_steps to learn on")
        self.goal, self.steps_at_row, self.row = goal, env_steps, {"mean_return": None}
        self.steps_at_begin = env_steps
        self.begun = self.last_row = time.monotonic()
        self.since += time.time() - self.resting_since

    def end(self, env_steps: int) -> None:
        """Stop the clock of a call of train(), after a last row of what was done since the one before."""
        self.measure_memory()
        if "env_steps" not in self.row or any(policy.training for policy in self.policies):
            self._write_row(env_steps)
        self.train_sec += time.monotonic() - self.begun
        self.begun = None
        self.resting_since = time.time()

    def scored_versions(self) -> list[int | None]:
        """Return the SGD steps of the weights of each policy that were scored last."""
        return [policy.last_evaluation.get("eval_sgd_steps") for policy in self.policies]

    def flush(self, env_steps: int) -> None:
        """Write a row for an evaluation that ended after the training."""
        if any(policy.evaluation for policy in self.policies):
            self._write_row(env_steps)

    def tick(self, env_steps: int, sgd_steps: int) -> list[tuple[int, int]]:
        """Write a row if one is due; return the checkpoints that are due, (policy, kind).

        sgd_steps: the sum over all policies.
        """
        now = time.monotonic()
        if self.first_step_sec is None and sgd_steps > self.sgd_steps_before:
            self.first_step_sec = time.time() - self.since
            self.log(f"first SGD step {self.first_step_sec:.1f} s after the start")
        kinds = [kind for kind, every_sec in (
            (SAVE_PERIODIC, max(self.cfg.save_every_sec, self.save_sec / SAVE_SHARE)),
            (SAVE_MILESTONE, self.cfg.save_milestones_sec)) if now - self.last_saved[kind] >= every_sec]
        self.last_saved |= dict.fromkeys(kinds, now)
        saves = self.find_best() + [(number, kind) for number in range(len(self.policies)) for kind in kinds]
        trained = any(policy.training for policy in self.policies)
        if trained if self.cfg.serial_mode else now - self.last_row >= self.cfg.report_interval_sec:
            self._write_row(env_steps)
        return saves

    def find_best(self, *, at_end: bool = False) -> list[tuple[int, int]]:
        """Return the policies that have never scored so high, as (policy, SAVE_BEST).

        The score is the mean true objective of a full window of episodes, or else return; where there are evaluations
        theirs counts instead, and the evaluator saves. At the end it does not matter when the last one was saved.
        """
        saves, now = [], time.monotonic()
        for number, policy in enumerate(self.policies if not self.cfg.eval_every_env_steps else ()):
            full = len(policy.objectives) == RETURN_WINDOW
            rested = at_end or (now - policy.last_best >= policy.best_every_sec and not policy.is_saving_best)
            sort = checkpoint.sort_of_score(is_objective=policy.has_objective, is_evaluation=False)
            best, best_sort = float(self.buffers.best_score[number]), int(self.buffers.best_sort[number])
            if full and rested and checkpoint.is_better(policy.objective, sort, best, best_sort):
                if not policy.is_saving_best:
                    policy.score_before = best, best_sort
                self.buffers.best_score[number], self.buffers.best_sort[number] = policy.objective, sort
                policy.last_best, policy.is_saving_best = now, True
                saves.append((number, SAVE_BEST))
        return saves

    def _write_row(self, env_steps: int) -> None:
        now = time.monotonic()
        seconds = max(now - self.last_row, 1e-9)
        fps = (env_steps - self.steps_at_row) * self.cfg.env_frameskip / seconds
        self.last_row, self.steps_at_row = now, env_steps
        row: dict[str, Any] = {
            "env_steps": env_steps, "env_frames": env_steps * self.cfg.env_frameskip,
            "wall_sec": self.wall_sec, "fps": fps, "num_episodes": self.num_episodes,
        }
        if not self.cfg.serial_mode:
            if now - self.last_memory >= MEMORY_EVERY_SEC:
                self.measure_memory()
            row["memory_mb"] = self.memory_bytes / 1e6
        parts = [policy.take_row() for policy in self.policies]
        for number, part in enumerate(parts):
            self.boards[number].add_row(row | part if number == 0 else part, env_steps)  # the first shows the run too
        self.row = row | (parts[0] if len(parts) == 1 else join_rows(parts))
        self._write(add_line, self.run_dir / "metrics.jsonl", json.dumps(self.row))
        self._write_summary(self._summary(env_steps))
        if self.begun is not None:
            self._show_progress(self.row)

    def measure_memory(self) -> None:
        """Measure the memory of all processes; it takes the kernel some ms for each, so not every report does it."""
        self.memory_bytes, self.last_memory = memory_of_all(), time.monotonic()
        self.peak_memory_bytes = max(self.peak_memory_bytes, self.memory_bytes)

    def _summary(self, env_steps: int) -> dict[str, Any]:
        num_datasets = sum(policy.num_datasets for policy in self.policies)
        env_frames = (env_steps - self.steps_before) * self.cfg.env_frameskip  # of this process
        return {
            "env": self.cfg.env, "env_steps": env_steps, "env_frames": env_steps * self.cfg.env_frameskip,
            "sgd_steps": sum(policy.latest["sgd_steps"] for policy in self.policies), "wall_sec": self.wall_sec,
            "fps": env_frames / max(self.wall_sec - self.wall_before, 1e-9), "num_episodes": self.num_episodes,
            "mean_return": [policy.mean_return for policy in self.policies],
            "best_score": [score if math.isfinite(score) else None for score in self.buffers.best_score.tolist()],
            "reached_return": [policy.reached if math.isfinite(policy.reached) else None for policy in self.policies],
            "true_objective": [policy.objective if policy.has_objective else None for policy in self.policies],
            "win_rate_vs_past": [policy.win_rate for policy in self.policies],
            "evaluation": [policy.last_evaluation or None for policy in self.policies],
            "policy_lag_mean": sum(policy.lag_sum for policy in self.policies) / max(num_datasets, 1),
            "policy_lag_max": max(policy.lag_max for policy in self.policies),
            "num_replaced": self.num_replaced,
            "first_sgd_step_sec": self.first_step_sec, "peak_memory_mb": self.peak_memory_bytes / 1e6,
        }

    def _write_summary(self, summary: dict[str, Any]) -> None:
        self._write(write_atomically, self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _write(self, write: Callable[..., None], *args: Any) -> None:
        """Call a function that writes into the folder; what cannot be written is lost, which is told once."""
        mend_run_dir(self.cfg, self.buffers.start)  # somebody may have removed a part of it
        try:
            write(*args)
        except OSError as error:
            if not self.is_losing_lines:
                self.is_losing_lines = True
                self.log(f"records are lost, {self.run_dir} cannot be written: {error.strerror or error}")

    def save_config(self) -> None:
        """Write the settings, if they have changed."""
        if self.cfg != self.saved_cfg:
            self.saved_cfg = self.cfg
            self._write(self.cfg.save, self.run_dir / "config.json")

    def check_saved(self) -> None:
        """Raise `ComponentError` when the last periodic checkpoint of a policy could not be written."""
        if unsaved := [f"policy {policy}: {why}" for (policy, kind), why in self.unsaved.items()
                       if kind == SAVE_PERIODIC]:
            raise ComponentError(f"what was learned last is not in {self.run_dir}: {', '.join(unsaved)}")

    def _show_progress(self, row: dict[str, Any]) -> None:
        """Say in one line how far the run has come; in a terminal each line takes the place of the one before."""
        if this_rank().rank:
            return
        trouble = [f"NOT SAVED: {why}" for why in [*self.unsaved.values()][:1]]
        trouble += [f"{self.num_replaced} replaced"] if self.num_replaced else []
        pace = (row["env_steps"] - self.steps_at_begin) / (time.monotonic() - self.begun)
        seconds_left = min((self.goal - row["env_steps"]) / pace if pace else math.inf,
                           self.cfg.train_for_seconds - row["wall_sec"])
        self.line_open = show_progress(describe_progress(
            self.cfg, row, self.policies, max(0.0, seconds_left), self.goal, self.buffers.agent_return.mean().item(),
            trouble))

    def close(self, env_steps: int) -> None:
        """Write the last summary, and close the files."""
        self.closed = True
        if self.begun is not None:
            self.end(env_steps)
        summary = self._summary(env_steps)
        self.log(describe_end(self.cfg, summary, self.policies))
        if env_steps > self.steps_before or not self.resumed:  # else the summary of the run so far stays true
            self._write_summary(summary)
        for board in self.boards:
            board.write(lambda writer: writer.close())


def memory_of_all() -> int:
    """Return the bytes of this process and all its descendants, shared pages counted once."""
    total, process = 0, psutil.Process()
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or may not be looked at
            total += member.memory_full_info().pss
    return total


def join_rows(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the rows of several policies: means, but the sum of sgd_steps and the extremes of returns and lag."""
    row: dict[str, Any] = {}
    for name in ("mean_return", "mean_length", "true_objective", "win_rate_vs_past", "policy_lag_mean"):
        values = [part[name] for part in parts if part.get(name) is not None]
        if values or name in parts[0]:
            row[name] = mean(values)
    row["sgd_steps"] = sum(part["sgd_steps"] for part in parts)
    for name, extreme in (("return_min", min), ("return_max", max), ("policy_lag_max", max)):
        if values := [part[name] for part in parts if part.get(name) is not None]:
            row[name] = extreme(values)
    return row | {"policies": parts}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read the summary of a run's earlier part; empty when there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_dir / "summary.json").read_text())
    return {}


def cut_lost_rows(metrics: Path, env_steps: int) -> tuple[int, dict[str, Any]]:
    """Cut out of metrics.jsonl what came after a checkpoint; return how many lines, and the last row that is left.

    After a crash the reports are newer than the weights. A reader must find one history, in which env_steps never
    decrease.
    """
    lines = metrics.read_text(errors="replace").splitlines() if metrics.exists() else []
    kept = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by the crash
            if json.loads(line)["env_steps"] <= env_steps:
                kept.append(line)
    if len(kept) < len(lines):
        write_atomically(metrics, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept), json.loads(kept[-1]) if kept else {}


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events of a population (`population.py`), but not one that a crash has cut off."""
    return read_lines(run_dir / "population.jsonl")
