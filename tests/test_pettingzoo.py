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
from envs.multi_agent import ParallelVectorEnv
from envs.vector_env import VectorEnv
from runtime.evaluator import RandomPlayer, play
from trainer import APPO

pytestmark = pytest.mark.filterwarnings("ignore")  # what the games themselves use that is outdated
pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")


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


def test_an_env_behind_wrappers_tells_whose_turn_it_is() -> None:
    """Also in the first step, when no info does."""
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel  # noqa: PLC0415
    from pettingzoo.utils.wrappers import BaseParallelWrapper  # noqa: PLC0415

    def make_wrapped() -> Any:
        return BaseParallelWrapper(BaseParallelWrapper(turn_based_aec_to_parallel(make_turns())))

    assert ParallelVectorEnv([make_wrapped() for _ in range(3)], "wrapped").reset(0).active.sum() == 3


def make_turns() -> Any:
    return importlib.import_module("pettingzoo.classic.leduc_holdem_v4").env()


def test_a_function_may_return_a_turn_based_game() -> None:
    env = families.make_vector_env(make_config({"env": "test_pettingzoo:make_turns"}), 3)
    assert env.reset(0).active.sum() == 3


def test_what_is_learned_from_are_moves(tmp_path: Path) -> None:
    """Through the rollout worker: each valid row is one move."""
    moves: list[Any] = []
    with APPO("pettingzoo:classic.leduc_holdem_v4", train_dir=str(tmp_path), serial_mode=True, **SMALL) as appo:
        (split,) = rollout_workers(appo)[0].splits.values()
        for env in split.env._envs:
            count_moves(env.aec_env, moves)
        appo.train(600)
        closed = int(appo.buffers.policy_steps.sum())
    assert 0 <= len(moves) - closed <= 8, "the last move of each agent waits for what follows"
    assert closed > 300


@pytest.mark.parametrize("name", games())
def test_decisions_are_moves(name: str) -> None:
    """The oracle is the game itself, over 20 episodes of random play; chess and go are long."""
    torch.manual_seed(0)
    moves: list[Any] = []
    env = make(name, moves)
    env.reset(0)  # the masks show
    moves.clear()
    num_episodes = 4 if name.startswith(("classic.chess", "classic.go")) else 20
    episodes = list(play(env, [RandomPlayer(env, kind.index) for kind in env.kinds], num_episodes, 0))
    decisions = np.sum([episode.lengths for episode in episodes], 0)
    assert dict(zip(env.agents, decisions.tolist(), strict=True)) == {
        agent: moves.count(agent) for agent in env.agents}
    assert len(moves) >= 20
    env.close()
