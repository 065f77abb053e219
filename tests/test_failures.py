"""What goes wrong in an environment stops the run and says which environment, which seed and which step it was."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import failing_envs
import gymnasium as gym
import numpy as np
import pytest
from failing_envs import EPISODE_LENGTH, FAILING_RESET, FAILING_SEED, FAILING_STEP, SEED
from parts import learners

import train
from appo import APPO
from config import make_config
from envs import families
from envs.families import make_vector_env
from envs.vector_env import EnvironmentFailure, VectorEnv
from runtime.user_error import UserError

SMALL: dict[str, Any] = {
    "num_workers": 1, "num_envs_per_worker": 4, "worker_num_splits": 2, "rollout": 8, "batch_size": 32,
    "encoder_conv_mlp_layers": (8,), "encoder_mlp_layers": (8,), "encoder_conv_architecture": "convnet_small",
    "device": "cpu", "seed": SEED}


def make(name: str, num_envs: int = 2) -> VectorEnv:
    return make_vector_env(make_config({"env": f"failing_envs:{name}"}), num_envs)


@pytest.fixture
def command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """Return a function that calls train.py's command in this process and returns its status and its errors."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(env: str, *flags: str) -> tuple[int, str]:
        small = [f"--{name}={value[0] if isinstance(value, tuple) else value}" for name, value in SMALL.items()]
        status = train.main([f"--env={env}", f"--train_dir={tmp_path}", *small, *flags])
        assert not multiprocessing.active_children()
        return status, capfd.readouterr().err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- failures while sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "step", "what"), [
    ("NanObservation", FAILING_STEP, "observation 'obs' is not finite: [nan nan]"),
    ("InfinityInDict", FAILING_STEP, "observation 'body/speed' is not finite: [ 0. inf]"),
    ("NanAfterReset", FAILING_RESET, "observation 'obs' is not finite: [nan nan]"),
    ("NanReward", FAILING_STEP, "reward is not finite: nan"),
    ("InfiniteReward", FAILING_STEP, "reward is not finite: -inf"),
    ("HugeReward", FAILING_STEP, "reward is out of range: 1e+30; use --reward_clip, or a smaller --reward_scale"),
    ("HugeObservation", FAILING_STEP, "observation 'obs' is out of range: [-1.e+30 -1.e+30]"),
    ("StepRaises", FAILING_STEP, "step() raised ValueError: the wheel came off"),
    ("ResetRaises", FAILING_RESET, "reset() raised KeyError: 'no more levels'"),
    ("NothingAllowed", FAILING_STEP, "the action mask forbids every action"),
    ("NothingAllowedInObservation", FAILING_STEP, "the action mask forbids every action"),
])
def test_failure_names_the_environment_its_seed_and_the_step(tmp_path: Path, name: str, step: int, what: str) -> None:
    with (pytest.raises(EnvironmentFailure) as failure,
          APPO(f"failing_envs:{name}", train_dir=str(tmp_path), serial_mode=True, **SMALL) as appo):
        appo.train()
    assert str(failure.value) == f"failing_envs:{name}, seed {FAILING_SEED}, step {step}: {what}"
    assert str(failure.value) in (appo.cfg.run_dir / "log.txt").read_text()


@pytest.mark.parametrize("settings", [{"reward_clip": 1.0}, {"reward_scale": 1e-20}])
def test_a_huge_reward_can_be_clipped_or_scaled(tmp_path: Path, settings: dict[str, float]) -> None:
    with APPO("failing_envs:HugeReward", train_dir=str(tmp_path), serial_mode=True, **SMALL | settings) as appo:
        appo.train(500)
        assert all(tensor.isfinite().all() for tensor in learners(appo)[0].model.state_dict().values())


@pytest.mark.parametrize("name", ["LargeReward", "LargeObservation"])
def test_large_numbers_are_learned_from(tmp_path: Path, name: str) -> None:
    """Nothing overflows just below what is refused."""
    with APPO(f"failing_envs:{name}", train_dir=str(tmp_path), serial_mode=True, gamma=0.9999, **SMALL) as appo:
        appo.train(500)
        assert all(tensor.isfinite().all() for tensor in learners(appo)[0].model.state_dict().values())


@pytest.mark.parametrize("action_mask", [True, False])
def test_finite_numbers_pass(action_mask: bool) -> None:
    env = make("NothingAllowed" if action_mask else "NanObservation", 4)
    env.reset(FAILING_SEED + 1)
    for _ in range(2 * FAILING_RESET):
        env.step([np.zeros((4, 1), np.float32)])
    env.close()


