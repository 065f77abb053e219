"""An environment of several agents whose observations and rewards name everything, and the rules that it follows.

`Script` is the oracle: fixed functions of (environment, agent, episode, step). `CountingAgents` plays a script behind
PettingZoo's parallel API, refuses actions that nobody should be given, and keeps those that it got.
"""

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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


class End(NamedTuple):
    """How an agent's episode ends: the number of its final observation, and the flag that comes with it."""

    step: int
    terminated: bool


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

    def always_there(self, env: int, agent: int, episode: int) -> bool:
        """Return whether an agent is the one that an episode begins with, whatever the rules."""
        return agent == chance(env, episode) % self.num_agents

    def present(self, env: int, agent: int, episode: int) -> bool:
        """Return whether an agent takes part in an episode, be it later."""
        if self.always_there(env, agent, episode):
            return True
        misses = self.absences and chance(env, agent, episode, 1) % 3 == 0
        return not misses and self.arrival(env, agent, episode) < self.end(env, agent, episode).step

    def arrival(self, env: int, agent: int, episode: int) -> int:
        """Return the step in which an agent joins."""
        if not self.late or self.always_there(env, agent, episode):
            return 0
        return chance(env, agent, episode, 8) % 4

    def end(self, env: int, agent: int, episode: int) -> End:
        length = 1 + chance(env, episode, 2) % 11
        step = 1 + chance(env, agent, episode, 3) % length if self.deaths else length
        return End(step, chance(env, agent, episode, 4) % 3 > 0)

    def length(self, env: int, episode: int) -> int:
        """Count the steps of an episode: until no agent is left."""
        return max(self.end(env, agent, episode).step for agent in range(self.num_agents)
                   if self.present(env, agent, episode))

    def acts(self, env: int, agent: int, episode: int, t: int) -> bool:
        there = self.arrival(env, agent, episode) <= t < self.end(env, agent, episode).step
        if not there or not self.present(env, agent, episode):
            return False
        if self.turns:
            return agent == (episode + t) % self.num_agents
        first = t == 0 and self.always_there(env, agent, episode)  # a reset shows something
        return not self.naps or first or chance(env, agent, episode, t, 5) % 5 > 1

    def decisions(self, env: int, agent: int, episode: int) -> list[int]:
        """List the steps in which an agent acts."""
        return [t for t in range(self.end(env, agent, episode).step) if self.acts(env, agent, episode, t)]

    def reward(self, env: int, agent: int, episode: int, t: int, action: int) -> float:
        """Give each transition a reward of its own; the sum over an episode is exact in float32."""
        if self.small_rewards:
            return chance(env, agent, episode, t, 6) % 3 - 1.0
        return ((((env % 16) * 4 + agent) * 64 + episode % 64) * 16 + t) * 16.0 + action

    def objective(self, env: int, agent: int, episode: int) -> float:
        return float(chance(env, agent, episode, 7) % 1000)

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
        mask = np.full(self.num_actions(agent), int(self.acts(env, agent, episode, t)), np.int8)
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
            leaves["action_mask"] = self.mask(env, agent, episode, t)
            leaves["action_mask"] |= not self.acts(env, agent, episode, t)
        return leaves


class CountingAgents:
    """Plays a script. The seed of the first reset gives the environment's number."""

    metadata: ClassVar = {"render_fps": 7}

    def __init__(self, script: Script = Script()) -> None:
        self.script = script
        self.possible_agents = [f"agent_{i}" for i in range(script.num_agents)]
        self.agents: list[str] = []
        self.number = self.episode = self.t = -1
        self.actions: dict[tuple[int, int, int], int] = {}  # by agent, episode and step, of those that acted
        self.shapings: dict[tuple[int, int], Any] = {}  # by agent and episode

    def observation_space(self, agent: str) -> spaces.Space:
        return self.script.obs_space(self.possible_agents.index(agent))

    def action_space(self, agent: str) -> spaces.Space:
        return self.script.action_space(self.possible_agents.index(agent))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.number, self.episode = number_of(seed), -1
        self.episode, self.t = self.episode + 1, 0
        self.agents = []
        self.join()
        return self.observe(self.agents)

    def join(self) -> None:
        """Let the agents come that take part from now on."""
        now = self.number, self.episode
        coming = [name for agent, name in enumerate(self.possible_agents) if self.script.present(now[0], agent, now[1])
                  and self.script.arrival(now[0], agent, now[1]) == self.t]
        self.agents = [name for name in self.possible_agents if name in self.agents or name in coming]

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        assert list(actions) == self.agents, f"actions for {list(actions)}, alive are {self.agents}"
        rewards = {name: self.act(self.possible_agents.index(name), action) for name, action in actions.items()}
        self.t += 1
        self.join()
        terminated, truncated = {}, {}
        for name in self.agents:
            end = self.script.end(self.number, self.possible_agents.index(name), self.episode)
            terminated[name] = self.t == end.step and end.terminated
            truncated[name] = self.t == end.step and not end.terminated
        obs, infos = self.observe(self.agents)
        self.agents = [name for name in self.agents if not terminated[name] and not truncated[name]]
        return obs, rewards, terminated, truncated, infos

    def act(self, agent: int, action: Any) -> float:
        """Take one agent's action and return its reward."""
        space, now = self.script.action_space(agent), (self.number, agent, self.episode, self.t)
        assert space.contains(action), f"{action!r} is not in {space}"
        index = int(action - space.start)
        if self.script.acts(*now):
            self.actions[now[1:]] = index
            assert "mask" not in self.script.naps or self.script.mask(*now)[index], f"{action} is forbidden"
        else:
            assert index == 0, f"agent {agent} does not act, but was given {action}"
        return self.script.reward(*now, index)

    def observe(self, names: list[str]) -> tuple[dict, dict]:
        obs, infos = {}, {}
        for name in names:
            agent = self.possible_agents.index(name)
            now = (self.number, agent, self.episode, self.t)
            over, acts = self.t == self.script.end(*now[:3]).step, self.script.acts(*now)
            infos[name] = {"true_objective": self.script.objective(*now[:3])} if over else {}
            if self.script.naps == "info":
                infos[name]["is_active"] = acts
            if self.script.naps == "mask in info":
                infos[name]["action_mask"] = self.script.mask(*now)
            if acts or over or self.script.naps != "missing":
                obs[name] = self.script.obs(*now)
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
