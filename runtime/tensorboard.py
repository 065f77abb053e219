"""The TensorBoard page of one policy: scalars, texts, and the settings of the run for the tab of hyperparameters.

`records.py` imports this file late, while the processes of a run start: PyTorch's writer takes 0.5 s to import.
"""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from torch.utils.tensorboard import SummaryWriter

from config import Config
from runtime.command_line import as_typed

COUNTERS = {"env_steps", "env_frames", "sgd_steps", "env_steps_trained", "wall_sec", "num_episodes", "eval_env_steps",
            "eval_sgd_steps"}  # of a row; as charts they say nothing
TAGS = {"mean_return": "episode/return_mean", "return_min": "episode/return_min", "return_max": "episode/return_max",
        "mean_length": "episode/length_mean", "true_objective": "episode/true_objective",
        "win_rate_vs_past": "episode/win_rate_vs_past", "policy_lag_mean": "lag/mean", "policy_lag_max": "lag/max",
        "fps": "system/frames_per_sec", "memory_mb": "system/memory_mb"}  # of the rest; others are "train/..."
NO_HYPERPARAMETERS = {"records", "failures", "evaluation", "train_dir", "experiment", "restart_behavior", "trust_run"}


def be_quiet(failure: threading.ExceptHookArgs, otherwise: Callable = threading.excepthook) -> None:
    """Show what has ended a thread, but not what has ended the writer's: `TensorBoard.write` says it in one line."""
    if not type(failure.thread).__module__.startswith("tensorboard"):
        otherwise(failure)


threading.excepthook = be_quiet


class TensorBoard:
    """Writes one folder that TensorBoard reads. The first error, such as a full disk, ends it and is told once."""

    def __init__(self, folder: Path, purge_step: int, tell: Callable[[str], None]) -> None:
        """purge_step: the curves of earlier files in the folder are hidden from this step on."""
        self.folder = str(folder)
        self.purge_step = purge_step
        self.tell = tell
        self.writer: SummaryWriter | None = None
        self.has_failed = False

    def write(self, what: Callable[[SummaryWriter], Any]) -> None:
        """Call a function with the writer, unless one before has failed."""
        if self.has_failed:
            return
        try:
            self.writer = self.writer or SummaryWriter(self.folder, purge_step=self.purge_step)
            what(self.writer)
        except OSError as error:  # also that of the thread which writes
            self.has_failed = True
            self.tell(f"the curves in {self.folder} end here: {error.strerror or error}")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.write(lambda writer: writer.add_scalar(tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text in Markdown."""
        self.write(lambda writer: writer.add_text(tag, text, step))

    def add_row(self, row: dict[str, Any], step: int) -> None:
        """Add what a row of metrics.jsonl holds of this policy; an evaluation at the env_steps of its weights."""
        for name, value in row.items():
            if name in COUNTERS or value is None:
                continue
            if name.startswith("eval_"):
                self.add_scalar(f"eval/{name.removeprefix('eval_')}", value, row["eval_env_steps"])
            else:
                self.add_scalar(TAGS.get(name, f"train/{name}"), value, step)
        self.write(lambda writer: writer.flush())

    def add_settings(self, cfg: Config) -> None:
        """Add the settings of the run as a text, and as hyperparameters."""
        table = "\n".join(f"| {name} | {value} |" for name, value in vars(cfg).items())
        self.add_text("config", "| setting | value |\n|---|---|\n" + table, 0)
        settings = {}
        for field in dataclasses.fields(cfg):
            if not {field.name, field.metadata["group"]} & NO_HYPERPARAMETERS:
                value = getattr(cfg, field.name)
                settings[field.name] = value if isinstance(value, bool | int | float) else as_typed(value)
        session = hparams_pb(settings, trial_id=f"{cfg.run_dir.name} in {cfg.run_dir.parent}")
        self.write(lambda writer: writer.file_writer.add_summary(session, 0))
