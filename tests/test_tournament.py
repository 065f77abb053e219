"""Tournaments: games are counted right, Elo ratings are those of the Bradley-Terry model; scores, bad input."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from parts import SMALL, make_config
from tiny_games import TAPE

import evaluate
from envs.families import make_vector_env
from envs.vector_env import Step, VectorEnv
from runtime.checkpoint import find_checkpoint, load_checkpoint, policy_dir, save_checkpoint
from runtime.evaluator import find_places
from tools import tournament
from tools.tournament import ELO_SCALE, MakePlayer, Results, describe, elo, play_all, play_games
from trainer import APPO

RATINGS = np.array([250.0, 120.0, 0.0, -70.0, -300.0])  # their mean is 0


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def simulate(ratings: np.ndarray, games_per_pair: int, rng: np.random.Generator) -> Results:
    """Play games of the Bradley-Terry model."""
    size = len(ratings)
    points, games = np.zeros((size, size)), np.zeros((size, size))
    for i in range(size):
        for j in range(i):
            points[i, j] = rng.binomial(games_per_pair, 1 / (1 + 10 ** ((ratings[j] - ratings[i]) / 400)))
            points[j, i] = games_per_pair - points[i, j]
            games[i, j] = games[j, i] = games_per_pair
    return Results(points, games)


def results(points: list[list[float]], games: float) -> Results:
    return Results(np.array(points, float), games * (1 - np.eye(len(points))))


# ---- ratings -----------------------------------------------------------------------------------------------------


def test_elo_recovers_the_ratings_of_a_large_tournament() -> None:
    ratings, errors = elo(simulate(RATINGS, 100_000, seeded()))
    assert (errors < 5).all()
    assert ratings == pytest.approx(RATINGS, abs=10)
    assert ratings.mean() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("num_entries", [2, 3, 5])
def test_confidence_intervals_cover_the_truth_in_95_of_100_tournaments(num_entries: int) -> None:
    rng, true_ratings = seeded(), RATINGS[:num_entries] - RATINGS[:num_entries].mean()
    covered = []
    for _ in range(600):
        ratings, errors = elo(simulate(true_ratings, 300, rng))
        covered.append(np.abs(ratings - true_ratings) <= errors)
    # of 600 independent tournaments: 95 % +- 5 standard deviations
    assert np.mean(covered) == pytest.approx(0.95, abs=5 * np.sqrt(0.95 * 0.05 / 600))


def test_400_points_are_10_to_1_and_more_games_give_more_confidence() -> None:
    (few, few_error), (many, many_error) = (elo(results([[0, 10 * n], [n, 0]], 11 * n)) for n in (1000, 100_000))
    assert few[0] - few[1] == pytest.approx(400, abs=1)
    assert many[0] - many[1] == pytest.approx(400, abs=0.01)
    assert few_error == pytest.approx(10 * many_error, rel=0.01)
    # with 2 entries the error is known: that of log odds is 1 / sqrt(n p q), and each has half of the difference
    known = 1.96 * ELO_SCALE / np.sqrt(1_100_000 * 10 / 11 * 1 / 11) / 2
    assert many_error == pytest.approx([known, known], rel=0.001)


@pytest.mark.parametrize("games", [1, 20, 100_000])
def test_ratings_are_finite_when_somebody_always_wins(games: int) -> None:
    ratings, errors = elo(results([[0, games, games], [0, 0, games], [0, 0, 0]], games))
    assert np.isfinite(ratings).all()
    assert np.isfinite(errors).all()
    assert ratings[0] > ratings[1] + 50 > ratings[2] + 100
    assert ratings.mean() == pytest.approx(0, abs=1e-9)
    assert (errors > 0).all()


# ---- games -------------------------------------------------------------------------------------------------------


class Scripted:
    """Always plays the same action."""

    def __init__(self, env: VectorEnv, agents: np.ndarray, action: int) -> None:
        self.kind, self.places = find_places(env, agents)
        self.action = action

    def act(self, step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        actions[self.kind][self.places] = self.action


def scripted(action: int, seats: list[list[int]] | None = None) -> MakePlayer:
    """Return the maker of a player, which adds the agents that it gets to `seats`."""
    def make(env: VectorEnv, agents: np.ndarray) -> Scripted:
        if seats is not None:
            seats.append(agents.tolist())
        return Scripted(env, agents, action)
    return make


def make_games(name: str, num_envs: int) -> VectorEnv:
    return make_vector_env(make_config({"env": f"tiny_games:{name}"}), num_envs)


@pytest.mark.parametrize(("name", "actions", "points"), [
    ("HigherWins", (2, 0), 20.0), ("HigherWins", (0, 1), 0.0), ("HigherWins", (1, 1), 10.0),
    ("AlwaysEven", (2, 0), 10.0), ("FirstSeatWins", (0, 2), 10.0),  # each has the better seat in half of the games
    ("FourScores", (2, 1), 20.0), ("FourScores", (0, 1), 0.0), ("FourScores", (2, 2), 10.0)])
@pytest.mark.parametrize("num_envs", [20, 4])
def test_won_even_and_lost_games_are_counted(name: str, actions: tuple[int, int], points: float, num_envs: int) -> None:
    env, seats = make_games(name, num_envs), []
    TAPE.clear()
    assert play_games(env, scripted(actions[0], seats), scripted(actions[1], seats), 20, seed=3) == points
    size = len(env.agents)
    assert sorted(seats[0] + seats[1]) == list(range(num_envs * size))
    for i in range(num_envs):
        first, second = (sorted(m - i * size for m in own if m // size == i) for own in seats)
        assert first == list(range(i % 2, size, 2)), "every other agent; in every other environment the other ones"
        assert second == list(range(1 - i % 2, size, 2))
    assert len(TAPE) >= 20, "so many games"
    env.close()


def test_everybody_plays_everybody() -> None:
    env = make_games("HigherWins", 4)
    played = play_all(env, [scripted(0), scripted(2), scripted(1), scripted(2)], 6, seed=0)
    env.close()
    assert played.games.tolist() == (6 * (1 - np.eye(4))).tolist()
    assert played.points.tolist() == [[0, 0, 0, 0], [6, 0, 6, 3], [6, 0, 0, 0], [6, 3, 6, 0]]
    ratings = elo(played)[0]
    assert ratings[1] == pytest.approx(ratings[3])
    assert ratings[1] > ratings[2] > ratings[0]


def parse_table(text: str) -> dict[str, tuple[list[float | None], float, float]]:
    """Read what `describe` wrote: the shares of each entry in the order of the rows, its rating and its error."""
    rows = {}
    for line in text.splitlines():
        if match := re.fullmatch(r" *(\d+)  (\S+) +([-.\d ]+?)  +(-?\d+) \+- (\d+)", line):
            assert int(match[1]) == len(rows) + 1, "numbered by place"
            shares = [None if share == "-" else float(share) for share in match[3].split()]
            rows[match[2]] = (shares, float(match[4]), float(match[5]))
    return rows


def test_the_table_is_right() -> None:
    names = ["weak", "a_strong_one", "mid"]
    played = results([[0, 1, 4], [9, 0, 7], [6, 3, 0]], 10)
    text, (ratings, errors) = describe(names, played), elo(played)
    rows = parse_table(text)
    assert list(rows) == ["a_strong_one", "mid", "weak"], "the best first"
    assert [shares for shares, _, _ in rows.values()] == [[None, 0.7, 0.9], [0.3, None, 0.6], [0.1, 0.4, None]]
    for name, (_, rating, error) in rows.items():
        assert rating == pytest.approx(ratings[names.index(name)], abs=0.5)
        assert error == pytest.approx(errors[names.index(name)], abs=0.5)


# ---- the commands ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the train_dir of runs, called as their environments, which no test changes."""
    train_dir = tmp_path_factory.mktemp("trained")
    for env, settings in {"HigherWins": {"self_play_past_fraction": 0.5, "self_play_snapshot_every_env_steps": 100},
                          "Payday": {}}.items():
        with APPO(f"tiny_games:{env}", train_dir=str(train_dir), experiment=env, num_policies=2, serial_mode=True,
                  **SMALL, **settings) as appo:
            appo.train(400)
    return train_dir


