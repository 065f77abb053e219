"""Every environment family behind one vector-environment contract.

A `VectorEnv` steps N environments at once and returns arrays with a leading axis N. It resets in gymnasium's
NEXT_STEP mode: the observation that step() returns with `terminated` or `truncated` is the episode's true final
one; the following step ignores its action and returns the first observation of the next episode with reward 0.

Observations are always a dict of arrays (a plain space becomes {"obs": space}), so that no other file has to tell
one kind from the other. Environments with a batched implementation of their own use it (Atari and CartPole: in C++
and NumPy); all others run in gymnasium's `SyncVectorEnv`.

Each family has a profile: the settings of `Config` that learn well there, as data ("num_envs" is the number of all
environments, spread over the rollout workers). Used by `rollout_worker.py`,
`appo.py` (the spaces) and `evaluate.py`.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from config import Config, UserError, cpu_cores

Observation = dict[str, np.ndarray]

# ---- families and their profiles ---------------------------------------------------------------------------------

PROFILES: dict[str, dict[str, Any]] = {
    "atari": {
        "env_frameskip": 4, "env_framestack": 4, "reward_clip": 1.0,
        "num_envs": 64, "rollout": 64,
        "batch_size": 1024, "num_batches_per_epoch": 4, "num_epochs": 4,
        "learning_rate": 3e-4, "lr_schedule": "kl_adaptive", "lr_schedule_kl_threshold": 0.015, "adam_eps": 1e-5,
        "ppo_clip_ratio": 0.2, "ppo_clip_value": 0.0, "value_loss_coeff": 1.0, "exploration_loss_coeff": 0.01,
        "max_grad_norm": 1.0, "learner_threads": 2,
    },
    "classic_control": {
        "train_for_env_steps": 500_000, "num_envs": 32, "rollout": 32,
        "batch_size": 256, "num_batches_per_epoch": 4, "num_epochs": 4,
        "learning_rate": 1e-3, "lr_schedule": "linear_decay", "adam_eps": 1e-5,
        "ppo_clip_ratio": 0.2, "ppo_clip_value": 0.0, "exploration_loss_coeff": 0.0, "max_grad_norm": 1.0,
        # small rewards make values of about 1, whose loss does not drown the policy's in the shared encoder
        "gamma": 0.98, "reward_scale": 0.02,
        "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh",
    },
    "other": {},
}

# where the environments of a namespace or a family come from, for the message when they are missing
PACKAGES = {
    "ALE": "ale-py", "ale_py": "ale-py", "minigrid": "minigrid", "vizdoom": "vizdoom", "pettingzoo": "pettingzoo",
    "mujoco": "gymnasium[mujoco]",
}


def find_spec(env_id: str) -> gym.envs.registration.EnvSpec:
    """Look an environment id up. Raises `UserError` naming the nearest known ids, or the package to install."""
    if not env_id.strip():
        raise UserError("--env is missing, for example --env PongNoFrameskip-v4")
    has_atari = _register_atari()
    module, _, name = env_id.rpartition(":")
    if ":" in env_id:
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            missing = getattr(error, "name", None) or module
            raise UserError(f"--env={env_id}: module '{missing}' cannot be imported; "
                            f"pip install {PACKAGES.get(missing, missing.split('.')[0])}") from error
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        namespace = name.split("/", maxsplit=1)[0]
        if namespace in PACKAGES and not any(spec_id.startswith(f"{namespace}/") for spec_id in gym.registry):
            raise UserError(f"--env={env_id}: pip install {PACKAGES[namespace]}") from error
        known = {spec_id.lower(): spec_id for spec_id in gym.registry}
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(known[spec_id] for spec_id in close)}?" if close else ""
        atari = "" if has_atari else "; Atari games need: pip install ale-py"
        raise UserError(f"--env={env_id} is unknown{hint}{atari}") from error


def _register_atari() -> bool:
    """Register the Atari games; False when their package is missing."""
    try:
        import ale_py  # noqa: PLC0415  optional package
    except ImportError:
        return False
    gym.register_envs(ale_py)
    return True


def family(env_id: str) -> str:
    """Name the family of an environment id, a key of `PROFILES`. Raises `UserError` for an unknown id."""
    entry_point = find_spec(env_id).entry_point
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    if module.startswith("ale_py"):
        return "atari"
    if module.startswith("gymnasium.envs.classic_control"):
        return "classic_control"
    return "other"


def profile(env_id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that learn well on this environment's family, beside those that are given.

    The number of all environments stays nearly the same whatever the machine, since it decides how much experience is
    in flight and so how old it is when it is learned from.
    """
    settings = dict(PROFILES[family(env_id)])
    if "num_envs" in settings:
        per_worker = settings.pop("num_envs") / max(1, given.get("num_workers", cpu_cores()))
        splits = max(1, given.get("worker_num_splits", 2))
        settings["num_envs_per_worker"] = splits * max(1, round(per_worker / splits))
    return settings


