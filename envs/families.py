"""Every environment family, made behind the one contract of `vector_env.py`.

Environments with a batched implementation of their own use it (Atari and CartPole: in C++ and NumPy); all others run in
gymnasium's `SyncVectorEnv`, and those of several agents in `multi_agent.py`.

Each family is an entry of `FAMILIES`, beside the function that makes its environments; another one is added by one more
entry. The algorithm adds how it learns well (`appo.PROFILES`), and `runtime/machine.py` makes settings of both.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space

from envs.flat_spaces import LARGEST, is_channels_last, num_columns
from envs.multi_agent import PREFIX, ParallelVectorEnv, convert_turns, is_parallel, pettingzoo_maker
from envs.vector_env import EnvInfo, Guard, GymVectorEnv, Info, VectorEnv, describe, naming_failures
from runtime.by_name import Named, check_importable, import_module
from runtime.seeding import ENVIRONMENT, derive_seed
from runtime.stop import handlers_kept
from runtime.user_error import UserError

Config = Any  # that of `config.py`, of which environments know a few settings
PROBED = 2**20  # the environment that only tells the spaces: no worker has so many

# ---- one environment ---------------------------------------------------------------------------------------------


def any_env(cfg: Config, spec: EnvSpec, render_mode: str | None, **kwargs: Any) -> Any:
    """Make one environment, of one agent or of several, its images resized if so configured.

    It need not know the argument render_mode unless it is to draw.
    """
    kwargs |= {} if render_mode is None else {"render_mode": render_mode}
    if spec.id in gym.registry:
        env = gym.make(spec, disable_env_checker=True, **kwargs)
    else:
        env = convert_turns(spec.entry_point(**copy.deepcopy(spec.kwargs), **kwargs))
    if not cfg.res_w:
        return env
    size = (cfg.res_w, cfg.res_h)
    if is_parallel(env):
        return ResizedAgents(env, size)
    space = env.observation_space
    small = resized(space, space, size)
    return gym.wrappers.TransformObservation(env, lambda obs: resized(space, obs, size), small)


def own_batch(cfg: Config, spec: EnvSpec, num_envs: int) -> gym.vector.VectorEnv | None:
    """Make the batched implementation that an environment comes with; None where there is none that will do."""
    if spec.vector_entry_point is None or cfg.res_w:
        return None
    return OneSeed(gym.make_vec(spec, num_envs=num_envs))


class OneSeed(gym.vector.VectorWrapper):
    """Seeds a vector environment that has one generator for all its environments."""

    def reset(self, *, seed: Sequence[int], **kwargs: Any) -> tuple[Any, Info]:
        return self.env.reset(seed=seed[0], **kwargs)


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
        return getattr(self.env, name)

    def observation_space(self, agent: Any) -> spaces.Space:
        space = self.env.observation_space(agent)
        return resized(space, space, self._size)

    def reset(self, **kwargs: Any) -> tuple[Any, ...]:
        return self._resize(*self.env.reset(**kwargs))

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        return self._resize(*self.env.step(actions))

    def _resize(self, obs: Mapping[Any, Any], *rest: Any) -> tuple[Any, ...]:
        return {agent: resized(self.env.observation_space(agent), seen, self._size)
                for agent, seen in obs.items()}, *rest


# ---- the families ------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """What environments of a kind have in common."""

    module: str  # the beginning of their entry points; of families that fit, the one with the longest counts
    # settings of `Config` that fit, as data. "num_envs" is the number of all environments on two cores, spread over the
    # rollout workers; "without_gpu" is what is set otherwise there
    profile: dict[str, Any]
    make: Callable[[Config, EnvSpec, str | None], Any] = any_env
    make_batch: Callable[[Config, EnvSpec, int], gym.vector.VectorEnv | None] = own_batch
    obeys: tuple[str, ...] = ("res_w", "res_h")  # of env_frameskip, env_framestack, res_w and res_h; others are refused
    frameskip: str = ""  # the argument that --env_frameskip gives
    large_observations: bool = False
    ids: tuple[str, ...] = ()  # beginnings of ids that are not registered before `registered_by` is imported
    registered_by: str = ""


FAMILIES = {
    "classic_control": Family("gymnasium.envs.classic_control", {
        "train_for_env_steps": 500_000, "num_envs": 32, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh"}),
    "box2d": Family("gymnasium.envs.box2d", {
        "train_for_env_steps": 3_000_000, "num_envs": 32, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh"}),
    "pettingzoo": Family(PREFIX, {"num_envs": 32, "encoder_mlp_layers": (128, 128), "rnn_size": 128}),
    "other": Family("", {"num_envs": 32, "encoder_mlp_layers": (256, 256), "rnn_size": 128}),
}


def minigrid_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one MiniGrid or BabyAI environment, each code of its cells (object, color, state) a plane of 0 and 255.

    A network can hardly tell a ball from a key when they are 6 and 5 of one number. (MiniGrid's own wrapper for this
    loops over the cells in Python.)
    """
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX  # noqa: PLC0415  optional package

    env = any_env(cfg, spec, render_mode)
    num_states = 4  # of a door, or the direction of an agent
    num_codes = (len(OBJECT_TO_IDX), len(COLOR_TO_IDX), num_states)
    planes = [255 * np.eye(n, dtype=np.uint8) for n in num_codes]
    parts = env.observation_space.spaces
    height_width = parts["image"].shape[:2]
    image = spaces.Box(0, 255, (*height_width, sum(num_codes)), np.uint8)

    def expand(obs: dict[str, Any]) -> dict[str, Any]:
        cells = [codes[obs["image"][..., i]] for i, codes in enumerate(planes)]
        return {**obs, "image": np.concatenate(cells, -1)}

    return gym.wrappers.TransformObservation(env, expand, spaces.Dict({**parts, "image": image}))


