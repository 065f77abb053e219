"""The plots: what is drawn of a run, and how runs are told apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

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


def picture(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


def ink(path: Path) -> int:
    """Count the pixels of a picture that are not white."""
    return int((picture(path) < 250).sum())


def make_run(run_dir: Path, value: float, **more: float) -> Path:
    rows = [{"wall_sec": 60.0 * i, "env_steps": 1_000_000 * i, "mean_return": value + i} | more for i in (1, 2, 3)]
    return write_lines(run_dir / "metrics.jsonl", rows)


def draw(monkeypatch: pytest.MonkeyPatch, *argv: str | Path) -> plot.plt.Figure:
    """Draw with these arguments; return the figure."""
    figures = []
    monkeypatch.setattr(plot.plt, "close", figures.append)
    assert plot.main([str(word) for word in argv]) == 0
    return figures[0]


def test_one_curve_over_minutes_and_one_over_env_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = draw(monkeypatch, make_run(tmp_path / "run", 5), tmp_path / "curve.png", "--goal", "7")
    (by_time, goal), (by_steps, _) = (panel.lines for panel in figure.axes)
    assert by_time.get_xydata().tolist() == [[1, 6], [2, 7], [3, 8]]
    assert by_steps.get_xydata().tolist() == [[1, 6], [2, 7], [3, 8]]
    assert set(goal.get_ydata()) == {7}
    assert (tmp_path / "curve.png").stat().st_size > 1000


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


def test_population_is_drawn(tmp_path: Path) -> None:
    """The number of panels tells what has changed: here the learning rate and the shaping, beside the objective."""
    run_dir, output = write_lines(tmp_path / "run" / "population.jsonl", EVENTS), tmp_path / "population.png"
    assert plot.main([str(run_dir), str(output), "--population"]) == 0
    assert picture(output).shape == (300, 1200)
    whole = ink(output)
    write_lines(run_dir / "population.jsonl", EVENTS[:2])
    assert plot.main([str(run_dir), str(output), "--population"]) == 0
    assert picture(output).shape == (300, 800)
    assert whole > ink(output) > 1000


@pytest.mark.parametrize("key", ["mean_return", "true_objective", "extra"])
def test_a_key_is_drawn(tmp_path: Path, key: str) -> None:
    run_dir = write_lines(tmp_path / "run" / "metrics.jsonl", ROWS)
    assert plot.main([str(run_dir), str(tmp_path / "curve.png"), "--key", key]) == 0
    assert ink(tmp_path / "curve.png") > 1000
    whole, *policies = plot.read_curves(run_dir, key)
    assert len(policies) == 2
    assert whole[2] == {"mean_return": [1, 2, 3, 4], "true_objective": [], "extra": [0, 1, 4, 9, 16]}[key]
    assert policies[0] == {
        "mean_return": ([0, 1, 2, 3, 4], [0, 0.001, 0.002, 0.003, 0.004], [0.5, 1.5, 2.5, 3.5, 4.5]),
        "true_objective": ([0, 1, 2, 3, 4], [0, 0.001, 0.002, 0.003, 0.004], [0, -1, -2, -3, -4]),
        "extra": ([], [], [])}[key]
    assert policies[1] == ([], [], [])


@pytest.mark.parametrize(("argv", "fragments"), [
    (["{tmp}/none", "{tmp}/out.png"], ["{tmp}/none holds no metrics.jsonl"]),
    (["{tmp}/run", "{tmp}/none", "{tmp}/out.png"], ["{tmp}/none holds no metrics.jsonl"]),
    (["{tmp}/none", "{tmp}/out.png", "--population"], ["{tmp}/none holds no population.jsonl"]),
    (["{tmp}/run", "{tmp}/run", "{tmp}/out.png", "--population"], ["--population draws one run"]),
    (["{tmp}/empty", "{tmp}/out.png", "--population"], ["{tmp}/empty"]),
    (["{tmp}/run", "{tmp}/out.png", "--key", "mean_retrun"], ["mean_retrun"]),
    (["{tmp}/run", "{tmp}/out.png", "--key", "policies"], ["policies"]),
    (["{tmp}/run", "{tmp}/out.nothing"], ["{tmp}/out.nothing"]),
    (["{tmp}/run", "{tmp}/no_such_folder/out.png"], ["{tmp}/no_such_folder"]),
], ids=str)
def test_plot_refuses_bad_input_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str],
                                              fragments: list[str]) -> None:
    write_lines(tmp_path / "run" / "metrics.jsonl", ROWS)
    write_lines(tmp_path / "run" / "population.jsonl", EVENTS)
    write_lines(tmp_path / "empty" / "population.jsonl", [])
    assert plot.main([argument.format(tmp=tmp_path) for argument in argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("plot.py: ")
    assert err.count("\n") == 1
    assert all(fragment.format(tmp=tmp_path) in err for fragment in fragments), err
    assert not list(tmp_path.glob("out.*"))