def test_first_observation_is_checked() -> None:
    env = make("NanAtFirst")
    env.reset(FAILING_SEED + 1)
    with pytest.raises(EnvironmentFailure, match=f"NanAtFirst, seed {FAILING_SEED}, step 0: observation 'obs'"):
        env.reset(FAILING_SEED - 1)


@pytest.mark.parametrize("name", ["NanReward", "StepRaises", "ResetRaises"])
def test_steps_are_counted_from_the_last_seeded_reset(name: str) -> None:
    env = make(name, 1)
    for _ in range(2):
        env.reset(FAILING_SEED + 1)
        for _ in range(3):
            env.step([np.zeros((1, 1), np.float32)])
    env.reset(FAILING_SEED)
    with pytest.raises(EnvironmentFailure, match=f"step {FAILING_RESET if name == 'ResetRaises' else FAILING_STEP}:"):
        for _ in range(2 * FAILING_RESET):
            env.step([np.zeros((1, 1), np.float32)])


def test_run_with_a_nan_ends_with_status_1(command: Callable[..., tuple[int, str]]) -> None:
    status, error = command("failing_envs:NanObservation")
    assert status == 1
    assert error.startswith("train.py: rollout_worker_0 failed\nTraceback")
    assert error.rstrip().endswith(f"EnvironmentFailure: failing_envs:NanObservation, seed {FAILING_SEED}, step 6: "
                                   "observation 'obs' is not finite: [nan nan]")


def test_environment_that_raises_shows_its_own_traceback() -> None:
    env = make("StepRaises")
    env.reset(FAILING_SEED)
    with pytest.raises(EnvironmentFailure) as failure:
        for _ in range(FAILING_STEP):
            env.step([np.zeros((2, 1), np.float32)])
    own, ours = "".join(traceback.format_exception(failure.value)).split("The above exception was the direct cause")
    assert f'File "{failing_envs.__file__}"' in own
    assert "ValueError: the wheel came off" in own.splitlines()
    assert ours.endswith(f"StepRaises, seed {FAILING_SEED}, step 6: step() raised ValueError: the wheel came off\n")


# ---- masks and spaces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fragments"), [
    ("ShortMask", ["an action mask has 2 entries", "Discrete(3) has 3 options"]),
    ("MaskOfNoChoices", ["gives action masks", "has no choices to mask"]),
    ("GraphInDict", ["observation 'map' is Graph(", "supported are Box"]),
    ("SequenceOfActions", ["part '1' of the action space is Sequence(Discrete(2)", "supported are Discrete"]),
])
def test_spaces_and_masks_that_cannot_be_used_are_refused_with_one_line(
        command: Callable[..., tuple[int, str]], tmp_path: Path, name: str, fragments: list[str]) -> None:
    status, error = command(f"failing_envs:{name}", "--serial_mode")
    assert status == 2
    assert_one_line(error, fragments)
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.parametrize("mode", ["--serial_mode", "--async_rl"])
def test_what_only_a_worker_can_refuse_is_one_line_too(command: Callable[..., tuple[int, str]], mode: str) -> None:
    status, error = command("failing_envs:LateMask", mode)
    assert status == 2
    assert_one_line(error, ["failing_envs:LateMask: info['action_mask'] comes from step() but not from reset()"])


def assert_one_line(text: str, fragments: list[str]) -> None:
    assert text.count("\n") == (1 if text.endswith("\n") else 0), text
    for fragment in fragments:
        assert fragment in text, text


