"""Every PettingZoo game that is installed: what is recorded as a decision is a move of the game, and the other way."""

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch

import envs
from config import make_config
from evaluator import RandomPlayer, play
from vector_env import VectorEnv


def games() -> list[str]:
    """List all games of PettingZoo's classic collection and of MPE, whatever their versions."""
    found = []
    for package, prefix in (("pettingzoo.classic", "classic."), ("mpe2", "mpe2.")):
        path = importlib.import_module(package).__path__
        found += [prefix + module.name for module in pkgutil.iter_modules(path)
                  if not module.ispkg and module.name.rsplit("_v", 1)[-1].isdigit()]
    return found


def make(name: str, moves: list[Any]) -> VectorEnv:
    """Make one game that adds to `moves` who moves whenever the game itself, below all conversions, is moved."""
    env = envs.make_vector_env(make_config({"env": f"pettingzoo:{name}"}), 1)
    game = env._envs[0].aec_env
    step = game.step

    def count(action: Any) -> None:
        if action is not None:  # else the agent is dead
            moves.append(game.agent_selection)
        step(action)

    game.step = count
    return env


def test_all_collections_are_there() -> None:
    names = games()
    assert sum(name.startswith("classic.") for name in names) == 9
    assert sum(name.startswith("mpe2.") for name in names) >= 9


@pytest.mark.filterwarnings("ignore")  # what the games themselves use that is outdated
@pytest.mark.parametrize("name", games())
def test_decisions_are_moves(name: str) -> None:
    """The oracle is the game itself, over 20 episodes of random play."""
    torch.manual_seed(0)
    moves: list[Any] = []
    env = make(name, moves)
    env.reset(0)  # the masks show
    moves.clear()
    episodes = list(play(env, [RandomPlayer(env, kind.index) for kind in env.kinds], 20, 0))
    decisions = np.sum([episode.lengths for episode in episodes], 0)
    assert dict(zip(env.agents, decisions.tolist(), strict=True)) == {
        agent: moves.count(agent) for agent in env.agents}
    assert len(moves) >= 20
    env.close()
