"""The timeline: what is recorded, what the trace file holds, the picture."""

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from test_plot import record_figures

from learner import Learner
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime.evaluator import Evaluator
from runtime.recorder import WAIT, Recorder, Span
from tools import timeline
from tools.timeline import Row, by_depth, read_trace, write_trace

ROOT = Path(__file__).parents[1]


class Worker:
    SPANS = (("step", lambda split: f"step {split}"), ("queue.get", "wait for work"))

    def __init__(self) -> None:
        self.queue = SimpleNamespace(get=lambda: time.sleep(0.002))

    def step(self, split: int) -> int:
        if split < 0:
            raise ValueError(split)
        self.queue.get()
        return 2 * split


def test_the_recorder_writes_down_names_threads_and_nesting() -> None:
    worker, recorder = Worker(), Recorder()
    recorder.attach(worker)
    assert worker.step(3) == 6
    thread = threading.Thread(target=worker.step, args=(4,), name="second")
    thread.start()
    thread.join()
    inner, outer, _, other = recorder.spans
    assert (inner.name, outer.name, outer.thread) == ("wait for work", "step 3", "MainThread")
    assert outer.begin <= inner.begin < inner.end <= outer.end
    assert inner.end - inner.begin >= 2_000_000
    assert (other.name, other.thread) == ("step 4", "second")


def test_a_call_that_fails_is_recorded_and_still_fails() -> None:
    worker, recorder = Worker(), Recorder()
    recorder.attach(worker)
    with pytest.raises(ValueError, match="-1"):
        worker.step(-1)
    assert [span.name for span in recorder.spans] == ["step -1"]


def test_only_one_object_is_recorded_and_waits_only_if_asked() -> None:
    worker, other, recorder = Worker(), Worker(), Recorder()
    recorder.attach(worker, waits=False)
    worker.step(1)
    other.step(2)
    assert [span.name for span in recorder.spans] == ["step 1"]
    assert "step" not in vars(other)


def test_the_oldest_spans_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.recorder.MAX_SPANS", 4)
    worker, recorder = Worker(), Recorder()
    recorder.attach(worker)
    for split in range(5):
        worker.step(split)
    assert [span.name for span in recorder.spans] == ["wait for work", "step 3", "wait for work", "step 4"]


def test_a_trace_holds_the_window_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = {"first": [Span("MainThread", "early", 0, 900_000), Span("MainThread", "cut", 500_000, 3_000_000)],
             "second": [Span("MainThread", "a", 2_000_000, 2_500_000), Span("batcher", "late", 4_500_000, 9_000_000)],
             "idle": []}
    write_trace(path, spans, 1_000_000, 5_000_000)
    assert read_trace(path) == [Row("first", [("cut", 0.0, 2.0)]), Row("second", [("a", 1.0, 0.5)]),
                                Row("second, batcher", [("late", 3.5, 0.5)])]
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["first", "second", "idle"]
    assert list(tmp_path.iterdir()) == [path]


def test_spans_are_sorted_into_outer_and_inner_ones() -> None:
    outer, inner, innermost, after = ("o", 0.0, 4.0), ("i", 1.0, 2.0), ("m", 1.5, 0.5), ("a", 4.0, 1.0)
    assert by_depth([innermost, inner, outer, after]) == [[outer, after], [inner], [innermost]]


