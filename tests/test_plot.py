"""The plots: what is drawn of a run, and how runs are told apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from runtime.files import save_settings
from tools import plot

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


def make_run(run_dir: Path, value: float, begin: int = 1, end: int = 4, settings: dict[str, Any] | None = None,
             **more: Any) -> Path:
    """Make a run whose mean return is value + i after i minutes and i env_steps."""
    rows = [{"wall_sec": 60 * i, "env_steps": i, "mean_return": value + i} | more for i in range(begin, end)]
    write_lines(run_dir / "metrics.jsonl", rows)
    save_settings(run_dir / "config.json", {"env": "X", "experiment": run_dir.name, "seed": 0} | (settings or {}))
    return run_dir


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


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
        whole, one, none, mean, evaluations, goal = (line.get_xydata().tolist() for line in panel.lines)
        assert (one, none) == ([[1, 0.5], [2, 0.5], [3, 0.5]], [])
        assert whole == [[1, 6], [2, 7], [3, 8]]
        assert (mean[0], mean[-1]) == ([1, 6], [3, 8])
        assert evaluations == [[1, 3], [2, 3], [3, 3]]
        assert {y for _, y in goal} == {7}


def test_runs_that_differ_only_in_their_seed_are_one_mean_curve_as_far_as_all_reach(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for name, seed, rate in (("fast_0", 0, 1e-3), ("fast_1", 1, 1e-3), ("fast_2", 2, 1e-3), ("slow_0", 0, 1e-4)):
        settings = {"seed": seed, "learning_rate": rate}
        runs.append(make_run(tmp_path / name, 3 * seed**2, seed, 20 + seed, settings))
    figure = draw(monkeypatch, *runs, tmp_path / "curve.png")
    for panel in figure.axes:
        mean, _ = (line for line in panel.lines if line.get_linewidth() == 2)
        x, y = mean.get_xydata().T
        assert (x[0], x[-1]) == (2, 19)
        np.testing.assert_allclose(y, x + 5)  # of 0, 3, 12
    assert legend_of(figure) == ["fast, mean of 3", "slow_0"]


@pytest.mark.parametrize(("runs", "legend"), [
    ({"A": 0, "B": 0}, ["A", "B"]), ({"A": 0, "B": 1}, ["A", "B"]), ({"run-1": 0, "run-2": 7}, ["run, mean of 2"]),
    ({"X-v1": 0, "X-v1_1": 1, "X-v2": 2}, ["X-v1, mean of 2", "X-v2"]), ({"X_s0": 0, "X_s1": 1}, ["X, mean of 2"]),
    ({"a/X": 0, "b/X": 1}, ["a/X", "b/X"])], ids=str)
def test_runs_that_were_named_apart_are_drawn_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    runs: dict[str, int], legend: list[str]) -> None:
    folders = [make_run(tmp_path / name, 3, settings={"seed": seed}) for name, seed in runs.items()]
    figure = draw(monkeypatch, *folders, tmp_path / "curve.png")
    assert legend_of(figure) == legend


def test_the_objective_and_all_that_has_changed_in_a_population_are_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_lines(tmp_path / "run" / "population.jsonl", EVENTS)
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: figures.append(figure))
    plot.draw_population(run_dir, tmp_path / "population.png")
    panels = figures[0].axes
    assert {panel.get_title("left"): [line.get_xydata().tolist() for line in panel.lines] for panel in panels} == {
        "objective": [[[1000, -7]], [[900, -3.5]]],
        "learning_rate": [[[0, 1e-3], [1000, 1.2e-2]], [[0, 1e-2], [900, 1e-2]]],
        "shaping/use": [[[0, 1], [1000, 0]], [[0, 1], [900, 1]]]}
