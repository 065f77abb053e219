"""The timeline: what is recorded, what the trace file holds."""

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import SMALL

from runtime.processes import Span, record, write_trace
from tools import timeline
from tools.timeline import read_trace
from trainer import APPO


class Worker:
    SPANS = (("step", lambda split: f"step {split}"), ("queue.get", "wait for work"))

    def __init__(self) -> None:
        self.queue = SimpleNamespace(get=lambda: None)

    def step(self, split: int) -> int:
        self.queue.get()
        return 2 // split


def test_calls_are_written_down_with_names_threads_and_nesting_also_those_that_fail() -> None:
    worker = Worker()
    spans = record(worker)
    assert worker.step(1) == 2
    thread = threading.Thread(target=worker.step, args=(2,), name="second")
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError):
        worker.step(0)
    inner, outer, *_ = spans
    assert [(span.name, span.thread) for span in spans if span.name != "wait for work"] == [
        ("step 1", "MainThread"), ("step 2", "second"), ("step 0", "MainThread")]
    assert (inner.name, len(spans)) == ("wait for work", 6)
    assert outer.begin <= inner.begin <= inner.end <= outer.end


def test_a_trace_holds_the_window_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = {"first": [Span("MainThread", "early", 0, 900_000), Span("MainThread", "cut", 500_000, 3_000_000)],
             "second": [Span("MainThread", "a", 2_000_000, 2_500_000), Span("batcher", "late", 4_500_000, 9_000_000)],
             "idle": []}
    write_trace(path, spans, 1_000_000, 5_000_000)
    assert read_trace(path) == {"first": [("cut", 0.0, 2.0)], "second": [("a", 1.0, 0.5)],
                                "second, batcher": [("late", 3.5, 0.5)]}
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["first", "second", "second, batcher"]


def test_every_component_is_in_the_trace_of_a_run(tmp_path: Path) -> None:
    settings = SMALL | {"num_workers": 2, "worker_num_splits": 2, "trace_sec": math.inf, "eval_every_env_steps": 500}
    with APPO("CartPole-v1", train_dir=str(tmp_path), **settings) as appo:
        appo.train(3000)
    run_dir = appo.cfg.run_dir
    assert timeline.main([str(run_dir)]) == 0
    assert (run_dir / "timeline.png").stat().st_size > 1000
    rows = {label: {name for name, *_ in spans} for label, spans in read_trace(run_dir / "trace.json").items()}
    for worker in range(2):
        assert {"step, split 1", "step, split 2", "store"} <= rows[f"rollout_worker_{worker}"]
    assert {"gather", "forward", "write", "copy weights", "wait"} <= rows["policy_worker_0"]
    assert {"SGD", "forward", "loss", "backward", "optimizer step", "publish"} <= rows["learner"]
    assert "batch" in rows["learner, batcher"]
    assert "evaluate" in rows["evaluator"]
