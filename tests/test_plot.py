"""The plots: what is drawn of a run, and how runs are told apart."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tools import plot
from tools.figures import COLORS

EVENTS = [
    {"policy": policy, "policy_steps": steps, "env_steps": 2 * steps, "objective": objective, "donor": donor,
     "words": "", "learning_rate": rate, "gamma": 0.99, "shaping/use": use}
    for policy, steps, objective, donor, rate, use in (
        (0, 0, None, None, 1e-3, True), (1, 0, None, None, 1e-2, True), (1, 900, -3.5, None, 1e-2, True),
        (0, 1000, -7.0, 1, 1.2e-2, False))]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def make_run(run_dir: Path, value: float, begin: int = 1, end: int = 4, **more: Any) -> Path:
    """Make a run whose mean return is value + i after i minutes and i million env_steps."""
    rows = [{"wall_sec": 60.0 * i, "env_steps": 1_000_000 * i, "mean_return": value + i} | more
            for i in range(begin, end)]
    return write_lines(run_dir / "metrics.jsonl", rows)


def draw(monkeypatch: pytest.MonkeyPatch, *argv: str | Path) -> Figure:
    """Draw with these arguments; return the figure."""
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: (
        figures.append(figure), savefig(figure, *args, **how)))
    assert plot.main([str(word) for word in argv]) == 0
    return figures[0]


def test_the_curves_of_a_run_its_policies_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 5, policies=[{"mean_return": 0.5}, {"mean_return": None}], eval_return=3.0)
    for panel in draw(monkeypatch, run, tmp_path / "curve.png", "--goal", "7").axes:
        one, none, whole, evaluations, goal = (line.get_xydata().tolist() for line in panel.lines)
        assert (one, none) == ([[1, 0.5], [2, 0.5], [3, 0.5]], [])
        assert whole == [[1, 6], [2, 7], [3, 8]]
        assert evaluations == [[1, 3], [2, 3], [3, 3]]
        assert {y for _, y in goal} == {7}


def test_runs_that_differ_only_in_their_seed_are_one_mean_curve_as_far_as_all_reach(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for name, seed, rate in (("fast_0", 0, 1e-3), ("fast_1", 1, 1e-3), ("fast_2", 2, 1e-3), ("slow_0", 0, 1e-4)):
        runs.append(make_run(tmp_path / name, 3 * seed**2, seed, 20 + seed))
        settings = {"seed": seed, "experiment": name, "train_dir": str(tmp_path), "learning_rate": rate}
        (runs[-1] / "config.json").write_text(json.dumps(settings))
    runs.append(make_run(tmp_path / "without_settings", 0))
    for panel in draw(monkeypatch, *runs, tmp_path / "curve.png").axes:
        mean = max(panel.lines, key=lambda line: line.get_linewidth())
        x, y = mean.get_xydata().T
        assert (x[0], x[-1]) == (2, 19)
        np.testing.assert_allclose(y, x + 5)  # of 0, 3, 12
        (band,) = panel.collections
        places, ends = band.get_paths()[0].vertices.T
        offsets = ends - places  # all curves have the same slope, so the band has the same width everywhere
        assert -1e-9 < offsets.min() < 5 < offsets.max() < 12 + 1e-9
    legend = [text.get_text() for text in panel.get_legend().get_texts()]
    assert legend == ["fast, mean of 3", "slow_0", "without_settings"]
    nothing = plot.mean_curve([np.array([[0, 5], [1, 5]]), np.array([[2, 5], [3, 5]])])
    assert [len(part) for part in nothing] == [0] * 4, "they share no place"


def test_the_objective_and_all_that_has_changed_in_a_population_are_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_lines(tmp_path / "run" / "population.jsonl", EVENTS)
    panels = draw(monkeypatch, run_dir, tmp_path / "population.png", "--population").axes
    assert {panel.get_ylabel(): [line.get_xydata().tolist() for line in panel.lines] for panel in panels} == {
        "objective": [[[1000, -7]], [[900, -3.5]]],
        "learning_rate": [[[0, 1e-3], [1000, 1.2e-2]], [[0, 1e-2], [900, 1e-2]]],
        "shaping/use": [[[0, 1], [1000, 0]], [[0, 1], [900, 1]]]}
    circles, _ = panels[0].collections
    assert circles.get_edgecolors().tolist() == [list(to_rgba(COLORS[1]))], "that of the donor"


@pytest.mark.parametrize("argv", [
    ["none", "out.png"], ["none", "out.png", "--population"], ["run", "out.png", "--key", "mean_retrun"],
    ["run", "out.nothing"], ["run", "no_such_folder/out.png"]], ids=str)
def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 5)
    monkeypatch.chdir(tmp_path)
    assert plot.main(argv) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(run), "out.png"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("plot.py: ")
    assert second.endswith("pip install matplotlib")