def describe_profiles() -> str:
    """Describe the profiles in one line each, for the command line's help."""
    lines = (f"{name}: " + ", ".join(f"{key}={value}" for key, value in settings.items())
             for name, settings in PROFILES.items() if settings)
    return "Families have defaults of their own. " + "; ".join(lines)


# ---- the contract ------------------------------------------------------------------------------------------------


class VectorEnv:
    """N environments stepped together, with dict observations and actions as the policy gives them.

    Owned by one rollout worker (or by `evaluate.py`), in its process. Continuous actions are given in units of the
    action range: -1 is a bounded dimension's low and +1 its high; beyond that they are clipped.
    """

    def __init__(self, env: gym.vector.VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(f"the vector environment resets in mode {mode}; NEXT_STEP is needed")
        self._env = env
        self.num_envs = env.num_envs
        single = env.single_observation_space
        self._is_dict = isinstance(single, spaces.Dict)
        self.obs_space: dict[str, spaces.Space] = dict(single.spaces) if self._is_dict else {"obs": single}
        self.action_space = env.single_action_space
        check_spaces(self.obs_space, self.action_space)

    def reset(self, seed: int) -> Observation:
        """Begin new episodes everywhere; environment i is seeded with seed + i."""
        obs, _ = self._env.reset(seed=seed)
        return self._named(obs)

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray]:
        """Step all environments.

        Args:
            actions: [N] int64 for a Discrete space, [N, A] float32 for a Box.

        Returns:
            Observations {name: [N, ...]}, rewards [N] float, terminated [N] bool, truncated [N] bool.
        """
        obs, rewards, terminated, truncated, _ = self._env.step(to_env_actions(actions, self.action_space))
        return self._named(obs), rewards, terminated, truncated

    def _named(self, obs: Any) -> Observation:
        return obs if self._is_dict else {"obs": obs}

    def render(self) -> np.ndarray:
        """Return the picture of the first environment, [H, W, 3] uint8."""
        return self._env.render()[0]

    def close(self) -> None:
        """Free what the environments hold."""
        self._env.close()


def check_spaces(obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> None:
    """Raise `UserError`, naming the part, for a space that cannot be learned on."""
    for name, space in obs_space.items():
        if not isinstance(space, spaces.Box) or len(space.shape) not in (1, 3):
            raise UserError(f"observation '{name}' is {space}; supported are Box vectors and Box images (3 axes)")
    if isinstance(action_space, spaces.Discrete):
        return
    if not isinstance(action_space, spaces.Box) or len(action_space.shape) != 1:
        raise UserError(f"the action space is {action_space}; supported are Discrete and one-dimensional Box")


def to_env_actions(actions: np.ndarray, space: spaces.Space) -> np.ndarray:
    """Turn the policy's actions into the environment's: shift a Discrete start, scale [-1, 1] to finite bounds."""
    if isinstance(space, spaces.Discrete):
        return actions + space.start
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1.0), np.where(bounded, space.high, 1.0)
    scaled = low + (np.clip(actions, -1.0, 1.0) + 1.0) * 0.5 * (high - low)
    return np.where(bounded, scaled, np.clip(actions, space.low, space.high)).astype(space.dtype)


