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

from envs.flat_spaces import ACTION_MASK, AgentKind, Observation
from envs.vector_env import Step, VectorEnv, as_number
from runtime.utils import UserError, import_module

PREFIX = "pettingzoo:"
ByAgent = Mapping[Any, Any]


class ParallelVectorEnv(VectorEnv):
    """N parallel environments, stepped one after another."""

    def __init__(self, envs: list[Any], name: str, *, squash_actions: bool = False,
                 resize: Callable | None = None) -> None:
        """Take over what is made. resize(space, obs) returns an observation, or its own space, with resized images."""
        first = envs[0]
        self._number = {agent: i for i, agent in enumerate(first.possible_agents)}
        self._spaces = {agent: first.observation_space(agent) for agent in self._number}
        self._resize = resize or (lambda space, obs: obs)
        pairs = [(self._resize(space, space), first.action_space(agent)) for agent, space in self._spaces.items()]
        super().__init__(name, len(envs), list(map(str, self._spaces)), pairs, squash_actions)
        self._envs = envs
        self.frames_per_sec = getattr(first, "metadata", {}).get("render_fps") or VectorEnv.frames_per_sec
        if hasattr(first, "get_default_reward_shaping"):
            self.default_shaping = first.get_default_reward_shaping()
        self._batch_spaces = [batch_space(kind.action_space, len(kind.index)) for kind in self.kinds]
        self._live: list[list[Any]] = [[] for _ in envs]  # agents whose episodes go on
        self._ended: list[set[Any]] = [set() for _ in envs]  # agents whose episodes are over
        self._active = np.zeros(self.num_envs * len(self.agents), bool)  # [M]
        self._obs: list[Observation] = []  # the last observation of every agent, by kind

    def _reset(self) -> Step:
        self._obs = []
        return self._play(np.ones(self.num_envs, bool), self.seeds, ())

    def _step(self, actions: list[np.ndarray]) -> Step:
        chosen: list[Any] = [None] * len(self._active)
        for space, kind, rows in zip(self._batch_spaces, self.kinds, actions, strict=True):
            taken = np.where(self._active[kind.index, None], rows, 0)
            for m, action in zip(kind.index, iterate(space, kind.actions(taken)), strict=True):
                chosen[m] = action
        return self._play(np.array([not live for live in self._live]), [None] * self.num_envs, chosen)

    def _play(self, was_reset: np.ndarray, seeds: Sequence[int | None], chosen: Sequence[Any]) -> Step:
        """Reset or step each environment, and put what all return, dicts by agent, into arrays."""
        num_agents = len(self._active)
        terminated, truncated, self._active = (np.zeros(num_agents, bool) for _ in range(3))
        step = Step(self._obs, np.zeros(num_agents), terminated, truncated, self._active, was_reset,
                    np.full(num_agents, np.nan))
        seen: dict[int, tuple[Any, Any]] = {}  # the observation and mask of each agent that shows one
        for i, env in enumerate(self._envs):
            with self._naming("reset" if was_reset[i] else "step", i):
                if was_reset[i]:
                    self._live[i], self._ended[i] = [], set()
                    obs, infos = env.reset(seed=seeds[i])
                    returned = obs, {}, {}, {}, infos
                else:
                    first = i * len(self.agents)
                    returned = env.step({agent: chosen[first + self._number[agent]] for agent in self._live[i]})
                self._take(i, returned, step, seen)
        if not self._obs:
            self._obs += [self._make_arrays(kind, seen) for kind in self.kinds]
        for kind, leaves in zip(self.kinds, self._obs, strict=True):
            self._write(kind, leaves, seen)
            if kind.has_mask:
                self._active[kind.index] &= leaves[ACTION_MASK].any(1)
        return step

    def _take(self, i: int, returned: Sequence[ByAgent], step: Step, seen: dict[int, tuple[Any, Any]]) -> None:
        """Enter what environment i returned into a step, and what its agents see into `seen`."""
        obs, rewards, ended, cut, infos = returned
        selected = getattr(self._envs[i], "agent_selection", None)  # whose turn it is
        # where the environment lists its agents, that tells who has joined
        listed = getattr(self._envs[i], "agents", None) or obs
        present = {*self._live[i], *listed} - self._ended[i]
        live = sorted(present, key=self._number.__getitem__)
        left = [agent for agent in live if not (ended.get(agent) or cut.get(agent))]
        # an environment that lists none any more ends the episode of those that are left, too
        vanished = not step.was_reset[i] and not getattr(self._envs[i], "agents", left)
        for agent in live:
            m = i * len(self.agents) + self._number[agent]
            info = infos.get(agent, {})
            step.truncated[m] = bool(cut.get(agent))
            step.terminated[m] = bool(ended.get(agent) or (vanished and not cut.get(agent)))
            step.objectives[m] = as_number(info.get(self.objective, np.nan))
            step.rewards[m] = as_number(rewards.get(agent, 0.0))
            if agent in obs:
                on_turn = info.get("active_agent", agent) if selected is None else selected
                is_over = step.terminated[m] or step.truncated[m]
                step.active[m] = not is_over and on_turn == agent and bool(info.get("is_active", True))
                seen[m] = self._resize(self._spaces[agent], obs[agent]), info.get(ACTION_MASK)
        self._live[i] = [] if vanished else left
        self._ended[i].update(present.difference(self._live[i]))

    @staticmethod
    def _make_arrays(kind: AgentKind, seen: Mapping[int, tuple[Any, Any]]) -> Observation:
        """Make the arrays of a kind, [M of the kind, ...], now that it is known whether the infos hold masks."""
        if not kind.has_mask and any(seen[m][1] is not None for m in kind.index if m in seen):
            kind.add_mask(in_info=True)
        return {name: np.zeros((len(kind.index), *leaf.shape), leaf.dtype) for name, leaf in kind.obs_space.items()}

    @staticmethod
    def _write(kind: AgentKind, leaves: Observation, seen: Mapping[int, tuple[Any, Any]]) -> None:
        """Write the observations of some agents of a kind into the arrays of all of them."""
        if kind.has_mask:
            leaves[ACTION_MASK][:] = 1  # of those that are missing
        if there := [m for m in kind.index if m in seen]:
            observations, masks = zip(*[seen[m] for m in there], strict=True)
            batch = create_empty_array(kind.space, len(there))
            flat = kind.flatten(concatenate(kind.space, observations, batch), masks)
            places = np.searchsorted(kind.index, there)
            with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
                for name, value in flat.items():
                    leaves[name][places] = value

    def set_shaping(self, env: int, agent: int, shaping: Any) -> None:
        self._envs[env].set_reward_shaping(shaping, agent)

    def render(self) -> np.ndarray:
        return self._envs[0].render()

    def close(self) -> None:
        for env in self._envs:
            getattr(env, "close", lambda: None)()


# ---- PettingZoo's own ----------------------------------------------------------------------------------------------


def pettingzoo_maker(env_id: str) -> Callable[..., Any]:
    """Return the function that makes the environment of pettingzoo:MODULE, which may leave out its "pettingzoo.".

    Raises `ModuleNotFoundError`, or `UserError` for a module without such a function.
    """
    name = env_id.removeprefix(PREFIX)
    if importlib.util.find_spec(f"pettingzoo.{name.partition('.')[0]}"):
        name = f"pettingzoo.{name}"
    module = import_module(name)
    maker = getattr(module, "parallel_env", None) or getattr(module, "env", None)
    if maker is None:
        raise UserError(f"--env={env_id}: module '{name}' has neither parallel_env nor env")
    return maker


def convert_turns(env: Any) -> Any:
    """Give a turn-based PettingZoo game (AEC) the parallel API; return anything else as it is."""
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel_wrapper  # noqa: PLC0415  optional package

    class Converted(turn_based_aec_to_parallel_wrapper):
        # PettingZoo says only after a step, in the infos, whose turn it is; the game itself knows always
        agent_selection = property(lambda self: self.aec_env.agent_selection)

    return Converted(env)