FAMILIES["minigrid"] = Family("minigrid", {
    "train_for_env_steps": 5_000_000, "num_envs": 32, "encoder_conv_architecture": "convnet_small",
    "encoder_conv_mlp_layers": (128,), "encoder_mlp_layers": (32,), "rnn_size": 128, "nonlinearity": "relu",
}, minigrid_env, obeys=(), ids=("MiniGrid", "BabyAI"), registered_by="minigrid")


def vizdoom_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one VizDoom scenario, with its own frame skip, drawn no larger than needed.

    It has no observation after an episode's last step, so its time limits count as terminations.
    """
    from vizdoom import ScreenResolution  # noqa: PLC0415  optional package

    kwargs: dict[str, Any] = {"doom_config_path": os.devnull}  # it would save its settings in the working folder
    if 0 < cfg.res_w <= 160 and cfg.res_h <= 120:  # a third faster than the default 320x240
        kwargs["screen_resolution"] = ScreenResolution.RES_160X120
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # and leaves an empty folder there
        env = any_env(cfg, spec, render_mode, frame_skip=cfg.env_frameskip, **kwargs)
        env.reset()
    return env


FAMILIES["vizdoom"] = Family("vizdoom", {
    "env_frameskip": 4, "res_w": 128, "res_h": 72, "num_envs": 16,
    "encoder_conv_architecture": "convnet_simple", "encoder_mlp_layers": (128, 128),
}, vizdoom_env, obeys=("env_frameskip", "res_w", "res_h"), frameskip="frame_skip", large_observations=True,
    ids=("Vizdoom",), registered_by="vizdoom.gymnasium_wrapper")


def mujoco_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one MuJoCo environment that writes no log of its own: each would repeat the same notes about its model."""
    import mujoco  # noqa: PLC0415  optional package

    if hasattr(mujoco, "MjLogConfig"):  # since version 4
        log = mujoco.MjLogConfig.get()
        log.logto_file = log.logto_console = False
        log.set()
    return any_env(cfg, spec, render_mode)


FAMILIES["mujoco"] = Family("gymnasium.envs.mujoco", {
    "num_envs": 32, "encoder_mlp_layers": (256, 256), "nonlinearity": "relu", "initial_stddev": 0.37}, mujoco_env)

# ---- Atari -------------------------------------------------------------------------------------------------------

# what the C++ implementation knows of an id's arguments; with others, or a limit, gymnasium's wrappers play
ATARI_BATCH_KWARGS = {"game", "frameskip", "repeat_action_probability", "full_action_space",
                      "max_num_frames_per_episode"}


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

    def reset(self, *, seed: Sequence[int], **kwargs: Any) -> tuple[Any, Info]:
        return super().reset(seed=np.array(seed), **kwargs)  # ALE takes no list

    def observations(self, observations: np.ndarray) -> np.ndarray:
        images = np.empty(self.observation_space.shape, np.uint8)
        num_envs, channels = observations.shape[:2]  # to OpenCV all images are one: twice as fast as one by one
        planes = observations.reshape(num_envs, channels, -1).swapaxes(0, 1)
        self._interleave(tuple(planes), images.reshape(num_envs, -1, channels))
        return images


