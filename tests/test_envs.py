"""The environment families: Atari in C++ against gymnasium's wrappers, autoreset, time limits, masks, ids, packages."""

import copy
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.envs.registration import EnvSpec
from parts import make_config
from tiny import NUMBERS, Tiny

from config import Config, defaults
from envs import families
from envs.families import make_vector_env
from envs.vector_env import GymVectorEnv, Step, VectorEnv
from runtime.utils import UserError

PONG = "PongNoFrameskip-v4"


def make_cfg(env_id: str, **settings: Any) -> Config:
    return make_config(defaults(env_id, settings), {"env": env_id, **settings})


def make(env_id: str, num_envs: int = 2, **settings: Any) -> VectorEnv:
    return make_vector_env(make_cfg(env_id, **settings), num_envs)


def rows(*actions: float) -> list[np.ndarray]:
    """Return actions of one column as the rows that a vector environment takes."""
    return [np.array(actions, np.float32)[:, None]]


def image(step: Step) -> np.ndarray:
    return step.obs[0]["obs"].astype(int)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that registers an environment until the end of the test."""
    def register_env(entry_point: Any, **kwargs: Any) -> str:
        monkeypatch.setitem(gym.registry, "TinyForTest-v0", EnvSpec("TinyForTest-v0", entry_point, kwargs=kwargs))
        return "TinyForTest-v0"
    return register_env


# ---- Atari -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "seed", "extreme", "lives"), [
    (PONG, 5, -1, 0), ("BreakoutNoFrameskip-v4", 3, 1, 5), ("MsPacmanNoFrameskip-v4", 0, 10, 3)])
def test_atari_in_cpp_equals_gymnasiums_wrappers(env_id: str, seed: int, extreme: float, lives: int,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a whole game, rewards unclipped, and the reset at the next step. They differ in random no-ops: here none."""
    monkeypatch.setattr(families, "NOOP_MAX", 0)
    cfg = make_cfg(env_id)
    fast, slow = make_vector_env(cfg, 1), families.make_env(cfg)
    assert fast.kinds[0].action_space == slow.action_space
    step, (seen, _) = fast.reset(seed), slow.reset(seed=seed)
    actions = np.random.default_rng(0)
    rewards, is_over = [], False
    while not is_over:
        assert step.obs[0]["obs"].dtype == seen.dtype == np.uint8
        assert image(step)[0].shape == seen.shape == (84, 84, 4)
        assert np.abs(image(step)[0] - seen).max() <= 1, f"step {fast.num_steps}"
        action = actions.integers(slow.action_space.n)
        step = fast.step(rows(action))
        seen, *outcome, info = slow.step(action)
        assert [step.rewards[0], step.terminated[0], step.truncated[0]] == outcome, f"step {fast.num_steps}"
        assert step.life_lost[0] == (info["lives"] < lives)
        lives = info["lives"]
        rewards, is_over = [*rewards, outcome[0]], any(outcome[1:])
    assert np.abs(image(step)[0] - seen).max() <= 1, "the true final observation"
    assert fast.num_steps > 100
    assert (extreme in rewards, lives) == (True, 0)
    step = fast.step(rows(1))
    assert (step.was_reset[0], step.rewards[0], step.terminated[0], step.truncated[0]) == (True, 0, False, False)
    assert np.abs(image(step)[0] - slow.reset()[0]).max() <= 1


@pytest.mark.parametrize(("env_id", "stick"), [
    ("ALE/Pong-v5", True), (PONG, False), ("Pong-v0", True), ("Pong-v4", False)])
