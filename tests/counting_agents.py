"""An environment of several agents whose observations and rewards name everything, and the rules that it follows.

`Script` is the oracle: fixed functions of (environment, agent, episode, step). `CountingAgents` plays a script behind
PettingZoo's parallel API, refuses actions that nobody should be given, and keeps those that it got.
"""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from counting_env import number_of
from gymnasium import spaces
from torch import Tensor, nn

from config import Config

Name = tuple[int, int, int, int]  # environment, agent, episode, step


def chance(*numbers: int) -> int:
    """Return a large number that looks random and is always the same for the same arguments."""
    return zlib.crc32(repr(numbers).encode())


class Life(NamedTuple):
    """What the rules say of one agent in one episode."""

    arrival: int  # the step in which it joins
    end: int  # the number of its final observation
    terminated: bool  # or else truncated
    decisions: list[int]  # the steps in which it acts
    objective: float


@dataclass(frozen=True)
class Script:
    """The rules of a game of 1 to 11 steps; every third episode of an agent, or so, is truncated."""

    num_agents: int = 3
    num_kinds: int = 1  # of agents, by their spaces
    most_actions: int = 5
    deaths: bool = False  # agents leave one by one
    absences: bool = False  # agents miss whole episodes
    late: bool = False  # agents join when an episode goes on already (not together with deaths)
    naps: str = ""  # agents sleep now and then; the sign: "info", "mask", "mask in info" or "missing" observation
    turns: bool = False  # all but one sleep
    small_rewards: bool = False  # -1, 0 or 1: games are often drawn

    def lives(self, env: int, episode: int) -> dict[int, Life]:
        """Return what all do that take part in an episode, be it later."""
        lives = {}
        first = chance(env, episode) % self.num_agents  # is there from the start, whatever the rules
        length = 1 + chance(env, episode, 2) % 11
        for agent in range(self.num_agents):
            end = 1 + chance(env, agent, episode, 3) % length if self.deaths else length
            arrival = chance(env, agent, episode, 8) % 4 if self.late and agent != first else 0
            misses = self.absences and agent != first and chance(env, agent, episode, 1) % 3 == 0
            decisions = list(range(arrival, end))
            if self.turns:
                decisions = [t for t in decisions if agent == (episode + t) % self.num_agents]
            elif self.naps:  # but a reset shows something
                decisions = [t for t in decisions
                             if chance(env, agent, episode, t, 5) % 5 > 1 or (t == 0 and agent == first)]
            if arrival < end and not misses:
                lives[agent] = Life(arrival, end, chance(env, agent, episode, 4) % 3 > 0, decisions,
                                    float(chance(env, agent, episode, 7) % 1000))
        return lives

    def reward(self, env: int, agent: int, episode: int, t: int, action: int) -> float:
        """Give each transition a reward of its own; the sum over an episode is exact in float32."""
        if self.small_rewards:
            return chance(env, agent, episode, t, 6) % 3 - 1.0
        return ((((env % 16) * 4 + agent) * 64 + episode % 64) * 16 + t) * 16.0 + action

    # ---- observations and actions ----------------------------------------------------------------------------------

    def kind(self, agent: int) -> int:
        return agent % self.num_kinds

    def num_actions(self, agent: int) -> int:
        return self.most_actions - self.kind(agent)

    def action_space(self, agent: int) -> spaces.Discrete:
        return spaces.Discrete(self.num_actions(agent), start=3 * self.kind(agent))

    def obs_space(self, agent: int) -> spaces.Dict:
        parts: dict[str, spaces.Space] = {"name": spaces.Box(-np.inf, np.inf, (4,), np.float32)}
        if self.kind(agent):
            parts["extra"] = spaces.Box(-np.inf, np.inf, (self.kind(agent),), np.float32)
        if self.naps == "mask":
            parts["action_mask"] = spaces.MultiBinary(self.num_actions(agent))
        return spaces.Dict(parts)

    def mask(self, env: int, agent: int, episode: int, t: int) -> np.ndarray:
        """Forbid everything to an agent that does not act, and else one option."""
        acts = t in self.lives(env, episode)[agent].decisions
        mask = np.full(self.num_actions(agent), int(acts), np.int8)
        mask[(episode + t) % len(mask)] = 0
        return mask

    def obs(self, env: int, agent: int, episode: int, t: int) -> dict[str, np.ndarray]:
        """Return what the environment shows, but a mask that comes in the info."""
        obs = {"name": np.array([env, agent, episode, t], np.float32)}
        if self.kind(agent):
            obs["extra"] = np.full(self.kind(agent), agent + 0.5 * t, np.float32)
        if self.naps == "mask":
            obs["action_mask"] = self.mask(env, agent, episode, t)
        return obs

    def leaves(self, env: int, agent: int, episode: int, t: int) -> dict[str, np.ndarray]:
        """Return what a learner must find: an agent that does not act is forbidden nothing."""
        leaves = self.obs(env, agent, episode, t)
        if "mask" in self.naps:
            mask = self.mask(env, agent, episode, t)
            leaves["action_mask"] = mask if mask.any() else np.ones_like(mask)
        return leaves