def atari_batch(cfg: Config, spec: EnvSpec, num_envs: int) -> gym.vector.VectorEnv | None:
    """Make the C++ implementation of the standard preprocessing, with the stickiness of the id.

    Frame skip with max-pooling over the last two frames, 84x84 gray, stacked frames, up to 30 no-ops and FIRE at
    a reset, whole games as episodes. Rewards come unclipped, so that logged returns are true.
    """
    from ale_py.vector_env import AtariVectorEnv  # noqa: PLC0415  optional package

    if spec.max_episode_steps is not None or not spec.kwargs.keys() <= ATARI_BATCH_KWARGS:
        return None
    kwargs = {"repeat_action_probability": 0.0, "max_num_frames_per_episode": 108_000, **spec.kwargs}
    kwargs |= {"frameskip": cfg.env_frameskip, "stack_num": cfg.env_framestack, "num_threads": 1}
    return ChannelsLast(AtariVectorEnv(num_envs=num_envs, reward_clipping=False, episodic_life=False,
                                       use_fire_reset=True, noop_max=30, **kwargs))


class NoopFireReset(gym.Wrapper):
    """After a reset wait up to `noop_max` frames, then press FIRE for one frame where the game may wait for it."""

    def __init__(self, env: gym.Env, noop_max: int) -> None:
        super().__init__(env)
        self._noop_max = noop_max
        self._has_fire = "FIRE" in env.unwrapped.get_action_meanings()[1:2]

    def reset(self, **kwargs: Any) -> tuple[Any, Info]:
        obs, info = self.env.reset(**kwargs)
        num_noops = self.unwrapped.np_random.integers(1, self._noop_max + 1) if self._noop_max else 0
        for action in [0] * int(num_noops) + [1] * self._has_fire:
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


def atari_env(cfg: Config, spec: EnvSpec, render_mode: str | None, noop_max: int = 30) -> gym.Env:
    """Make one game from gymnasium's wrappers: the same observations as the C++ ones, and it can be rendered."""
    env = gym.make(spec, frameskip=1, render_mode=render_mode, disable_env_checker=True)
    env.metadata = {**env.metadata, "render_fps": 60}  # as the console; ALE says 30
    env = NoopFireReset(env, noop_max)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=0, frame_skip=cfg.env_frameskip)
    env = gym.wrappers.FrameStackObservation(env, cfg.env_framestack, padding_type="zero")
    height_width = env.observation_space.shape[1:]
    return gym.wrappers.TransformObservation(env, lambda frames: np.moveaxis(frames, 0, -1),
                                             spaces.Box(0, 255, (*height_width, cfg.env_framestack), np.uint8))


FAMILIES["atari"] = Family("ale_py", {
    "env_frameskip": 4, "env_framestack": 4, "reward_clip": 1.0, "num_envs": 64,
    "encoder_conv_architecture": "convnet_atari", "encoder_conv_mlp_layers": (512,),
    "without_gpu": {"num_envs": 32, "encoder_conv_architecture": "convnet_a3c", "encoder_conv_mlp_layers": (256,)},
}, atari_env, atari_batch, obeys=("env_frameskip", "env_framestack"), frameskip="frameskip", large_observations=True)

