"""Environments of several agents: PettingZoo's parallel API, or any plain class with the same methods.

    possible_agents                      names of all agents, fixed
    observation_space(agent), action_space(agent)
    reset(seed=None, options=None)       -> {agent: obs}, {agent: info}
    step({agent: action})                -> {agent: obs}, {agent: reward}, {agent: terminated}, {agent: truncated},
                                            {agent: info}

An agent whose `terminated` or `truncated` is true leaves until the next episode, which begins when none is left. An
agent does not act in a step, and no experience of it is recorded, while it is missing from the observations, while its
info has is_active = False (Sample Factory's convention), while its action mask forbids everything, or while it is not
its turn: info["active_agent"] or the environment's `agent_selection` names another agent (PettingZoo's conventions).
Its rewards meanwhile belong to its last action. An action is then 0 and should be ignored.

Turn-based games (PettingZoo's AEC API) are converted by PettingZoo itself.
"""

import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envs.flat_spaces import ACTION_MASK, flatten_mask, name_mask
from envs.vector_env import (
    RETURNS,
    TRUE_OBJECTIVE,
    AgentKind,
    Step,
    VectorEnv,
    as_bool,
    as_number,
    check_obs,
    copied,
    read_objective,
)
from runtime.by_name import import_module
from runtime.seeding import consecutive
from runtime.user_error import ComponentError, EnvironmentFailure, UserError

PREFIX = "pettingzoo:"
EXAMPLE = f"{PREFIX}mpe2.simple_spread_v3"


def pettingzoo_maker(env_id: str) -> Callable[..., Any]:
    """Return the function that makes the environment of pettingzoo:MODULE, which may leave out its "pettingzoo.".

    Raises `ModuleNotFoundError`, or `UserError` for a module without such a function.
    """
    name = env_id.removeprefix(PREFIX)
    if importlib.util.find_spec(f"pettingzoo.{name.partition('.')[0]}"):
        name = f"pettingzoo.{name}"
    module = import_module(name)
    for function in ("parallel_env", "env"):
        if hasattr(module, function):
            return getattr(module, function)
    raise UserError(f"--env={env_id}: module '{name}' has neither parallel_env nor env; name one as in {EXAMPLE}")


def is_parallel(env: Any) -> bool:
    """Tell whether an object is an environment of several agents."""
    return hasattr(env, "possible_agents")


def convert_turns(env: Any) -> Any:
    """Give a turn-based PettingZoo game (AEC) the parallel API; return anything else as it is."""
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel  # noqa: PLC0415  optional package

    return turn_based_aec_to_parallel(env)


def acts(agent: Any, info: Mapping[str, Any], mask: Any, selected: Any) -> bool:
    """Tell whether an agent that sees something acts; selected: whose turn it is (`agent_selection`)."""
    on_turn = info.get("active_agent", agent) if selected is None else selected
    return bool(info.get("is_active", True) and on_turn == agent and (mask is None or flatten_mask(mask).any()))


def agent_selection(env: Any) -> Any:
    """Return whose turn it is in a turn-based game; None: the environment does not tell.

    PettingZoo's conversion of turn-based games tells only after a step, in the infos; its game knows always. (Its other
    conversion, in which all agents act at once, has such a game too, which must not be asked.)
    """
    while env is not None and not hasattr(env, "agent_selection"):
        if any(kind.__name__ == "turn_based_aec_to_parallel_wrapper" for kind in type(env).__mro__):
            return env.aec_env.agent_selection
        env = vars(env).get("env")  # that a wrapper holds
    return getattr(env, "agent_selection", None)


