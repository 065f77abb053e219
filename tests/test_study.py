"""The study: what it refuses, what it counts, and that it goes on where it was."""

import json
from pathlib import Path

import pytest

from runtime.user_error import UserError
from tools import study
from tools.study import NEVER, Result, Study

HEAD = 'flags = "--env CartPole-v1"\nmax_minutes = 1.0\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "error"), [
    (HEAD + "seeds = [0]\n[setings]\na = ''", "unknown key setings (did you mean settings?)"),
    (HEAD + "[settings]\na = ''", "seeds is missing"),
    (HEAD + "seeds = []\n[settings]\na = ''", "at least one seed"),
    (HEAD + "seeds = [0]\n[settings]\n'a/b' = ''", "without '/'"),
    (HEAD + "seeds = 0 1", "is no study"),
])
def test_what_is_no_study_is_refused(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        study.read_study(write(tmp_path / "study.toml", text))
    assert error in str(caught.value)


def test_the_interval_of_the_median_holds_between_the_extremes() -> None:
    assert study.median_interval([4.0]) == (4, 4, 4)
    assert study.median_interval([3.0, 9.0, 4.0]) == (4, 3, 9)
    median, low, high = study.median_interval([float(i) for i in range(101)])
    assert median == 50
    # of 101 values the ends are near the order statistics 50 +- 1.96 * sqrt(101) / 2
    assert 36 < low < 44
    assert 56 < high < 64


@pytest.mark.parametrize(("values", "text"), [
    ([3.04, 3.04], "3.0"), ([3.0, 4.0, NEVER], "4.0 (3.0 to never)"), ([3.0, NEVER, NEVER], "never (3.0 to never)"),
    ([NEVER], "never"), ([1.0, NEVER], "never (1.0 to never)")])
def test_a_run_that_failed_counts_as_one_without_end(values: list[float], text: str) -> None:
    assert study.show(values, 1) == text


def result(setting: str, seed: int, *, reached: bool, minutes: float) -> Result:
    return Result(setting, "--env X", seed, reached, minutes, minutes, int(minutes * 1e5), 17.0, 0.0,
                  {"mean": 18.5, "deviation": 1.0})


def test_the_table_counts_failures() -> None:
    runs = [result("a", 0, reached=True, minutes=2.0), result("a", 1, reached=False, minutes=8.0),
            result("a", 2, reached=True, minutes=3.0), result("b", 0, reached=True, minutes=5.0)]
    lines = study.make_table(Study("--env X", 8.0, [0, 1, 2], {"a": "", "b": "", "c": ""}, 18.0, 20), runs).splitlines()
    assert lines[2:] == [
        "| setting | reached | minutes | thousand env_steps | evaluated |", "| --- | --- | --- | --- | --- |",
        "| a | 2 of 3 | 3.00 (2.00 to never) | 300 (200 to never) | 18.5, 18.5, 18.5 |",
        "| b | 1 of 1 | 5.00 | 500 | 18.5 |"]
    unscored = Result("a", "--env X", 0, True, 2.0, 2.0, 1000, 18.0, 0.0)  # made before the study asked for scores
    lines = study.make_table(Study("--env X", 8.0, [0], {"a": ""}, 18.0, 20), [unscored]).splitlines()
    assert lines[-1] == "| a | 1 of 1 | 2.00 | 1 | - |"
    lines = study.make_table(Study("--env X", 8.0, [0], {"a": ""}), runs).splitlines()
    assert lines[0].startswith("After 8 minutes")
    assert lines[-1] == "| a | 3 | 17.0 |"


@pytest.mark.slow
def test_a_study_stops_at_the_goal_scores_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = 'flags = "--env CartPole-v1"\ngoal = 15.0\nmax_minutes = 2.0\nseeds = [3]\n{}[settings]\n"a b" = "{}"\n'
    file, folder = write(tmp_path / "study.toml", text.format("eval_episodes = 2\n", "")), tmp_path / "out"
    assert study.main([str(file), str(folder)]) == 0
    (line,) = (folder / "results.jsonl").read_text().splitlines()
    found = json.loads(line)
    rows = [json.loads(row) for row in (folder / "a b/seed_3/metrics.jsonl").read_text().splitlines()]
    (first, *_) = [row for row in rows if row["num_episodes"] >= 100 and row["mean_return"] >= 15]
    assert found["reached"]
    assert found["env_steps"] == first["env_steps"]
    assert found["train_minutes"] == pytest.approx(first["wall_sec"] / 60)
    assert found["minutes"] > found["train_minutes"]
    assert found["evaluation"]["mean"] > 5
    assert "| a b | 1 of 1 |" in capsys.readouterr().out
    assert (folder / "curves.png").stat().st_size > 1000
    (folder / "table.md").unlink()
    assert study.main([str(file), str(folder)]) == 0  # nothing is left to do but the report
    assert "| a b | 1 of 1 |" in (folder / "table.md").read_text()
    assert (folder / "results.jsonl").read_text().splitlines() == [line]
    write(file, text.format("", "--gamma 0.5"))
    assert study.main([str(file), str(folder)]) == 2
    assert "holds runs of 'a b' with other flags" in capsys.readouterr().err
    write(file, text.format("", "").replace("CartPole-v1", "CartPole-v7"))
    assert study.main([str(file), str(tmp_path / "other")]) == 1
    assert "failed, see" in capsys.readouterr().err
