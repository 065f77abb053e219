"""The vector-environment contract: N environments of A agents each, stepped together, whatever their spaces.

`VectorEnv` says what the rollout workers, the evaluator and `evaluate.py` rely on; `GymVectorEnv` keeps it for
gymnasium (one agent), `multi_agent.py` for parallel environments. The M = N x A agents are numbered environment by
environment. Agents with the same spaces are of one *kind*, nearly always all; observations and actions come kind by
kind, as dicts of arrays and rows of numbers (`flat_spaces.AgentKind`).

Environments reset in gymnasium's NEXT_STEP mode: the observation that comes with `terminated` or `truncated` is the
episode's true final one; when no agent of an environment is left, the following step ignores all actions and returns
the first observations of the next episode.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from envs.flat_spaces import ACTION_MASK, LARGEST, AgentKind, Observation, describe_parts, flatten_mask, out_of_range
from runtime.console import say
from runtime.seeding import consecutive
from runtime.user_error import EnvironmentFailure, UserError

Info = Mapping[str, Any]


class Step(NamedTuple):
    """What one reset() or step() of all environments returned."""

    obs: list[Observation]  # of each kind of agents, {leaf: [M of the kind, ...]}; valid until the next step
    rewards: np.ndarray  # [M] float
    terminated: np.ndarray  # [M] bool; with it or `truncated` an agent's episode ends, its observation is the final one
    truncated: np.ndarray  # [M] bool
    active: np.ndarray  # [M] bool: the agent acts in the next step; False: dead, gone, or not its turn
    was_reset: np.ndarray  # [N] bool: this step only reset the environment
    objectives: np.ndarray  # [M] float: what the info tells as --pbt_target_objective; nan where it does not


TRUE_OBJECTIVE = "true_objective"  # the key of an episode's last info that population-based training ranks by


@contextlib.contextmanager
def naming_failures(name: str, seed: int | None, num_steps: int, what: str) -> Iterator[None]:
    """Turn whatever an environment raises in its method `what` into an `EnvironmentFailure` that says where it was."""
    try:
        yield
    except (KeyboardInterrupt, UserError, EnvironmentFailure):
        raise
    except BaseException as error:
        raise EnvironmentFailure(f"{name}, seed {seed}, step {num_steps}: {what}() raised {type(error).__name__}: "
                                 f"{error}") from error


def as_number(value: Any) -> float:
    """Return a number that may come in an array of one. Raises `ValueError` or `TypeError` for anything else."""
    return value if isinstance(value, float) else np.asarray(value, np.float64).item()


def read_objective(info: Info, key: str) -> float:
    """Return the true objective that an info tells; nan: none."""
    return np.nan if info.get(key) is None else as_number(info[key])


class VectorEnv:
    """N environments of A agents. Owned by one rollout worker (or by an evaluation), in its process.

    `reset` and `step` raise `EnvironmentFailure`, which names the environment, its seed and the step, for an
    observation or reward that is not finite or too large and for an action mask that forbids everything.
    """

    num_envs: int
    agents: list[str]  # the names of the agents of one environment, [A]
    kind_of_agent: list[int]  # [A]
    kinds: list[AgentKind]
    name: str
    max_reward = LARGEST  # in absolute value
    frames_per_sec = 30.0  # how many simulator frames a person would see
    seeds: Sequence[int] = ()  # of the last reset, [N]
    num_steps = 0

    def reset(self, seed: int | Sequence[int]) -> Step:
        """Begin new episodes everywhere. May add a mask to an `obs_space`.

        seed: one for each environment, [N], or a number: environment i is seeded with seed + i.
        """
        raise NotImplementedError

    def step(self, actions: list[np.ndarray]) -> Step:
        """Step all environments with actions [M of the kind, num_columns] float32 for each kind (`flat_spaces.py`)."""
        raise NotImplementedError

    def default_shapings(self) -> list[Any]:
        """List the reward shapings that the environments offer to population-based training; empty: they have none."""
        return []

    def set_shaping(self, env: int, agent: int, shaping: Any) -> None:
        """Give an agent of an environment another reward shaping."""

    def render(self) -> np.ndarray:
        """Return the picture of the first environment, [H, W, 3] uint8."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the environments hold."""

    def _checked(self, step: Step) -> Step:
        if fault := out_of_range("reward", step.rewards, -self.max_reward, self.max_reward):
            agent, what = fault
            cure = "; use --reward_clip, or a smaller --reward_scale" if np.isfinite(step.rewards[agent]) else ""
            self._fail(agent, what + cure)
        for kind, obs in zip(self.kinds, step.obs, strict=True):
            if fault := kind.find_fault(obs):
                self._fail(kind.index[fault[0]], fault[1])
        return step

    def _naming(self, what: str, env: int | None = None) -> Any:
        return naming_failures(self.name, None if env is None else self.seeds[env], self.num_steps, what)

    def _fail(self, agent: int, what: str) -> NoReturn:
        env, agent = divmod(int(agent), len(self.agents))
        who = f", agent {self.agents[agent]}" if len(self.agents) > 1 else ""
        raise EnvironmentFailure(f"{self.name}, seed {self.seeds[env]}, step {self.num_steps}{who}: {what}") from None