def run_command(env: str, train_dir: Path, *argv: str, of: ModuleType = evaluate) -> int:
    """Call a command for one of the runs; return its exit status."""
    return of.main(["--env", f"tiny_games:{env}", "--experiment", env, "--train_dir", str(train_dir), "--device=cpu",
                    *argv])


@pytest.fixture
def command(trained: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls a command for one of the runs and returns what it printed."""
    def call(env: str, *argv: str, train_dir: Path = trained, of: ModuleType = evaluate) -> str:
        assert run_command(env, train_dir, *argv, of=of) == 0
        return capsys.readouterr().out
    return call


def test_tournament_against_checkpoints_and_random(command: Callable[..., str], trained: Path, tmp_path: Path) -> None:
    snapshot = sorted(policy_dir(trained / "HigherWins", 1).glob("snapshot_*.pt"))[0]
    other = shutil.copy(snapshot, tmp_path / "my_copy.pt")
    argv = ["HigherWins", "--episodes", "4", "--against", "random", str(snapshot), str(other)]
    out = command(*argv, of=tournament)
    assert "5 entries, 4 games each two" in out
    rows = parse_table(out)
    assert rows.keys() == {"policy_00", "policy_01", "random", f"policy_01/{snapshot.stem}",
                           str(other).removesuffix(".pt")}
    assert all(len(row[0]) == 5 for row in rows.values())
    assert command(*argv, of=tournament) == out, "one seed gives one result"


def test_a_strong_entry_wins_the_tournament(command: Callable[..., str], trained: Path, tmp_path: Path) -> None:
    """One that always plays the highest action is the best, whatever its place among the entries."""
    shutil.copytree(trained / "HigherWins", tmp_path / "HigherWins")
    strong = find_checkpoint(tmp_path / "HigherWins", policy=1)
    state = load_checkpoint(strong)
    state["model"]["policy_head.bias"][2] = 30.0
    save_checkpoint(state, strong)
    out = command("HigherWins", "--episodes", "60", "--against", "random", train_dir=tmp_path, of=tournament)
    rows = parse_table(out)
    assert next(iter(rows)) == "policy_01"
    assert min(share for share in rows["policy_01"][0] if share is not None) > 0.8


def test_a_tournament_without_opponents_is_refused_in_one_line(trained: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("Payday", trained, of=tournament) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tournament.py: a tournament needs an environment of several agents")


@pytest.mark.parametrize("policy", [0, 1])
def test_the_policy_that_is_asked_for_plays(command: Callable[..., str], trained: Path, policy: int) -> None:
    out = command("Payday", "--policy", str(policy), "--episodes", "3")
    assert f"playing {policy_dir(trained / 'Payday', policy)}/" in out
    assert "3 episodes: return 4.50 +- 0.00" in out
    assert "of each agent" not in out


@pytest.mark.parametrize(("summary", "best"), [
    ({"best_score": [None, -5.0], "true_objective": [9.0, 0.0], "mean_return": [9.0, 0.0]}, 1),
    ({"best_score": [None, None], "true_objective": [None, -5.0], "mean_return": [9.0, 0.0]}, 1),
    ({"mean_return": [1.0, 2.0]}, 1), ({}, 0),
    ({"true_objective": [1.0, 2.0, 3.0], "mean_return": [2.0, 1.0]}, 0)])  # of another number of policies
def test_the_best_policy_is_chosen_by_its_best_score_or_else_its_objective_or_its_return(
        command: Callable[..., str], trained: Path, tmp_path: Path, summary: dict[str, Any], best: int) -> None:
    run_dir = Path(shutil.copytree(trained / "Payday", tmp_path / "Payday"))
    (run_dir / "summary.json").write_text(json.dumps(summary))
    out = command("Payday", "--episodes", "1", train_dir=tmp_path)
    assert f"playing {policy_dir(run_dir, best)}/" in out
