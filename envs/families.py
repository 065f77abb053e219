"""Every environment family, made behind the one contract of `vector_env.py`.

Environments with a batched implementation of their own use it (Atari and CartPole: in C++ and NumPy); all others run in
gymnasium's `SyncVectorEnv`, and those of several agents in `multi_agent.py`.

Each family has a profile: the settings of `Config` that fit its environments, as data. "num_envs" is the number of all
environments on two cores, spread over the rollout workers; "without_gpu" is what is set otherwise there. The algorithm
adds how it learns well (`appo.PROFILES`), and `runtime/machine.py` makes settings of both. Used by `rollout_worker.py`,
`supervisor.py` (the spaces), `runtime/evaluator.py` and `evaluate.py`.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space

from algorithms import algorithm_class
from config import Config
from envs.flat_spaces import ACTION_MASK, is_channels_last, random_row
from envs.multi_agent import PREFIX, ParallelVectorEnv, agent_space, convert_turns, is_parallel, pettingzoo_maker
from envs.vector_env import LARGEST, EnvInfo, Guard, GymVectorEnv, VectorEnv, describe, naming_failures
from runtime.by_name import Named, check_importable, import_module
from runtime.machine import Machine, automatic, this_machine
from runtime.seeding import ENVIRONMENT, derive_seed
from runtime.stop import handlers_kept
from runtime.user_error import EnvironmentFailure, UserError

# ---- families and their profiles ---------------------------------------------------------------------------------

PROFILES: dict[str, dict[str, Any]] = {
    "atari": {
        "env_frameskip": 4, "env_framestack": 4, "reward_clip": 1.0, "num_envs": 64,
        "encoder_conv_architecture": "convnet_atari", "encoder_conv_mlp_layers": (512,),
        "without_gpu": {"num_envs": 32, "encoder_conv_architecture": "convnet_a3c", "encoder_conv_mlp_layers": (256,)},
    },
    "classic_control": {
        "train_for_env_steps": 500_000, "num_envs": 32, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh",
    },
    "box2d": {
        "train_for_env_steps": 3_000_000, "num_envs": 32, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh",
    },
    "mujoco": {
        "num_envs": 32, "encoder_mlp_layers": (256, 256), "nonlinearity": "relu", "initial_stddev": 0.37,
    },
    "minigrid": {
        "train_for_env_steps": 5_000_000, "num_envs": 32, "encoder_conv_architecture": "convnet_small",
        "encoder_conv_mlp_layers": (128,), "encoder_mlp_layers": (32,), "rnn_size": 128, "nonlinearity": "relu",
    },
    "vizdoom": {
        "env_frameskip": 4, "res_w": 128, "res_h": 72, "num_envs": 16,
        "encoder_conv_architecture": "convnet_simple", "encoder_mlp_layers": (128, 128),
    },
    "pettingzoo": {"num_envs": 32, "encoder_mlp_layers": (128, 128), "rnn_size": 128},
    "other": {"num_envs": 32, "encoder_mlp_layers": (256, 256), "rnn_size": 128},
}

# what the C++ implementation of Atari knows of an id's arguments; with others, or a limit, gymnasium's wrappers play
ATARI_VECTOR_KWARGS = {"game", "frameskip", "repeat_action_probability", "full_action_space",
                       "max_num_frames_per_episode"}
FRAMESKIPS = {"atari": "frameskip", "vizdoom": "frame_skip"}  # an argument that --env_frameskip gives
LARGE_OBSERVATIONS = ("atari", "vizdoom")
PROBED = 2**20  # the environment that only tells the spaces: no worker has so many

# beginnings of entry points
FAMILIES = {
    "ale_py": "atari", "gymnasium.envs.classic_control": "classic_control", "gymnasium.envs.box2d": "box2d",
    "gymnasium.envs.mujoco": "mujoco", "minigrid": "minigrid", "vizdoom": "vizdoom",
}

# the beginning of an id -> the module that registers it; for others NAMESPACE/Name-v0 or module:Name-v0 does it
REGISTERED_BY = {"Vizdoom": "vizdoom.gymnasium_wrapper", "MiniGrid": "minigrid", "BabyAI": "minigrid",
                 "popgym-": "popgym"}
# a module -> what pip installs, where that has another name
PACKAGES = {"ale_py": "ale-py", "mujoco": "'gymnasium[mujoco]'", "Box2D": "'gymnasium[box2d]'"}


@contextlib.contextmanager
def naming_packages(env_id: str) -> Iterator[None]:
    """Raise `UserError` with what to install where a package of an environment is missing."""
    try:
        yield
    except gym.error.DependencyNotInstalled as error:
        raise UserError(f"--env={env_id}: {error}") from error
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise UserError(f"--env={env_id}: there is no module '{error.name}'; check the name and PYTHONPATH, or: "
                        f"pip install {PACKAGES.get(package, package)}") from error


def registering_module(env_id: str) -> str | None:
    """Return the module that registers an id, by its beginning or its namespace; None: gymnasium itself, or none."""
    namespace, slash, _ = env_id.partition("/")
    is_module = slash and namespace.isidentifier() and importlib.util.find_spec(namespace)
    return next((module for beginning, module in REGISTERED_BY.items() if env_id.startswith(beginning)),
                namespace if is_module else None)


def find_spec(env_id: str) -> EnvSpec:
    """Look an environment id up, or the function that makes it.

    Raises `UserError` with what gymnasium says of an unknown id, or with the package to install.
    """
    if not env_id.strip():
        raise UserError("--env is missing, for example --env PongNoFrameskip-v4")
    if isinstance(env_id, Named):
        found = env_id.value
        return found if isinstance(found, EnvSpec) else EnvSpec(id=env_id.rpartition(":")[2], entry_point=found)
    check_importable("env", env_id)
    module, _, name = env_id.rpartition(":")
    with contextlib.suppress(ImportError):
        gym.register_envs(importlib.import_module("ale_py"))
    with naming_packages(env_id):
        if env_id.startswith(PREFIX):
            return EnvSpec(id=env_id.removeprefix(PREFIX), entry_point=pettingzoo_maker(env_id))
        if module:
            found = getattr(import_module(module), name, None)
            if callable(found):
                return EnvSpec(id=name, entry_point=found)
        elif name not in gym.registry and (registering := registering_module(name)):
            import_module(registering)
    try:
        return gym.spec(name if module else env_id)
    except gym.error.Error as error:
        hint = "" if sys.modules.get("ale_py") else "; Atari games need: pip install ale-py"
        raise UserError(f"--env={env_id} is unknown: {error}{hint}") from error


def family(env_id: str) -> str:
    """Name the family of an environment id, a key of `PROFILES`. Raises `UserError` for an unknown id."""
    entry_point = find_spec(env_id).entry_point
    if env_id.startswith(PREFIX):
        return "pettingzoo"
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return next((name for beginning, name in FAMILIES.items() if module.startswith(beginning)), "other")


def family_profile(kind: str, algo: str) -> dict[str, Any]:
    """Join the settings of a family and those of an algorithm for it."""
    of_env, of_algorithm = PROFILES[kind], algorithm_class(algo).profiles.get(kind, {})
    without_gpu = of_env.get("without_gpu", {}) | of_algorithm.get("without_gpu", {})
    return {**of_env, **of_algorithm, "without_gpu": without_gpu}


def profile(env_id: str, given: Mapping[str, Any], machine: Machine | None = None) -> dict[str, Any]:
    """Return the settings that learn well on this environment's family and machine, beside those that are given.

    machine: None is this one.
    """
    kind = family(env_id)
    settings = family_profile(kind, given.get("algo", Config.algo))
    if any(given.get(name, size) != size for name in ("res_w", "res_h") if (size := settings.get(name))):
        del settings["encoder_conv_architecture"]  # it belongs to that size
    return automatic(machine or this_machine(given.get("device", "auto")), settings, given,
                     large_observations=kind in LARGE_OBSERVATIONS)


# ---- making them -------------------------------------------------------------------------------------------------


class OneSeed(gym.vector.VectorWrapper):
    """Seeds a vector environment that has one generator for all its environments."""

    def reset(self, *, seed: Sequence[int], options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed[0], options=options)


def spec_of(cfg: Config) -> EnvSpec:
    """Look up the environment of a run, with its `env_kwargs`.

    Of a registered id `max_episode_steps` is an argument of gymnasium.make, as one would write it there.
    """
    spec, given = find_spec(cfg.env), dict(cfg.env_arguments)
    if spec.id in gym.registry and "max_episode_steps" in given:
        spec = dataclasses.replace(spec, max_episode_steps=given.pop("max_episode_steps"))
        if type(spec.max_episode_steps) is not int or spec.max_episode_steps < 1:
            raise UserError(f"--env_kwargs={cfg.env_kwargs}: max_episode_steps must be a number of steps, at least 1")
    return dataclasses.replace(spec, kwargs={**spec.kwargs, **given})


@handlers_kept()
def make_vector_env(cfg: Config, num_envs: int, render_mode: str | None = None) -> VectorEnv:
    """Make `num_envs` environments of `cfg.env`; with a render mode, ones that can be looked at (slower).

    Raises `UserError` with the install command when a package is missing, `EnvironmentFailure` for what they raise.
    """
    spec, kind = spec_of(cfg), family(cfg.env)
    if cfg.env_frameskip != 1 and kind not in FRAMESKIPS:
        raise UserError("--env_frameskip is for Atari games and VizDoom; leave it at 1")
    if FRAMESKIPS.get(kind) in cfg.env_arguments:
        raise UserError(f"--env_kwargs: {FRAMESKIPS[kind]} is --env_frameskip here; give that")
    if cfg.env_framestack != 1 and kind != "atari":
        raise UserError("--env_framestack is for Atari games only; leave it at 1")
    if cfg.res_w and kind in ("atari", "minigrid"):
        raise UserError("--res_w and --res_h are not for Atari games, which come as 84x84, nor for the cells of "
                        "MiniGrid; leave them at 0")
    try:
        with naming_packages(cfg.env):
            if cfg.env.startswith(PREFIX) or makes_parallel_env(spec):
                env = ParallelVectorEnv(lambda: parallel_env(cfg, spec, render_mode), num_envs, cfg.env,
                                        squash_actions=cfg.squash_actions, objective=cfg.pbt_target_objective)
            else:
                env = GymVectorEnv(gym_vector_env(cfg, spec, kind, num_envs, render_mode), cfg.env,
                                   squash_actions=cfg.squash_actions, objective=cfg.pbt_target_objective)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EnvironmentFailure(f"--env={cfg.env} cannot be made: {type(error).__name__}: {error}") from error
    shapes = [leaf.shape for each in env.kinds for leaf in each.obs_space.values()]
    if cfg.res_w and not any(shape[:2] == (cfg.res_h, cfg.res_w) for shape in shapes):
        raise UserError(f"--res_w and --res_h need uint8 images of height x width x channels, not {shapes}; leave them "
                        "at 0")
    largest = float(np.finfo(np.float32).max)
    env.frames_per_sec = 60.0 if kind == "atari" else env.frames_per_sec  # as the console; ALE says 30
    env.max_reward = largest if math.isfinite(cfg.reward_clip) else min(largest, LARGEST / cfg.reward_scale)
    return env


def gym_vector_env(cfg: Config, spec: EnvSpec, kind: str, num_envs: int, render_mode: str | None,
                   ) -> gym.vector.VectorEnv:
    """Make gymnasium environments of one agent: a batched implementation where there is one that will do."""
    known = spec.kwargs.keys() <= ATARI_VECTOR_KWARGS and spec.max_episode_steps is None
    if kind == "atari" and render_mode is None and known:
        return _atari_vector(cfg, spec, num_envs)
    if spec.vector_entry_point is not None and render_mode is None and not cfg.res_w:
        return OneSeed(gym.make_vec(spec, num_envs=num_envs))
    return SyncVectorEnv([lambda: Guard(gym_env(cfg, spec, kind, render_mode), cfg.env, cfg.pbt_target_objective)]
                         * num_envs, copy=False)


def gym_env(cfg: Config, spec: EnvSpec, kind: str, render_mode: str | None) -> gym.Env:
    """Make one gymnasium environment of one agent, with what its family wraps around it."""
    make = {"atari": atari_env, "minigrid": minigrid_env, "mujoco": mujoco_env, "vizdoom": vizdoom_env}.get(
        kind, single_env)
    return make(cfg, spec, render_mode)


def make_env(cfg: Config, render_mode: str | None = None) -> Any:
    """Make one environment with what its family wraps around it: gymnasium's, or one of several agents."""
    spec = spec_of(cfg)
    if cfg.env.startswith(PREFIX) or makes_parallel_env(spec):
        return parallel_env(cfg, spec, render_mode)
    return gym_env(cfg, spec, family(cfg.env), render_mode)