class EnvInfo(NamedTuple):
    """What is known of one environment before the run begins."""

    agents: list[str]  # [A]
    kind_of_agent: list[int]  # [A]
    kinds: list[tuple[dict[str, spaces.Space], spaces.Space]]  # observation leaves and action space of each kind
    shaping: Any  # the default reward shaping, or None
    obs_spaces: Sequence[spaces.Space] = ()  # of each kind, as the environment has them

    def spaces_of(self, kind: int) -> dict[str, str]:
        """Describe what agents of a kind see, in the order in which a model takes it, and do; for their checkpoints."""
        leaves, action_space = self.kinds[kind]
        seen = describe_parts(self.obs_spaces[kind], bounds=False)
        done = describe_parts(action_space, bounds=True)
        described = {f"observation {name}": seen.get(name, seen.get("")) for name in leaves if name != ACTION_MASK}
        return described | {"action": ", ".join(f"{path} {part}".strip() for path, part in done.items())}

    def as_trained(self, kind: int, state: Mapping[str, Any], path: Path) -> tuple[dict[str, spaces.Space], Any]:
        """Return the spaces of a kind, its observations in the order of a checkpoint: they are found by their names.

        Raises `UserError` when the policy was trained with others, which would mean something else to it.
        """
        leaves, action_space = self.kinds[kind]
        own, saved = self.spaces_of(kind), state.get("spaces")
        if saved is None:
            say(f"checkpoint {path} is of an earlier version: it holds no spaces to compare, and observations "
                "that vary by less than 0.01 are normalized otherwise now")
            return leaves, action_space
        changed = [f"{name} is {own.get(name, 'gone')} and was {saved.get(name, 'not there')}"
                   for name in saved | own if own.get(name) != saved.get(name)]
        if changed:
            raise UserError(f"checkpoint {path} was trained with other spaces: {'; '.join(changed)[:500]}; give the "
                            "environment its former ones, or use another --experiment, or --restart_behavior=restart")
        parts = (name.removeprefix("observation ") for name in saved if name != "action")
        return {part: leaves[part] for part in parts} | leaves, action_space


def describe(env: VectorEnv) -> EnvInfo:
    """Describe environments that were reset (an action mask may only show then)."""
    return EnvInfo(env.agents, env.kind_of_agent, [(kind.obs_space, kind.action_space) for kind in env.kinds],
                   next(iter(env.default_shapings()), None), [kind.space for kind in env.kinds])


