"""Every environment family, made behind the one contract of `vector_env.py`.

Environments with a batched implementation of their own use it (Atari and CartPole: in C++ and NumPy; what a function
makes that takes `num_envs`); all others run in gymnasium's `SyncVectorEnv`, those of several agents in
`multi_agent.py`.

Makers come first, then the table `FAMILIES`: another family is one more entry there. The algorithm adds how it learns
well (`appo.PROFILES`), and `runtime/machine.py` makes settings of both.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator

from envs.flat_spaces import ACTION_MASK, LARGEST, is_channels_last, parts_of
from envs.multi_agent import PREFIX, ParallelVectorEnv, convert_turns, pettingzoo_maker
from envs.vector_env import EnvInfo, Guard, GymVectorEnv, Info, VectorEnv, naming_failures
from runtime.utils import ENVIRONMENT, Named, UserError, Values, derive_seed, import_module

Config = Any  # that of `config.py`, of which environments know a few settings
PROBED = 2**20  # the environment that only shows the spaces: no worker has so many

# ---- any environment ---------------------------------------------------------------------------------------------


def any_env(cfg: Config, spec: EnvSpec, render_mode: str | None, **kwargs: Any) -> Any:
    """Make one environment, of one agent or of several. It need not know the argument render_mode unless it is to draw.

    Images are resized if so configured; those of several agents later, by `ParallelVectorEnv`.
    """
    kwargs |= {"render_mode": render_mode} if render_mode else {}
    if spec.id in gym.registry:
        env = gym.make(spec, disable_env_checker=True, **kwargs)
    else:
        env = convert_turns(spec.entry_point(**copy.deepcopy(spec.kwargs), **kwargs))
    if not cfg.res_w or hasattr(env, "possible_agents"):
        return env
    resize = functools.partial(resized, (cfg.res_h, cfg.res_w), env.observation_space)
    return gym.wrappers.TransformObservation(env, resize, resize(env.observation_space))


def own_batch(cfg: Config, spec: EnvSpec, num_envs: int) -> gym.vector.VectorEnv | None:
    """Make the batched implementation that an environment comes with; None where there is none that will do."""
    if spec.vector_entry_point is None or cfg.res_w:
        return None
    env = gym.make_vec(spec, num_envs=num_envs)
    return OneSeed(env) if "autoreset_mode" in env.metadata else None


def makes_batches(spec: EnvSpec) -> bool:
    """Return whether an environment is a function that makes a vector environment of `num_envs` at once."""
    with contextlib.suppress(TypeError, ValueError):  # written in C, or the name of an id's class
        return "num_envs" in inspect.signature(spec.entry_point).parameters
    return False


class OneSeed(gym.vector.VectorWrapper):
    """Seeds a vector environment as all of gymnasium's can be: with one number."""

    def reset(self, *, seed: Sequence[int] | None = None, **kwargs: Any) -> tuple[Any, Info]:
        return self.env.reset(seed=None if seed is None else seed[0], **kwargs)


def resized(size: tuple[int, int], space: spaces.Space, value: Any) -> Any:
    """Resize HxWxC uint8 images to (height, width), also in Dicts and Tuples: those of an observation, or of the space.

    Gymnasium's ResizeObservation takes one image alone.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = {key: resized(size, part, value[key]) for key, part in parts_of(space).items()}
        return type(value)(parts if isinstance(space, spaces.Dict) else parts.values())
    if space.dtype != np.uint8 or len(space.shape) != 3 or not is_channels_last(space.shape):
        return value
    if value is space:
        return spaces.Box(0, 255, (*size, space.shape[2]), np.uint8)
    import cv2  # noqa: PLC0415  slow to import

    return cv2.resize(value, size[::-1], interpolation=cv2.INTER_AREA).reshape(*size, -1)


# ---- MiniGrid, VizDoom, MuJoCo -----------------------------------------------------------------------------------


def minigrid_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one MiniGrid or BabyAI environment, each code of its cells (object, color, state) a plane of 0 and 255.

    A network can hardly tell a ball from a key when they are 6 and 5 of one number. (MiniGrid's own wrapper for this
    loops over the cells in Python.)
    """
    env = any_env(cfg, spec, render_mode)
    planes = [255 * np.eye(n, dtype=np.uint8) for n in (11, 6, 4)]  # the last: states of a door, directions of an agent
    parts = env.observation_space.spaces
    image = spaces.Box(0, 255, (*parts["image"].shape[:2], 11 + 6 + 4), np.uint8)

    def expand(obs: dict) -> dict:
        cells = [codes[obs["image"][..., i]] for i, codes in enumerate(planes)]
        return {**obs, "image": np.concatenate(cells, -1)}

    return gym.wrappers.TransformObservation(env, expand, spaces.Dict({**parts, "image": image}))