def call_maker(make: Callable, render_mode: str | None, kwargs: Mapping[str, Any]) -> Any:
    """Make an environment. It need not know the argument render_mode unless it is to draw."""
    return make(**kwargs, **({} if render_mode is None else {"render_mode": render_mode}))


def makes_parallel_env(spec: EnvSpec) -> bool:
    """Tell whether a function makes environments of several agents; it must make one for that."""
    make = spec.entry_point
    if not callable(make) or (isinstance(make, type) and issubclass(make, gym.Env)):
        return False
    env = call_maker(make, None, spec.kwargs)
    getattr(env, "close", lambda: None)()
    return is_parallel(env)


def parallel_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> Any:
    """Make one environment of several agents, their images resized if so configured."""
    env = convert_turns(call_maker(spec.entry_point, render_mode, spec.kwargs))
    return ResizedAgents(env, (cfg.res_w, cfg.res_h)) if cfg.res_w else env


def single_env(cfg: Config, spec: EnvSpec, render_mode: str | None, **kwargs: Any) -> gym.Env:
    """Make one environment, its images resized if so configured."""
    env = call_maker(functools.partial(gym.make, spec, disable_env_checker=True), render_mode, kwargs)
    if not cfg.res_w:
        return env
    space, size = env.observation_space, (cfg.res_w, cfg.res_h)
    return gym.wrappers.TransformObservation(env, lambda obs: resized(space, obs, size), resized(space, space, size))