class GymVectorEnv(VectorEnv):
    """A gymnasium vector environment whose reset() takes a list of seeds: one agent in each environment."""

    def __init__(self, env: gym.vector.VectorEnv, name: str, *, squash_actions: bool = False,
                 objective: str = TRUE_OBJECTIVE) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(f"the vector environment resets in mode {mode}; NEXT_STEP is needed")
        self._env, self.name, self._objective = env, name, objective
        self.num_envs = env.num_envs
        self.frames_per_sec = env.metadata.get("render_fps") or VectorEnv.frames_per_sec
        self.agents, self.kind_of_agent = ["agent"], [0]
        self.kind = AgentKind(name, env.single_observation_space, env.single_action_space, np.arange(env.num_envs),
                              squash_actions=squash_actions)
        self.kinds = [self.kind]

    def reset(self, seed: int | Sequence[int]) -> Step:
        self.seeds, self.num_steps = consecutive(seed, self.num_envs), 0
        with self._naming("reset"):
            obs, info = self._env.reset(seed=self.seeds)
            if ACTION_MASK in info and not self.kind.has_mask:
                self.kind.add_mask(in_info=True)
            no = np.zeros(self.num_envs, bool)
            self._over = ~no
            return self._step(obs, np.zeros(self.num_envs), no, no, info)

    def step(self, actions: list[np.ndarray]) -> Step:
        self.num_steps += 1
        with self._naming("step"):
            return self._step(*self._env.step(self.kind.actions(actions[0])))

    def _step(self, obs: Any, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, info: Info) -> Step:
        was_reset, self._over = self._over, terminated | truncated
        flat = self.kind.flatten(obs)
        source = self.kind.mask_source(flat, info)
        if self.kind.has_mask:
            masks = source.get(ACTION_MASK, [None] * self.num_envs)
            given = source.get(f"_{ACTION_MASK}", [True] * self.num_envs)  # where there is one in the info
            flat[ACTION_MASK] = self.kind.join_masks([mask if is_given else None
                                                      for mask, is_given in zip(masks, given, strict=True)])
            # no action follows; but a target across a time limit takes the best one that is allowed
            flat[ACTION_MASK][terminated | (truncated & self.kind.forbids_all(flat[ACTION_MASK]))] = True
        objectives = np.full(self.num_envs, np.nan)
        if (key := self._objective) in info:
            objectives = np.where(info.get(f"_{key}", True), info[key], np.nan)
        return self._checked(Step([flat], rewards, terminated, truncated, ~self._over, was_reset, objectives))

    def default_shapings(self) -> list[Any]:
        return [env.get_wrapper_attr("get_default_reward_shaping")() for env in getattr(self._env, "envs", ())
                if env.has_wrapper_attr("get_default_reward_shaping")]

    def set_shaping(self, env: int, agent: int, shaping: Any) -> None:
        self._env.envs[env].get_wrapper_attr("set_reward_shaping")(shaping, agent)

    def render(self) -> np.ndarray:
        return self._env.render()[0]

    def close(self) -> None:
        self._env.close()


class Guard(gym.Wrapper):
    """Stands between one environment and gymnasium's `SyncVectorEnv`.

    When reset() or step() raises, it says which environment it was, with which seed and in which step. Of the infos it
    passes on only what somebody reads, in one form: gymnasium joins those of all environments in arrays that are made
    for the first one, and fails where types or shapes differ.
    """

    def __init__(self, env: gym.Env, name: str, objective: str = TRUE_OBJECTIVE) -> None:
        super().__init__(env)
        self._name, self._objective = name, objective
        self._first_seed, self._num_steps = None, 0
        self._has_masks = False  # a method that gives them, looked for when the environment is ready

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, Info]:
        self._num_steps += 1
        if seed is not None:
            self._first_seed, self._num_steps = seed, 0
        with naming_failures(self._name, self._first_seed, self._num_steps, "reset"):
            obs, info = self.env.reset(seed=seed, **kwargs)
            self._has_masks = self.env.has_wrapper_attr("action_masks")  # as SB3-contrib has it
            return obs, self._read(info, needs_mask=True)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        self._num_steps += 1
        with naming_failures(self._name, self._first_seed, self._num_steps, "step"):
            obs, reward, terminated, truncated, info = self.env.step(action)
            return obs, as_number(reward), terminated, truncated, self._read(info, needs_mask=not terminated)

    def _read(self, info: Info, *, needs_mask: bool) -> Info:
        read: dict[str, Any] = {}
        mask = info.get(ACTION_MASK)
        if mask is None and self._has_masks and needs_mask:
            mask = self.env.get_wrapper_attr("action_masks")()
        if mask is not None:
            read[ACTION_MASK] = flatten_mask(mask)
        if not np.isnan(objective := read_objective(info, self._objective)):
            read[self._objective] = objective
        return read
