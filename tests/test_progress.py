"""The progress line: its units, what it is short of, and the time left."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from appo import APPO
from config import Config, make_config
from runtime.files import read_lines
from runtime.policy_records import PolicyRecords
from runtime.progress import Pace, describe_progress, format_roughly
from runtime.records import join_rows, read_summary

ROW = {"env_steps": 1_234_567, "env_frames": 4_938_268, "wall_sec": 1500.0, "fps": 8211.4, "mean_return": -20.45,
       "policy_lag_mean": 4.83, "policy_lag_max": 16}


def describe(pace: Pace, trouble: Sequence[str] = (), row: dict[str, Any] = ROW, **settings: Any) -> tuple[str, str]:
    cfg = make_config({"env": "tiny"}, settings)
    return describe_progress(cfg, row, [], 10_000_000, pace, -3.2, trouble)


def pace_of(*intervals: tuple[int, float]) -> Pace:
    pace = Pace()
    for interval in intervals:
        pace.add(*interval)
    return pace


def test_the_line_counts_env_steps_and_fits_80_columns() -> None:
    in_full, in_short = describe(pace_of((10_000, 5.0)), env_frameskip=4)
    assert in_full == ("12.3% | 0:25:00 gone, 73m left | 1,234,567 env_steps (4,938,268 frames) | 8,211 frames/s | "
                       "return -20.45 | lag 4.8 (max 16)")
    assert in_short == "12.3% | 73m left | 1.23M env_steps | 8,211 fps | return -20.45 | lag 4.8"
    without_frames = describe(pace_of((10_000, 5.0)))
    assert "frames" not in " ".join(without_frames)
    assert "| 8,211/s |" in without_frames[0]
    early = describe(Pace(), row=ROW | {"env_steps": 123_456, "mean_return": None}, env_frameskip=4)[1]
    assert early == "1.2% | ? left | 123k env_steps | 8,211 fps | return so far -3.20 | lag 4.8"
    assert describe(Pace(), ["NOT SAVED: the disk is full"])[1].startswith("12.3% | NOT SAVED: the disk is full | ")


def test_the_time_left_does_not_jump_when_one_interval_is_slow() -> None:
    steady = pace_of(*[(10_000, 5.0)] * 100)
    assert steady.seconds_for(1_000_000) == pytest.approx(500)
    for interval, most in (((1000, 5.0), 1.05), ((0, 5.0), 1.05), ((30_000, 5.0), 0.9)):
        left = pace_of(*[(10_000, 5.0)] * 100, interval).seconds_for(1_000_000)
        assert min(most, 1) * 500 <= left <= max(most, 1) * 500
    slower = pace_of(*[(10_000, 5.0)] * 100, *[(5000, 5.0)] * 100)
    assert slower.seconds_for(1_000_000) == pytest.approx(1000, rel=0.05), "what lasts is believed"
    assert Pace().seconds_for(1) == pace_of((0, 5.0)).seconds_for(1) == math.inf


def test_an_estimate_is_written_roughly() -> None:
    assert [format_roughly(seconds) for seconds in (0, 95.4, 100, 5900, 6000, 100_000, math.inf)] == [
        "0s", "95s", "2m", "98m", "1h40m", "27h47m", "?"]


def test_running_episodes_stand_for_finished_ones_and_the_first_step_counts_from_the_call(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()
    with APPO("CartPole-v1", train_dir=str(tmp_path), serial_mode=True, num_workers=1, num_envs_per_worker=4, rollout=4,
              batch_size=16, num_batches_per_epoch=1, num_epochs=1, encoder_mlp_layers=(4,)) as appo:
        appo.train(16)
        (worker, *_) = appo.crew.components
        (split,) = worker.splits.values()
        assert "return so far 4.00" in capsys.readouterr().out
        assert split.episode_return.tolist() == appo.buffers.agent_return[0].tolist()
        appo.train(400)
        took = time.time() - began
    assert "return so far" not in capsys.readouterr().out.splitlines()[-2]
    assert 0 < read_summary(appo.cfg.run_dir)["first_sgd_step_sec"] < took
    rows = read_lines(appo.cfg.run_dir / "metrics.jsonl")
    assert rows[0]["return_min"] is None
    assert 1 < rows[-1]["return_min"] <= rows[-1]["mean_return"] <= rows[-1]["return_max"] <= 500


def test_rows_of_several_policies_are_joined_to_their_extremes(tmp_path: Path) -> None:
    cfg: Config = make_config({"env": "tiny", "train_dir": str(tmp_path)})
    parts = []
    for policy, returns in enumerate(([1.0, 5.0], [-3.0], [])):
        records = PolicyRecords(cfg, policy, {}, 0, 1, None)
        for value in returns:
            records.add_episode(value, 10, math.nan)
        parts.append(records.take_row())
    row = join_rows(parts)
    assert (row["return_min"], row["return_max"], row["mean_return"]) == (-3.0, 5.0, 0.0)
