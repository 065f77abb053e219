"""The contract of environments: N environments of A agents each, stepped together, whatever their spaces.

`VectorEnv` says what the rollout workers and `evaluate.py` rely on. `GymVectorEnv` keeps it for gymnasium (one agent),
`multi_agent.py` for parallel environments; `families.py` makes both. The M = N x A agents are numbered environment by
environment. Agents with the same spaces are of one *kind*, nearly always all; observations and actions come kind by
kind, as dicts of arrays and rows of numbers (`flat_spaces.AgentKind`).

When no agent of an environment is left, its episode is over. Most environments reset then as in gymnasium's NEXT_STEP
mode: the observation that comes with `terminated` or `truncated` is the episode's true last one; the following step
ignores all actions and returns the first observations of the next episode. A batch of gymnasium may also return these
with the last step (SAME_STEP), or be told to (DISABLED): then the last observations come beside, in `Step.last`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from envs.flat_spaces import ACTION_MASK, LARGEST, AgentKind, Observation, as_array, num_columns, out_of_range
from runtime.utils import EnvironmentFailure, UserError

Info = Mapping[str, Any]


class Step(NamedTuple):
    """What one reset() or step() of all environments returned."""

    obs: list[Observation]  # of each kind of agents, {leaf: [M of the kind, ...]}; valid until the next step
    rewards: np.ndarray  # [M] float
    terminated: np.ndarray  # [M] bool; with it or `truncated` an agent's episode ends, its observation is the final one
    truncated: np.ndarray  # [M] bool
    was_reset: np.ndarray  # [N] bool: the observations are the first of an episode
    active: np.ndarray  # [M] bool: the agent acts in the next step; False: dead, gone, or not its turn
    objectives: np.ndarray  # [M] float: what the info holds as --pbt_target_objective; nan where it holds none
    # where the next episode begins with the last step of one: the last observations of those that are over, {leaf: [K,
    # ...]}, or {} if the environment does not tell them
    last: Observation | None = None
    life_lost: np.ndarray | bool = False  # [N] bool: what follows counts no more for what came before; the game goes on


class VectorEnv:
    """N environments of A agents. Owned by one rollout worker (or by an evaluation), in its process.

    `reset` and `step` raise `EnvironmentFailure`, which names the environment, its seed and the step: for whatever the
    environment raises, for an observation or reward that is not finite or too large, and for an action mask that
    forbids everything.
    """

    objective = "true_objective"  # the key of an episode's last info that population-based training ranks by
    max_reward = LARGEST  # in absolute value
    frames_per_sec = 30.0  # how many simulator frames a person would see
    default_shaping: Any = None  # the reward shaping that population-based training begins with; None: there is none
    seeds: Sequence[int] = ()  # of the last reset, [N]
    num_steps = 0  # since then
    _envs: Sequence[Any] = ()  # [N], where they are not made as one batch
    at: tuple[int | None, str] = None, ""  # the environment that is being reset or stepped (None: all of them), and how

    def __init__(self, name: str, num_envs: int, agents: Sequence[str], pairs: Sequence[Any], squash: bool) -> None:
        """Group the agents of each environment, by their names and pairs of spaces: of observations, of actions."""
        self.name, self.num_envs = name, num_envs
        self.agents = agents  # [A]
        kinds = [pair for i, pair in enumerate(pairs) if pair not in pairs[:i]]
        self.kind_of_agent = [kinds.index(pair) for pair in pairs]  # [A]
        of_all = np.tile(self.kind_of_agent, num_envs)  # [M]
        self.kinds = [AgentKind(*pair, np.flatnonzero(of_all == k), squash=squash) for k, pair in enumerate(kinds)]

    def reset(self, seed: int | Sequence[int]) -> Step:
        """Begin new episodes everywhere. May add a mask to an `obs_space`.

        seed: one for each environment, [N], or a number: environment i is seeded with seed + i.
        """
        self.seeds, self.num_steps = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed, 0
        return self._checked("reset", self._reset)

    def step(self, actions: list[np.ndarray]) -> Step:
        """Step all environments with actions [M of the kind, num_columns] float32 for each kind (`flat_spaces.py`)."""
        self.num_steps += 1
        return self._checked("step", self._step, actions)

    def set_shaping(self, env: int, agent: int, shaping: Any) -> None:
        """Give an agent of an environment another reward shaping."""
        self._envs[env].set_reward_shaping(shaping, agent)

    def render(self) -> np.ndarray:
        """Return the picture of the first environment, [H, W, 3] uint8."""
        return self._envs[0].render()

    def spread_ages(self) -> bool:
        """Draw how old the first episodes are, or time may end all at once, for ever; return whether that can be done.

        It can where the environment has `episode_length_buf` and `max_episode_length`, as Isaac Lab's have.
        """
        return False

    def no_actions(self) -> list[np.ndarray]:
        """Return actions of zeros, [M of the kind, columns] float32 for each kind."""
        return [np.zeros((len(kind.index), num_columns(kind.action_space)), np.float32) for kind in self.kinds]

    def close(self) -> None:
        """Free what the environments hold."""

    def _learn_of(self, env: Any) -> None:
        """Take over what one environment, or a batch, says of all."""
        self.frames_per_sec = getattr(env, "metadata", {}).get("render_fps") or self.frames_per_sec
        if hasattr(env, "get_default_reward_shaping"):
            self.default_shaping = env.get_default_reward_shaping()

    def _reset(self) -> Step:
        """Reset all environments with `seeds`."""

    def _step(self, actions: list[np.ndarray]) -> Step:
        """Step them. What `_reset` and `_step` return is checked here."""

    def _checked(self, method: str, function: Callable[..., Step], *args: Any) -> Step:
        """Call `_reset` or `_step`; allow everything where no action follows, refuse what cannot be learned from."""
        self.at = None, method
        with naming_failures(self.name, self._where):
            step = function(*args)
        for kind, obs in zip(self.kinds, step.obs, strict=True):
            if ACTION_MASK in obs:
                # a target across a time limit takes the best action that is allowed in the final observation
                asked = step.truncated[kind.index] & ~kind.forbids_all(obs[ACTION_MASK])
                obs[ACTION_MASK][~step.active[kind.index] & ~asked] = True
            if fault := kind.find_fault(obs):
                self._fail(kind.index[fault[0]], fault[1])
        if step.last and (fault := self.kinds[0].find_fault(step.last)):
            self._fail(step.was_reset.nonzero()[0][fault[0]], f"the last {fault[1]}")
        if fault := out_of_range("reward", step.rewards, -self.max_reward, self.max_reward):
            agent, what = fault
            cure = "; use --reward_clip, or a smaller --reward_scale" if np.isfinite(step.rewards[agent]) else ""
            self._fail(agent, what + cure)
        return step

    def _fail(self, agent: int, what: str) -> NoReturn:
        env, agent = divmod(int(agent), len(self.agents))
        who = f", agent {self.agents[agent]}" if len(self.agents) > 1 else ""
        raise EnvironmentFailure(f"{self.name}, seed {self.seeds[env]}, step {self.num_steps}{who}: {what}") from None

    def _where(self) -> str:
        env, method = self.at
        return f"seed {None if env is None else self.seeds[env]}, step {self.num_steps}: {method}()"


@contextlib.contextmanager
def naming_failures(name: str, where: Callable[[], str]) -> Iterator[None]:
    """Turn whatever an environment raises into an `EnvironmentFailure` that says where it was.

    A missing package becomes a `UserError` that says what to install.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError, EnvironmentFailure):
        raise
    except gym.error.DependencyNotInstalled as error:  # it says what to install
        raise UserError(f"--env={name}: {error}") from error
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise UserError(f"--env={name}: {error}; check the name and PYTHONPATH, or: pip install {package}") from error
    except BaseException as error:  # such as SystemExit, or what is written in Rust raises
        raise EnvironmentFailure(f"{name}, {where()} raised {type(error).__name__}: {error}") from error


