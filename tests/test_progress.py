"""What a run says of itself: the progress line, the time left."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parts import SMALL, make_config

from runtime.checkpoint import read_lines
from services.progress import WIDTH, PolicyProgress, describe_progress
from services.records import join_rows
from trainer import APPO

ROW = {"env_steps": 1_234_567, "env_frames": 4_938_268, "wall_sec": 1500.0, "fps": 8211.4, "mean_return": -20.45,
       "policy_lag_mean": 4.83, "policy_lag_max": 16}


@pytest.mark.parametrize(("more", "pace", "trouble", "line"), [
    ({}, 2001.2, "", "12.3% | 1:13:00 left | 4,938,268 frames | 8,211/s | return -20.45 | lag 4.8"),
    ({"env_steps": 123_456, "mean_return": None}, 0.0, "",
     "1.2% | ? left | 4,938,268 frames | 8,211/s | return -3.20 so far | lag 4.8"),
    ({}, 1e9, "NOT SAVED: No space left on device",
     "12.3% | NOT SAVED: No space left on device | 0:00:00 left | 4,938,268 frames | ")])
def test_the_progress_line_fits_80_columns(more: dict, pace: float, trouble: str, line: str) -> None:
    trainer = SimpleNamespace(cfg=make_config({"env": "tiny", "env_frameskip": 4}), row=ROW | more, goal=10_000_000,
                              trouble=trouble, besides="", buffers=SimpleNamespace(agent_return=torch.tensor([-3.2])))
    assert describe_progress(trainer, [], {"fps": 4 * pace, "num_replaced": 0}) == line
    assert len(line) <= WIDTH


def test_running_episodes_stand_for_finished_ones_and_the_first_step_counts_from_the_call(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()
    with APPO("CartPole-v1", train_dir=str(tmp_path), serial_mode=True,
              **SMALL | {"rollout": 4, "batch_size": 16}) as appo:
        appo.train(16)
        (worker, *_) = appo.crew.components
        (split,) = worker.splits
        assert "return 4.00 so far" in capsys.readouterr().out
        assert split.episode_return.tolist() == appo.buffers.agent_return[0].tolist()
        appo.train(400)
        took = time.time() - began
    assert "so far" not in capsys.readouterr().out.splitlines()[-2]
    assert 0 < json.loads((appo.cfg.run_dir / "summary.json").read_text())["first_sgd_step_sec"] < took
    rows = read_lines(appo.cfg.run_dir / "metrics.jsonl")
    assert rows[0]["return_min"] is None
    assert 1 < rows[-1]["return_min"] <= rows[-1]["mean_return"] <= rows[-1]["return_max"] <= 500


def test_rows_of_several_policies_are_joined_to_their_extremes() -> None:
    parts = []
    for returns in ([1.0, 5.0], [-3.0], []):
        records = PolicyProgress(0)
        for value in returns:
            records.add_episode(value, 10, math.nan)
        parts.append(records.take_row())
    row = join_rows(parts)
    assert (row["return_min"], row["return_max"], row["mean_return"]) == (-3.0, 5.0, 0.0)


@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.inf]])
def test_a_statistic_that_was_not_finite_is_null(values: list[float]) -> None:
    """JSON has no nan; and an extreme would depend on the order."""
    records = PolicyProgress(0)
    for value in values:
        records.add_training({"sgd_steps": 1, "env_steps_trained": 8, "learning_rate": 1.0, "policy_lag_mean": 0.0,
                              "policy_lag_max": 0, "odd_max": value, "odd_min": -value, "odd": value})
    row = records.take_row()
    assert (row["odd_max"], row["odd_min"], row["odd"], row["policy_lag_max"]) == (None, None, None, 0)