def make_vector_env(cfg: Config, num_envs: int, render_mode: str | None = None) -> VectorEnv:
    """Make `num_envs` environments of `cfg.env`; with a render mode, ones that can be looked at (slower).

    Raises `UserError` with the install command when a package is missing.
    """
    spec = find_spec(cfg.env)
    is_atari = family(cfg.env) == "atari"
    if not is_atari and (cfg.env_frameskip, cfg.env_framestack) != (1, 1):
        raise UserError("--env_frameskip and --env_framestack are for Atari games only; leave them at 1")
    try:
        if is_atari:
            env = (_atari_vector(cfg, spec, num_envs) if render_mode is None
                   else SyncVectorEnv([lambda: atari_env(cfg, spec, render_mode)] * num_envs))
        elif spec.vector_entry_point is not None and render_mode is None:
            env = gym.make_vec(spec.id, num_envs=num_envs)
        else:
            env = SyncVectorEnv([_single(spec.id, render_mode)] * num_envs)
    except gym.error.DependencyNotInstalled as error:
        raise UserError(f"--env={cfg.env}: {str(error).splitlines()[0]}") from error
    except ModuleNotFoundError as error:
        raise UserError(f"--env={cfg.env}: module {error.name} is missing; "
                        f"pip install {PACKAGES.get(error.name, error.name)}") from error
    return VectorEnv(env)


def _single(env_id: str, render_mode: str | None) -> Callable[[], gym.Env]:
    kwargs = {"render_mode": render_mode} if render_mode else {}  # an environment need not know that argument
    return lambda: gym.make(env_id, disable_env_checker=True, **kwargs)


# ---- Atari -------------------------------------------------------------------------------------------------------


def _atari_vector(cfg: Config, spec: gym.envs.registration.EnvSpec, num_envs: int) -> gym.vector.VectorEnv:
    """Make the C++ implementation of the standard preprocessing, with the stickiness of the id.

    Frame skip with max-pooling over the last two frames, 84x84 gray, stacked frames, up to 30 no-ops and FIRE at
    a reset, whole games as episodes. Rewards come unclipped, so that logged returns are true.
    """
    from ale_py.vector_env import AtariVectorEnv  # noqa: PLC0415  optional package

    return AtariVectorEnv(
        spec.kwargs["game"], num_envs, num_threads=1, frameskip=cfg.env_frameskip, stack_num=cfg.env_framestack,
        repeat_action_probability=spec.kwargs.get("repeat_action_probability", 0.0),
        full_action_space=spec.kwargs.get("full_action_space", False),
        max_num_frames_per_episode=spec.kwargs.get("max_num_frames_per_episode", 108_000),
        reward_clipping=False, episodic_life=False, use_fire_reset=True, noop_max=30)


class NoopFireReset(gym.Wrapper):
    """After a reset wait up to `noop_max` frames, then press FIRE for one frame where the game may wait for it."""

    def __init__(self, env: gym.Env, noop_max: int) -> None:
        super().__init__(env)
        self._noop_max = noop_max
        self._has_fire = "FIRE" in env.unwrapped.get_action_meanings()[1:2]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        num_noops = self.unwrapped.np_random.integers(1, self._noop_max + 1) if self._noop_max else 0
        for action in [0] * int(num_noops) + [1] * self._has_fire:
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


def atari_env(cfg: Config, spec: gym.envs.registration.EnvSpec, render_mode: str | None, noop_max: int = 30) -> gym.Env:
    """Make one game from gymnasium's wrappers: the same observations as the C++ ones, and it can be rendered."""
    env = gym.make(spec.id, frameskip=1, render_mode=render_mode, disable_env_checker=True)
    env = NoopFireReset(env, noop_max)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=0, frame_skip=cfg.env_frameskip)
    return gym.wrappers.FrameStackObservation(env, cfg.env_framestack, padding_type="zero")
