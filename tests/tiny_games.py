"""Environments of a few lines whose rewards tell who plays: for tests of populations, self-play and tournaments.

In those with a reward shaping nothing but the shaping decides what is earned. All tell what was called on `TAPE`,
which a test that reads it clears first; it is of use where everything runs in one process.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEPS = 4  # of an episode


class Call(NamedTuple):
    """What was called, of which environment; what was handed over, and for which agent."""

    env: Any
    what: str  # reset, step or shaping
    shaping: Any = None
    agent: int = 0


TAPE: list[Call] = []


# ---- one agent, with a reward shaping --------------------------------------------------------------------------------


class Payday(gym.Env):
    """Each step pays "pay", the last one also the bonus, if there is one, whatever is done."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.shaping = Payday.get_default_reward_shaping(self)

    def get_default_reward_shaping(self) -> Any:
        return {"pay": 1, "bonus": {"at_end": (0.5, True)}}

    def set_reward_shaping(self, reward_shaping: Any, agent_idx: int) -> None:
        TAPE.append(Call(self, "shaping", reward_shaping, agent_idx))
        self.shaping = reward_shaping

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        TAPE.append(Call(self, "reset"))
        self.t, self.earned = 0, 0.0
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        TAPE.append(Call(self, "step"))
        self.t += 1
        over = self.t == STEPS
        reward = self.shaping["pay"]
        if over and self.shaping["bonus"]["at_end"][1]:
            reward += self.shaping["bonus"]["at_end"][0]
        self.earned += reward
        return self.observe(), reward, over, False, self.info() if over else {}

    def observe(self) -> np.ndarray:
        return np.array([self.t / STEPS], np.float32)

    def info(self) -> dict[str, Any]:
        return {}


def wage(shaping: Any) -> float:
    """Return what an episode of `Payday` earns."""
    amount, is_paid = shaping["bonus"]["at_end"]
    return STEPS * shaping["pay"] + amount * is_paid


class Misleading(Payday):
    """The true objective is to earn little."""

    def info(self) -> dict[str, Any]:
        return {"true_objective": -self.earned}


# ---- several agents --------------------------------------------------------------------------------------------------


class HigherWins:
    """A game of two steps. Whoever has the higher sum of actions gets 1, the other -1; both 0 when it is even."""

    possible_agents: ClassVar[list[str]] = ["left", "right"]
    metadata: ClassVar[dict[str, Any]] = {}
    head_start = 0.0  # of the first seat

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 1, (len(self.possible_agents),), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        TAPE.append(Call(self, "reset"))
        self.agents, self.t = list(self.possible_agents), 0
        self.sums = np.zeros(len(self.agents))
        self.sums[0] = self.head_start
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        self.t += 1
        self.sums += [actions[agent] for agent in self.agents]
        over, agents = self.t == 2, self.agents
        rewards = self.score() if over else np.zeros(len(agents))
        results = (self.observe(), dict(zip(agents, rewards.tolist(), strict=True)), dict.fromkeys(agents, over),
                   dict.fromkeys(agents, False), {agent: {} for agent in agents})
        self.agents = [] if over else agents
        return results

    def score(self) -> np.ndarray:
        return np.sign(self.sums - self.sums[::-1])

    def observe(self) -> dict[str, np.ndarray]:
        return dict(zip(self.agents, np.eye(len(self.agents), dtype=np.float32), strict=True))

    def close(self) -> None:
        """Do nothing: nothing is open."""


class FirstSeatWins(HigherWins):
    head_start = 100.0


class AlwaysEven(HigherWins):
    def score(self) -> np.ndarray:
        return np.zeros(len(self.agents))


class FourScores(HigherWins):
    """Four agents; each gets the sum of its own actions."""

    possible_agents: ClassVar[list[str]] = ["north", "east", "south", "west"]

    def score(self) -> np.ndarray:
        return self.sums


class HunterAndPrey(HigherWins):
    """Two agents that have different action spaces."""

    possible_agents: ClassVar[list[str]] = ["hunter", "prey"]

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
