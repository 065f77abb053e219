"""Policies that play each other: a matrix of results, and Elo ratings with confidence.

    python -m tools.tournament --env pettingzoo:classic.connect_four_v3 --episodes 200 --against random SNAPSHOT.pt ...

An entry is a policy of the run, a checkpoint such as an earlier version of one, or "random". In a game two entries
share the agents of an environment: one plays the first, third, ... agent, the other the second, fourth, ...; in every
other environment they change seats. Whose agents have the higher mean return has won.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from envs.families import make_vector_env
from envs.vector_env import VectorEnv
from evaluate import arguments_of_a_run, load_policy
from runtime.evaluator import MAX_ENVS, Player, RandomPlayer, play
from runtime.generators import seed_all
from runtime.guard import take_programs_along
from runtime.policy import load
from runtime.seeding import EVALUATION, derive_seed
from runtime.user_error import UserError, exit_status

ELO_SCALE = 400 / np.log(10)  # points per unit of log odds
VIRTUAL_DRAWS = 0.5  # added between each two entries, so that one that never loses has a finite rating

MakePlayer = Callable[[VectorEnv, np.ndarray], Player | RandomPlayer]


class Results(NamedTuple):
    """Sums over the games of each two entries, [E, E]; row against column."""

    points: np.ndarray  # 1 for a won game, 0.5 for a draw
    games: np.ndarray


def play_games(env: VectorEnv, first: MakePlayer, second: MakePlayer, num_games: int, seed: int) -> float:
    """Play games between two entries; return the points of the first."""
    num_agents = len(env.agents)
    agents = np.arange(env.num_envs * num_agents)
    swapped = agents // num_agents % 2 == 1  # in every other environment they change seats
    is_first = (agents % num_agents % 2 == 0) != swapped
    players = [first(env, agents[is_first]), second(env, agents[~is_first])]
    points = 0.0
    for episode in play(env, players, num_games, seed):
        seats = is_first.reshape(env.num_envs, num_agents)[episode.env]
        lead = episode.returns[seats].mean() - episode.returns[~seats].mean()
        points += 0.5 + 0.5 * float(np.sign(lead))
    return points


def play_all(env: VectorEnv, entries: Sequence[MakePlayer], games_per_pair: int, seed: int) -> Results:
    """Let every two entries play games against each other."""
    shape = (len(entries), len(entries))
    points, games = np.zeros(shape), np.zeros(shape)
    for i in range(len(entries)):
        for j in range(i):
            points[i, j] = play_games(env, entries[i], entries[j], games_per_pair, seed)
            points[j, i] = games_per_pair - points[i, j]
            games[i, j] = games[j, i] = games_per_pair
    return Results(points, games)


def elo(results: Results) -> tuple[np.ndarray, np.ndarray]:
    """Fit Elo ratings to results: the maximum likelihood of the Bradley-Terry model, a draw being half a won game.

    Returns:
        Ratings [E], their mean 0, and the half widths of their 95 % confidence intervals [E], from the inverse of the
        Fisher information. An advantage of 400 points means 10 to 1.
    """
    num_entries = len(results.games)
    others = ~np.eye(num_entries, dtype=bool)
    games = results.games + 2 * VIRTUAL_DRAWS * others
    points = results.points + VIRTUAL_DRAWS * others
    ratings = np.zeros(num_entries)  # log odds
    for _ in range(100):
        wins = 1 / (1 + np.exp(ratings[None] - ratings[:, None]))  # probability of row against column
        gradient = (points - games * wins).sum(1)
        spread = games * wins * (1 - wins)
        information = np.diag(spread.sum(1)) - spread
        covariance = np.linalg.pinv(information)  # singular: only differences of ratings matter
        step = np.clip(covariance @ gradient, -2, 2)
        ratings = ratings + step - step.mean()
        if np.abs(step).max() < 1e-9:
            break
    return ratings * ELO_SCALE, 1.96 * np.sqrt(np.diag(covariance)) * ELO_SCALE


def describe(names: Sequence[str], results: Results) -> str:
    """Lay out the results as a text: the share of points of each row against each column, and the ratings."""
    ratings, errors = elo(results)
    order = np.argsort(-ratings, kind="stable")
    width = max(len(name) for name in names)
    numbers = " ".join(f"{place:5}" for place in range(1, len(names) + 1))
    lines = ["share of points of each row against each column (a draw is half a point):", "",
             f"{'':{width + 5}}{numbers}    Elo (95 %)"]
    for place, i in enumerate(order, 1):
        shares = [f"{results.points[i, j] / results.games[i, j]:5.2f}" if i != j else "    -" for j in order]
        lines.append(f"{place:3}  {names[i]:{width}}{' '.join(shares)}  {ratings[i]:6.0f} +- {errors[i]:.0f}")
    return "\n".join(lines)


@exit_status
def main(argv: list[str]) -> None:
    """Let all policies of a run, and the entries of `--against`, play each other; print the results."""
    parser = arguments_of_a_run(__doc__)
    parser.add_argument("--checkpoint", default="latest", help="of each policy of the run: best, else latest [latest]")
    parser.add_argument("--against", nargs="+", default=[], metavar="FILE",
                        help="other entries: checkpoints, or random")
    args = parser.parse(argv)
    torch.set_num_threads(1)  # several would wait for each other in each small operator
    seed_all(derive_seed(args.seed, EVALUATION, part=1))
    policies = [load_policy(args, 0, args.checkpoint)]
    cfg = policies[0].cfg
    files = [os.path.abspath(name) for name in args.against if name != "random"]
    policies += [load_policy(args, number, args.checkpoint) for number in range(1, cfg.num_policies)]
    policies += [load(file, env=args.env or None, device=args.device, trust_run=args.trust_run) for file in files]
    names = [f"policy_{number:02}" for number in range(cfg.num_policies)]
    names += [file.removeprefix(f"{cfg.run_dir}/checkpoints/").removesuffix(".pt") for file in files]
    print("\n".join(f"playing {policy.source}" for policy in policies))
    entries = [partial(Player, each.algorithm, each.model, deterministic=args.deterministic) for each in policies]
    if "random" in args.against:
        names.append("random")
        entries.append(RandomPlayer)
    if len(entries) < 2:
        raise UserError("a tournament needs two entries; add --against random, or checkpoints such as "
                        f"{cfg.run_dir}/checkpoints/policy_00/snapshot_*.pt")
    with contextlib.closing(make_vector_env(cfg, min(args.episodes, MAX_ENVS))) as env:
        if len(env.agents) < 2 or len(env.kinds) > 1:
            raise UserError(f"a tournament needs an environment of several agents with the same spaces, not {cfg.env}")
        print(f"{len(entries)} entries, {args.episodes} games each two")
        print(describe(names, play_all(env, entries, args.episodes, args.seed)))


if __name__ == "__main__":
    take_programs_along()
    sys.exit(main(sys.argv[1:]))
