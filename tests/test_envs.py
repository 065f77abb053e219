"""The environment families: Atari in C++ against gymnasium's wrappers, autoreset, time limits, spaces, masks, ids."""

import copy
import functools
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ale_py.vector_env
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.envs.registration import EnvSpec
from parts import make_config

from config import Config
from envs import families
from envs.families import make_vector_env
from envs.flat_spaces import num_columns
from envs.vector_env import EnvironmentFailure, GymVectorEnv, Step, VectorEnv
from runtime.machine import defaults
from runtime.user_error import UserError


def make_cfg(env_id: str, **settings: Any) -> Config:
    return make_config(defaults(env_id, settings), {"env": env_id, **settings})


def make(env_id: str, num_envs: int = 2, **settings: Any) -> VectorEnv:
    return make_vector_env(make_cfg(env_id, **settings), num_envs)


def rows(*actions: float) -> list[np.ndarray]:
    """Return actions of one column as the rows that a vector environment takes."""
    return [np.array(actions, np.float32)[:, None]]


class TinyEnv(gym.Env):
    """An environment of any spaces: random observations, never done. Refuses actions that are not of its space."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = obs_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.action = action
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.fixture
def register(request: pytest.FixtureRequest) -> Any:
    """Return a function that registers an environment until the end of the test."""
    def register_env(entry_point: Any, **kwargs: Any) -> str:
        gym.register("TinyForTest-v0", entry_point, kwargs=kwargs)
        request.addfinalizer(lambda: gym.registry.pop("TinyForTest-v0"))
        return "TinyForTest-v0"
    return register_env


# ---- Atari -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "seed"), [("PongNoFrameskip-v4", 5), ("BreakoutNoFrameskip-v4", 3)])
def test_atari_in_cpp_equals_gymnasiums_wrappers(env_id: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two differ only in their random no-ops, so here there are none."""
    original = ale_py.vector_env.AtariVectorEnv
    monkeypatch.setattr(ale_py.vector_env, "AtariVectorEnv",
                        lambda *args, **kwargs: original(*args, **kwargs | {"noop_max": 0}))
    cfg = make_cfg(env_id)
    fast = make_vector_env(cfg, 1)
    slow = families.atari_env(cfg, families.find_spec(env_id), None, noop_max=0)
    assert fast.kinds[0].action_space == slow.action_space
    fast_obs = fast.reset(seed).obs[0]["obs"]
    slow_obs, _ = slow.reset(seed=seed)
    actions = np.random.default_rng(0)
    fast_return = slow_return = 0.0
    done, steps = False, 0
    while not done:
        assert fast_obs.dtype == slow_obs.dtype == np.uint8
        assert fast_obs[0].shape == slow_obs.shape == (84, 84, 4)
        assert np.abs(fast_obs[0].astype(int) - slow_obs.astype(int)).max() <= 1, f"step {steps}"
        action = actions.integers(fast.kinds[0].action_space.n)
        (obs,), rewards, terminated, truncated, *_ = fast.step(rows(action))
        fast_obs = obs["obs"]
        slow_obs, reward, slow_terminated, slow_truncated, _ = slow.step(action)
        assert (rewards[0], terminated[0], truncated[0]) == (reward, slow_terminated, slow_truncated), f"step {steps}"
        fast_return, slow_return = fast_return + rewards[0], slow_return + reward
        done, steps = slow_terminated or slow_truncated, steps + 1
    assert np.abs(fast_obs[0].astype(int) - slow_obs.astype(int)).max() <= 1, "final observation"
    assert steps > 100
    assert fast_return == slow_return
    assert fast_return < 0 if "Pong" in env_id else fast_return > 0
    fast.close()
    slow.close()