def test_actions_stick_where_the_id_says_so(env_id: str, stick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without no-ops nothing else in a game depends on the seed."""
    monkeypatch.setattr(families, "NOOP_MAX", 0)
    one, other = play(make(env_id), 7, 8).swapaxes(0, 1)
    assert (one != other).any() == stick


@pytest.mark.parametrize(("frameskip", "steps"), [(4, 25), (1, 100)])
def test_atari_obeys_frameskip_and_framestack_and_truncates_at_a_limit_of_frames(frameskip: int, steps: int) -> None:
    """So the 108,000 frames of every id are 27,000 env_steps at frameskip 4 (no-ops and FIRE come on top)."""
    spec = copy.deepcopy(families.find_spec(PONG))
    spec.kwargs["max_num_frames_per_episode"] = 100
    env = GymVectorEnv(families.atari_batch(make_cfg(PONG, env_frameskip=frameskip, env_framestack=3), spec, 2), PONG)
    assert image(env.reset(0)).shape == (2, 84, 84, 3)
    ends = [env.step(rows(0, 0)).truncated.all() for _ in range(2 * steps + 1)]  # the step between only resets
    assert np.flatnonzero(ends).tolist() == [steps - 1, 2 * steps]


# ---- autoreset and time limits ---------------------------------------------------------------------------------------


def test_only_the_finished_environment_resets_at_the_next_step() -> None:
    """Environment 0 falls again and again; environment 1 balances."""
    env = make("CartPole-v1")
    assert not isinstance(env._env, gym.vector.SyncVectorEnv), "CartPole has a vector environment of its own"
    step, resets = env.reset(0), 0
    for _ in range(40):
        was_over = step.terminated[0]
        balance = int(step.obs[0]["obs"][1, 2] + 0.3 * step.obs[0]["obs"][1, 3] > 0)
        step = env.step(rows(1, balance))
        obs = step.obs[0]["obs"]
        assert (step.was_reset.tolist(), step.rewards.tolist()) == ([was_over, False], [1 - was_over, 1])
        assert np.abs(obs[0]).max() <= 0.05 or not was_over, "a first observation"
        assert abs(obs[0, 2]) > 12 * np.pi / 180 or not step.terminated[0], "the final one is the fallen pole's"
        assert not (step.terminated[1] or step.truncated.any())
        resets += was_over
    assert resets >= 2


def test_pendulum_is_truncated_at_its_time_limit_and_resets_at_the_next_step() -> None:
    """The oracle is gymnasium's single environment, also beyond the end; environment i has the seed 7 + i."""
    env, alone = make("Pendulum-v1"), [gym.make("Pendulum-v1") for _ in range(2)]
    assert isinstance(env._env, gym.vector.SyncVectorEnv)
    step, seen = env.reset(7), [each.reset(seed=7 + i)[0] for i, each in enumerate(alone)]
    for t in range(1, 210):
        np.testing.assert_array_equal(step.obs[0]["obs"], seen)
        step = env.step(rows(0.5, 0.5))
        results = [(each.reset()[0], 0) if t == 201 else each.step(np.float32([1]))[:2] for each in alone]
        seen = [obs for obs, _ in results]
        assert step.rewards.tolist() == [reward for _, reward in results]
        assert (step.truncated == (t == 200)).all(), f"step {t}"
        assert not step.terminated.any()


def make_limited(max_episode_steps: int) -> Tiny:
    """Make an environment that has a time limit of its own, as an argument."""
    return Tiny(length=max_episode_steps, truncates=True)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1", "test_envs:make_limited", "NoVersion"])
def test_a_time_limit_is_given_as_to_gymnasiums_make(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, "NoVersion", EnvSpec("NoVersion", PendulumEnv))
    env = make(env_id, env_kwargs='{"max_episode_steps": 7}')
    env.reset(0)
    assert [t for t in range(1, 16) if env.step(rows(0, 0)).truncated.all()] == [7, 15]


def test_an_atari_game_may_have_a_time_limit() -> None:
    """Which the implementation in C++ does not know. Waiting for the first action takes 31 of the 40 frames at most."""
    env = make(PONG, 1, env_kwargs='{"max_episode_steps": 40}')
    env.reset(0)
    assert any(env.step(rows(0)).truncated.any() for _ in range(10))


# ---- seeds -----------------------------------------------------------------------------------------------------------


def play(env: VectorEnv, *seeds: int) -> np.ndarray:
    """Return the observations [61, N, ...] of random actions that are the same for every environment."""
    random, space = np.random.default_rng(0), env.kinds[0].action_space
    observations = [env.reset(seeds).obs[0]["obs"].copy()]
    for _ in range(60):
        action = random.integers(space.n) if isinstance(space, spaces.Discrete) else random.uniform(-1, 1)
        observations.append(env.step(rows(*[action] * env.num_envs)).obs[0]["obs"].copy())
    return np.stack(observations)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", PONG, "ALE/Breakout-v5"])
def test_the_same_seeds_begin_the_same_episodes_and_other_seeds_other_ones(env_id: str) -> None:
    env, twin = make(env_id), make(env_id)
    first = play(env, 2**31 - 2, 7)
    np.testing.assert_array_equal(first, play(twin, 2**31 - 2, 7))
    other = play(env, 8, 9)
    for i in range(2):
        assert (first[:, i] != other[:, i]).any(), f"environment {i} begins alike whatever the seed"
    assert (other[:, 0] != other[:, 1]).any(), "the environments are copies of each other"


# ---- infos and action masks ------------------------------------------------------------------------------------------


class Telling(Tiny):
    """Tells objectives and masks of different types, by its seed, and infos that nobody reads."""

    length = 1

    def info(self) -> dict[str, Any]:
        if self.t == 0:
            return {"action_mask": np.ones(2)}
        number = self.np_random_seed
        mask = [np.array([1, 0]), None, (np.array([0, 1]),), [True, True], np.ones(2), None][number]
        objective = [1, 0.4, np.float32(0.25), np.array([0.75]), None, 3.0][number]
        why = ["words", 3, None, {"deep": np.ones(number)}, (), 0][number]
        return {"action_mask": mask, "frags": objective, "true_objective": 7, "path": np.zeros(number), "why": why}


@pytest.mark.parametrize(("key", "expected"), [
    ("frags", [1, 0.4, 0.25, 0.75, np.nan, 3]), ("true_objective", [7] * 6), ("kills", [np.nan] * 6)])
def test_objectives_are_floats_whatever_the_first_environment_tells(register: Any, key: str, expected: list) -> None:
    """Gymnasium would make an array of the first one's type: 0.4 would become 0. Infos of any shape do no harm."""
    env = make(register(Telling), 6, pbt_target_objective=key)
    env.reset(0)
    np.testing.assert_array_equal(env.step(rows(*[0] * 6)).objectives, expected)
    for _ in range(2):  # a step that resets, and the next one
        step = env.step(rows(*[0] * 6))
    assert step.obs[0]["action_mask"].shape == (6, 2)


class Masked(Tiny):
    """Gives a mask with the info or the observation; each mask is the one before, moved on by one."""

    action_space = spaces.MultiDiscrete([2, 3])
    where = "info"

    def begin(self) -> None:
        self.mask = getattr(self, "mask", np.roll([1, 0, 1, 1, 0], self.np_random_seed))

    def observe(self) -> Any:
        self.mask = np.roll(self.mask, 1)
        self.given = np.concatenate([[1], self.mask[1:4], [1]]).astype(np.int8)  # each choice has an option left
        position = np.zeros(2, np.float32)
        return {"position": position, "action_mask": self.given} if self.where == "obs" else position

    def info(self) -> dict[str, Any]:
        return {"action_mask": (self.given[:2], self.given[2:].astype(bool))} if self.where == "info" else {}


class MasksByMethod(Masked):
    """Gives its masks as SB3-contrib has them."""

    where = "method"

    def action_masks(self) -> np.ndarray:
        assert self.t < self.length, "the episode has ended"
        return self.given


IN_OBS = {"where": "obs", "observation_space": spaces.Dict(position=NUMBERS, action_mask=spaces.MultiBinary(5))}


@pytest.mark.parametrize(("one", "parts"), [(MasksByMethod, {}), (Masked, {}), (Masked, IN_OBS)], ids=str)
def test_masks_come_with_the_observation_they_belong_to(register: Any, one: type[Masked], parts: dict) -> None:
    env = make(register(one, **parts))
    alone = [Masked(**IN_OBS) for _ in range(2)]
    step, expected = env.reset(4), [each.reset(seed=4 + i)[0] for i, each in enumerate(alone)]
    for t in range(1, 12):
        assert env.kinds[0].obs_space["action_mask"] == spaces.MultiBinary(5)
        masks = np.ones((2, 5)) if step.terminated.all() else [seen["action_mask"] for seen in expected]
        np.testing.assert_array_equal(step.obs[0]["action_mask"], masks)
        step = env.step([np.zeros((2, 2), np.float32)])
        expected = [each.reset()[0] if t % 4 == 0 else each.step(np.zeros(2, int))[0] for each in alone]
        assert (step.terminated == (t % 4 == 3)).all()


@pytest.mark.parametrize(("mask", "truncates", "expected"), [
    ([0, 1], True, [0, 1]),  # the best action of this state is asked for
    ([0, 0], True, [1, 1]), ([0, 1], False, [1, 1]), ([0, 0], False, [1, 1])])
def test_the_mask_of_an_episodes_last_observation_counts_across_a_time_limit(
        register: Any, mask: list[int], truncates: bool, expected: list[int]) -> None:
    class Last(Tiny):
        def info(self) -> dict[str, Any]:
            return {"action_mask": mask if self.t else [1, 1]}

    env = make(register(Last, length=1, truncates=truncates))
    env.reset(0)
    assert env.step(rows(0, 0)).obs[0]["action_mask"].tolist() == [expected] * 2


# ---- ids, packages, families -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "words"), [
    ("CartPol-v1", "is unknown: .*`CartPole`"), ("CartPole-v9", "is unknown: .*`v1`"),
    ("ALE/Pang-v5", "is unknown: .*`Pong`"), ("Pendulum-v0", "is unknown: .*`Pendulum-v1`"),
    ("failing_envs:make_stedy", "is unknown"), (" ", "--env is missing"), (":", "is unknown"),
    ("no such thing", "is unknown"), ("no_such_module:Env-v0", "No module named 'no_such_module'.*pip install")])
def test_an_unknown_id_is_refused_in_one_line_with_what_gymnasium_says(env_id: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        families.find_spec(env_id)
    assert "\n" not in str(refused.value)


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


@pytest.mark.parametrize("entry_point", [raise_not_installed, "foo:Missing"])
def test_missing_dependency_of_an_environment_gives_the_install_line(register: Any, entry_point: Any) -> None:
    with pytest.raises(UserError, match=r"^--env=TinyForTest-v0: .*pip install foo") as refused:
        make(register(entry_point))
    assert "\n" not in str(refused.value)


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