def test_the_picture_is_drawn_from_a_run_folder_or_a_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    write_trace(tmp_path / "trace.json", {"worker": [Span("MainThread", "step", 0, 10**9)]}, 0, 2 * 10**9)
    figures, pictures = record_figures(monkeypatch), [tmp_path / "timeline.png", tmp_path / "other.png"]
    assert timeline.main([str(tmp_path)]) == 0
    assert timeline.main([str(tmp_path / "trace.json"), "--output", str(pictures[1]), "--seconds", "0.1"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path) for path in pictures if path.exists()]
    for figure, milliseconds in zip(figures, (500, 100), strict=True):
        (axes,) = figure.axes
        assert axes.get_xlim() == pytest.approx((0, milliseconds))
        assert [label.get_text() for label in axes.get_yticklabels()] == ["worker"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [
            "step", "waiting", "other work, or no free core"]


def test_the_picture_may_end_before_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [Span("MainThread", "step", 0, 10**9), Span("MainThread", "store", 10**9, 2 * 10**9)]
    write_trace(tmp_path / "trace.json", {"worker": spans}, 0, 2 * 10**9)
    figures = record_figures(monkeypatch)
    for until, names in (("1", ["step"]), ("9", ["store"]), ("1.25", ["step", "store"])):
        assert timeline.main([str(tmp_path), "--until", until]) == 0
        assert [text.get_text() for text in figures[-1].legends[0].get_texts()][:-2] == names


def test_no_two_colors_look_alike_and_unknown_names_get_some() -> None:
    """Compare them in a space in which equal distances look equally different."""
    alike = {"step": "step, split 1"}  # these are never in one picture
    colors = [color for name, color in timeline.COLORS.items() if name not in alike]
    places = [to_lab(color) for color in (*colors, timeline.WAITING["facecolor"])]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 20
    names = {"step", "loss", "mine", "yours"}
    chosen = timeline.choose_colors(names)
    assert len({chosen[name] for name in names}) == 4


def to_lab(color: str) -> np.ndarray:
    """Convert a color to CIELAB (white D65)."""
    rgb = np.array(to_rgb(color))
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    x, y, z = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_name_of_a_component_has_a_color() -> None:
    spans = [*RolloutWorker.SPANS, *PolicyWorker.SPANS, *Learner.SPANS, *Evaluator.SPANS]
    names = {name for _, name in spans if isinstance(name, str) and not name.startswith(WAIT)}
    assert names <= timeline.COLORS.keys()


def test_gaps_and_splits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = record_figures(monkeypatch)
    rows = [Row("rollout_worker_1", [("step split 2", 0.0, 4.0), ("step split 3", 5.0, 4.0)]),
            Row("learner, part_0", [("forward", 2.0, 3.0)])]
    timeline.draw(rows, tmp_path / "out.png", 0.0, 10.0)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "step, split 1", "step, split 2", "forward", "waiting", "other work, or no free core"]
    behind = [bars.get_hatch() for bars in figures[0].axes[0].collections if len(bars.get_paths()) == 1]
    assert behind[0] == timeline.OTHER["hatch"], "between the spans of a main thread"
    assert behind[1] is None, "another thread waits there"


def test_a_span_that_never_ends_is_in_the_trace() -> None:
    worker, recorder = Worker(), Recorder()
    recorder.attach(worker)
    worker.step(1)
    recorder.open.add(("batcher", "wait for work", 5))
    assert [span.name for span in recorder.all_spans()] == ["wait for work", "step 1", "wait for work"]
    assert recorder.all_spans()[-1].end > recorder.spans[-1].end


@pytest.mark.parametrize("arguments", [
    ["nowhere"], ["{tmp}/bad.json"], ["{tmp}/empty.json"], ["{tmp}/good.json", "--seconds", "0"],
    ["{tmp}/good.json", "--until", "0"],
    ["{tmp}/good.json", "--output", "a.xyz"]])
def test_bad_input_is_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "bad.json").write_text("{")
    write_trace(tmp_path / "empty.json", {}, 0, 1)
    write_trace(tmp_path / "good.json", {"worker": [Span("MainThread", "step", 0, 10**9)]}, 0, 10**9)
    assert timeline.main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("timeline.py: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--serial_mode"], ["--num_policies", "2", "--eval_every_env_steps", "500"]])
def test_train_writes_the_timeline_of_every_component(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "--env", "CartPole-v1", "--train_dir", str(tmp_path), "--num_workers", "2",
               "--num_envs_per_worker", "4", "--batch_size", "64", "--train_for_env_steps", "3000",
               "--trace_sec", "inf", "--worker_num_splits", "2", *flags]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    run_dir = tmp_path / "CartPole-v1"
    assert "trace.json" in output
    assert (run_dir / "timeline.png").stat().st_size > 1000
    rows = {row.label: {name for name, _, _ in row.spans} for row in read_trace(run_dir / "trace.json")}
    policies = ["0_", "1_"] if "--num_policies" in flags else [""]
    for worker in range(2):
        assert {f"step split {2 * worker}", f"step split {2 * worker + 1}", "store"} <= rows[f"rollout_worker_{worker}"]
    for policy in policies:
        assert {"gather", "forward", "write", "copy weights"} <= rows[f"policy_worker_{policy}0"]
        learner = f"learner_{policy}".rstrip("_")
        assert {"SGD", "forward", "loss", "backward", "optimizer step", "publish"} <= rows[learner]
        batcher = learner if "--serial_mode" in flags else f"{learner}, batcher"
        assert "batch" in rows[batcher]
    waits = {name for names in rows.values() for name in names if name.startswith("wait")}
    assert bool(waits) == ("--serial_mode" not in flags)
    assert ("evaluator" in rows) == ("--eval_every_env_steps" in flags)
