"""Environments of a few lines whose rewards tell who plays: for tests of populations, self-play and tournaments.

In those with a reward shaping nothing but the shaping decides what is earned. `SHAPINGS` holds all that were given, to
be cleared by a test that reads it, where everything runs in one process.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from tiny import Tiny, TinyGame

STEPS = 4  # of an episode
SHAPINGS: list[Any] = []


# ---- one agent, with a reward shaping --------------------------------------------------------------------------------


class Payday(Tiny):
    """Each step pays "pay", the last one also the bonus, if there is one, whatever is done."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    length = STEPS

    def __init__(self) -> None:
        self.shaping = self.get_default_reward_shaping()

    def get_default_reward_shaping(self) -> Any:
        return {"pay": 1, "bonus": {"at_end": [0.5, True]}}

    def set_reward_shaping(self, reward_shaping: Any, agent_idx: int) -> None:
        assert agent_idx == 0
        SHAPINGS.append(reward_shaping)
        self.shaping = reward_shaping

    def reward(self, action: int) -> float:
        amount, is_paid = self.shaping["bonus"]["at_end"]
        return self.shaping["pay"] + (amount if is_paid and self.t == STEPS - 1 else 0)

    def observe(self) -> np.ndarray:
        return np.array([self.t / STEPS], np.float32)


def wage(shaping: Any) -> float:
    """Return what an episode of `Payday` earns."""
    amount, is_paid = shaping["bonus"]["at_end"]
    return STEPS * shaping["pay"] + amount * is_paid


class Misleading(Payday):
    """The true objective is to earn little."""

    def info(self) -> dict[str, Any]:
        return {"true_objective": -wage(self.shaping)} if self.t == STEPS else {}


# ---- several agents --------------------------------------------------------------------------------------------------


class HigherWins(TinyGame):
    """A game of two steps. Whoever has the higher sum of actions gets 1, the other -1; both 0 when it is even."""

    length = 2
    head_start = 0.0  # of the first seat

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 1, (len(self.possible_agents),), np.float32)

    def begin(self) -> None:
        self.sums = np.zeros(len(self.agents))
        self.sums[0] = self.head_start

    def rewards(self, actions: dict[str, Any]) -> dict[str, float]:
        self.sums += [actions[agent] for agent in self.agents]
        scores = self.score() if self.t == self.length - 1 else np.zeros(len(self.agents))
        return dict(zip(self.agents, scores.tolist(), strict=True))

    def score(self) -> np.ndarray:
        return np.sign(self.sums - self.sums[::-1])

    def observe(self) -> dict[str, np.ndarray]:
        return dict(zip(self.possible_agents, np.eye(len(self.possible_agents), dtype=np.float32), strict=True))


class FirstSeatWins(HigherWins):
    head_start = 100.0


class AlwaysEven(HigherWins):
    def score(self) -> np.ndarray:
        return 0 * self.sums


class FourScores(HigherWins):
    """Four agents; each gets the sum of its own actions."""

    possible_agents = ("north", "east", "south", "west")

    def score(self) -> np.ndarray:
        return self.sums


class HunterAndPrey(HigherWins):
    """Two agents that have different action spaces."""

    possible_agents = ("hunter", "prey")

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3 if agent == "hunter" else 4)


# ---- choices of policies ---------------------------------------------------------------------------------------------


def all_play_first(agents: Sequence[str], num_policies: int, rng: np.random.Generator) -> list[int]:
    """Map all agents to one policy."""
    return [0] * len(agents)


def too_large(agents: Sequence[str], num_policies: int, rng: np.random.Generator) -> list[int]:
    return [num_policies] * len(agents)


def one_too_few(agents: Sequence[str], num_policies: int, rng: np.random.Generator) -> list[int]:
    return [0] * (len(agents) - 1)
