"""The study: what it counts, and that it stops at the goal and goes on where it was."""

import json
from pathlib import Path

import pytest

from tools import study
from tools.study import Study


def test_the_table_counts_failures() -> None:
    made = Study("--env X", 8.0, [0, 1, 2], {"a": "", "b": "--c 1"}, 18.0)
    runs = [{"flags": flags, "seed": 0, "reached": minutes < 8, "minutes": minutes, "env_steps": 100_000 * minutes,
             "score": 17.5} for flags, minutes in (("--env X ", 2.0), ("--env X ", 8.0), ("--env X ", 3.0),
                                                   ("--env X --c 1", 5.0))]
    assert study.make_table(made, runs).splitlines()[4:] == [
        "| a | 2 of 3 | 3 (2 to inf) | 300 (200 to inf) | 17.5 (17.5 to 17.5) |",
        "| b | 1 of 1 | 5 (5 to 5) | 500 (500 to 500) | 17.5 (17.5 to 17.5) |"]


def test_a_study_stops_at_the_goal_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = ('flags = "--env CartPole-v1 --serial_mode"\ngoal = 15.0\nmax_minutes = 2.0\nseeds = [3]\n'
            '[settings]\n"a b" = ""\n')
    file, folder = tmp_path / "study.toml", tmp_path / "out"
    file.write_text(text)
    assert study.main([str(file), str(folder)]) == 0
    (line,) = (folder / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["reached"]
    assert json.loads(line)["score"] >= 15
    assert (folder / "curves.png").stat().st_size > 1000
    assert study.main([str(file), str(folder)]) == 0  # nothing is left to do
    assert "| a b | 1 of 1 |" in capsys.readouterr().out
    assert (folder / "results.jsonl").read_text().splitlines() == [line]
    file.write_text(text.replace('""', '"--train_for_env_steps 9000"').replace("goal = 15.0", ""))
    assert study.main([str(file), str(folder)]) == 0
    (_, line) = (folder / "results.jsonl").read_text().splitlines()
    assert (json.loads(line)["reached"], json.loads(line)["score"] > 0) == (False, True), "without a goal"
    file.write_text(text.replace('""', '"--gama 0.5"'))
    assert study.main([str(file), str(folder)]) == 2
    assert capsys.readouterr().err == f"study.py: {folder}/a b_seed_3 failed\n"
