"""Policies that play each other: a matrix of results, and Elo ratings with confidence.

    python -m tools.tournament --env pettingzoo:classic.connect_four_v3 --episodes 200 --against SNAPSHOT.pt ...

An entry is a policy of the run, or a checkpoint such as an earlier version of one; `random` is a new network, `idle`
does nothing. In a game two entries share the agents of an environment: one plays the first, third, ... agent, the other
the second, fourth, ...; in every other environment they change seats. Whose agents have the higher mean objective, or
return where the environment has none, has won.
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from envs.families import make_vector_env
from envs.vector_env import VectorEnv
from evaluate import MAX_ENVS, Player, Policy, arguments_of_a_run, load_policy, play
from runtime.utils import EVALUATION, UserError, derive_seed, exit_status, run_command, seed_all

ELO_SCALE = 400 / np.log(10)  # points per unit of log odds
VIRTUAL_DRAWS = 0.5  # added between each two entries, so that one that never loses has a finite rating


@exit_status
def main(argv: list[str]) -> None:
    """Let all policies of a run, and the entries of `--against`, play each other; print the results."""
    parser = arguments_of_a_run(__doc__)
    parser.add_argument("--checkpoint", default="latest", help="of each policy of the run: best, else latest [latest]")
    parser.add_argument("--against", nargs="+", default=[], metavar="FILE",
                        help="other entries: checkpoints, random, idle")
    args = parser.parse(argv)
    torch.set_num_threads(1)  # several would wait for each other in each small operator
    first = load_policy(args, 0, args.checkpoint)
    seed_all(derive_seed(args.seed, EVALUATION, part=1))
    entries = {"policy_00": first}
    for number in range(1, first.cfg.num_policies):
        entries[f"policy_{number:02}"] = load_policy(args, number, args.checkpoint)
    with contextlib.closing(make_vector_env(first.cfg, min(args.episodes, MAX_ENVS))) as env:
        if len(env.agents) < 2 or len(env.kinds) > 1:
            raise UserError(f"a tournament needs an environment of several agents with the same spaces, not {env.name}")
        for name in args.against:
            make = {"random": Policy, "idle": Idle}.get(name)
            entries[name] = make(first.cfg, env, 0, first.device) if make else load_policy(args, 0, name)
            entries[name].deterministic = args.deterministic and not make
        points = play_all(env, list(entries.values()), args.episodes, args.seed)
    print(describe(list(entries), points, args.episodes))


class Idle(Policy):
    """Plays the first of each set of actions, also where it is forbidden."""

    def act(self, *args: Any, **more: Any) -> tuple[np.ndarray, torch.Tensor]:
        rows, rnn_states = super().act(*args, **more)
        return np.zeros_like(rows), rnn_states


def play_all(env: VectorEnv, entries: Sequence[Policy], games: int, seed: int) -> np.ndarray:
    """Play so many games between each two entries; return the points of each row against each column, [E, E]."""
    points = np.zeros((len(entries), len(entries)))
    for i, j in itertools.combinations(range(len(entries)), 2):
        points[j, i] = play_games(env, entries[j], entries[i], games, seed)
        points[i, j] = games - points[j, i]
    return points


def play_games(env: VectorEnv, first: Policy, second: Policy, games: int, seed: int) -> float:
    """Play games between two entries; return the points of the first: 1 for a won game, 0.5 for a draw."""
    is_first = np.add.outer(range(env.num_envs), range(len(env.agents))) % 2 == 0
    players = [Player(first, env, 0, is_first.ravel()), Player(second, env, 0, ~is_first.ravel())]
    points = 0.0
    for ended in play(env, players, games, seed):
        for episode in ended:
            seats = is_first[episode.env]
            scores = episode.returns if np.isnan(episode.objectives).any() else episode.objectives
            lead = scores[seats].mean() - scores[~seats].mean()
            points += 0.5 + 0.5 * float(np.sign(lead))
    return points


def elo(points: np.ndarray, games: int) -> tuple[np.ndarray, np.ndarray]:
    """Fit Elo ratings to results: the maximum likelihood of the Bradley-Terry model, a draw being half a won game.

    Args:
        points: of each row against each column, [E, E]. games: of each two entries.

    Returns:
        Ratings [E], their mean 0, and the half widths of their 95 % confidence intervals [E], from the inverse of the
        Fisher information. An advantage of 400 points means 10 to 1.
    """
    others = ~np.eye(len(points), dtype=bool)
    games_and_draws = (games + 2 * VIRTUAL_DRAWS) * others
    points = points + VIRTUAL_DRAWS * others
    ratings = np.zeros(len(points))  # log odds
    for _ in range(100):
        wins = 1 / (1 + np.exp(ratings[None] - ratings[:, None]))  # probability of row against column
        gradient = (points - games_and_draws * wins).sum(1)
        spread = games_and_draws * wins * (1 - wins)
        information = np.diag(spread.sum(1)) - spread
        covariance = np.linalg.pinv(information)  # singular: only differences of ratings matter
        ratings += np.clip(covariance @ gradient, -2, 2)
    return (ratings - ratings.mean()) * ELO_SCALE, 1.96 * np.sqrt(np.diag(covariance)) * ELO_SCALE


def describe(names: Sequence[str], points: np.ndarray, games: int) -> str:
    """Lay out the results as a text: the share of points of each row against each column, and the ratings."""
    ratings, errors = elo(points, games)
    order = np.argsort(-ratings, kind="stable")
    width = max(map(len, names))
    numbers = " ".join(f"{place:5}" for place in range(1, len(names) + 1))
    lines = [f"share of points of each row against each column, {games} games (a draw is half a point):", "",
             f"{'':{width + 5}}{numbers}    Elo (95 %)"]
    for place, i in enumerate(order, 1):
        shares = " ".join(f"{share:5.2f}" for share in points[i, order] / games)
        lines.append(f"{place:3}  {names[i]:{width}}{shares}  {ratings[i]:6.0f} +- {errors[i]:.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
