"""Whatever is typed: one line or a run, no traceback of ours.

Hypothesis draws the input, and shrinks what fails to something small.
"""

import contextlib
import io
import os
import shutil
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import train
from config import Config

TINY = ["--env=CartPole-v1", "--experiment=run", "--serial_mode", "--device=cpu", "--num_workers=1",
        "--num_envs_per_worker=2", "--rollout=4", "--batch_size=8", "--num_epochs=1", "--num_batches_per_epoch=1",
        "--encoder_mlp_layers=8", "--train_for_env_steps=24", "--train_for_seconds=2"]
# EXAMPLES=400 draws others each time; without it they are the same, so that what fails is what has changed
FEW = settings(max_examples=int(os.environ.get("EXAMPLES", "6")), derandomize="EXAMPLES" not in os.environ,
               deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.one_of(st.integers(-3, 20), st.integers(), st.floats(-2, 2), st.floats())
WORDS = st.text(string.printable, max_size=8)
VALUES = st.one_of(NUMBERS.map(str), WORDS, st.sampled_from(["True", "False", "inf", "nan", "1e3", "none", "cpu", ""]))
# these would write elsewhere, or do what takes long by intent
LEFT_OUT = {"train_dir", "experiment", "serial_mode", "env", "trace_sec"}


@FEW
@given(flags=st.lists(st.tuples(st.sampled_from(sorted(Config.__dataclass_fields__.keys() - LEFT_OUT)),
                                st.lists(VALUES, min_size=1, max_size=2)), max_size=3))
def test_a_random_command_line_trains_or_is_refused_in_one_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[tuple[str, list[str]]]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("train_dir", ignore_errors=True)
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            status = train.main([*TINY, *(word for name, values in flags for word in (f"--{name}", *values))])
        except SystemExit as end:  # --help
            status = end.code
    event(f"status {status}")  # how many work is told by --hypothesis-show-statistics
    assert status in (0, 2), err.getvalue()
    assert "Traceback" not in err.getvalue()
    assert status == 0 or len(err.getvalue().splitlines()) == 1, err.getvalue()
