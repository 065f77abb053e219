"""Environment families that need a package of their own: found by their plain ids, they train and leave no files."""

import json
import multiprocessing.process
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from parts import make_config

from config import Config, defaults
from envs import families
from envs.families import make_vector_env
from envs.flat_spaces import hash_words, num_columns
from envs.vector_env import VectorEnv
from runtime.utils import UserError
from trainer import APPO

# Box2D's binding makes its types so; Python 3.12 warns of it
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


class Example(NamedTuple):
    """An environment and what it should look like."""

    env: str
    package: str
    family: str
    obs: dict[str, tuple[int, ...]]  # the shape of each leaf
    action_space: str  # the beginning of its text


SCREEN = {"gamevariables": (1,), "screen": (72, 128, 3)}
GRID = {"direction": (), "image": (7, 7, 21), "mission": (64,)}
EXAMPLES = [
    Example("LunarLander-v3", "Box2D", "box2d", {"obs": (8,)}, "Discrete(4)"),
    Example("HalfCheetah-v5", "mujoco", "mujoco", {"obs": (17,)}, "Box(-1.0, 1.0, (6,)"),
    Example("MiniGrid-GoToDoor-5x5-v0", "minigrid", "minigrid", GRID, "Discrete(7)"),
    Example("VizdoomBasic-v1", "vizdoom", "vizdoom", SCREEN, "Discrete(4)"),
    Example("VizdoomBasic-MultiBinary-v1", "vizdoom", "vizdoom", SCREEN, "MultiBinary(3)"),
    Example("Taxi-v4", "gymnasium", "other", {"obs": (), "action_mask": (6,)}, "Discrete(6)"),
]


@pytest.fixture(params=EXAMPLES, ids=[example.env for example in EXAMPLES])
def example(request: pytest.FixtureRequest) -> Example:
    """Return each example whose package is installed."""
    pytest.importorskip(request.param.package)
    return request.param


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder, child processes too, and check that it stays empty."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(multiprocessing.process, "ORIGINAL_DIR", str(folder))  # where children go
    yield
    assert not list(folder.iterdir())


def make_cfg(env: str, **settings: Any) -> Config:
    return make_config(defaults(env, settings), {"env": env, **settings})


def make(env: str, num_envs: int = 2, **settings: Any) -> VectorEnv:
    return make_vector_env(make_cfg(env, **settings), num_envs)


# ---- every family ----------------------------------------------------------------------------------------------------


def test_observations_and_actions_are_those_of_the_family_and_repeat_with_the_seed(example: Example) -> None:
    assert families.family(example.env) == example.family
    env, twin = make(example.env), make(example.env)
    step, same = env.reset(5), twin.reset(5)
    assert {name: space.shape for name, space in env.kinds[0].obs_space.items()} == example.obs
    assert str(env.kinds[0].action_space).startswith(example.action_space)
    generator = np.random.default_rng(1)
    for _ in range(6):
        for name, shape in example.obs.items():
            assert step.obs[0][name].shape == (2, *shape)
            np.testing.assert_array_equal(step.obs[0][name], same.obs[0][name])
        actions = [generator.integers(2, size=(2, num_columns(env.kinds[0].action_space))).astype(np.float32)]
        step, same = env.step(actions), twin.step(actions)


def test_trains(example: Example, tmp_path: Path) -> None:
    """VizDoom, which writes where it is started, in processes of its own."""
    small: dict[str, Any] = {
        "num_workers": 1, "num_envs_per_worker": 2, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 1,
        "num_epochs": 1, "encoder_conv_mlp_layers": (8,), "encoder_mlp_layers": (8,), "rnn_size": 8, "device": "cpu"}
    with APPO(example.env, train_dir=str(tmp_path), serial_mode=example.env != "VizdoomBasic-v1", **small) as appo:
        appo.train(100)
    summary = json.loads((appo.cfg.run_dir / "summary.json").read_text())
    assert summary["sgd_steps"] > 0
    profile = defaults(example.env, {"device": "cpu"})
    assert summary["env_frames"] == summary["env_steps"] * profile.get("env_frameskip", 1)
    assert appo.cfg.learning_rate == profile.get("learning_rate", type(appo.cfg).learning_rate)