class CountingAgents:
    """Plays a script. The seed of the first reset gives the environment's number."""

    def __init__(self, script: Script = Script()) -> None:
        self.script = script
        self.possible_agents = list(range(script.num_agents))
        self.observation_space, self.action_space = script.obs_space, script.action_space
        self.number = self.episode = self.t = -1
        self.num_steps = 0
        self.actions: dict[tuple[int, int, int], int] = {}  # by agent, episode and step, of those that acted
        self.shapings: dict[tuple[int, int], Any] = {}  # by agent and episode

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.number, self.episode = number_of(seed), -1
        self.episode, self.t = self.episode + 1, 0
        self.lives = self.script.lives(self.number, self.episode)
        return self.observe()

    def step(self, actions: dict[int, Any]) -> tuple[dict, dict, dict, dict, dict]:
        assert list(actions) == self.agents, f"actions for {list(actions)}, alive are {self.agents}"
        rewards = {agent: self.act(agent, action) for agent, action in actions.items()}
        self.t += 1
        self.num_steps += 1
        obs, infos = self.observe()
        over = {agent: life for agent, life in self.lives.items() if life.end == self.t}
        terminated = {agent: life.terminated for agent, life in over.items()}
        truncated = {agent: not life.terminated for agent, life in over.items()}
        return obs, rewards, terminated, truncated, infos

    @property
    def agents(self) -> list[int]:
        """List those whose episodes go on."""
        return [agent for agent, life in self.lives.items() if life.arrival <= self.t < life.end]

    def act(self, agent: int, action: Any) -> float:
        """Take one agent's action and return its reward."""
        space, now = self.script.action_space(agent), (self.number, agent, self.episode, self.t)
        assert space.contains(action), f"{action!r} is not in {space}"
        index = int(action - space.start)
        if self.t in self.lives[agent].decisions:
            self.actions[now[1:]] = index
            assert "mask" not in self.script.naps or self.script.mask(*now)[index], f"{action} is forbidden"
        else:
            assert index == 0, f"agent {agent} does not act, but was given {action}"
        return self.script.reward(*now, index)

    def observe(self) -> tuple[dict, dict]:
        obs, infos = {}, {}
        for agent, life in self.lives.items():
            if not life.arrival <= self.t <= life.end:
                continue
            now = (self.number, agent, self.episode, self.t)
            over, acts = self.t == life.end, self.t in life.decisions
            infos[agent] = {"true_objective": life.objective} if over else {}
            if self.script.naps == "info":
                infos[agent]["is_active"] = acts
            if self.script.naps == "mask in info":
                infos[agent]["action_mask"] = self.script.mask(*now)
            if acts or over or self.script.naps != "missing":
                obs[agent] = self.script.obs(*now)
        return obs, infos

    def get_default_reward_shaping(self) -> dict[str, float]:
        return {"speed": 1.0, "care": 0.5}

    def set_reward_shaping(self, shaping: dict[str, float], agent: int) -> None:
        self.shapings[agent, self.episode] = shaping


class CountingCore(nn.Module):
    """A memory that counts the decisions of an episode, and outputs nothing else: 0 for the first one."""

    def __init__(self, cfg: Config, in_size: int) -> None:
        super().__init__()
        self.out_size = self.state_size = 1

    def forward(self, features: Tensor, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor]:
        counts = []
        for begins in new_episode.unbind(1):
            counts.append(rnn_states.masked_fill(begins[:, None], 0.0))
            rnn_states = counts[-1] + 1
        return torch.stack(counts, 1), rnn_states


def alone_or_together(agents: list[str], num_policies: int, rng: np.random.Generator) -> list[int]:
    """A --policy_mapping: the first agent plays policy 0, all others the same one of the other policies."""
    return [0] + [int(rng.integers(1, num_policies))] * (len(agents) - 1)
