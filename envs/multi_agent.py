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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envs.flat_spaces import ACTION_MASK, AgentKind, Observation, flatten_mask
from envs.vector_env import TRUE_OBJECTIVE, Step, VectorEnv, as_number, read_objective
from runtime.by_name import import_module
from runtime.seeding import consecutive
from runtime.user_error import UserError

PREFIX = "pettingzoo:"
ByAgent = dict[Any, Any]


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
    raise UserError(f"--env={env_id}: module '{name}' has neither parallel_env nor env")


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
    may_act = mask is None or flatten_mask(mask).any()
    return bool(info.get("is_active", True) and on_turn == agent and may_act)


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
        self.name = name
        self.num_envs = len(envs)
        self._objective = objective
        self._envs, first = envs, envs[0]
        self._number = {agent: i for i, agent in enumerate(first.possible_agents)}
        self.agents = [str(agent) for agent in self._number]
        pairs = [(first.observation_space(agent), first.action_space(agent)) for agent in self._number]
        kinds = [pair for i, pair in enumerate(pairs) if pair not in pairs[:i]]
        self.kind_of_agent = [kinds.index(pair) for pair in pairs]
        of_all = np.tile(self.kind_of_agent, len(envs))
        self.kinds = [AgentKind(name, *pair, np.flatnonzero(of_all == k), squash_actions=squash_actions)
                      for k, pair in enumerate(kinds)]
        self._batch_spaces = [batch_space(kind.action_space, len(kind.index)) for kind in self.kinds]
        self._live: list[list[Any]] = [[] for _ in envs]  # agents whose episodes go on
        self._ended: list[set[Any]] = [set() for _ in envs]  # agents whose episodes are over
        self._active = np.zeros(len(of_all), bool)
        self._obs: list[Observation] = []  # the last observation of every agent, by kind
        self.frames_per_sec = getattr(first, "metadata", {}).get("render_fps") or VectorEnv.frames_per_sec

    def reset(self, seed: int | Sequence[int]) -> Step:
        self.seeds, self.num_steps = consecutive(seed, self.num_envs), 0
        results = [self._reset(i, self.seeds[i]) for i in range(self.num_envs)]
        with self._naming("reset"):
            for *_, infos in results:
                for agent, number in self._number.items():
                    kind = self.kinds[self.kind_of_agent[number]]
                    if ACTION_MASK in (infos.get(agent) or {}) and not kind.has_mask:
                        kind.add_mask(in_info=True)
        self._obs = [{name: np.zeros((len(kind.index), *leaf.shape), leaf.dtype)
                      for name, leaf in kind.obs_space.items()} for kind in self.kinds]
        return self._join(results, np.ones(self.num_envs, bool))

    def step(self, actions: list[np.ndarray]) -> Step:
        self.num_steps += 1
        chosen: list[Any] = [None] * len(self._active)
        for space, kind, rows in zip(self._batch_spaces, self.kinds, actions, strict=True):
            taken = np.where(self._active[kind.index, None], rows, 0)
            for m, action in zip(kind.index, iterate(space, kind.actions(taken)), strict=True):
                chosen[m] = action
        was_reset = np.array([not live for live in self._live])
        results = []
        for i, env in enumerate(self._envs):
            if was_reset[i]:
                results.append(self._reset(i))
                continue
            first = i * len(self.agents)
            present = getattr(env, "agents", self._live[i])
            own = {agent: chosen[first + self._number[agent]] for agent in self._live[i] if agent in present}
            with self._naming("step", i):
                results.append(env.step(own))
        return self._join(results, was_reset)

    def _reset(self, i: int, seed: int | None = None) -> Sequence[ByAgent]:
        self._live[i], self._ended[i] = [], set()
        with self._naming("reset", i):
            obs, infos = self._envs[i].reset(seed=seed)
        return obs, {}, {}, {}, infos

    def _join(self, results: list[Sequence[ByAgent]], was_reset: np.ndarray) -> Step:
        """Put what all environments returned, dicts by agent, into arrays."""
        num_agents = len(self._active)
        terminated, truncated, self._active = (np.zeros(num_agents, bool) for _ in range(3))
        rewards, objectives = np.zeros(num_agents), np.full(num_agents, np.nan)
        step = Step(self._obs, rewards, terminated, truncated, self._active, was_reset, objectives)
        seen: dict[int, tuple[Any, Any]] = {}  # the observation and mask of each agent that shows one
        for i, returned in enumerate(results):
            with self._naming("step", i):
                self._take(i, returned, step, seen)
        with self._naming("step"):
            for kind, leaves in zip(self.kinds, self._obs, strict=True):
                if kind.has_mask:
                    leaves[ACTION_MASK][:] = 1  # of those that are missing
                if there := [m for m in kind.index if m in seen]:
                    observations, masks = zip(*[seen[m] for m in there], strict=True)
                    self._write(kind, leaves, np.searchsorted(kind.index, there), observations, masks)
        return self._checked(step)

    def _take(self, i: int, returned: Sequence[ByAgent], step: Step, seen: dict[int, tuple[Any, Any]]) -> None:
        """Enter what environment i returned into a step, and what its agents see into `seen`."""
        obs, rewards, ended, cut, infos = returned
        env, selected = self._envs[i], agent_selection(self._envs[i])
        # where the environment lists its agents, that tells who has joined
        listed = getattr(env, "agents", None) or obs
        present = {*self._live[i], *listed} - self._ended[i]
        live = sorted(present, key=self._number.__getitem__)
        left = [agent for agent in live if not (ended.get(agent) or cut.get(agent))]
        vanished = not step.was_reset[i] and not getattr(env, "agents", left)  # those left, with the episode
        for agent in live:
            number, info = self._number[agent], infos.get(agent) or {}
            m = i * len(self.agents) + number
            step.terminated[m] = bool(ended.get(agent) or (vanished and agent in left))
            step.truncated[m] = bool(cut.get(agent))
            step.objectives[m] = read_objective(info, self._objective)
            step.rewards[m] = as_number(rewards.get(agent, 0.0))
            if agent in obs:
                kind = self.kinds[self.kind_of_agent[number]]
                mask = kind.mask_source(obs[agent], info).get(ACTION_MASK)
                is_over = step.terminated[m] or step.truncated[m]
                step.active[m] = acts(agent, info, mask, selected) and not is_over
                counts = step.active[m] or (step.truncated[m] and kind.allows(mask))
                seen[m] = (obs[agent], mask if counts else None)
        self._live[i] = [] if vanished else left
        self._ended[i].update(present.difference(self._live[i]))

    @staticmethod
    def _write(kind: AgentKind, leaves: Observation, places: np.ndarray, observations: Sequence[Any],
               masks: Sequence[Any]) -> None:
        """Write the observations of some agents of a kind into the arrays of all of them."""
        batch = create_empty_array(kind.space, len(places))
        flat = kind.flatten(concatenate(kind.space, observations, batch))
        if kind.has_mask:
            flat[ACTION_MASK] = kind.join_masks(masks)
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
            for name, value in flat.items():
                leaves[name][places] = value

    def default_shapings(self) -> list[Any]:
        return [env.get_default_reward_shaping() for env in self._envs if hasattr(env, "get_default_reward_shaping")]

    def set_shaping(self, env: int, agent: int, shaping: Any) -> None:
        self._envs[env].set_reward_shaping(shaping, agent)

    def render(self) -> np.ndarray:
        return self._envs[0].render()

    def close(self) -> None:
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()
