"""The plots: what is drawn of a run, and how runs are told apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tools import plot

EVENTS = [
    {"policy": 0, "policy_steps": 0, "env_steps": 0, "objective": None, "donor": None, "words": "policy 0 begins",
     "learning_rate": 1e-3, "gamma": 0.99, "shaping/use": True},
    {"policy": 1, "policy_steps": 0, "env_steps": 0, "objective": None, "donor": None, "words": "policy 1 begins",
     "learning_rate": 1e-2, "gamma": 0.99, "shaping/use": True},
    {"policy": 1, "policy_steps": 900, "env_steps": 1900, "objective": -3.5, "donor": None, "words": "unchanged",
     "learning_rate": 1e-2, "gamma": 0.99, "shaping/use": True},
    {"policy": 0, "policy_steps": 1000, "env_steps": 2000, "objective": -7.0, "donor": 1, "words": "a copy of policy 1",
     "learning_rate": 1.2e-2, "gamma": 0.99, "shaping/use": False},
]
ROWS = [{"wall_sec": 60.0 * i, "env_steps": 1000 * i, "mean_return": None if i == 0 else float(i), "extra": i * i,
         "policies": [{"mean_return": i + 0.5, "true_objective": -1.0 * i}, {"mean_return": None, "win_rate": 0.5}]}
        for i in range(5)]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def make_run(run_dir: Path, value: float, **more: float) -> Path:
    rows = [{"wall_sec": 60.0 * i, "env_steps": 1_000_000 * i, "mean_return": value + i} | more for i in (1, 2, 3)]
    return write_lines(run_dir / "metrics.jsonl", rows)


def record_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list of all figures that are saved from now on."""
    figures, savefig = [], Figure.savefig

    def save(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        savefig(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


def draw(monkeypatch: pytest.MonkeyPatch, *argv: str | Path) -> Figure:
    """Draw with these arguments; return the figure."""
    figures = record_figures(monkeypatch)
    assert plot.main([str(word) for word in argv]) == 0
    return figures[0]


def test_one_curve_over_minutes_and_one_over_env_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = draw(monkeypatch, make_run(tmp_path / "run", 5), tmp_path / "curve.png", "--goal", "7")
    (by_time, goal), (by_steps, _) = (panel.lines for panel in figure.axes)
    assert by_time.get_xydata().tolist() == [[1, 6], [2, 7], [3, 8]]
    assert by_steps.get_xydata().tolist() == [[1, 6], [2, 7], [3, 8]]
    assert set(goal.get_ydata()) == {7}


@pytest.mark.parametrize(("flags", "labels", "num_colors"), [
    ([], ["seed_0", "seed_1", "seed_0"], 3), (["--by_folder"], ["float32, mean of 2", "bfloat16"], 2)])
def test_runs_differ_in_color_unless_they_share_a_folder(flags: list[str], labels: list[str], num_colors: int,
                                                         tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name, 0) for name in ("float32/seed_0", "float32/seed_1", "bfloat16/seed_0")]
    panel = draw(monkeypatch, *runs, tmp_path / "curve.png", *flags).axes[1]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == labels
    colors = [line.get_color() for line in panel.lines]
    assert len(set(colors)) == num_colors
    assert (colors[0] == colors[1]) == bool(flags)


def test_runs_that_differ_only_in_their_seed_are_one_curve_with_its_interval(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for name, seed, rate in (("fast_0", 0, 1e-3), ("fast_1", 1, 1e-3), ("slow_0", 0, 1e-4), ("broken", 0, 1e-3)):
        runs.append(make_run(tmp_path / name, seed))
        settings = {"seed": seed, "experiment": name, "train_dir": str(tmp_path), "learning_rate": rate}
        (runs[-1] / "config.json").write_text("[" if name == "broken" else json.dumps(settings))
    for panel in draw(monkeypatch, *runs, tmp_path / "curve.png").axes:
        assert len(panel.collections) == 1, "the band"
        mean = max(panel.lines, key=lambda line: line.get_linewidth())
        assert mean.get_ydata()[[0, -1]].tolist() == [1.5, 3.5]
    legend = [text.get_text() for text in panel.get_legend().get_texts()]
    assert legend == ["fast, mean of 2", "slow_0", "broken"]


def test_the_mean_of_a_folder_reaches_as_far_as_all_its_runs_and_lies_in_its_band(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for seed, (value, last) in enumerate([(0.0, 30), (3.0, 20), (9.0, 40)]):
        rows = [{"wall_sec": 60.0 * i, "env_steps": 1e6 * i, "mean_return": value + i} for i in range(seed, last)]
        runs.append(write_lines(tmp_path / f"setting/{seed}/metrics.jsonl", rows))
    for panel in draw(monkeypatch, *runs, tmp_path / "curve.png", "--by_folder").axes:
        mean = max(panel.lines, key=lambda line: line.get_linewidth())
        x, y = mean.get_xydata().T
        assert (x[0], x[-1]) == (2, 19)
        np.testing.assert_allclose(y, x + 4)
        band = panel.collections[0].get_paths()[0].vertices
        offsets = band[:, 1] - band[:, 0]  # all curves have the same slope, so the band has the same width everywhere
        assert -1e-9 < offsets.min() < 4 < offsets.max() < 9 + 1e-9


def test_curves_that_share_no_place_have_no_mean() -> None:
    assert [len(part) for part in plot.mean_curve([([0, 1], [5, 5]), ([2, 3], [5, 5])])] == [0] * 4


def test_another_key_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 0, entropy=0.5, eval_return=3.0, eval_env_steps=500_000)
    panel = draw(monkeypatch, run, tmp_path / "curve.png", "--key", "entropy").axes[1]
    assert [line.get_ydata().tolist() for line in panel.lines] == [[0.5] * 3]
    _, evaluations = draw(monkeypatch, run, tmp_path / "curve.png").axes[1].lines
    assert evaluations.get_xydata().tolist() == [[0.5, 3.0]] * 3


def test_the_objective_and_all_that_has_changed_in_a_population_are_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, output = write_lines(tmp_path / "run" / "population.jsonl", EVENTS), tmp_path / "population.png"
    panels = {panel.get_title(): panel for panel in draw(monkeypatch, run_dir, output, "--population").axes}
    assert {title: [line.get_xydata().tolist() for line in panel.lines] for title, panel in panels.items()} == {
        "objective": [[[1, -7]], [[0.9, -3.5]]],
        "learning_rate": [[[0, 1e-3], [1, 1.2e-2]], [[0, 1e-2], [0.9, 1e-2]]],
        "shaping/use": [[[0, 1], [1, 0]], [[0, 1], [0.9, 1]]]}
    for title, y in (("objective", -7), ("learning_rate", 1.2e-2), ("shaping/use", 0)):
        (replaced, none) = panels[title].collections
        assert replaced.get_offsets().tolist() == [[1, y]]
        assert replaced.get_edgecolors().tolist() == [list(to_rgba(plot.style.LINES[1]))], "that of the donor"
        assert not len(none.get_offsets())
    heights = [line.get_transform().transform(line.get_xydata())[0, 1] for line in panels["shaping/use"].lines]
    assert heights[1] - heights[0] == pytest.approx(plot.SIDE_BY_SIDE * 100 / 72), "equal lines are both seen"
    write_lines(run_dir / "population.jsonl", EVENTS[:2])
    begin = draw(monkeypatch, run_dir, output, "--population").axes
    assert [panel.get_title() for panel in begin] == ["objective", "learning_rate"]
    write_lines(run_dir / "population.jsonl", [*EVENTS, EVENTS[-1] | {"gamma": 0.98}])
    titles = [panel.get_title() for panel in draw(monkeypatch, run_dir, output, "--population").axes]
    assert titles == ["objective", "learning_rate", "gamma", "shaping/use"], "and no empty panel"


@pytest.mark.parametrize(("key", "curves"), [  # of the whole run and of its two policies
    ("mean_return", [[1, 2, 3, 4], [0.5, 1.5, 2.5, 3.5, 4.5], []]),
    ("true_objective", [[], [0, -1, -2, -3, -4], []]), ("extra", [[0, 1, 4, 9, 16], [], []])])
def test_a_key_is_drawn_where_it_has_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str,
                                            curves: list[list[float]]) -> None:
    run_dir = write_lines(tmp_path / "run" / "metrics.jsonl", ROWS)
    panels = draw(monkeypatch, run_dir, tmp_path / "curve.png", "--key", key).axes
    for panel, places in zip(panels, ([0, 1, 2, 3, 4], [0, 0.001, 0.002, 0.003, 0.004]), strict=True):
        assert [line.get_ydata().tolist() for line in panel.lines] == curves
        assert [line.get_xdata().tolist() for line in panel.lines] == [places[5 - len(curve):] for curve in curves]


@pytest.mark.parametrize(("argv", "fragment"), [
    (["{tmp}/none", "{tmp}/out.png"], "{tmp}/none holds no metrics.jsonl"),
    (["{tmp}/run", "{tmp}/none", "{tmp}/out.png"], "{tmp}/none holds no metrics.jsonl"),
    (["{tmp}/none", "{tmp}/out.png", "--population"], "{tmp}/none holds no population.jsonl"),
    (["{tmp}/run", "{tmp}/run", "{tmp}/out.png", "--population"], "--population draws one run"),
    (["{tmp}/empty", "{tmp}/out.png", "--population"], "{tmp}/empty"),
    (["{tmp}/run", "{tmp}/out.png", "--key", "mean_retrun"], "mean_retrun"),
    (["{tmp}/run", "{tmp}/out.png", "--key", "policies"], "policies"),
    (["{tmp}/run", "{tmp}/out.nothing"], "{tmp}/out.nothing"),
    (["{tmp}/run", "{tmp}/no_such_folder/out.png"], "{tmp}/no_such_folder"),
], ids=str)
def test_plot_refuses_bad_input_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str],
                                              fragment: str) -> None:
    write_lines(tmp_path / "run" / "metrics.jsonl", ROWS)
    write_lines(tmp_path / "run" / "population.jsonl", EVENTS)
    write_lines(tmp_path / "empty" / "population.jsonl", [])
    assert plot.main([argument.format(tmp=tmp_path) for argument in argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("plot.py: ")
    assert err.count("\n") == 1
    assert fragment.format(tmp=tmp_path) in err
    assert not list(tmp_path.glob("out.*"))