def vizdoom_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one VizDoom scenario, with its own frame skip, drawn no larger than needed.

    It has no observation after an episode's last step, so its time limits count as terminations.
    """
    from vizdoom import ScreenResolution  # noqa: PLC0415  optional package

    kwargs: Values = {"doom_config_path": os.devnull}  # it would save its settings in the working folder
    if 0 < cfg.res_w <= 160 and cfg.res_h <= 120:  # a third faster than the default 320x240
        kwargs["screen_resolution"] = ScreenResolution.RES_160X120
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # and leaves an empty folder there
        env = any_env(cfg, spec, render_mode, frame_skip=cfg.env_frameskip, **kwargs)
        env.reset()
    return env


def doom_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> Any:
    """Make one match of several players, with its own frame skip."""
    make = load_env_creator(spec.entry_point)  # what it makes is none of gymnasium's
    env = make(**spec.kwargs, frame_skip=cfg.env_frameskip, render_mode=render_mode)
    env.num_decisions = spec.max_episode_steps or env.num_decisions
    return env


def mujoco_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one MuJoCo environment that writes no log of its own: each would repeat the same notes about its model."""
    import mujoco  # noqa: PLC0415  optional package

    if hasattr(mujoco, "MjLogConfig"):  # since version 4
        log = mujoco.MjLogConfig.get()
        log.logto_file = log.logto_console = False
        log.set()
    return any_env(cfg, spec, render_mode)


# ---- Atari -------------------------------------------------------------------------------------------------------

NOOP_MAX = 30  # frames to wait at a reset
# what the C++ implementation knows of an id's arguments; with others, or a limit, gymnasium's wrappers play
ATARI_BATCH_KWARGS = {"game", "frameskip", "repeat_action_probability", "full_action_space",
                      "max_num_frames_per_episode"}


def atari_batch(cfg: Config, spec: EnvSpec, num_envs: int) -> gym.vector.VectorEnv | None:
    """Make the C++ implementation of the standard preprocessing, with the stickiness of the id.

    Frame skip with max-pooling over the last two frames, 84x84 gray, stacked frames, up to 30 no-ops and FIRE at
    a reset, whole games as episodes: a lost life ends none, only what counts for the actions before it. Rewards come
    unclipped, so that logged returns are true.
    """
    from ale_py.vector_env import AtariVectorEnv  # noqa: PLC0415  optional package

    if spec.max_episode_steps or spec.kwargs.keys() - ATARI_BATCH_KWARGS:
        return None
    kwargs = spec.kwargs | {"frameskip": cfg.env_frameskip, "stack_num": cfg.env_framestack, "num_threads": 1}
    return ChannelsLast(AtariVectorEnv(num_envs=num_envs, reward_clipping=False, noop_max=NOOP_MAX, **kwargs))


class ChannelsLast(gym.vector.VectorObservationWrapper):
    """Turns CxHxW images into HxWxC ones.

    Convolutions in bfloat16 are faster on those (`docs/tried.md`).
    """

    def __init__(self, env: gym.vector.VectorEnv) -> None:
        super().__init__(env)
        channels, height, width = env.single_observation_space.shape
        self.single_observation_space = spaces.Box(0, 255, (height, width, channels), np.uint8)

    def reset(self, *, seed: Sequence[int], **kwargs: Any) -> tuple[Any, Info]:
        return super().reset(seed=np.array(seed), **kwargs)  # ALE takes no list

    def observations(self, observations: np.ndarray) -> np.ndarray:
        import cv2  # noqa: PLC0415  slow to import

        num_envs, channels = observations.shape[:2]  # to OpenCV all images are one: twice as fast as one by one
        images = np.empty((num_envs, *self.single_observation_space.shape), np.uint8)
        planes = observations.reshape(num_envs, channels, -1).swapaxes(0, 1)
        cv2.merge(tuple(planes), images.reshape(num_envs, -1, channels))
        return images