@pytest.mark.parametrize(("env_id", "stickiness"), [
    ("ALE/Pong-v5", 0.25), ("PongNoFrameskip-v4", 0.0), ("Pong-v0", 0.25), ("Pong-v4", 0.0),
])
def test_atari_vector_has_the_stickiness_of_the_id(env_id: str, stickiness: float,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Mock(wraps=ale_py.vector_env.AtariVectorEnv)
    monkeypatch.setattr(ale_py.vector_env, "AtariVectorEnv", maker)
    make(env_id).close()
    made_with = maker.call_args.kwargs
    assert made_with["repeat_action_probability"] == stickiness
    assert (made_with["frameskip"], made_with["stack_num"]) == (4, 4)
    assert made_with["max_num_frames_per_episode"] == 108_000


def test_atari_rewards_are_not_clipped() -> None:
    env = make("MsPacmanNoFrameskip-v4")
    env.reset(0)
    actions = np.random.default_rng(0)
    num_actions = env.kinds[0].action_space.n
    assert max(env.step(rows(*actions.integers(num_actions, size=2))).rewards.max() for _ in range(100)) >= 10
    env.close()


@pytest.mark.parametrize(("frameskip", "steps"), [(4, 25), (1, 100)])
def test_atari_obeys_frameskip_and_framestack_and_truncates_at_a_limit_of_frames(frameskip: int, steps: int) -> None:
    """So the 108,000 frames of every id are 27,000 env_steps at frameskip 4 (no-ops and FIRE come on top)."""
    env_id = "PongNoFrameskip-v4"
    spec = copy.deepcopy(families.find_spec(env_id))
    spec.kwargs["max_num_frames_per_episode"] = 100
    cfg = make_cfg(env_id, env_frameskip=frameskip, env_framestack=3)
    env = GymVectorEnv(families.atari_batch(cfg, spec, 2), env_id)
    assert env.reset(0).obs[0]["obs"].shape == (2, 84, 84, 3)
    for step in range(1, 2 * steps + 2):  # two episodes and the step between them, which only resets
        _, _, terminated, truncated, *_ = env.step(rows(0, 0))
        assert not terminated.any()
        assert (truncated == (step in (steps, 2 * steps + 1))).all(), f"step {step}"
    env.close()


def test_atari_resets_at_the_next_step() -> None:
    """The ball is lost 21 times, then comes the final observation; the step after it begins a new game."""
    env = make("PongNoFrameskip-v4", 1)
    first = env.reset(0).obs[0]["obs"]
    done = False
    while not done:
        (obs,), _, terminated, truncated, *_ = env.step(rows(0))
        done = terminated[0] or truncated[0]
    assert terminated[0]
    assert not truncated[0]
    assert obs["obs"][0].any(axis=(1, 2)).all(), "the final observation has no padding of zeros"
    (obs,), rewards, terminated, truncated, *_ = env.step(rows(0))
    assert rewards[0] == 0
    assert not terminated[0]
    assert not truncated[0]
    assert (obs["obs"][0].any(axis=(1, 2)) == first[0].any(axis=(1, 2))).all(), "padded like any first observation"
    env.close()


# ---- autoreset and time limits ---------------------------------------------------------------------------------------


def test_cartpole_resets_at_the_next_step() -> None:
    """Pushing one way always fails within the angle's limit; both actions after that lead to one first observation."""
    afterwards = []
    for action in (0, 1):
        env = make("CartPole-v1", 1)
        assert not isinstance(env._env, gym.vector.SyncVectorEnv), "CartPole has a vector environment of its own"
        env.reset(0)
        terminated = np.array([False])
        while not terminated[0]:
            (obs,), rewards, terminated, truncated, *_ = env.step(rows(1))
            assert rewards[0] == 1
            assert not truncated[0]
        assert abs(obs["obs"][0, 2]) > 12 * np.pi / 180, "the final observation is the fallen pole's"
        (obs,), rewards, terminated, truncated, *_ = env.step(rows(action))
        assert np.abs(obs["obs"]).max() <= 0.05, "a first observation"
        assert rewards[0] == 0
        assert not terminated[0]
        assert not truncated[0]
        afterwards.append(obs["obs"])
        assert np.abs(env.step(rows(action)).obs[0]["obs"] - obs["obs"]).max() > 0.1, "the next action counts again"
    assert (afterwards[0] == afterwards[1]).all()


def test_only_the_finished_environment_resets() -> None:
    """Environment 0 falls again and again, environment 1 balances and is not touched by it."""
    env, neighbor_balances = make("CartPole-v1"), make("CartPole-v1")
    obs = env.reset(0).obs[0]["obs"]
    neighbor_balances.reset(0)
    resets = 0
    for _ in range(40):
        balancing = int(obs[1, 2] + 0.3 * obs[1, 3] > 0)
        (named,), rewards, terminated, truncated, _, begins, _ = env.step(rows(1, balancing))
        obs = named["obs"]
        assert begins.tolist() == [rewards[0] == 0, False]
        resets += begins[0]
        assert rewards[1] == 1
        assert not terminated[1]
        assert not truncated.any()
        assert np.allclose(obs[1], neighbor_balances.step(rows(balancing, balancing)).obs[0]["obs"][1], atol=1e-6)
    assert resets >= 2


def test_pendulum_is_truncated_at_its_time_limit_and_resets_at_the_next_step() -> None:
    env = make("Pendulum-v1")
    assert isinstance(env._env, gym.vector.SyncVectorEnv)
    env.reset(0)
    actions = rows(0.5, 0.5)
    for step in range(1, 201):
        before = [single.unwrapped.state for single in env._env.envs]
        (obs,), rewards, terminated, truncated, *_ = env.step(actions)
        assert not terminated.any()
        assert (truncated == (step == 200)).all(), f"step {step}"
    for i, (old_angle, old_speed) in enumerate(before):  # the dynamics of Pendulum, torque 0.5 * 2
        speed = np.clip(old_speed + (15 * np.sin(old_angle) + 3 * 1.0) * 0.05, -8, 8)
        angle = old_angle + speed * 0.05
        assert np.allclose(obs["obs"][i], [np.cos(angle), np.sin(angle), speed], atol=1e-5), "the true final one"
    (obs,), rewards, terminated, truncated, *_ = env.step(actions)
    assert (rewards == 0).all()
    assert not terminated.any()
    assert not truncated.any()
    assert (np.abs(obs["obs"][:, 2]) <= 1).all(), "a first observation is slow"
    for i, single in enumerate(env._env.envs):
        assert np.allclose(obs["obs"][i], single.unwrapped._get_obs()), "no torque has acted on it"
    _, rewards, _, truncated, *_ = env.step(actions)
    assert (rewards < 0).all()
    assert not truncated.any()


class Limits(TinyEnv):
    """Has a time limit of its own, as an argument."""

    def __init__(self, max_episode_steps: int) -> None:
        super().__init__(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
        self.limit, self.t = max_episode_steps, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return *super().step(action)[:3], self.t % self.limit == 0, {}


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1", "test_envs:Limits", "NoVersion"])
def test_a_time_limit_is_given_as_to_gymnasiums_make(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, "NoVersion", EnvSpec("NoVersion", PendulumEnv))
    env = make(env_id, env_kwargs='{"max_episode_steps": 7}')
    env.reset(0)
    assert [t for t in range(1, 16) if env.step(rows(0, 0)).truncated.all()] == [7, 15]


def test_an_atari_game_may_have_a_time_limit() -> None:
    """Which the implementation in C++ does not know. Waiting for the first action takes 31 of the 40 frames at most."""
    env = make("PongNoFrameskip-v4", 1, env_kwargs='{"max_episode_steps": 40}')
    env.reset(0)
    assert any(env.step(rows(0)).truncated.any() for _ in range(10))


def test_the_frames_of_a_step_are_not_given_twice() -> None:
    with pytest.raises(UserError, match="frameskip is --env_frameskip here"):
        make("PongNoFrameskip-v4", env_kwargs='{"frameskip": 2}')


# ---- seeds -----------------------------------------------------------------------------------------------------------


def play(env: VectorEnv, seed: int | list[int], steps: int = 60) -> np.ndarray:
    """Return the observations [steps + 1, N, ...] of random actions that are the same for every environment."""
    random, space = np.random.default_rng(0), env.kinds[0].action_space
    observations = [env.reset(seed).obs[0]["obs"].copy()]
    for _ in range(steps):
        if isinstance(space, spaces.Discrete):
            actions = np.full((env.num_envs, 1), random.integers(space.n), np.float32)
        else:
            actions = np.repeat(random.uniform(-1, 1, (1, *space.shape)), env.num_envs, 0).astype(np.float32)
        observations.append(env.step([actions]).obs[0]["obs"].copy())
    return np.stack(observations)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "PongNoFrameskip-v4", "ALE/Breakout-v5"])
