"""best.pt is the best: by evaluation where there is one, else by the mean over full windows of episodes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from parts import SMALL, make_config
from tiny import Tiny

from runtime.checkpoint import BEST, is_better, load_checkpoint, policy_dir, read_lines, sort_of_score
from services import saving
from services.progress import RETURN_WINDOW, PolicyProgress
from services.records import Records
from shared_buffers import SharedWeights
from trainer import APPO

SERIAL = SMALL | {"serial_mode": True, "experiment": "run"}


class RisesAndFalls(Tiny):
    """Episodes of one step. All environments together: the return rises to 1 in episode 600, and falls again."""

    length = 1
    episodes: ClassVar[list[float]] = []  # the returns so far
    has_objective = False

    def reward(self, action: Any) -> float:
        self.value = 1 - abs(len(self.episodes) - 600) / 600
        self.episodes.append(self.value)
        return -self.value if self.has_objective else self.value

    def info(self) -> dict[str, Any]:
        return {"true_objective": self.value} if self.has_objective and self.t else {}


class RisesAndFallsByObjective(RisesAndFalls):
    """The return says the contrary."""

    has_objective = True


def run(train_dir: Path, env_steps: int, env: str = "RisesAndFalls", *, episodes: Sequence[float] = (),
        **settings: Any) -> APPO:
    """Train, or train on, as if there had been these episodes before."""
    RisesAndFalls.episodes[:] = episodes
    with APPO(f"test_best:{env}", train_dir=str(train_dir), **SERIAL | settings) as appo:
        appo.train(env_steps)
    return appo


def best_of(train_dir: Path) -> dict[str, Any]:
    return load_checkpoint(policy_dir(train_dir / "run") / BEST)


def summary_of(train_dir: Path) -> dict[str, Any]:
    return json.loads((train_dir / "run" / "summary.json").read_text())


def evaluations_of(train_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(train_dir / "run" / "metrics.jsonl") if "eval_return" in row]


def windows() -> np.ndarray:
    """Return the mean of every full window of episodes."""
    return np.convolve(RisesAndFalls.episodes, np.full(RETURN_WINDOW, 1 / RETURN_WINDOW), "valid")


# ---- by mean return --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["RisesAndFalls", "RisesAndFallsByObjective"])
def test_the_best_full_window_is_saved_when_it_happens(env: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the end, and in a shorter time than 20 seconds."""
    monkeypatch.setattr(saving, "MIN_BEST_SEC", 0.0)
    monkeypatch.setattr(saving, "BEST_SHARE", 1e9)
    appo = run(tmp_path, 1200, env)
    best = best_of(tmp_path)
    assert best["score"] == pytest.approx(max(windows()), abs=0.02), "a few episodes finish between two looks"
    assert 600 < best["env_steps"] < 700
    assert float(appo.buffers.best_score[0]) == best["score"]
    assert summary_of(tmp_path)["best_score"] == [best["score"]]
    assert f"best score {best['score']:.2f}" in (tmp_path / "run" / "log.txt").read_text()


def test_at_the_end_it_is_looked_at_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving is rare here, and the return still rises."""
    monkeypatch.setattr(saving, "MIN_BEST_SEC", 1e9)
    appo = run(tmp_path, 450)
    assert best_of(tmp_path)["score"] == pytest.approx(windows()[-1], abs=0.01)
    assert appo.find(Records).policies[0].mean_return == pytest.approx(best_of(tmp_path)["score"])


# ---- good enough -----------------------------------------------------------------------------------------------------


def test_a_run_ends_when_the_mean_of_100_episodes_is_good_enough_and_says_so(
        tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Episode i brings i / 600: those of 251 to 350 are the first hundred with a mean of 0.5."""
    run(tmp_path, 5000, stop_at_return=0.5)
    assert 351 <= len(RisesAndFalls.episodes) < 400
    reached, = summary_of(tmp_path)["reached_return"]
    assert 0.5 <= reached < 0.54
    finished = f"finished: a return of {reached:.2f} has reached --stop_at_return=0.5"
    assert capsys.readouterr().out.splitlines()[-1] == finished
    for more, num_episodes in (({}, 0), ({"stop_at_return": 0.4}, 0), ({"stop_at_return": math.inf}, 50)):
        run(tmp_path, 100, **more)
        out = capsys.readouterr().out
        assert num_episodes <= len(RisesAndFalls.episodes) <= 2 * num_episodes + 1, "one tells the spaces"
        assert (f"a return of {reached:.2f} of {more.get('stop_at_return', 0.5)}; raise" in out) == (num_episodes == 0)


def test_a_hundred_good_episodes_are_needed_and_other_parameters_begin_anew(tmp_path: Path) -> None:
    RisesAndFalls.episodes[:] = [1.0] * 600
    with APPO("test_best:RisesAndFalls", train_dir=str(tmp_path), stop_at_return=0.5, **SERIAL) as appo:
        appo.train(5000)
        assert 700 <= len(RisesAndFalls.episodes) < 750
        appo.train(5000)
        assert len(RisesAndFalls.episodes) < 750
        appo.set_parameters(appo.get_parameters())
        appo.train(5000)
        assert 800 <= len(RisesAndFalls.episodes) < 900