class ParallelVectorEnv(VectorEnv):
    """N parallel environments, stepped one after another."""

    def __init__(self, envs: list[Any], name: str, *, squash_actions: bool = False,
                 objective: str = TRUE_OBJECTIVE) -> None:
        self.name, self.num_envs, self._objective = name, len(envs), objective
        self._read = (ACTION_MASK, "is_active", "active_agent", objective)  # of the infos
        self._envs, first = envs, envs[0]
        self.agents = [str(agent) for agent in first.possible_agents]
        if not self.agents:
            raise UserError(f"{name}: possible_agents is empty")
        pairs: list[tuple[spaces.Space, spaces.Space]] = []
        self.kind_of_agent = []
        for agent in first.possible_agents:
            pair = (agent_space(first, "observation_space", agent), agent_space(first, "action_space", agent))
            if pair not in pairs:
                pairs.append(pair)
            self.kind_of_agent.append(pairs.index(pair))
        kinds = np.tile(self.kind_of_agent, len(envs))
        self.kinds = [AgentKind(name, *pair, np.flatnonzero(kinds == k), squash_actions=squash_actions)
                      for k, pair in enumerate(pairs)]
        self._batch_spaces = [batch_space(kind.action_space, len(kind.index)) for kind in self.kinds]
        self._place = np.zeros(len(kinds), np.int64)  # of each agent in its kind
        for kind in self.kinds:
            self._place[kind.index] = np.arange(len(kind.index))
        self._number = {agent: i for i, agent in enumerate(first.possible_agents)}
        self._live: list[list[Any]] = [[] for _ in self._envs]  # agents whose episodes go on
        self._ended: list[set[Any]] = [set() for _ in self._envs]  # agents whose episodes are over
        self._active = np.zeros(len(kinds), bool)
        self._obs: list[dict[str, np.ndarray]] = []  # the last observation of every agent, by kind
        self.frames_per_sec = (getattr(first, "metadata", None) or {}).get("render_fps") or VectorEnv.frames_per_sec

    def reset(self, seed: int | Sequence[int]) -> Step:
        self.seeds, self.num_steps = consecutive(seed, self.num_envs), 0
        fresh = [self._reset(i, self.seeds[i]) for i in range(self.num_envs)]
        for agent, info in itertools.chain.from_iterable(infos.items() for _, infos in fresh):
            if ACTION_MASK in (info or {}) and agent in self._number:
                kind = self.kinds[self.kind_of_agent[self._number[agent]]]
                if not kind.has_mask:
                    kind.add_mask(in_info=True)
        self._obs = [{name: np.zeros((len(kind.index), *leaf.shape), leaf.dtype)
                      for name, leaf in kind.obs_space.items()} for kind in self.kinds]
        return self._join([(obs, {}, {}, {}, infos) for obs, infos in fresh], np.ones(self.num_envs, bool))

    def step(self, actions: list[np.ndarray]) -> Step:
        self.num_steps += 1
        rows = [np.where(self._active[kind.index, None], kind_rows, 0)
                for kind, kind_rows in zip(self.kinds, actions, strict=True)]
        decoded = [list(iterate(space, kind.actions(kind_rows)))
                   for space, kind, kind_rows in zip(self._batch_spaces, self.kinds, rows, strict=True)]
        was_reset = np.array([not live for live in self._live])
        results = []
        for i, env in enumerate(self._envs):
            if was_reset[i]:
                obs, infos = self._reset(i)
                results.append((obs, {}, {}, {}, infos))
                continue
            chosen = {}
            for agent in self._live[i]:
                number = self._number[agent]
                if agent in getattr(env, "agents", self._live[i]):
                    place = self._place[i * len(self.agents) + number]
                    chosen[agent] = decoded[self.kind_of_agent[number]][place]
            with self._naming("step", i):
                results.append(dicts_by_agent("step", env.step(chosen), self._read))
        return self._join(results, was_reset)

    def _reset(self, i: int, seed: int | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        with self._naming("reset", i):
            obs, infos = dicts_by_agent("reset", self._envs[i].reset(seed=seed), self._read)
            if not obs:
                raise ValueError("it has returned no observation")
        self._live[i], self._ended[i] = [], set()
        return obs, infos

    def _join(self, results: list[tuple], was_reset: np.ndarray) -> Step:
        """Put what all environments returned into arrays, and say which of them is to blame if that is not possible."""
        try:
            return self._gather(results, was_reset)
        except (UserError, ComponentError):
            raise
        except Exception:
            for i, (obs, *_) in enumerate(results):
                with self._naming("reset" if was_reset[i] else "step", i):
                    for agent, seen in obs.items():
                        check_obs(self.kinds[self.kind_of_agent[self._number[agent]]].space, seen)
            with self._naming("step"):
                raise

    def _gather(self, results: list[tuple], was_reset: np.ndarray) -> Step:
        """Put what all environments returned, dicts by agent, into arrays."""
        num_agents = len(self._active)
        rewards, objectives = np.zeros(num_agents), np.full(num_agents, np.nan)
        terminated, truncated, active = (np.zeros(num_agents, bool) for _ in range(3))
        seen: list[list[tuple[int, Any, Any]]] = [[] for _ in self.kinds]  # (place in the kind, obs, mask)
        for i, (obs, reward, *flags, infos) in enumerate(results):
            first, live, selected = i * len(self.agents), self._find_live(i, obs), agent_selection(self._envs[i])
            with self._naming("step", i):
                ended, cut = ({agent: as_bool(flag or False) for agent, flag in by_agent.items()} for by_agent in flags)
            left = [agent for agent in live if not (ended.get(agent) or cut.get(agent))]
            vanished = not was_reset[i] and not getattr(self._envs[i], "agents", left)  # those left, with the episode
            for agent in live:
                m = first + self._number[agent]
                info = infos.get(agent) or {}
                with self._naming("step", i):
                    terminated[m] = ended.get(agent, False) or (vanished and agent in left)
                    truncated[m] = cut.get(agent, False)
                    objectives[m] = read_objective(info, self._objective)
                    rewards[m] = as_number(reward.get(agent, 0.0))
                if agent in obs:
                    kind_number = self.kind_of_agent[self._number[agent]]
                    kind = self.kinds[kind_number]
                    mask = kind.mask_source(obs[agent], info).get(ACTION_MASK)
                    active[m] = acts(agent, info, mask, selected) and not (terminated[m] or truncated[m])
                    seen[kind_number].append((self._place[m], obs[agent],
                                              mask if active[m] or (truncated[m] and kind.allows(mask)) else None))
            self._live[i] = [] if vanished else left
            self._ended[i].update(agent for agent in live if agent not in self._live[i])
        for kind, leaves, shown in zip(self.kinds, self._obs, seen, strict=True):
            self._write(kind, leaves, shown)
        self._active = active
        return self._checked(Step(self._obs, rewards, terminated, truncated, active, was_reset, objectives))

    def _find_live(self, i: int, obs: dict[Any, Any]) -> list[Any]:
        """List the agents of an environment whose episodes go on, also one that has just joined."""
        for agent in obs:
            if agent not in self._number:
                raise EnvironmentFailure(f"{self.name}, seed {self.seeds[i]}, step {self.num_steps}: agent {agent!r} "
                                         f"is not among possible_agents {self.agents}")
        # where the environment lists its agents, that tells who has joined
        present = {*self._live[i], *(getattr(self._envs[i], "agents", None) or obs)}
        return [agent for agent in self._number if agent in present and agent not in self._ended[i]]

    @staticmethod
    def _write(kind: AgentKind, leaves: dict[str, np.ndarray], seen: list[tuple[int, Any, Any]]) -> None:
        """Write the observations of some agents of a kind into the arrays of all of them."""
        if kind.has_mask:
            leaves[ACTION_MASK][:] = 1  # of those that are missing
        if not seen:
            return
        places = [place for place, _, _ in seen]
        observations = [obs for _, obs, _ in seen]
        flat = kind.flatten(concatenate(kind.space, observations, create_empty_array(kind.space, len(seen))))
        if kind.has_mask:
            flat[ACTION_MASK] = kind.join_masks([mask for _, _, mask in seen])
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
            for name, value in flat.items():
                leaves[name][places] = value

    def default_shapings(self) -> list[Any]:
        with self._naming("get_default_reward_shaping"):
            return [env.get_default_reward_shaping() for env in self._envs
                    if hasattr(env, "get_default_reward_shaping")]

    def set_shaping(self, env: int, agent: int, shaping: Any) -> None:
        with self._naming("set_reward_shaping", env):
            self._envs[env].set_reward_shaping(shaping, agent)

    def render(self) -> np.ndarray:
        with self._naming("render"):
            return self._envs[0].render()

    def close(self) -> None:
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()


def agent_space(env: Any, what: str, agent: Any) -> spaces.Space:
    """Return the "observation_space" or "action_space" of an agent."""
    space = getattr(env, what)
    return space(agent) if callable(space) else space[agent]


def dicts_by_agent(what: str, returned: Any, read: Sequence[str]) -> Sequence[Mapping[Any, Any]]:
    """Copy what reset() or step() has returned; of the infos only what is read.

    Raises `TypeError` when these are not as many dicts as they must.
    """
    is_long = isinstance(returned, (tuple, list)) and len(returned) == len(RETURNS[what])
    if not is_long or not all(isinstance(part, Mapping) for part in returned):
        raise TypeError(f"it must return {len(RETURNS[what])} dicts by agent, of each its {', '.join(RETURNS[what])}")
    *parts, infos = returned
    named = ((agent, name_mask(info)) for agent, info in infos.items() if info)
    infos = {agent: {key: info[key] for key in read if key in info} for agent, info in named}
    return [copied(dict(part)) for part in (*parts, infos)]