def as_number(value: Any) -> float:
    """Return a number that may come in an array of one; None is nan. Raises errors for anything else."""
    return value if isinstance(value, float) else np.asarray(value, np.float64).item()


# ---- what is known before a run begins -----------------------------------------------------------------------------


class EnvInfo(NamedTuple):
    """What is known of one environment before the run begins."""

    agents: list[str]  # [A]
    kind_of_agent: list[int]  # [A]
    kinds: list[AgentKind]
    shaping: Any  # the default reward shaping, or None


# ---- one agent: gymnasium ------------------------------------------------------------------------------------------


class GymVectorEnv(VectorEnv):
    """A gymnasium vector environment, whose reset() takes a list of seeds; each has one agent.

    Its arrays are of NumPy, JAX or PyTorch: then it gets tensors too, where its observations are. Action masks and
    objectives are those of the `Guard`s in it; a batched implementation has neither.
    """

    def __init__(self, env: gym.vector.VectorEnv, name: str, *, squash_actions: bool = False) -> None:
        spaces_of_one = (env.single_observation_space, env.single_action_space)
        super().__init__(name, env.num_envs, ["agent"], [spaces_of_one], squash_actions)
        self._env, self.kind = env, self.kinds[0]
        self._mode = env.metadata.get("autoreset_mode")
        if not isinstance(self._mode, AutoresetMode):
            raise UserError(f"--env={name}: the metadata of its vector environment must hold autoreset_mode, one of "
                            f"gymnasium.vector.AutoresetMode, not {self._mode!r}")
        self._as_its_arrays = lambda array: array
        self._envs: list[Guard] = getattr(env, "envs", [])
        self._no_objectives = np.full(self.num_envs, np.nan)
        for number, guard in enumerate(self._envs):
            guard.owner, guard.number = self, number
        one = [*self._envs, env][0]
        self._learn_of(one)
        self._lives, self._is_atari = 0, hasattr(one.unwrapped, "ale")

    def _reset(self) -> Step:
        obs, infos = self._env.reset(seed=self.seeds)
        if ACTION_MASK in infos:
            raise UserError(f"--env={self.name}: the masks of a batch must be part of its observations")
        first = tree_leaves(obs)[0]
        if isinstance(first, Tensor):
            self._as_its_arrays = functools.partial(torch.as_tensor, device=first.device)
        if any(guard.mask is not None for guard in self._envs):
            self.kind.add_mask()
        self._over = np.zeros(self.num_envs, bool)
        return self._join(obs, infos, np.zeros(self.num_envs), self._over, self._over, ~self._over)

    def spread_ages(self) -> bool:
        ages = getattr(self._env.unwrapped, "episode_length_buf", None)
        longest = getattr(self._env.unwrapped, "max_episode_length", 0)
        if ages is None or not longest:
            return False
        drawn = np.random.default_rng(self.seeds[0]).integers(longest, size=self.num_envs)
        ages[:] = ages.new_tensor(drawn) if isinstance(ages, Tensor) else drawn
        return True

    def _step(self, actions: list[np.ndarray]) -> Step:
        of_env = tree_map(self._as_its_arrays, self.kind.actions(actions[0]))
        obs, rewards, terminated, truncated, infos = self._env.step(of_env)
        rewards = as_array(rewards).astype(np.float64)  # copies, since reset() may overwrite them
        terminated = as_array(terminated).astype(bool)
        truncated = as_array(truncated).astype(bool)
        shapes = {rewards.shape, terminated.shape, truncated.shape}
        if shapes != {(self.num_envs,)}:
            raise ValueError(f"rewards, terminated and truncated must have the shape ({self.num_envs},), not {shapes}")
        before, self._over = self._over, terminated | truncated
        if self._mode == AutoresetMode.NEXT_STEP:
            rewards[before] = 0.0  # whatever the step says that only resets
            return self._join(obs, infos, rewards, terminated, truncated, before)
        last = None
        if self._over.any():
            last = self._last(obs, infos)
            if self._mode == AutoresetMode.DISABLED:
                obs, _ = self._env.reset(options={"reset_mask": self._as_its_arrays(self._over)})
        over, self._over = self._over, np.zeros(self.num_envs, bool)
        return self._join(obs, infos, rewards, terminated, truncated, over, last=last)

    def _last(self, obs: Any, infos: Info) -> Observation:
        """Return copies of the last observations of the K episodes that are over."""
        if self._mode == AutoresetMode.SAME_STEP:
            obs = infos.get("final_obs", infos.get("final_observation"))
        if obs is None:
            return {}
        ended = self._over.nonzero()[0]
        if isinstance(obs, np.ndarray) and obs.dtype.hasobject:  # one by one, None where an episode goes on
            empty = create_empty_array(self.kind.space, len(ended))
            last = self.kind.flatten(concatenate(self.kind.space, obs[ended], empty))
        else:
            last = {name: value[ended] for name, value in self.kind.flatten(obs).items()}
        if ACTION_MASK in last:  # nobody acts there
            last[ACTION_MASK][self.kind.forbids_all(last[ACTION_MASK])] = True
        return last

    def _join(self, obs: Any, infos: Info, *outcome: np.ndarray, last: Observation | None = None) -> Step:
        """Make a step. outcome: rewards, terminated, truncated and was_reset, each [N]."""
        flat = self.kind.flatten(obs, [guard.mask for guard in self._envs])
        objectives = np.array([guard.objective for guard in self._envs] or self._no_objectives)
        lives = infos.get("lives", [guard.unwrapped.ale.lives() for guard in self._envs]) if self._is_atari else 0
        before, self._lives = self._lives, np.array(lives)
        return Step([flat], *outcome, ~self._over, objectives, last, self._lives < before)

    def render(self) -> np.ndarray:
        return self._env.render()[0]

    def close(self) -> None:
        self._env.close()


class Guard(gym.Wrapper):
    """Stands between one environment and gymnasium's `SyncVectorEnv`.

    It notes in its owner's `at` when it is reset or stepped. It keeps what somebody reads of the last info, and passes
    no info on: gymnasium would join those of all environments in arrays that are made for the first one, and fail where
    types or shapes differ. What else the environment has can be seen through it.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._find_mask = getattr(self, "action_masks", lambda: None)  # as SB3-contrib has it

    def __getattr__(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, Info]:
        self.owner.at = self.number, "reset"
        obs, info = self.env.reset(seed=seed, **kwargs)
        return obs, self._read(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        self.owner.at = self.number, "step"
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, as_number(reward), terminated, truncated, self._read(info, is_over=terminated)

    def _read(self, info: Info, *, is_over: bool = False) -> Info:
        self.objective = as_number(info.get(self.owner.objective, np.nan))
        self.mask = info.get(ACTION_MASK)
        if self.mask is None and not is_over:
            self.mask = self._find_mask()
        self.owner.at = None, self.owner.at[1]
        return {}