def atari_env(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """Make one game from gymnasium's wrappers: the same observations as the C++ ones, and it can be rendered."""
    env = gym.make(spec, frameskip=1, render_mode=render_mode, disable_env_checker=True)
    env.metadata = {**env.metadata, "render_fps": 60}  # as the console; ALE says 30
    env = gym.wrappers.AtariPreprocessing(NoopFireReset(env), noop_max=0, frame_skip=cfg.env_frameskip)
    env = gym.wrappers.FrameStackObservation(env, cfg.env_framestack, padding_type="zero")
    channels_last = spaces.Box(0, 255, (84, 84, cfg.env_framestack), np.uint8)
    return gym.wrappers.TransformObservation(env, lambda frames: np.moveaxis(frames, 0, -1), channels_last)


class NoopFireReset(gym.Wrapper):
    """After a reset waits up to `NOOP_MAX` frames, then presses FIRE for one frame where the game may wait for it."""

    def reset(self, **kwargs: Any) -> tuple[Any, Info]:
        obs, info = self.env.reset(**kwargs)
        num_noops = self.unwrapped.np_random.integers(1, NOOP_MAX + 1) if NOOP_MAX else 0
        has_fire = "FIRE" in self.unwrapped.get_action_meanings()[1:2]
        for action in [0] * int(num_noops) + [1] * has_fire:
            obs, *_, info = self.env.step(action)
        return obs, info


# ---- the table ---------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """What environments of a kind have in common."""

    module: str  # the beginning of their entry points; of families that fit, the one with the longest counts
    # settings of `Config` that fit, as data. "num_envs" is the number of all environments on two cores, spread over the
    # rollout workers; "without_gpu" is what is set otherwise there
    profile: Values
    make: Callable[[Config, EnvSpec, str | None], Any] = any_env
    make_batch: Callable[[Config, EnvSpec, int], gym.vector.VectorEnv | None] = own_batch
    obeys: tuple[str, ...] = ("res_w", "res_h")  # of env_frameskip, env_framestack, res_w and res_h; others are refused
    ids: tuple[str, ...] = ()  # beginnings of the ids that importing `module` registers
    large_observations: bool = False
    like: str = ""  # the family whose profiles of the algorithms it uses; empty: its own


DOOM: Values = {  # what Doom's two families share
    "env_frameskip": 4, "res_w": 128, "res_h": 72, "encoder_conv_architecture": "convnet_simple",
    "encoder_mlp_layers": (128, 128)}

FAMILIES = {
    "classic_control": Family("gymnasium.envs.classic_control", {
        "train_for_env_steps": 500_000, "num_envs": 32, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh"}),
    "box2d": Family("gymnasium.envs.box2d", {
        "train_for_env_steps": 3_000_000, "num_envs": 32, "encoder_mlp_layers": (64, 64), "nonlinearity": "tanh"}),
    "mujoco": Family("gymnasium.envs.mujoco", {
        "num_envs": 32, "encoder_mlp_layers": (256, 256), "nonlinearity": "relu", "initial_stddev": 0.37}, mujoco_env),
    "minigrid": Family("minigrid", {
        "train_for_env_steps": 5_000_000, "num_envs": 32, "encoder_conv_architecture": "convnet_small",
        "encoder_conv_mlp_layers": (128,), "encoder_mlp_layers": (32,), "rnn_size": 128, "nonlinearity": "relu",
    }, minigrid_env, obeys=(), ids=("MiniGrid", "BabyAI")),
    "vizdoom": Family(
        "vizdoom.gymnasium_wrapper", {"num_envs": 16, **DOOM}, vizdoom_env,
        obeys=("env_frameskip", "res_w", "res_h"), ids=("Vizdoom",), large_observations=True),
    "doom": Family("envs.doom", {"num_envs": 8, **DOOM}, doom_env, obeys=("env_frameskip", "res_w", "res_h"),
                   ids=("doom_",), large_observations=True, like="vizdoom"),
    "atari": Family("ale_py", {
        "env_frameskip": 4, "env_framestack": 4, "reward_clip": 1.0, "num_envs": 64,
        "encoder_conv_architecture": "convnet_atari", "encoder_conv_mlp_layers": (512,),
        "without_gpu": {"num_envs": 32, "encoder_conv_architecture": "convnet_a3c", "encoder_conv_mlp_layers": (256,)},
    }, atari_env, atari_batch, obeys=("env_frameskip", "env_framestack"), ids=("",), large_observations=True),
    "pettingzoo": Family(PREFIX, {"num_envs": 32, "encoder_mlp_layers": (128, 128), "rnn_size": 128}),
    "other": Family("", {"num_envs": 32, "encoder_mlp_layers": (256, 256), "rnn_size": 128}),
}


# ---- by their names ----------------------------------------------------------------------------------------------


def find_spec(env_id: str) -> EnvSpec:
    """Look an environment id up, or the function that makes it.

    Raises `UserError` with what gymnasium says of an unknown id, or with the package to install.
    """
    if not env_id.strip():
        raise UserError("--env is missing, for example --env PongNoFrameskip-v4")
    if isinstance(env_id, Named):
        return env_id.value if isinstance(env_id.value, EnvSpec) else EnvSpec(id=env_id, entry_point=env_id.value)
    module, _, name = env_id.rpartition(":")
    with naming_failures(env_id, lambda: "its import"):
        if env_id.startswith(PREFIX):
            return EnvSpec(id=env_id, entry_point=pettingzoo_maker(env_id))
        if module and callable(found := getattr(import_module(module), name, None)):
            return EnvSpec(id=env_id, entry_point=found)
        for each in FAMILIES.values():
            if name.startswith(each.ids) and name not in gym.registry:
                import_module(each.module)
    try:
        return gym.spec(name if module else env_id)
    except gym.error.Error as error:
        raise UserError(f"--env={env_id} is unknown: {error}") from error


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
    spec, given = find_spec(cfg.env), json.loads(cfg.env_kwargs or "{}")
    if spec.id in gym.registry and "max_episode_steps" in given:
        spec = dataclasses.replace(spec, max_episode_steps=given.pop("max_episode_steps"))
    return dataclasses.replace(spec, kwargs={**spec.kwargs, **given})


def make_env(cfg: Config, render_mode: str | None = None) -> Any:
    """Make one environment with what its family wraps around it: gymnasium's, or one of several agents."""
    spec = spec_of(cfg)
    if makes_batches(spec):
        raise UserError(f"--env={cfg.env} makes a batch of environments, not one; call it yourself")
    return FAMILIES[family(cfg.env)].make(cfg, spec, render_mode)


def make_vector_env(cfg: Config, num_envs: int, render_mode: str | None = None) -> VectorEnv:
    """Make `num_envs` environments of `cfg.env`; with a render mode, ones that can be looked at (slower).

    Raises `UserError` with the install command when a package is missing, `EnvironmentFailure` for what they raise.
    """
    kind = FAMILIES[family(cfg.env)]
    for name in ("env_frameskip", "env_framestack", "res_w", "res_h"):
        if name not in kind.obeys and getattr(cfg, name) != getattr(type(cfg), name):
            raise UserError(f"--{name} is not for {cfg.env}; leave it at {getattr(type(cfg), name)}")
    resize = functools.partial(resized, (cfg.res_h, cfg.res_w)) if cfg.res_w else None
    with naming_failures(cfg.env, lambda: "its maker"):
        spec = spec_of(cfg)
        if makes_batches(spec):
            drawn = {"render_mode": render_mode} if render_mode else {}
            batch = OneSeed(spec.entry_point(num_envs=num_envs, **copy.deepcopy(spec.kwargs), **drawn))
        else:
            batch = kind.make_batch(cfg, spec, num_envs) if render_mode is None else None
        envs = [kind.make(cfg, spec, render_mode) for _ in range(num_envs)] if batch is None else []
        if envs and hasattr(envs[0], "possible_agents"):
            env = ParallelVectorEnv(envs, cfg.env, squash_actions=cfg.squash_actions, resize=resize)
        else:
            guards = [functools.partial(Guard, each) for each in envs]
            env = GymVectorEnv(gym.vector.SyncVectorEnv(guards, copy=False) if batch is None else batch, cfg.env,
                               squash_actions=cfg.squash_actions)
    env.objective = cfg.pbt_target_objective
    sizes = [leaf.shape[:2] for each in env.kinds for leaf in each.obs_space.values()]
    if cfg.res_w and (cfg.res_h, cfg.res_w) not in sizes:
        raise UserError("--res_w and --res_h need uint8 images of height x width x channels; leave them at 0")
    largest = float(np.finfo(np.float32).max)
    env.max_reward = largest if np.isfinite(cfg.reward_clip) else min(largest, LARGEST / cfg.reward_scale)
    return env


def probe(cfg: Config) -> EnvInfo:
    """Make, reset and step one environment to learn about it (an action mask may only show in the info of a reset).

    It is not stepped where a mask may forbid the first action.
    """
    with contextlib.closing(make_vector_env(cfg, 1)) as env:
        env.reset([derive_seed(cfg.seed, ENVIRONMENT, part=PROBED)])
        if not any(ACTION_MASK in kind.obs_space for kind in env.kinds):
            env.step(env.no_actions())
        return EnvInfo(env.agents, env.kind_of_agent, env.kinds, env.default_shaping)
