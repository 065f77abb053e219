"""Every PettingZoo game that is installed: what is recorded as a decision is a move of the game, and the other way."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import SMALL, make_config, rollout_workers

from envs import families
from envs.multi_agent import convert_turns
from envs.vector_env import VectorEnv
from evaluate import Player, Policy, play
from trainer import APPO

pytestmark = pytest.mark.filterwarnings("ignore")  # what the games themselves use that is outdated
pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")


def games() -> list[str]:
    """List all games of PettingZoo's classic collection, whatever their versions, and one of MPE."""
    path = importlib.import_module("pettingzoo.classic").__path__
    names = [module.name for module in pkgutil.iter_modules(path) if not module.ispkg]
    return ["mpe2.simple_world_comm_v3", *(f"classic.{name}" for name in names if name.rsplit("_v", 1)[-1].isdigit())]


def make(name: str, moves: list[Any]) -> VectorEnv:
    """Make one game that adds to `moves` who moves whenever the game itself, below all conversions, is moved."""
    env = families.make_vector_env(make_config({"env": f"pettingzoo:{name}"}), 1)
    count_moves(env._envs[0].aec_env, moves)
    return env


def count_moves(game: Any, moves: list[Any]) -> None:
    step = game.step

    def count(action: Any) -> None:
        if action is not None:  # else the agent is dead
            moves.append(game.agent_selection)
        step(action)

    game.step = count


def make_turns() -> Any:
    return importlib.import_module("pettingzoo.classic.leduc_holdem_v4").env()


def make_wrapped() -> Any:
    from pettingzoo.utils.wrappers import BaseParallelWrapper  # noqa: PLC0415

    return BaseParallelWrapper(BaseParallelWrapper(convert_turns(make_turns())))


@pytest.mark.parametrize("name", ["make_turns", "make_wrapped"])
def test_a_function_may_return_a_turn_based_game(name: str) -> None:
    """Also in the first step, when no info tells whose turn it is."""
    env = families.make_vector_env(make_config({"env": f"test_pettingzoo:{name}"}), 3)
    assert env.reset(0).active.sum() == 3


def test_what_is_learned_from_are_moves(tmp_path: Path) -> None:
    """Through the rollout worker: each valid row is one move."""
    moves: list[Any] = []
    with APPO("pettingzoo:classic.leduc_holdem_v4", train_dir=str(tmp_path), serial_mode=True, **SMALL) as appo:
        (split,) = rollout_workers(appo)[0].splits
        for env in split.env._envs:
            count_moves(env.aec_env, moves)
        appo.train(600)
        closed = int(appo.buffers.policy_steps.sum())
    assert 0 <= len(moves) - closed <= 8, "the last move of each agent waits for what follows"
    assert closed > 300


@pytest.mark.parametrize("name", games())
def test_decisions_are_moves(name: str) -> None:
    """The oracle is the game itself, over 20 episodes of random play; one of chess or go is long."""
    torch.manual_seed(0)
    moves: list[Any] = []
    env = make(name, moves)
    env.reset(0)  # the masks show
    moves.clear()
    num_episodes = 1 if name.startswith(("classic.chess", "classic.go")) else 20
    cfg = make_config({"env": env.name})
    players = [Player(Policy(cfg, env, kind, torch.device("cpu")), env, kind) for kind in range(len(env.kinds))]
    episodes = [episode for ended in play(env, players, num_episodes, 0) for episode in ended]
    decisions = np.sum([episode.lengths for episode in episodes], 0)
    assert dict(zip(env.agents, decisions.tolist(), strict=True)) == {agent: moves.count(agent) for agent in env.agents}
    assert len(moves) >= 20
    env.close()