# ---- by their names ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def naming_packages(env_id: str) -> Iterator[None]:
    """Raise `UserError` with what to install where a package of an environment is missing."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        package = str(getattr(error, "name", None) or "").partition(".")[0]
        hint = f"; check the name and PYTHONPATH, or: pip install {package}" if package else ""
        raise UserError(f"--env={env_id}: {error}{hint}") from error


def find_spec(env_id: str) -> EnvSpec:
    """Look an environment id up, or the function that makes it.

    Raises `UserError` with what gymnasium says of an unknown id, or with the package to install.
    """
    if not env_id.strip():
        raise UserError("--env is missing, for example --env PongNoFrameskip-v4")
    if isinstance(env_id, Named):
        return env_id.value if isinstance(env_id.value, EnvSpec) else EnvSpec(id=env_id, entry_point=env_id.value)
    check_importable("env", env_id)
    module, _, name = env_id.rpartition(":")
    with contextlib.suppress(ImportError):
        gym.register_envs(importlib.import_module("ale_py"))
    with naming_packages(env_id):
        if env_id.startswith(PREFIX):
            return EnvSpec(id=env_id, entry_point=pettingzoo_maker(env_id))
        if module and callable(found := getattr(import_module(module), name, None)):
            return EnvSpec(id=env_id, entry_point=found)
        for each in FAMILIES.values():
            if name.startswith(each.ids) and name not in gym.registry:
                import_module(each.registered_by)
    try:
        return gym.spec(name if module else env_id)
    except gym.error.Error as error:
        hint = "" if sys.modules.get("ale_py") else "; Atari games need: pip install ale-py"
        raise UserError(f"--env={env_id} is unknown: {error}{hint}") from error


def family(env_id: str) -> str:
    """Name the family of an environment id, a key of `FAMILIES`. Raises `UserError` for an unknown id."""
    made_by = find_spec(env_id).entry_point
    module = made_by if isinstance(made_by, str) else getattr(made_by, "__module__", "")
    origin = env_id if env_id.startswith(PREFIX) else module
    return max((name for name, each in FAMILIES.items() if origin.startswith(each.module)),
               key=lambda name: len(FAMILIES[name].module))


# ---- those of a run ----------------------------------------------------------------------------------------------


def spec_of(cfg: Config) -> EnvSpec:
    """Look up the environment of a run, with its `env_kwargs`.

    Of a registered id `max_episode_steps` is an argument of gymnasium.make, as one would write it there.
    """
    spec, given = find_spec(cfg.env), dict(cfg.env_arguments)
    if spec.id in gym.registry and "max_episode_steps" in given:
        spec = dataclasses.replace(spec, max_episode_steps=given.pop("max_episode_steps"))
    return dataclasses.replace(spec, kwargs={**spec.kwargs, **given})


def make_env(cfg: Config, render_mode: str | None = None) -> Any:
    """Make one environment with what its family wraps around it: gymnasium's, or one of several agents."""
    return FAMILIES[family(cfg.env)].make(cfg, spec_of(cfg), render_mode)


@handlers_kept()
def make_vector_env(cfg: Config, num_envs: int, render_mode: str | None = None) -> VectorEnv:
    """Make `num_envs` environments of `cfg.env`; with a render mode, ones that can be looked at (slower).

    Raises `UserError` with the install command when a package is missing, `EnvironmentFailure` for what they raise.
    """
    kind, objective = FAMILIES[family(cfg.env)], cfg.pbt_target_objective
    for name in ("env_frameskip", "env_framestack", "res_w", "res_h"):
        if name not in kind.obeys and getattr(cfg, name) != getattr(type(cfg), name):
            raise UserError(f"--{name} is not for {cfg.env}; leave it at {getattr(type(cfg), name)}")
    if kind.frameskip and kind.frameskip in cfg.env_arguments:
        raise UserError(f"--env_kwargs: {kind.frameskip} is --env_frameskip here; give that")
    with naming_failures(cfg.env, None, 0, "make"), naming_packages(cfg.env):
        spec = spec_of(cfg)
        batch = kind.make_batch(cfg, spec, num_envs) if render_mode is None else None
        envs = [kind.make(cfg, spec, render_mode) for _ in range(num_envs)] if batch is None else []
        if envs and is_parallel(envs[0]):
            env = ParallelVectorEnv(envs, cfg.env, squash_actions=cfg.squash_actions, objective=objective)
        else:
            makers = [functools.partial(Guard, each, cfg.env, objective) for each in envs]
            env = GymVectorEnv(SyncVectorEnv(makers, copy=False) if batch is None else batch, cfg.env,
                               squash_actions=cfg.squash_actions, objective=objective)
    sizes = [leaf.shape[:2] for each in env.kinds for leaf in each.obs_space.values()]
    if cfg.res_w and (cfg.res_h, cfg.res_w) not in sizes:
        raise UserError("--res_w and --res_h need uint8 images of height x width x channels; leave them at 0")
    largest = float(np.finfo(np.float32).max)
    env.max_reward = largest if math.isfinite(cfg.reward_clip) else min(largest, LARGEST / cfg.reward_scale)
    return env


def probe(cfg: Config) -> EnvInfo:
    """Make, reset and step one environment to learn about it (an action mask may only show in the info of a reset).

    It is not stepped where a mask may forbid the first action.
    """
    with contextlib.closing(make_vector_env(cfg, 1)) as env:
        env.reset([derive_seed(cfg.seed, ENVIRONMENT, part=PROBED)])
        if not any(kind.has_mask for kind in env.kinds):
            sizes = [(len(kind.index), num_columns(kind.action_space)) for kind in env.kinds]
            env.step([np.zeros(size, np.float32) for size in sizes])
        return describe(env)