@pytest.mark.parametrize(("num_episodes", "evaluated", "every", "is_enough"), [
    (99, None, 0, False), (100, None, 0, True), (100, None, 500, False), (0, 18.0, 500, True), (100, 17.9, 500, False)])
def test_where_there_are_evaluations_they_decide(num_episodes: int, evaluated: float | None, every: int,
                                                 is_enough: bool) -> None:
    policy = PolicyProgress(0)
    for _ in range(num_episodes):
        policy.add_episode(18.0, 10, math.nan)
    if evaluated is not None:
        policy.last_evaluation = {"eval_return": evaluated}
    cfg = make_config({"env": "tiny", "eval_every_env_steps": every, "stop_at_return": 18.0})
    assert policy.is_good_enough(cfg) == is_enough
    assert not policy.is_good_enough(make_config({"env": "tiny", "eval_every_env_steps": every}))


@pytest.mark.parametrize("damage", ["", "summary.json", "checkpoints/policy_00/best.pt"])
def test_a_resumed_run_knows_the_score_of_the_file(tmp_path: Path, damage: str) -> None:
    run(tmp_path, 600)
    before = best_of(tmp_path)["score"]
    if damage:
        (tmp_path / "run" / damage).write_bytes(b"damaged")
    run(tmp_path, 300, episodes=[0.0] * 50)  # it is bad again, and does not become as good
    after = best_of(tmp_path)["score"]
    assert (0 < after <= before) if damage.endswith(BEST) else after == before


@pytest.mark.parametrize(("new", "old", "better"), [
    # (score, is it an objective, is it an evaluation)
    ((2, 0, 0), (1, 0, 0), True), ((1, 0, 0), (1, 0, 0), False), ((1, 0, 0), (2, 0, 0), False),
    ((0.1, 1, 0), (300, 0, 0), True), ((300, 0, 0), (0.1, 1, 0), False), ((300, 0, 1), (0.1, 1, 0), False),
    ((0.1, 1, 1), (300, 0, 1), True), ((0.1, 1, 0), (300, 0, 1), True),
    ((5, 0, 1), (9, 0, 0), True), ((5, 0, 0), (9, 0, 1), False), ((9, 0, 0), (5, 0, 1), True),
    ((5, 0, 0), (-math.inf, 0, 0), True), ((-5, 1, 1), (-math.inf, 0, 0), True)])
def test_scores_of_different_sorts_are_never_compared_by_size(new: tuple, old: tuple, better: bool) -> None:
    sorts = [sort_of_score(is_objective=bool(objective), is_evaluation=bool(evaluation))
             for _, objective, evaluation in (new, old)]
    assert is_better(new[0], sorts[0], old[0], sorts[1]) == better


def test_a_resumed_run_whose_objectives_come_seldom_keeps_what_they_chose(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, 600, "RisesAndFallsByObjective")
    before = best_of(tmp_path)["score"]
    monkeypatch.setattr(RisesAndFallsByObjective, "has_objective", False)  # returns of up to 1 come first
    resumed = run(tmp_path, 160, "RisesAndFallsByObjective", episodes=[0.0] * 500)
    assert resumed.find(Records).policies[0].mean_return > before
    assert best_of(tmp_path)["score"] == before


# ---- by evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16", "encoder_mlp_layers": (8, 8)}])
def test_the_weights_with_the_best_evaluation_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        settings: dict[str, Any]) -> None:
    """They are those that were scored, in float32, though the learner has gone on; of equal ones the last."""
    published: dict[int, dict[str, torch.Tensor]] = {}
    publish = SharedWeights.publish

    def record(weights: SharedWeights, *args: Any, **more: Any) -> None:
        publish(weights, *args, **more)
        state, version = weights.read()
        published[version] = state

    monkeypatch.setattr(SharedWeights, "publish", record)
    with APPO("CartPole-v1", train_dir=str(tmp_path), eval_every_env_steps=300, eval_episodes=5,
              **SERIAL | settings) as appo:
        appo.train(3000)
    rows = evaluations_of(tmp_path)
    assert rows[-1]["eval_sgd_steps"] == appo.versions[0], "the last weights were scored too"
    top = max(row["eval_return"] for row in rows)
    expected = [row for row in rows if row["eval_return"] == top][-1]
    best = best_of(tmp_path)
    assert (best["score"], best["sgd_steps"], best["env_steps"]) == (
        top, expected["eval_sgd_steps"], expected["eval_env_steps"])
    torch.testing.assert_close(dict(best["model"]), published[best["sgd_steps"]], rtol=0, atol=0)
    assert len({row["eval_return"] for row in rows}) > 3


def test_evaluations_score_the_true_objective(tmp_path: Path) -> None:
    appo = run(tmp_path, 900, "RisesAndFallsByObjective", eval_every_env_steps=200, eval_episodes=4)
    rows = evaluations_of(tmp_path)
    assert all(row["eval_true_objective"] == pytest.approx(-row["eval_return"]) for row in rows)
    top = max(row["eval_true_objective"] for row in rows)
    assert best_of(tmp_path)["score"] == top > min(row["eval_true_objective"] for row in rows)
    assert rows[-1]["eval_true_objective"] < top
    assert float(appo.buffers.best_score[0]) == top
