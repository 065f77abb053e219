"""What a run says of itself: the lines at its start, the progress line, the time left."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from parts import make_config

from envs.families import profile
from envs.vector_env import EnvInfo
from runtime.files import read_lines
from runtime.policy_records import PolicyRecords
from runtime.progress import WIDTH, describe_end, describe_progress, describe_run
from runtime.records import join_rows, read_summary
from trainer import APPO

ROW = {"env_steps": 1_234_567, "env_frames": 4_938_268, "wall_sec": 1500.0, "fps": 8211.4, "mean_return": -20.45,
       "policy_lag_mean": 4.83, "policy_lag_max": 16}
IMAGE, VECTOR = {"obs": spaces.Box(0, 255, (84, 84, 4), np.uint8)}, {"obs": spaces.Box(-1, 1, (17,), np.float32)}
KEYS = {"red": spaces.Box(-1, 1, (3,), np.float32), "green": spaces.Box(-1, 1, (2,), np.float32)}


@pytest.mark.parametrize("given", [{"env": "PongNoFrameskip-v4"}, {"env": "CartPole-v1", "num_policies": 2}], ids=str)
def test_a_few_short_lines_say_what_a_run_is_made_of(given: dict) -> None:
    cfg = make_config(profile(given["env"], given), given)
    kinds = [(IMAGE, spaces.Discrete(6)), (KEYS, spaces.Discrete(2))][: cfg.num_policies]
    info = EnvInfo(["ann", "bob", "cal"][: 2 * len(kinds) - 1], [0, 1, 1][: 2 * len(kinds) - 1], kinds, None)
    plan = SimpleNamespace(info=info, devices=[torch.device("cpu")], models=[torch.nn.Linear(1000, 2)])
    lines = describe_run(cfg, plan)
    assert len(lines) <= 8
    assert all(len(line) <= WIDTH for line in lines), "\n".join(lines)
    text = " ".join(" ".join(lines).split())
    spaces_of = [f"{cfg.env}: obs 84x84x4 -> Discrete(6)"] if len(kinds) == 1 else [
        f"{cfg.env} (ann): obs 84x84x4 -> Discrete(6)", f"{cfg.env} (bob, cal): red 3, green 2 -> Discrete(2)"]
    for part in (*spaces_of, f"{cfg.num_workers} workers x {cfg.num_envs_per_worker} environments",
                 f"{cfg.batch_size:,}", "2,002 parameters", "on cpu", f"records in {cfg.run_dir}"):
        assert part in text


@pytest.mark.parametrize(("more", "left", "trouble", "line"), [
    ({}, 4380.0, [], "12.3% | 1:13:00 left | 4,938,268 frames | 8,211/s | return -20.45 | lag 4.8"),
    ({"env_steps": 123_456, "mean_return": None}, math.inf, [],
     "1.2% | ? left | 4,938,268 frames | 8,211/s | return -3.20 so far | lag 4.8"),
    ({}, 0.0, ["NOT SAVED: No space left on device"],
     "12.3% | NOT SAVED: No space left on device | 0:00:00 left | 4,938,268 frames | ")])
def test_the_progress_line_fits_80_columns(more: dict, left: float, trouble: list[str], line: str) -> None:
    cfg = make_config({"env": "tiny", "env_frameskip": 4})
    assert describe_progress(cfg, ROW | more, [], left, 10_000_000, -3.2, trouble) == line
    assert len(line) <= WIDTH


@pytest.mark.parametrize(("more", "row", "line"), [
    ({}, {}, "at most 1:13:00 | 4,938,268 frames | 8,211/s | return -20.45 of 18 | lag 4.8"),
    ({}, {"mean_return": None}, "at most 1:13:00 | 4,938,268 frames | 8,211/s | return -3.20 so far | lag 4.8"),
    ({"eval_every_env_steps": 1000}, {},
     "at most 1:13:00 | 4,938,268 frames | 8,211/s | return -20.45 | eval -3.00 of 18"),
    ({"num_policies": 2}, {}, "at most 1:13:00 | 4,938,268 frames | 8,211/s | return -20.45 | lag 4.8")])
def test_the_progress_line_says_which_return_would_be_enough(more: dict, row: dict, line: str) -> None:
    cfg = make_config({"env": "tiny", "env_frameskip": 4, "stop_at_return": 18.0}, more)
    policies = [SimpleNamespace(last_evaluation={"eval_return": -3.0})] if cfg.eval_every_env_steps else []
    assert describe_progress(cfg, ROW | row, policies, 4380.0, 10_000_000, -3.2, []) == line


@pytest.mark.parametrize("num_policies", [1, 20])
def test_the_last_lines_fit_80_columns(num_policies: int) -> None:
    cfg = make_config({"env": "tiny", "stop_at_return": -20.0})
    summary = {"env_steps": 123_456_789, "wall_sec": 45_296.0, "mean_return": [-1234.5] * num_policies,
               "best_score": [-1034.5] * num_policies, "peak_memory_mb": 12_345.6}
    good, bad = ([SimpleNamespace(reached=reached), SimpleNamespace(reached=-21.0)] for reached in (-19.5, -20.5))
    lines = describe_end(cfg, summary, good).splitlines()
    assert all(len(line) <= WIDTH for line in lines), lines
    assert " ".join(" ".join(lines[:-2]).split()) == (
        "123,456,789 env_steps in 12:34:56, mean return " + ", ".join(["-1234.50"] * num_policies) + ", best score "
        + ", ".join(["-1034.50"] * num_policies))
    assert lines[-2:] == ["peak memory 12.35 GB; records in train_dir/tiny",
                          "finished: a return of -19.50 has reached --stop_at_return=-20"]
    assert describe_end(cfg, summary, bad).splitlines() == lines[:-1]
    nothing = describe_end(cfg, summary | {"best_score": [None] * num_policies}, bad)
    assert "best score none yet peak memory" in " ".join(nothing.split())


def test_running_episodes_stand_for_finished_ones_and_the_first_step_counts_from_the_call(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()
    with APPO("CartPole-v1", train_dir=str(tmp_path), serial_mode=True, num_workers=1, num_envs_per_worker=4, rollout=4,
              batch_size=16, num_batches_per_epoch=1, num_epochs=1, encoder_mlp_layers=(4,)) as appo:
        appo.train(16)
        (worker, *_) = appo.crew.components
        (split,) = worker.splits.values()
        assert "return 4.00 so far" in capsys.readouterr().out
        assert split.episode_return.tolist() == appo.buffers.agent_return[0].tolist()
        appo.train(400)
        took = time.time() - began
    assert "so far" not in capsys.readouterr().out.splitlines()[-2]
    assert 0 < read_summary(appo.cfg.run_dir)["first_sgd_step_sec"] < took
    rows = read_lines(appo.cfg.run_dir / "metrics.jsonl")
    assert rows[0]["return_min"] is None
    assert 1 < rows[-1]["return_min"] <= rows[-1]["mean_return"] <= rows[-1]["return_max"] <= 500


def test_rows_of_several_policies_are_joined_to_their_extremes() -> None:
    parts = []
    for policy, returns in enumerate(([1.0, 5.0], [-3.0], [])):
        records = PolicyRecords(policy, {}, 0, 1, None)
        for value in returns:
            records.add_episode(value, 10, math.nan)
        parts.append(records.take_row())
    row = join_rows(parts)
    assert (row["return_min"], row["return_max"], row["mean_return"]) == (-3.0, 5.0, 0.0)


@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.inf]])
def test_a_statistic_that_was_not_finite_is_null(values: list[float]) -> None:
    """JSON has no nan; and an extreme would depend on the order."""
    records = PolicyRecords(0, {}, 0, 1, None)
    for value in values:
        records.add_training({"sgd_steps": 1, "env_steps_trained": 8, "policy_lag_mean": 0.0, "policy_lag_max": 0,
                              "odd_max": value, "odd_min": -value, "odd": value})
    row = records.take_row()
    assert (row["odd_max"], row["odd_min"], row["odd"], row["policy_lag_max"]) == (None, None, None, 0)