def test_the_same_seeds_begin_the_same_episodes_and_other_seeds_other_ones(env_id: str) -> None:
    env, twin = make(env_id), make(env_id)
    first = play(env, [2**31 - 2, 7])
    np.testing.assert_array_equal(first, play(twin, [2**31 - 2, 7]))
    other = play(env, [8, 9])
    for i in range(2):
        assert (first[:, i] != other[:, i]).any(), f"environment {i} begins alike whatever the seed"
    assert (other[:, 0] != other[:, 1]).any(), "the environments are copies of each other"
    env.close()
    twin.close()


def test_environment_i_is_seeded_with_seed_plus_i() -> None:
    env = make("Pendulum-v1")
    assert (play(env, 7, 5)[:, 1] == play(env, 8, 5)[:, 0]).all()


# ---- spaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [np.finfo(np.float32).max, 2e38, 1.7e38, 1e6])
def test_actions_of_a_huge_box_are_finite(register: Any, far: float) -> None:
    """A range that float32 cannot hold is none: the number itself is the action."""
    box = spaces.Box(np.float32(-far), np.float32(far), (2,), np.float32)
    env = make(register(TinyEnv, obs_space=spaces.Box(-1, 1, (2,)), action_space=box), 3)
    env.reset(0)
    env.step([np.array([[0.5, -0.5], [-1, 1], [7, 0]], np.float32)])
    taken = np.stack([single.unwrapped.action for single in env._env.envs])
    expected = [[0.5, -0.5], [-1, 1], [7, 0]]
    if far < 1.8e38:
        expected = np.clip(np.array(expected), -1, 1) * far
    np.testing.assert_allclose(taken, expected, rtol=1e-6)


