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

from envs.flat_spaces import ACTION_MASK, Observation
from envs.vector_env import Step, VectorEnv, as_number
from runtime.utils import UserError, import_module

PREFIX = "pettingzoo:"


class ParallelVectorEnv(VectorEnv):
    """N parallel environments, stepped one after another."""

    def __init__(self, envs: list[Any], name: str, *, squash_actions: bool = False,
                 resize: Callable | None = None) -> None:
        """Take over what is made. resize(space, obs) returns an observation, or its own space, with resized images."""
        first = envs[0]
        self._spaces = {agent: first.observation_space(agent) for agent in first.possible_agents}
        self._resize = resize or (lambda space, obs: obs)
        pairs = [(self._resize(space, space), first.action_space(agent)) for agent, space in self._spaces.items()]
        super().__init__(name, len(envs), list(map(str, self._spaces)), pairs, squash_actions)
        self._envs = envs
        self._learn_of(first)
        self._batch_spaces = [batch_space(kind.action_space, len(kind.index)) for kind in self.kinds]
        # [M] bool: whose episode goes on, whose is over (who has not joined is neither), who acts next
        self._live, self._over, self._active = np.zeros((3, len(envs) * len(pairs)), bool)
        self._obs: list[Observation] = []  # the last observation of every agent, by kind

    def _reset(self) -> Step:
        self._obs = []
        self._live[:] = False
        return self._play({})

    def _step(self, actions: list[np.ndarray]) -> Step:
        chosen: dict[int, Any] = {}
        for space, kind, rows in zip(self._batch_spaces, self.kinds, actions, strict=True):
            taken = np.where(self._active[kind.index, None], rows, 0)
            chosen.update(zip(kind.index, iterate(space, kind.actions(taken)), strict=True))
        return self._play(chosen)

    def _play(self, chosen: Mapping[int, Any]) -> Step:
        """Step each environment, or reset it if no agent is left; put what all return, dicts by agent, into arrays."""
        num_agents = len(self._live)
        terminated, truncated, self._active = np.zeros((3, num_agents), bool)
        was_reset = ~self._live.reshape(self.num_envs, -1).any(1)
        step = Step(self._obs, np.zeros(num_agents), terminated, truncated, was_reset, self._active,
                    np.full(num_agents, np.nan))
        seen: dict[int, tuple[Any, Any]] = {}  # the observation and mask of each agent that shows one
        for i, env in enumerate(self._envs):
            first = i * len(self.agents)
            self.at = i, "reset" if was_reset[i] else "step"
            if was_reset[i]:
                self._over[first : first + len(self.agents)] = False
                obs, infos = env.reset(seed=None if self.num_steps else self.seeds[i])
                returned = obs, {}, {}, {}, infos
            else:
                acting = {agent: chosen[m] for m, agent in enumerate(self._spaces, first) if self._live[m]}
                returned = env.step(acting)
            self._take(i, returned, step, seen)
        self.at = None, self.at[1]
        self._show(seen)
        return step

    def _take(self, i: int, returned: Sequence[Mapping], step: Step, seen: dict[int, tuple[Any, Any]]) -> None:
        """Enter what environment i returned into a step, and what its agents see into `seen`."""
        obs, rewards, ended, cut, infos = returned
        selected = getattr(self._envs[i], "agent_selection", None)  # whose turn it is
        # where the environment lists its agents, that tells who has joined
        listed = {*(getattr(self._envs[i], "agents", None) or obs)}
        if unknown := listed - self._spaces.keys():
            raise ValueError(f"{', '.join(map(str, unknown))}: not among the possible_agents")
        present = [(m, agent) for m, agent in enumerate(self._spaces, i * len(self.agents))
                   if self._live[m] or (agent in listed and not self._over[m])]
        # an environment that lists none any more ends the episode of those that are left, too
        vanished = not step.was_reset[i] and not getattr(self._envs[i], "agents", True)
        for m, agent in present:
            info = infos.get(agent, {})
            step.truncated[m] = cut.get(agent)
            step.terminated[m] = ended.get(agent) or (vanished and not cut.get(agent))
            step.objectives[m] = as_number(info.get(self.objective, np.nan))
            step.rewards[m] = as_number(rewards.get(agent, 0.0))
            self._over[m] = step.terminated[m] or step.truncated[m]
            self._live[m] = not self._over[m]
            if agent in obs:
                on_turn = info.get("active_agent", agent) if selected is None else selected
                step.active[m] = self._live[m] and on_turn == agent and info.get("is_active", True)
                seen[m] = self._resize(self._spaces[agent], obs[agent]), info.get(ACTION_MASK)

    def _show(self, seen: Mapping[int, tuple[Any, Any]]) -> None:
        """Write what agents see into the arrays of all of their kind; who is allowed nothing does not act."""
        for k, kind in enumerate(self.kinds):
            there = [m for m in kind.index if m in seen]
            if len(self._obs) == k:  # the first time: now it is known whether the infos hold masks
                if any(seen[m][1] is not None for m in there):
                    kind.add_mask()
                self._obs.append({name: np.zeros((len(kind.index), *leaf.shape), leaf.dtype)
                                  for name, leaf in kind.obs_space.items()})
            if there:
                observations, masks = zip(*[seen[m] for m in there], strict=True)
                batch = create_empty_array(kind.space, len(there))
                flat = kind.flatten(concatenate(kind.space, observations, batch), masks)
                places = np.searchsorted(kind.index, there)
                with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
                    for name, value in flat.items():
                        self._obs[k][name][places] = value
            if ACTION_MASK in self._obs[k]:
                self._active[kind.index] &= self._obs[k][ACTION_MASK].any(1)

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