def resized(space: spaces.Space, value: Any, size: tuple[int, int]) -> Any:
    """Resize HxWxC uint8 images to (width, height), also in Dicts and Tuples: those of an observation, or of the space.

    Gymnasium's ResizeObservation takes one image alone.
    """
    if isinstance(space, spaces.Dict):
        return type(value)({key: resized(part, value[key], size) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return type(value)([resized(part, value[i], size) for i, part in enumerate(space.spaces)])
    if space.dtype != np.uint8 or len(space.shape) != 3 or not is_channels_last(space.shape):
        return value
    if value is space:
        return spaces.Box(0, 255, (*size[::-1], space.shape[2]), np.uint8)
    import cv2  # noqa: PLC0415  slow to import

    return cv2.resize(value, size, interpolation=cv2.INTER_AREA).reshape(*size[::-1], -1)


class ResizedAgents:
    """An environment of several agents with resized images; all else is its own."""

    def __init__(self, env: Any, size: tuple[int, int]) -> None:
        self.env, self._size = env, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["env"], name)

    def observation_space(self, agent: Any) -> spaces.Space:
        space = agent_space(self.env, "observation_space", agent)
        return resized(space, space, self._size)

    def reset(self, **kwargs: Any) -> tuple[Any, ...]:
        return self._resize(*self.env.reset(**kwargs))

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        return self._resize(*self.env.step(actions))

    def _resize(self, obs: Mapping[Any, Any], *rest: Any) -> tuple[Any, ...]:
        return {agent: resized(agent_space(self.env, "observation_space", agent), value, self._size)
                for agent, value in obs.items()}, *rest


def minigrid_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one MiniGrid or BabyAI environment, each code of its cells (object, color, state) a plane of 0 and 255.

    A network can hardly tell a ball from a key when they are 6 and 5 of one number. (MiniGrid's own wrapper for this
    loops over the cells in Python.)
    """
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX  # noqa: PLC0415  optional package

    env = single_env(cfg, spec, render_mode)
    num_states = 4  # of a door, or the direction of an agent
    planes = [255 * np.eye(n, dtype=np.uint8) for n in (len(OBJECT_TO_IDX), len(COLOR_TO_IDX), num_states)]
    parts = env.observation_space.spaces
    image = spaces.Box(0, 255, (*parts["image"].shape[:2], sum(map(len, planes))), np.uint8)

    def expand(obs: dict[str, Any]) -> dict[str, Any]:
        cells = [codes[obs["image"][..., i]] for i, codes in enumerate(planes)]
        return {**obs, "image": np.concatenate(cells, -1)}

    return gym.wrappers.TransformObservation(env, expand, spaces.Dict({**parts, "image": image}))


def vizdoom_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one VizDoom scenario, with its own frame skip, drawn no larger than needed.

    It has no observation after an episode's last step, so its time limits count as terminations.
    """
    from vizdoom import ScreenResolution  # noqa: PLC0415  optional package

    kwargs: dict[str, Any] = {"doom_config_path": os.devnull}  # it would save its settings in the working folder
    if 0 < cfg.res_w <= 160 and cfg.res_h <= 120:  # a third faster than the default 320x240
        kwargs["screen_resolution"] = ScreenResolution.RES_160X120
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # and leaves an empty folder there
        env = single_env(cfg, spec, render_mode, frame_skip=cfg.env_frameskip, **kwargs)
        env.reset()
    return env


def mujoco_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one MuJoCo environment that writes no log of its own: each would repeat the same notes about its model."""
    import mujoco  # noqa: PLC0415  optional package

    if hasattr(mujoco, "MjLogConfig"):  # since version 4
        log = mujoco.MjLogConfig.get()
        log.logto_file = log.logto_console = False
        log.set()
    return single_env(cfg, spec, render_mode)


# ---- Atari -------------------------------------------------------------------------------------------------------


class ChannelsLast(gym.vector.VectorObservationWrapper):
    """Turns CxHxW images into HxWxC ones.

    Convolutions in bfloat16 are faster on those: 23 of 221 us an image when training the Nature CNN on one core of an
    EPYC (Zen 5), 11 of 86 when acting; the conversion takes 1 us (`python -m docs.encoder`).
    """

    def __init__(self, env: gym.vector.VectorEnv) -> None:
        super().__init__(env)
        import cv2  # noqa: PLC0415  slow to import

        self._interleave = cv2.merge
        channels, height, width = env.single_observation_space.shape
        self.single_observation_space = spaces.Box(0, 255, (height, width, channels), np.uint8)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Sequence[int], options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=np.array(seed), options=options)  # ALE takes no list

    def observations(self, observations: np.ndarray) -> np.ndarray:
        images = np.empty(self.observation_space.shape, np.uint8)
        num_envs, channels = observations.shape[:2]  # to OpenCV all images are one: twice as fast as one by one
        planes = observations.reshape(num_envs, channels, -1).swapaxes(0, 1)
        self._interleave(tuple(planes), images.reshape(num_envs, -1, channels))
        return images


def _atari_vector(cfg: Config, spec: EnvSpec, num_envs: int) -> gym.vector.VectorEnv:
    """Make the C++ implementation of the standard preprocessing, with the stickiness of the id.

    Frame skip with max-pooling over the last two frames, 84x84 gray, stacked frames, up to 30 no-ops and FIRE at
    a reset, whole games as episodes. Rewards come unclipped, so that logged returns are true.
    """
    from ale_py.vector_env import AtariVectorEnv  # noqa: PLC0415  optional package

    return ChannelsLast(AtariVectorEnv(
        spec.kwargs["game"], num_envs, num_threads=1, frameskip=cfg.env_frameskip, stack_num=cfg.env_framestack,
        repeat_action_probability=spec.kwargs.get("repeat_action_probability", 0.0),
        full_action_space=spec.kwargs.get("full_action_space", False),
        max_num_frames_per_episode=spec.kwargs.get("max_num_frames_per_episode", 108_000),
        reward_clipping=False, episodic_life=False, use_fire_reset=True, noop_max=30))


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


def atari_env(cfg: Config, spec: EnvSpec, render_mode: str | None, noop_max: int = 30) -> gym.Env:
    """Make one game from gymnasium's wrappers: the same observations as the C++ ones, and it can be rendered."""
    env = gym.make(spec, frameskip=1, render_mode=render_mode, disable_env_checker=True)
    env = NoopFireReset(env, noop_max)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=0, frame_skip=cfg.env_frameskip)
    env = gym.wrappers.FrameStackObservation(env, cfg.env_framestack, padding_type="zero")
    height_width = env.observation_space.shape[1:]
    return gym.wrappers.TransformObservation(env, lambda frames: np.moveaxis(frames, 0, -1),
                                             spaces.Box(0, 255, (*height_width, cfg.env_framestack), np.uint8))


def probe(cfg: Config) -> EnvInfo:
    """Make, reset and step one environment to learn about it (an action mask may only show in the info of a reset).

    Raises `UserError` when it returns what it must not.
    """
    env, seed = make_vector_env(cfg, 1), derive_seed(cfg.seed, ENVIRONMENT, part=PROBED)
    try:
        first, rng = env.reset([seed]), np.random.default_rng(seed)
        masks = [obs.get(ACTION_MASK, [None] * len(kind.index)) for kind, obs in zip(env.kinds, first.obs, strict=True)]
        env.step([np.array([random_row(kind.action_space, mask, rng) for mask in masks_of_kind], np.float32)
                  for kind, masks_of_kind in zip(env.kinds, masks, strict=True)])
    except EnvironmentFailure as error:
        if error.__cause__ is None:  # nothing was raised
            raise UserError(str(error)) from error
        raise
    with naming_failures(cfg.env, seed, 1, "close"):
        env.close()
    return describe(env)
