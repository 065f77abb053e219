"""What goes wrong in an environment stops the run and says which environment, which seed and which step it was."""

import errno
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from failing_envs import FAILING_RESET, FAILING_SEED, FAILING_STEP, SEED
from parts import learners, make_config

import train
from envs.families import make_vector_env
from envs.vector_env import EnvironmentFailure, VectorEnv
from runtime import plan
from runtime.user_error import ComponentError, UserError
from trainer import APPO

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
        try:
            status = train.main([f"--env={env}", f"--train_dir={tmp_path}", *small, *flags])
        except EnvironmentFailure:  # as Python shows it
            status = 1
            traceback.print_exc()
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
    ("HugeReward", FAILING_STEP, "reward is out of range: 1e+30; use --reward_clip, or a smaller --reward_scale"),
    ("StepRaises", FAILING_STEP, "step() raised ValueError: the wheel came off"),
    ("ResetRaises", FAILING_RESET, "reset() raised KeyError: 'no more levels'"),
    ("NothingAllowedInObservation", FAILING_STEP, "the action mask forbids every action"),
])
def test_failure_names_the_environment_its_seed_and_the_step(tmp_path: Path, name: str, step: int, what: str) -> None:
    with (pytest.raises(EnvironmentFailure) as failure,
          APPO(f"failing_envs:{name}", train_dir=str(tmp_path), serial_mode=True, **SMALL) as appo):
        appo.train()
    assert str(failure.value) == f"failing_envs:{name}, seed {FAILING_SEED}, step {step}: {what}"
    assert str(failure.value) in (appo.cfg.run_dir / "log.txt").read_text()


@pytest.mark.parametrize(("name", "settings"), [
    ("HugeReward", {"reward_clip": 1.0}), ("HugeReward", {"reward_scale": 1e-20}), ("LargeReward", {"gamma": 0.9999}),
    ("LargeObservation", {"gamma": 0.9999})])
def test_nothing_overflows_when_clipped_or_scaled_or_just_below_what_is_refused(
        tmp_path: Path, name: str, settings: dict[str, float]) -> None:
    with APPO(f"failing_envs:{name}", train_dir=str(tmp_path), serial_mode=True, **SMALL | settings) as appo:
        appo.train(500)
        assert all(tensor.isfinite().all() for tensor in learners(appo)[0].model.state_dict().values())


# ---- masks and spaces ------------------------------------------------------------------------------------------------


def test_a_space_that_cannot_be_used_is_refused_with_one_line(
        command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, error = command("failing_envs:GraphInDict", "--serial_mode")
    assert status == 2
    assert_one_line(error, ["observation 'map' is Graph(", "supported are Box"])
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_what_only_a_worker_can_refuse_is_one_line_too(command: Callable[..., tuple[int, str]]) -> None:
    status, error = command("failing_envs:LateMask", "--async_rl")
    assert status == 2
    assert_one_line(error, ["failing_envs:LateMask: info['action_mask'] comes from step() but not from reset()"])


def assert_one_line(text: str, fragments: list[str]) -> None:
    assert text.count("\n") == (1 if text.endswith("\n") else 0), text
    for fragment in fragments:
        assert fragment in text, text


# ---- making, leaving and closing -------------------------------------------------------------------------------------


ALONE = ("MakingLeaves", "MakingCrashes", "StepExits")  # the first two would end the tests, too


@pytest.mark.parametrize(("name", "line"), [
    ("MakingRaises", "--env=failing_envs:MakingRaises cannot be made: KeyError: 'no such level'"),
    ("MakingLeaves", "probe of failing_envs:MakingLeaves left with status 3"),
    ("MakingCrashes", "probe of failing_envs:MakingCrashes was killed by SIGSEGV"),
    ("StepExits", "step 1: step() raised SystemExit: 0"),
    ("ClosingRaises", "step 1: close() raised OSError: the lid is stuck"),
])
def test_whatever_an_environment_does_is_told_in_one_line(
        command: Callable[..., tuple[int, str]], name: str, line: str) -> None:
    mode = "--async_rl" if name in ALONE else "--serial_mode"
    status, error = command(f"failing_envs:{name}", mode, "--max_restarts=0")
    assert status == 1
    assert line in error.rstrip("\n").splitlines()[-1]
    if "raised" in line:  # in the environment's own code, wherever that ran
        assert 'failing_envs.py", line' in error


def test_an_environment_may_hang_while_it_is_made_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "START_SEC", 0.5)
    with pytest.raises(ComponentError, match=r"^probe of failing_envs:MakingHangs hangs: more than 1 s "
                       r"\(--stall_timeout_sec\)$"):
        plan.probe_in_child(make_config({"env": "failing_envs:MakingHangs", "stall_timeout_sec": 0.5}))
    assert not multiprocessing.active_children()


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
    ("minigrid", "BabyAI-GoToLocal-v0", "pip install minigrid"),
    ("popgym", "popgym-RepeatFirstEasy-v0", "pip install popgym"),
    ("pettingzoo", "pettingzoo:classic.rps_v2", "pip install pettingzoo"),
    ("mpe2", "pettingzoo:mpe2.simple_v3", "pip install mpe2"),
    ("ale_py", "PongNoFrameskip-v4", "pip install ale-py"),
    ("mujoco", "HalfCheetah-v5", "pip install 'gymnasium[mujoco]'"),
])
def test_missing_package_is_one_line_with_the_command_that_installs_it(
        hide: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, package: str, env_id: str, install: str) -> None:
    if package == "mpe2":
        pytest.importorskip("pettingzoo")
    hide(package)
    if package == "mujoco":  # gymnasium's own modules are there, but cannot be imported
        for name in [name for name in sys.modules if name.startswith(f"gymnasium.envs.{package.lower()}.")]:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError) as refusal:
        make_vector_env(make_config({"env": env_id}), 1)
    assert_one_line(str(refusal.value), [f"--env={env_id}", install])


@pytest.mark.parametrize("is_there", [True, False])
def test_processes_end_where_the_system_gives_no_descriptors_of_them(monkeypatch: pytest.MonkeyPatch, *,
                                                                     is_there: bool) -> None:
    """Older kernels and strict containers have no `pidfd_open`, and other systems Python's function neither."""
    def refuse(pid: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if is_there:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    assert plan.probe_in_child(make_config({"env": "CartPole-v1"})).agents == ["agent"]
    assert not multiprocessing.active_children()
