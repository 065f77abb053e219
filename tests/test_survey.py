"""The survey of other packages: each environment gets its row, and what was found of others is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import survey

FOUND = {"status": 0, "env_steps": 900, "per_sec": 1234.5, "episodes": 3, "mean_return": 0.5}
SPACES = [[{"obs": ["float32", 10, 10, 4], "clock": ["int64"]}, "Discrete(3)"]]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the trainings: MinAtar works, all others do not; return the environments that were tried."""
    seen: list[str] = []

    def try_entry(entry: survey.Entry, python: str, seconds: float) -> dict[str, Any]:
        seen.append(entry.env)
        outcome = FOUND if "MinAtar" in entry.env else {"status": 2, "why_not": "there is | no\nmodule"}
        return {"package": entry.package, "env": entry.env, "flags": entry.flags} | outcome

    def add_spaces(rows: list[dict[str, Any]], python: str) -> None:
        for row in rows:
            row["obs"], row["actions"] = SPACES[0]

    monkeypatch.setattr(survey, "try_entry", try_entry)
    monkeypatch.setattr(survey, "add_spaces", add_spaces)
    return seen


def test_packages_that_are_named_are_tried_and_the_rows_of_others_are_kept(tried: list[str], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    assert survey.main(["rware", "--output", str(table)]) == 0
    assert tried == ["rware-tiny-2ag-v2"]
    assert survey.main(["minatar", "--output", str(table)]) == 0
    assert tried[1:] == ["MinAtar/Breakout-v1", "MinAtar/SpaceInvaders-v1"]
    text = table.read_text()
    assert "2 of 3 run, from 1 packages" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows[0].startswith("| minatar==1.0.15 | `MinAtar/Breakout-v1`")
    assert rows[0].endswith("| 10x10x4 float32, clock 1 int64 | Discrete(3) | 1,234 env_steps/s, mean return 0.5 |")
    assert rows[2] == "| rware==2.0.0 | `rware-tiny-2ag-v2` | | | there is \\| no module |"
    assert len([json.loads(line) for line in table.with_suffix(".jsonl").read_text().splitlines()]) == 3


def test_an_unknown_package_is_refused_with_the_nearest(tried: list[str], tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert survey.main(["minatari", "--output", str(tmp_path / "table.md")]) == 2
    assert "did you mean minatar?" in capsys.readouterr().err
    assert not tried


def test_the_survey_is_of_many_packages_and_its_table_is_in_docs() -> None:
    assert len({survey.name_of(entry) for entry in survey.ENTRIES}) >= 12
    assert len({entry.env for entry in survey.ENTRIES}) >= 25
    table = (survey.ROOT / "docs/environments.md").read_text()
    assert [entry.env for entry in survey.ENTRIES if f"`{entry.env}`" not in table] == []
