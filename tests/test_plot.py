"""The plots: what is drawn of a run, and which runs are drawn together."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tools import plot

EVENTS = [
    {"policy": policy, "policy_steps": steps, "env_steps": 2 * steps, "objective": objective, "donor": donor,
     "words": "", "learning_rate": rate, "gamma": 0.99, "shaping/use": use}
    for policy, steps, objective, donor, rate, use in (
        (0, 0, None, None, 1e-3, True), (1, 0, None, None, 1e-2, True), (1, 900, -3.5, None, 1e-2, True),
        (0, 1000, -7.0, 1, 1.2e-2, False))]


def make_run(run_dir: Path, value: float, begin: int = 1, end: int = 4) -> Path:
    """Make a run whose mean return is value + i after i minutes and i million env_steps."""
    rows = [{"wall_sec": 60 * i, "env_steps": i * 10**6, "mean_return": value + i} for i in range(begin, end)]
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def draw(monkeypatch: pytest.MonkeyPatch, *argv: str | Path) -> Figure:
    """Draw with these arguments; return the figure."""
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: (
        figures.append(figure), savefig(figure, *args, **how)))
    assert plot.main([str(word) for word in argv]) == 0
    return figures[0]


def test_the_curve_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 5)
    for panel in draw(monkeypatch, run, tmp_path / "curve.png", "--goal", "7").axes:
        whole, mean, goal = (line.get_xydata().tolist() for line in panel.lines)
        assert whole == [[1, 6], [2, 7], [3, 8]]
        assert (mean[0], mean[-1]) == ([1, 6], [3, 8])
        assert {y for _, y in goal} == {7}


def test_runs_that_differ_only_in_a_number_are_one_mean_curve_as_far_as_all_reach(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name, 3 * seed**2, seed, 20 + seed) for seed, name in (
        (0, "a/X-v1_0"), (1, "a/X-v1_1"), (2, "a/X-v1_2"), (0, "a/X-v2"), (0, "b/X-v1_seed_0"))]
    figure = draw(monkeypatch, *runs, tmp_path / "curve.png")
    for panel in figure.axes:
        mean, *others = (line for line in panel.lines if line.get_linewidth() == 2)
        x, y = mean.get_xydata().T
        assert (x[0], x[-1], len(others)) == (2, 19, 2)
        np.testing.assert_allclose(y, x + 5)  # of 0, 3, 12
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{tmp_path}/{name}" for name in ("a/X-v1, mean of 3", "a/X-v2", "b/X-v1")]


def test_the_objective_and_all_that_has_changed_in_a_population_are_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "population.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    panels = draw(monkeypatch, "--population", tmp_path).axes
    assert {panel.get_title("left"): [line.get_xydata().tolist() for line in panel.lines] for panel in panels} == {
        "objective": [[[1000, -7]], [[900, -3.5]]],
        "learning_rate": [[[0, 1e-3], [1000, 1.2e-2]], [[0, 1e-2], [900, 1e-2]]],
        "shaping/use": [[[0, 1], [1000, 0]], [[0, 1], [900, 1]]]}
    assert (tmp_path / "population.png").stat().st_size > 1000


def test_what_holds_nothing_to_draw_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, output = str(make_run(tmp_path / "run", 5)), str(tmp_path / "curve.png")
    for argv in ([str(tmp_path), output], [run, output, "--key", "mean_retrun"], ["--population", run], [run]):
        assert plot.main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "holds no " in line or "is a folder; name the picture last" in line
