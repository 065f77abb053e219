"""Try every Atari game: `python -m docs.atari_games` trains each one a few seconds, and resets all other ids.

Prints one line for each game and what failed; the exit status is 1 if anything did. It takes about 20 minutes on two
cores. `--games 5` tries the first ones only.
"""

import argparse
import contextlib
import math
import os
import sys
import tempfile

import ale_py
import gymnasium as gym
import numpy as np

from appo import Settings
from config import make_config
from envs.families import make_vector_env
from runtime.machine import defaults
from trainer import APPO


def ids_by_game() -> dict[str, list[str]]:
    """List all registered ids of each game."""
    gym.register_envs(ale_py)
    games: dict[str, list[str]] = {}
    for spec in gym.registry.values():
        if str(spec.entry_point).startswith("ale_py"):
            games.setdefault(spec.kwargs["game"], []).append(spec.id)
    return games


def train(env_id: str, seconds: float, train_dir: str) -> str:
    """Train with few environments, since making them takes longest, and until it has learned; describe how it went."""
    with APPO(env_id, train_dir=train_dir, num_workers=2, num_envs_per_worker=4, train_for_seconds=10 * seconds + 60,
              batch_size=256, num_batches_per_epoch=1, report_interval_sec=1.0) as appo:
        (policy,) = appo.records.policies
        appo.train(should_stop=lambda: appo.records.wall_sec > seconds and policy.num_datasets > 0)
        steps, losses = appo.env_steps, policy.latest
    assert policy.num_datasets > 0, "no dataset was trained on"
    assert all(math.isfinite(value) for value in losses.values()), losses
    return f"{steps:6,} env_steps, {losses['sgd_steps']:3} SGD steps, loss {losses['loss']:7.3f}"


def reset(env_id: str) -> None:
    """Reset one environment of an id, and step it."""
    env = make_vector_env(make_config(Settings, defaults(env_id, {}), {"env": env_id}), 1)
    shape = env.reset(0).obs[0]["obs"].shape
    assert shape == (1, 84, 84, 4), shape
    env.step([np.zeros((1, 1), np.float32)])
    env.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", type=int, default=None, help="how many games, in alphabetical order [all]")
    parser.add_argument("--seconds", type=float, default=5.0, help="of training of each game [5]")
    args = parser.parse_args(argv)
    games = [ids for _, ids in sorted(ids_by_game().items())][: args.games]
    failed = []
    with tempfile.TemporaryDirectory() as train_dir:
        for number, ids in enumerate(games, 1):
            trained = next((env_id for env_id in ids if env_id.endswith("NoFrameskip-v4")), ids[0])
            outcome = "failed"
            for env_id in ids:
                try:
                    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
                        if env_id == trained:
                            outcome = train(env_id, args.seconds, train_dir)
                        else:
                            reset(env_id)
                except Exception as error:  # noqa: BLE001  the others are tried too
                    failed.append(f"{env_id}: {type(error).__name__}: {error}")
                    print(f"FAILED {failed[-1]}", flush=True)
            print(f"{number:3}/{len(games)} {trained}: {outcome}, {len(ids) - 1} other ids", flush=True)
    print(f"{len(games)} games, {sum(map(len, games))} ids, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