# ---- packages that are missing ---------------------------------------------------------------------------------------


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a package look as if it were not installed."""
    def hide_package(package: str) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        registry = {name: spec for name, spec in gym.registry.items()
                    if not str(spec.entry_point).startswith(package)}
        monkeypatch.setattr(gym.envs.registration, "registry", registry)
        monkeypatch.setattr(gym, "registry", registry)
    return hide_package


@pytest.mark.parametrize(("package", "env_id", "install"), [
    ("vizdoom", "VizdoomBasic-v1", "pip install vizdoom"),
    ("minigrid", "MiniGrid-Empty-5x5-v0", "pip install minigrid"),
    ("minigrid", "BabyAI-GoToLocal-v0", "pip install minigrid"),
    ("ale_py", "ALE/Pong-v5", "pip install ale-py"),
    ("ale_py", "PongNoFrameskip-v4", "pip install ale-py"),
    ("mujoco", "HalfCheetah-v5", "pip install 'gymnasium[mujoco]'"),
    ("Box2D", "LunarLander-v3", 'pip install "gymnasium[box2d]"'),
])
def test_missing_package_is_one_line_with_the_command_that_installs_it(
        hide: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, package: str, env_id: str, install: str) -> None:
    hide(package)
    if package in ("mujoco", "Box2D"):  # gymnasium's own modules are there, but cannot be imported
        for name in [name for name in sys.modules if name.startswith(f"gymnasium.envs.{package.lower()}.")]:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError) as refusal:
        make_vector_env(make_config({"env": env_id}), 1)
    assert_one_line(str(refusal.value), [f"--env={env_id}", install])


# ---- settings that an environment does not have ----------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "settings", "fragments"), [
    ("CartPole-v1", {"res_w": 64}, ["--res_w and --res_h belong together"]),
    ("CartPole-v1", {"res_h": 64}, ["--res_w and --res_h belong together"]),
    ("CartPole-v1", {"res_w": 64, "res_h": 64}, ["--res_w and --res_h need uint8 images", "leave them at 0"]),
    ("PongNoFrameskip-v4", {"res_w": 64, "res_h": 64}, ["not for Atari", "leave them at 0"]),
    ("CartPole-v1", {"env_frameskip": 4}, ["--env_frameskip is for Atari games and VizDoom", "leave it at 1"]),
    ("failing_envs:Steady", {"env_frameskip": 2}, ["--env_frameskip is for", "leave it at 1"]),
    ("CartPole-v1", {"env_framestack": 4}, ["--env_framestack is for Atari games only", "leave it at 1"]),
])
def test_settings_an_environment_does_not_have_are_refused(
        env_id: str, settings: dict[str, int], fragments: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        make_vector_env(make_config({"env": env_id, **settings}), 1)
    assert_one_line(str(refusal.value), fragments)


# ---- functions that make environments --------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "serial_mode"), [
    ("failing_envs:make_steady", False), (failing_envs.make_steady, True), (failing_envs.Steady, True)])
def test_function_that_makes_an_environment_works_in_every_process(
        tmp_path: Path, env: str | Callable, serial_mode: bool) -> None:
    with APPO(env, train_dir=str(tmp_path), serial_mode=serial_mode, **SMALL) as appo:
        appo.train(300)
    name = env if isinstance(env, str) else f"failing_envs:{env.__name__}"
    assert_learned(tmp_path / name.replace(":", "_"), name)


def assert_learned(run_dir: Path, env: str) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["env"] == env
    assert summary["sgd_steps"] > 0
    assert summary["mean_return"] == [EPISODE_LENGTH]


SCRIPT = """
from appo import APPO
from failing_envs import Steady

def make_env():
    return Steady()

if __name__ == "__main__":
    with APPO(make_env, num_workers=1, num_envs_per_worker=4, rollout=32, batch_size=128,
              num_batches_per_epoch=1) as appo:
        appo.train(300)
"""


def test_function_of_the_running_script_works_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(train.__file__).parent), str(Path(__file__).parent)])
    process = subprocess.run([sys.executable, "my_script.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
                             timeout=180, check=False, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert_learned(tmp_path / "train_dir" / "my_script_make_env", "my_script:make_env")


@pytest.mark.parametrize(("env", "fragments"), [
    ("no_such_module:make", ["--env=no_such_module:make", "'no_such_module'", "install no_such_module", "PYTHONPATH"]),
    ("failing_envs:make_stedy", ["--env=failing_envs:make_stedy"]),
    ("failing_envs:not_callable", ["--env=failing_envs:not_callable"]),
    ("failing_envs:", ["--env=failing_envs:"]),
    (":make", ["--env=:make"]),
])
def test_function_that_does_not_exist_is_refused_with_one_line(env: str, fragments: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        families.find_spec(env)
    assert_one_line(str(refusal.value), fragments)


def test_function_without_a_name_is_refused_with_one_line(tmp_path: Path) -> None:
    def nested() -> gym.Env:
        return failing_envs.Steady()

    for function in (nested, lambda: failing_envs.Steady(), functools.partial(failing_envs.Steady)):  # noqa: PLW0108
        with pytest.raises(UserError) as refusal:
            APPO(function, train_dir=str(tmp_path))
        assert_one_line(str(refusal.value), ["must be defined at the top level of a file"])
    assert not list(tmp_path.iterdir())