class Telling(TinyEnv):
    """Tells an objective: an int in the first environment, else a float or an array; and infos that nobody reads."""

    made = 0

    def __init__(self) -> None:
        super().__init__(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
        self.number, Telling.made = Telling.made, Telling.made + 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"action_mask": np.ones(2)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_ = super().step(action)
        info = [{"true_objective": objective} for objective in (1, 0.4, np.float32(0.25), np.array([0.75]), None)]
        info = [*info, {}][self.number]
        info["action_mask"] = [np.array([1, 0]), None, (np.array([0, 1]),), [True, True], np.ones(2), None][self.number]
        why = ["words", 3, None, {"deep": np.ones(self.number)}, (), 0][self.number]
        shapes = {"path": np.zeros(3 + self.number), "why": why}
        return obs, reward, True, False, info | shapes


def test_objectives_are_floats_whatever_the_first_environment_tells(register: Any) -> None:
    """Gymnasium makes an array of the first one's type: 0.4 would become 0. Infos of any shape do no harm."""
    Telling.made = 0
    env = make(register(Telling), 6)
    env.reset(0)
    np.testing.assert_array_equal(env.step(rows(*[0] * 6)).objectives, [1, 0.4, 0.25, 0.75, np.nan, np.nan])
    for _ in range(2):  # a step that resets, and the next one
        step = env.step(rows(*[0] * 6))
    assert step.obs[0]["action_mask"].shape == (6, 2)


class Halves(TinyEnv):
    """Observations of 16 bits, which cannot hold what is refused; the second one is infinite."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(-np.inf, np.inf, (2,), np.float16), spaces.Discrete(2))
        self.numbers = iter((60000.0, math.inf))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(2, next(self.numbers), np.float16), *super().step(action)[1:]


def test_infinity_in_16_bits_is_refused_too(register: Any) -> None:
    env = make(register(Halves))
    env.reset(3)
    env.step(rows(0, 0))
    with pytest.raises(EnvironmentFailure, match="seed 3, step 2: observation 'obs' is not finite"):
        env.step(rows(0, 0))


VECTOR, IMAGE = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (8, 8, 3), np.uint8)


@pytest.mark.parametrize("obs_space", [
    spaces.Discrete(4, start=2), spaces.Box(-1, 1, (3, 4)), spaces.Box(-1, 1, ()), spaces.MultiBinary(4),
    spaces.Text(12), spaces.Dict(near=VECTOR, kind=spaces.Discrete(4), deep=spaces.Dict(far=IMAGE)),
    spaces.Tuple((VECTOR, IMAGE, spaces.MultiDiscrete([[2, 3]]))),
])
def test_observations_are_those_of_the_declared_leaves(register: Any, obs_space: spaces.Space) -> None:
    env = make(register(TinyEnv, obs_space=obs_space, action_space=spaces.Discrete(2)), 3)
    for (obs,) in (env.reset(0).obs, env.step(rows(0, 1, 0)).obs):
        assert obs.keys() == env.kinds[0].obs_space.keys()
        for name, leaf in env.kinds[0].obs_space.items():
            assert obs[name].shape == (3, *leaf.shape)
            batch = obs[name] if isinstance(leaf, spaces.Discrete) else obs[name].astype(leaf.dtype)
            assert all(leaf.contains(value) for value in batch)


@pytest.mark.parametrize("action_space", [
    spaces.Discrete(2, start=5), spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, 4]]),
    spaces.MultiBinary(3), spaces.Box(-1, 1, (2, 2)),
    spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2, start=-4))),
    spaces.Dict(hand=spaces.Discrete(2), arm=spaces.Dict(turn=spaces.Box(-2, 3, (1,)), keys=spaces.MultiBinary(2))),
])
def test_the_environment_gets_actions_of_its_space(register: Any, action_space: spaces.Space) -> None:
    """Which `TinyEnv` asserts."""
    env = make(register(TinyEnv, obs_space=VECTOR, action_space=action_space), 3)
    env.reset(0)
    for bit in (0, 1):
        env.step([np.full((3, num_columns(action_space)), bit, np.float32)])


# ---- action masks ----------------------------------------------------------------------------------------------------


class MaskedEnv(gym.Env):
    """Gives a mask with the info or the observation; each mask is the one before, moved on by one; 3 steps long."""

    def __init__(self, in_info: bool, split: bool) -> None:
        self.in_info, self.split = in_info, split
        self.action_space = spaces.MultiDiscrete([2, 3])
        self.observation_space = VECTOR if in_info else spaces.Dict(
            position=VECTOR, action_mask=spaces.MultiBinary(5))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.mask = np.roll([1, 0, 1, 1, 0], seed)
        self.t = 0
        return self.observe()

    def observe(self) -> tuple[Any, dict[str, Any]]:
        self.mask = np.roll(self.mask, 1)
        mask = np.concatenate([[1], self.mask[1:4], [1]]).astype(np.int8)  # so that each choice has an option left
        position = np.zeros(3, np.float32)
        if self.in_info:
            return position, {"action_mask": (mask[:2], mask[2:].astype(bool)) if self.split else mask}
        return {"position": position, "action_mask": mask}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        obs, info = self.observe()
        return obs, 0.0, self.t == 3, False, info


class MasksByMethod(MaskedEnv):
    """Gives its masks as SB3-contrib has them."""

    def observe(self) -> tuple[Any, dict[str, Any]]:
        obs, info = super().observe()
        self.found = info.pop("action_mask")
        return obs, info

    def action_masks(self) -> np.ndarray:
        assert self.t < 3, "the episode has ended"
        return self.found


@pytest.mark.parametrize("make_one", [
    functools.partial(MasksByMethod, in_info=True, split=False),
    *(functools.partial(MaskedEnv, in_info=in_info, split=split) for in_info, split in (
        (True, False), (True, True), (False, False)))])
def test_masks_come_with_the_observation_they_belong_to(register: Any, make_one: Any) -> None:
    env = make(register(make_one))
    alone = [MaskedEnv(in_info=False, split=False) for _ in range(2)]

    def check(step: Step, expected: list[dict[str, Any]], done: bool) -> None:
        (obs,) = step.obs
        assert obs.keys() == env.kinds[0].obs_space.keys()
        assert env.kinds[0].obs_space["action_mask"] == spaces.MultiBinary(5)
        masks = np.ones((2, 5)) if done else np.stack([one["action_mask"] for one in expected])
        assert (obs["action_mask"] == masks).all()

    check(env.reset(4), [one.reset(seed=4 + i)[0] for i, one in enumerate(alone)], done=False)
    for step in range(1, 12):
        result = env.step([np.zeros((2, 2), np.float32)])
        assert (result.terminated == (step % 4 == 3)).all()
        check(result, [one.reset()[0] if step % 4 == 0 else one.step(None)[0] for one in alone], done=step % 4 == 3)


class LastMaskEnv(gym.Env):
    """Ends after one step; its last mask is a given one."""

    observation_space = spaces.Dict(position=VECTOR, action_mask=spaces.MultiBinary(3))
    action_space = spaces.Discrete(3)

    def __init__(self, mask: list[int], truncates: bool) -> None:
        self.mask, self.truncates = mask, truncates

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"position": np.zeros(3, np.float32), "action_mask": np.ones(3, np.int8)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs = {"position": np.ones(3, np.float32), "action_mask": np.array(self.mask, np.int8)}
        return obs, 0.0, not self.truncates, self.truncates, {}


@pytest.mark.parametrize(("mask", "truncates", "expected"), [
    ([0, 1, 0], True, [0, 1, 0]),  # the best action of this state is asked for
    ([0, 0, 0], True, [1, 1, 1]),
    ([0, 1, 0], False, [1, 1, 1]), ([0, 0, 0], False, [1, 1, 1])])
def test_the_mask_of_an_episodes_last_observation_counts_across_a_time_limit(
        register: Any, mask: list[int], truncates: bool, expected: list[int]) -> None:
    env = make(register(LastMaskEnv, mask=mask, truncates=truncates))
    env.reset(0)
    step = env.step([np.zeros((2, 1), np.float32)])
    assert (step.obs[0]["action_mask"] == np.array(expected)).all()


# ---- ids, packages, profiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "meant"), [
    ("CartPol-v1", "`CartPole`"), ("cartpole-v1", "`CartPole`"), ("CartPole-v9", "`v1`"), ("ALE/Pang-v5", "`Pong`"),
    ("Pendulum-v0", "`Pendulum-v1`"), ("failing_envs:make_stedy", ""),
    ("", ""), (" ", ""), (":", ""), (":CartPole-v1", ""), ("no such thing", ""), ("Xyzzyqqq/Wvut-v3", "")])
def test_an_unknown_id_is_refused_in_one_line_with_what_gymnasium_says(env_id: str, meant: str) -> None:
    with pytest.raises(UserError) as refused:
        families.find_spec(env_id)
    assert str(refused.value).startswith(f"--env={env_id} is unknown: " if env_id.strip() else "--env is missing")
    assert meant in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_a_module_misses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_for_test.py").write_text("import not_installed_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="No module named 'not_installed_at_all'"):
        families.find_spec("module_for_test:Env-v0")


def test_a_module_prefix_imports_the_module(tmp_path: Path, request: pytest.FixtureRequest,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    name, registered = "good_module_for_test:TinyOfModule-v0", "TinyOfModule-v0"
    (tmp_path / "good_module_for_test.py").write_text(
        f"import gymnasium\ngymnasium.register('{registered}', 'gymnasium.envs.classic_control:PendulumEnv')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "good_module_for_test", raising=False)
    request.addfinalizer(lambda: gym.registry.pop(registered))
    assert make(name).reset(0).obs[0]["obs"].shape == (2, 3)
    assert families.find_spec(name).id == registered, "it is not registered twice"


def raise_not_installed(**_: Any) -> None:
    raise gym.error.DependencyNotInstalled("Foo is not installed, run `pip install foo`\nand more")


def import_missing(**_: Any) -> None:
    import foo  # noqa: F401, PLC0415


@pytest.mark.parametrize("entry_point", [raise_not_installed, import_missing])
def test_missing_dependency_of_an_environment_gives_the_install_line(register: Any, entry_point: Any) -> None:
    env_id = register(entry_point)
    with pytest.raises(UserError) as refused:
        make(env_id)
    text = str(refused.value)
    assert text.startswith(f"--env={env_id}: ")
    assert "pip install foo" in text
    assert "\n" not in text


def test_a_family_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings, also those of an algorithm, its maker and what it obeys; a longer beginning of a module counts."""
    def make_slow(cfg: Config, spec: EnvSpec, render_mode: str | None) -> gym.Env:
        return gym.make(spec, render_mode=render_mode, g=float(cfg.env_frameskip))

    monkeypatch.setitem(families.FAMILIES, "swings", families.Family(
        "gymnasium.envs.classic_control.pendulum", {"env_frameskip": 3, "num_envs": 8, "gamma": 0.9}, make_slow,
        obeys=("env_frameskip",)))
    cfg = make_cfg("Pendulum-v1", num_workers=1)
    assert (families.family("Pendulum-v1"), families.family("CartPole-v1")) == ("swings", "classic_control")
    assert (cfg.gamma, cfg.num_envs_per_worker) == (0.9, 8)
    assert make_vector_env(cfg, 1)._env.envs[0].unwrapped.g == 3
    with pytest.raises(UserError, match="--res_w is not for Pendulum-v1; leave it at 0"):
        make("Pendulum-v1", res_w=8, res_h=8)


@pytest.mark.parametrize(("env_id", "family"), [
    ("PongNoFrameskip-v4", "atari"), ("ALE/Breakout-v5", "atari"), ("CartPole-v1", "classic_control"),
    ("Pendulum-v1", "classic_control"), ("FrozenLake-v1", "other"),
])
def test_families(env_id: str, family: str) -> None:
    assert families.family(env_id) == family


# ---- another key of the infos ----------------------------------------------------------------------------------------


class TellsFrags(TinyEnv):
    """Tells two numbers, at the end of its episode."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_ = super().step(action)
        return obs, reward, True, False, {"frags": 3, "true_objective": 7.0}


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, 7.0), ({"pbt_target_objective": "frags"}, 3.0), ({"pbt_target_objective": "kills"}, np.nan)])
def test_the_objective_is_read_under_the_key_that_is_named(register: Any, settings: dict[str, str],
                                                           expected: float) -> None:
    env = make(register(TellsFrags, obs_space=spaces.Box(-1, 1, (2,)), action_space=spaces.Discrete(2)),
               **settings)
    env.reset(0)
    np.testing.assert_array_equal(env.step(rows(0, 0)).objectives, [expected] * 2)
