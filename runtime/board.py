"""The TensorBoard page of one policy: scalars and texts. What cannot be written waits for the next `flush`.

The file is opened for each flush alone, so a full disk or a folder that has gone away costs nothing but the wait.
Used by `policy_records.py`.
"""

import collections
import io
import itertools
import os
import socket
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from runtime.files import append

MOST_WAITING = 1_000_000  # events; then the oldest are given up
NUMBERS = itertools.count()
PASSED_OVER = ".profile-empty"  # how TensorFlow's profiler names files that hold nothing


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
