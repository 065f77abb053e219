"""Tournaments: games are counted right, Elo ratings are those of the Bradley-Terry model; which policy plays."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parts import SMALL, make_config
from torch import Tensor

import evaluate
from envs.families import make_vector_env
from envs.flat_spaces import Observation
from envs.vector_env import VectorEnv
from runtime.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, policy_dir, save_checkpoint
from tools import tournament
from tools.tournament import ELO_SCALE, elo, play_all, play_games
from trainer import APPO

RATINGS = np.array([250.0, 120.0, 0.0, -70.0, -300.0])  # their mean is 0


# ---- ratings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_entries", [2, 5])
def test_confidence_intervals_cover_the_truth_in_95_of_100_tournaments(num_entries: int) -> None:
    """Of the Bradley-Terry model."""
    rng, true_ratings = np.random.default_rng(0), RATINGS[:num_entries] - RATINGS[:num_entries].mean()
    wins = 1 / (1 + 10 ** ((true_ratings - true_ratings[:, None]) / 400))  # probability of row against column
    covered = []
    for _ in range(600):
        points = np.tril(rng.binomial(300, wins), -1)
        ratings, errors = elo(points + np.tril(300 - points, -1).T, 300)
        covered.append(np.abs(ratings - true_ratings) <= errors)
    assert np.mean(covered) == pytest.approx(0.95, abs=5 * np.sqrt(0.95 * 0.05 / 600))  # 5 standard deviations


def test_400_points_are_10_to_1_and_more_games_give_more_confidence() -> None:
    (few, few_error), (many, many_error) = (elo(np.array([[0, 10 * n], [n, 0]]), 11 * n) for n in (1000, 100_000))
    assert few[0] - few[1] == pytest.approx(400, abs=1)
    assert many[0] - many[1] == pytest.approx(400, abs=0.01)
    assert few_error == pytest.approx(10 * many_error, rel=0.01)
    # with 2 entries the error is known: that of log odds is 1 / sqrt(n p q), and each has half of the difference
    known = 1.96 * ELO_SCALE / np.sqrt(1_100_000 * 10 / 11 * 1 / 11) / 2
    assert many_error == pytest.approx([known, known], rel=0.001)


@pytest.mark.parametrize("games", [1, 100_000])
def test_ratings_are_finite_when_somebody_always_wins(games: int) -> None:
    ratings, errors = elo(np.array([[0, games, games], [0, 0, games], [0, 0, 0]]), games)
    assert np.isfinite(errors).all()
    assert ratings[0] > ratings[1] + 50 > ratings[2] + 100
    assert ratings.mean() == pytest.approx(0, abs=1e-9)


# ---- games -------------------------------------------------------------------------------------------------------


class Scripted:
    """Always plays the same action."""

    state_size, deterministic = 0, False

    def __init__(self, action: int) -> None:
        self.action = action

    def act(self, obs: Observation, rnn_states: Tensor, new_episode: np.ndarray, *,
            deterministic: bool) -> tuple[np.ndarray, Tensor]:
        return np.full((len(new_episode), 1), self.action), rnn_states


def make_games(name: str, num_envs: int) -> VectorEnv:
    return make_vector_env(make_config({"env": f"tiny_games:{name}"}), num_envs)


@pytest.mark.parametrize(("name", "actions", "points"), [
    ("HigherWins", (2, 0), 20.0), ("HigherWins", (0, 1), 0.0), ("HigherWins", (1, 1), 10.0),
    ("AlwaysEven", (2, 0), 10.0), ("FirstSeatWins", (0, 2), 10.0),  # each has the better seat in half of the games
    ("FourScores", (2, 1), 20.0), ("FourScores", (0, 1), 0.0), ("FourScores", (2, 2), 10.0)])
@pytest.mark.parametrize("num_envs", [20, 4])
def test_won_even_and_lost_games_are_counted(name: str, actions: tuple[int, int], points: float, num_envs: int) -> None:
    env, moves = make_games(name, num_envs), []
    step = env.step
    env.step = lambda rows: moves.append(rows[0].reshape(num_envs, -1).copy()) or step(rows)
    assert play_games(env, Scripted(actions[0]), Scripted(actions[1]), 20, seed=3) == points
    assert len(moves) * num_envs >= 20 * 2, "so many games of two steps"
    seats = np.add.outer(range(num_envs), range(len(env.agents))) % 2
    for rows in moves:
        assert (rows == np.take(actions, seats)).all(), "every other agent; in every other environment the other ones"
    env.close()


def test_the_true_objective_decides_where_there_is_one() -> None:
    env = make_games("HigherWins", 4)
    step = env.step
    env.step = lambda rows: (taken := step(rows))._replace(objectives=-taken.rewards)
    assert play_games(env, Scripted(2), Scripted(0), 20, seed=3) == 0
    env.close()


def test_everybody_plays_everybody() -> None:
    env = make_games("HigherWins", 4)
    points = play_all(env, [Scripted(action) for action in (0, 2, 1, 2)], 6, seed=0)
    env.close()
    assert points.tolist() == [[0, 0, 0, 0], [6, 0, 6, 3], [6, 0, 0, 0], [6, 3, 6, 0]]


def read_table(text: str) -> dict[str, list[str]]:
    """Return the shares of each entry of a printed table, from the best to the worst."""
    rows = re.findall(r"^ *\d+  (\S+) +(.*?) +-?\d+ \+- \d+$", text, re.MULTILINE)
    return {name: shares.split() for name, shares in rows}


# ---- the commands ------------------------------------------------------------------------------------------------


def call(main: Callable[[list[str]], int], run_dir: Path, *argv: str) -> int:
    """Call a command for a run; return its exit status."""
    return main(["--env=tiny_games:HigherWins", f"--experiment={run_dir.name}", f"--train_dir={run_dir.parent}",
                 "--device=cpu", *argv])


def test_policies_play_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that always plays the highest action is the best, whatever its place among the entries."""
    with APPO("tiny_games:HigherWins", train_dir=str(tmp_path), experiment="run", num_policies=2, serial_mode=True,
              self_play_past_fraction=0.5, keep_checkpoints=2, **SMALL) as appo:
        for _ in range(2):
            appo.train(150)
            appo.save()
    run_dir = appo.cfg.run_dir
    assert call(evaluate.main, run_dir, "--policy=1", "--episodes=2") == 0
    assert f"playing {policy_dir(run_dir, 1)}/" in capsys.readouterr().out
    earlier = list_checkpoints(policy_dir(run_dir, 1))[-1]
    strong = find_checkpoint(run_dir, policy=1)
    state = load_checkpoint(strong)
    state["model"]["policy_head.bias"][2] = 30.0
    for path in (strong, tmp_path / "copy.pt"):
        save_checkpoint(state, path)
    printed = []
    for _ in range(2):
        assert call(tournament.main, run_dir, "--episodes=40", "--against", str(earlier),
                    str(tmp_path / "copy.pt"), "random", "idle") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1], "one seed gives one result"
    rows = read_table(printed[0])
    best, others = list(rows)[:2], list(rows)[2:]
    assert {*best} == {"policy_01", str(tmp_path / "copy.pt")}
    assert {*others} == {"policy_00", str(earlier), "random", "idle"}
    assert max(rows["idle"]) < "0.5", "it always plays the lowest action"
    assert all(float(share) > 0.8 for name in best for share in rows[name][2:])