# ---- rendering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "package"), [
    ("LunarLander-v3", "Box2D"), ("MiniGrid-Empty-5x5-v0", "minigrid"), ("VizdoomBasic-v1", "vizdoom"),
    ("Taxi-v4", "pygame")])
def test_picture_can_be_drawn_without_a_display(env: str, package: str) -> None:
    pytest.importorskip(package)
    draw(env)


def draw(env: str) -> None:
    """Draw an environment after one step; check that the picture shows something."""
    vector_env = make_vector_env(make_cfg(env), 1, "rgb_array")
    vector_env.reset(0)
    vector_env.step(vector_env.no_actions())
    picture = vector_env.render()
    assert (picture.dtype, picture.ndim, picture.shape[2]) == (np.uint8, 3, 3)
    assert picture.std() > 1
    assert 1 <= vector_env.frames_per_sec <= 100


def test_mujoco_picture_can_be_drawn_without_a_display() -> None:
    """In a process of its own: the variable must be set before MuJoCo is imported."""
    pytest.importorskip("mujoco")
    code = ("import mujoco; mujoco.GLContext(64, 64).free(); print('EGL'); import test_families; "
            "test_families.draw('HalfCheetah-v5')")
    drawn = subprocess.run([sys.executable, "-c", code], timeout=180, check=False, capture_output=True, text=True,
                           env={"MUJOCO_GL": "egl", "PYTHONPATH": ":".join(sys.path)})
    if "EGL" not in drawn.stdout:
        pytest.skip(f"no EGL here: {drawn.stderr.splitlines()[-1]}")
    assert drawn.returncode == 0, drawn.stderr


# ---- what is special in one family -----------------------------------------------------------------------------------


def test_mission_comes_as_the_set_of_its_words() -> None:
    pytest.importorskip("minigrid")
    env = make("MiniGrid-GoToDoor-5x5-v0", 8)
    (obs,) = env.reset(0).obs
    missions = [gym.make("MiniGrid-GoToDoor-5x5-v0").reset(seed=seed)[0]["mission"] for seed in range(8)]
    assert len(set(missions)) > 1
    assert (obs["mission"] == [hash_words(mission) for mission in missions]).all()


def test_cells_of_minigrid_become_planes_and_are_not_resized() -> None:
    minigrid = pytest.importorskip("minigrid")
    env = make("MiniGrid-Empty-5x5-v0", 1)
    planes = env.reset(0).obs[0]["image"][0]
    codes = minigrid.wrappers.gym.make("MiniGrid-Empty-5x5-v0").reset(seed=Config.seed)[0]["image"]
    for i, one_hot in enumerate(np.split(planes, [11, 17], -1)):
        assert ((one_hot == 255).sum(-1) == 1).all()
        np.testing.assert_array_equal(one_hot.argmax(-1), codes[..., i])
    with pytest.raises(UserError, match="--res_w is not for MiniGrid-Empty-5x5-v0"):
        make("MiniGrid-Empty-5x5-v0", res_w=20, res_h=10)


def test_doom_episode_ends_and_the_next_one_begins() -> None:
    """VizDoom has no observation after the last step; its Basic scenario lasts 300 frames."""
    pytest.importorskip("vizdoom")
    env = make("VizdoomBasic-v1", 1)
    env.reset(0)
    steps = [env.step(env.no_actions()) for _ in range(160)]
    assert [t for t, step in enumerate(steps, 1) if step.terminated[0] or step.truncated[0]] == [75, 151]
    assert [t for t, step in enumerate(steps, 1) if step.was_reset[0]] == [76, 152]
    assert steps[75].rewards[0] == 0


def test_taxi_gets_the_action_mask_of_its_info() -> None:
    env = make("Taxi-v4", 4)
    taxi = gym.make("Taxi-v4").unwrapped
    step = env.reset(0)
    generator = np.random.default_rng(0)
    num_ends = 0
    for _ in range(450):
        masks = step.obs[0]["action_mask"]
        expected = [np.ones(6) if over else taxi.action_mask(int(state))
                    for over, state in zip(step.terminated, step.obs[0]["obs"], strict=True)]
        np.testing.assert_array_equal(masks, expected)
        step = env.step([np.float32([[generator.choice(np.flatnonzero(mask))] for mask in masks])])
        assert (step.rewards > -10).all(), "no action was illegal"
        num_ends += (step.terminated | step.truncated).sum()
    assert num_ends >= 8
