"""The TensorBoard page of one policy: scalars, texts, and the settings of the run for the tab of hyperparameters.

What cannot be written waits for the next `flush`. The file is opened for each flush alone, so a full disk or a folder
that has gone away costs nothing but the wait. Used by `policy_records.py` and `records.py`.
"""

import collections
import dataclasses
import io
import itertools
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from config import Config
from runtime.command_line import as_typed
from runtime.files import append

MOST_WAITING = 1_000_000  # events; then the oldest are given up
NUMBERS = itertools.count()
PASSED_OVER = ".profile-empty"  # how TensorFlow's profiler names files that hold nothing
COUNTERS = {"env_steps", "env_frames", "sgd_steps", "env_steps_trained", "wall_sec", "num_episodes", "eval_env_steps",
            "eval_sgd_steps"}  # of a row; as charts they say nothing
TAGS = {"mean_return": "episode/return_mean", "return_min": "episode/return_min", "return_max": "episode/return_max",
        "mean_length": "episode/length_mean", "true_objective": "episode/true_objective",
        "win_rate_vs_past": "episode/win_rate_vs_past", "policy_lag_mean": "lag/mean", "policy_lag_max": "lag/max",
        "fps": "system/frames_per_sec", "memory_mb": "system/memory_mb"}  # of the rest; others are "train/..."
NO_HYPERPARAMETERS = {"records", "failures", "evaluation", "train_dir", "experiment", "restart_behavior", "trust_run"}


class Board:
    """Adds events to a folder that TensorBoard reads."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """Begin; purge_step: of earlier files in the folder what came from this step on is hidden."""
        self.waiting: collections.deque[Event] = collections.deque(maxlen=MOST_WAITING)
        self.path = folder / (f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}."
                              f"{next(NUMBERS):06}")
        if purge_step is not None:
            self.waiting.append(Event(wall_time=time.time(), step=purge_step,
                                      session_log=SessionLog(status=SessionLog.START)))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._add(Summary.Value(tag=name, simple_value=value), step)

    def add_row(self, row: dict[str, Any], step: int) -> None:
        """Add what a row of metrics.jsonl holds of this policy; an evaluation at the env_steps of its weights."""
        for name, value in row.items():
            if name in COUNTERS or value is None:
                continue
            if name.startswith("eval_"):
                self.add_scalar(f"eval/{name.removeprefix('eval_')}", value, row["eval_env_steps"])
            else:
                self.add_scalar(TAGS.get(name, f"train/{name}"), value, step)

    def add_settings(self, cfg: Config) -> None:
        """Add the settings of the run as a text, and as hyperparameters."""
        table = "\n".join(f"| {name} | {value} |" for name, value in vars(cfg).items())
        self.add_text("config", "| setting | value |\n|---|---|\n" + table)
        settings = {}
        for field in dataclasses.fields(cfg):
            if not {field.name, field.metadata["group"]} & NO_HYPERPARAMETERS:
                value = getattr(cfg, field.name)
                settings[field.name] = value if isinstance(value, bool | int | float) else as_typed(value)
        for value in hparams_pb(settings, trial_id=f"{cfg.run_dir.name} in {cfg.run_dir.parent}").value:
            self._add(value, 0)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Add a text in Markdown."""
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="backslashreplace")],
                             tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]))
        about = SummaryMetadata(plugin_data=plugin)
        self._add(Summary.Value(tag=f"{name}/text_summary", metadata=about, tensor=tensor), step)

    def _add(self, value: Summary.Value, step: int) -> None:
        self.waiting.append(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Write what waits. Raises `OSError` when that fails; the file is as before then, and it goes on waiting."""
        if not self.waiting:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        records = RecordWriter(data)
        if not self.path.exists():
            announce(self.path.parent)
            records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for event in self.waiting:
            records.write(event.SerializeToString())
        append(self.path, data.getvalue())
        self.waiting.clear()


def announce(folder: Path) -> None:
    """Let whoever has replaced TensorBoard's writer to follow what it writes, as W&B does, know of a folder.

    That writer's own file goes away at once; by its name those who read the folder pass it over.
    """
    if writers := sys.modules.get("tensorboard.summary.writer.event_file_writer"):  # else nobody has
        writers.EventFileWriter(str(folder), filename_suffix=PASSED_OVER).close()
        for file in folder.glob(f"*{PASSED_OVER}"):
            file.unlink()
