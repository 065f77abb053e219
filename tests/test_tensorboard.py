"""The TensorBoard page: charts, hyperparameters, resumption, a full disk."""

import threading
from pathlib import Path

import pytest
from parts import make_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.progress import TensorBoard

# the writer's thread prints its error when it ends
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def make(folder: Path, purge_step: int = 0) -> tuple[TensorBoard, list[str]]:
    """Return a page, and what it tells."""
    told: list[str] = []
    return TensorBoard(folder, purge_step, told.append), told


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(scalar.step, scalar.value) for scalar in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_charts_have_plain_names_counters_have_none_and_settings_are_a_text(tmp_path: Path) -> None:
    board, _ = make(tmp_path)
    board.add_settings(make_config({"env": "CartPole-v1", "learning_rate": 0.01}))
    board.add_row({"env_steps": 100, "env_frames": 400, "wall_sec": 5.0, "num_episodes": 3, "sgd_steps": 7, "fps": 80.0,
                   "mean_return": 2.0, "return_min": 1.0, "return_max": 3.0, "mean_length": None, "loss": 0.5,
                   "policy_lag_mean": 4.0, "eval_return": 9.0, "eval_env_steps": 90, "eval_sgd_steps": 6}, 100)
    assert scalars(tmp_path) == {
        "system/frames_per_sec": [(100, 80)], "episode/return_mean": [(100, 2)], "episode/return_min": [(100, 1)],
        "episode/return_max": [(100, 3)], "train/loss": [(100, 0.5)], "lag/mean": [(100, 4)], "eval/return": [(90, 9)],
    }, "without closing it: a run that is killed leaves its curves"
    text = EventAccumulator(str(tmp_path)).Reload().Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"| learning_rate | 0.01 |" in text


def test_a_resumed_run_hides_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    board, _ = make(tmp_path)
    for step in (1, 2, 3):
        board.add_row({"loss": float(step)}, step)
    resumed, _ = make(tmp_path, purge_step=3)
    resumed.add_row({"loss": 4.0}, 4)
    assert scalars(tmp_path) == {"train/loss": [(1, 1), (2, 2), (4, 4)]}


def test_what_cannot_be_written_ends_the_curves_and_is_told_once(tmp_path: Path) -> None:
    folder, before = tmp_path / "board", set(threading.enumerate())
    board, told = make(folder)
    board.add_row({"loss": 1.0}, 1)
    folder.rename(tmp_path / "elsewhere")
    for step in (2, 3):
        board.add_row({"loss": 2.0}, step)
        board.write("add_text", "said", "*something*", step)
    assert told == [f"the curves in {folder} end here: No such file or directory"]
    assert scalars(tmp_path / "elsewhere") == {"train/loss": [(1, 1)]}
    board, told = make(Path(__file__) / "board")
    board.add_row({"loss": 1.0}, 1)
    assert len(told) == 1
    for thread in set(threading.enumerate()) - before:
        thread.join()  # else its error would be another test's
