"""What goes wrong in an environment stops the run and says which environment, which seed and which step it was."""

import multiprocessing
from pathlib import Path

import pytest
from failing_envs import FAILING_RESET, FAILING_SEED, FAILING_STEP, SEED
from parts import SMALL, learners

import trainer
from envs.vector_env import EnvironmentFailure
from runtime.utils import ComponentError, UserError
from trainer import APPO

SETTINGS = SMALL | {"worker_num_splits": 2, "seed": SEED}


# ---- failures while sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "step", "what"), [
    ("NanObservation", FAILING_STEP, "observation 'obs' is not finite: [nan nan]"),
    ("HugeReward", FAILING_STEP, "reward is out of range: 1e+30; use --reward_clip, or a smaller --reward_scale"),
    ("ResetRaises", FAILING_RESET, "reset() raised KeyError: 'no more levels'"),
    ("NothingAllowedInObservation", FAILING_STEP, "the action mask forbids every action"),
])
def test_failure_names_the_environment_its_seed_and_the_step(tmp_path: Path, name: str, step: int, what: str) -> None:
    with (pytest.raises(EnvironmentFailure) as failure,
          APPO(f"failing_envs:{name}", train_dir=str(tmp_path), serial_mode=True, **SETTINGS) as appo):
        appo.train()
    assert str(failure.value) == f"failing_envs:{name}, seed {FAILING_SEED}, step {step}: {what}"
    assert str(failure.value) in (appo.cfg.run_dir / "log.txt").read_text()


@pytest.mark.parametrize(("name", "settings"), [
    ("HugeReward", {"reward_clip": 1.0}), ("HugeReward", {"reward_scale": 1e-20}), ("LargeReward", {"gamma": 0.9999}),
    ("LargeObservation", {"gamma": 0.9999})])
def test_nothing_overflows_when_clipped_or_scaled_or_just_below_what_is_refused(
        tmp_path: Path, name: str, settings: dict[str, float]) -> None:
    with APPO(f"failing_envs:{name}", train_dir=str(tmp_path), serial_mode=True, **SETTINGS | settings) as appo:
        appo.train(500)
        assert all(tensor.isfinite().all() for tensor in learners(appo)[0].model.state_dict().values())


# ---- making, leaving and closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "line"), [
    ("MakingLeaves", "probe of failing_envs:MakingLeaves left with status 3"),
    ("MakingCrashes", "probe of failing_envs:MakingCrashes was killed by SIGSEGV"),
    ("StepExits", "step 1: step() raised SystemExit: 0"),
    ("LateMask", "info['action_mask'] comes from step()")])  # which only a worker sees
def test_whatever_an_environment_does_is_told_in_the_last_line(tmp_path: Path, name: str, line: str) -> None:
    with (pytest.raises((ComponentError, EnvironmentFailure, UserError)) as failure,
          APPO(f"failing_envs:{name}", train_dir=str(tmp_path), max_restarts=0, **SETTINGS) as appo):
        appo.train()
    assert line in str(failure.value).rstrip().splitlines()[-1]
    assert not multiprocessing.active_children()


def test_an_environment_may_hang_while_it_is_made_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "START_SEC", 0.5)
    with pytest.raises(ComponentError, match=r"^probe of failing_envs:MakingHangs hangs: more than 1 s "):
        APPO("failing_envs:MakingHangs", stall_timeout_sec=0.5)
    assert not multiprocessing.active_children()
