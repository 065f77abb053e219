"""With which settings a run is resumed, what is said of them, and what is refused because it cannot go together."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from config import Config
from runtime import machine
from runtime.checkpoint import policy_dir
from runtime.machine import Machine
from runtime.run_folder import MODES, configure, describe_resume
from runtime.user_error import UserError
from train import main as train
from trainer import APPO

SMALL = {"num_workers": 1, "num_envs_per_worker": 4, "rollout": 16, "batch_size": 64}
MODES_GIVEN = {"trust_run": True, "device": "cpu", "serial_mode": True, "policy_workers_per_policy": 3,
               "set_workers_cpu_affinity": True, "learner_threads": 5, "trace_sec": 2.0, "tf32": True,
               "torch_compile": True}


def start(folder: Path, **given: Any) -> Config:
    """Configure a run as `Supervisor` does."""
    return configure({"env": "CartPole-v1", "train_dir": str(folder), "experiment": "run"} | given)


def save(folder: Path, **given: Any) -> Config:
    """Leave what a run leaves, as far as the settings of its resumption depend on it."""
    cfg = start(folder, **given)
    policy_dir(cfg.run_dir).mkdir(parents=True)
    cfg.save(cfg.run_dir / "config.json")
    (policy_dir(cfg.run_dir) / "checkpoint_000000001_00000000064.pt").touch()
    return cfg


def told(folder: Path, **given: Any) -> list[str]:
    """Return the lines that a resumption says of its settings."""
    return describe_resume(start(folder, **given), given).splitlines()


# ---- which settings --------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_what_it_learns_with_but_not_how_it_runs(tmp_path: Path) -> None:
    saved = save(tmp_path, **SMALL, **MODES_GIVEN, seed=3, async_rl=False, report_interval_sec=1.0)
    resumed = start(tmp_path)
    differ = {name for name, value in vars(saved).items() if value != getattr(resumed, name)}
    assert differ == MODES_GIVEN.keys() == set(MODES) - {"restart_behavior"}
    assert all(getattr(resumed, name) == getattr(Config, name) for name in differ), "those of a new run"
    assert start(tmp_path, **MODES_GIVEN) == saved


def test_how_a_resumed_run_runs_follows_from_the_machine_that_it_runs_on(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path, env="PongNoFrameskip-v4", learner_threads=1)
    monkeypatch.setattr(machine, "this_machine", lambda device: Machine(16, 0))
    resumed = start(tmp_path, env="PongNoFrameskip-v4")
    assert (resumed.learner_threads, resumed.policy_workers_per_policy) == (16, 2)
    for name in ("num_workers", "num_envs_per_worker", "worker_num_splits", "rollout", "batch_size"):
        assert getattr(resumed, name) == getattr(saved, name), "they shape what is learned"
    given = start(tmp_path, env="PongNoFrameskip-v4", learner_threads=3)
    assert (given.learner_threads, given.policy_workers_per_policy) == (3, 2)


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_a_resumption_says_what_has_changed_and_what_is_kept(tmp_path: Path) -> None:
    assert save(tmp_path, **SMALL, encoder_mlp_layers=(32, 16), gamma=0.9, serial_mode=True).learning_rate == 1e-3
    assert told(tmp_path, learning_rate=5e-4, rollout=16, reward_clip=2) == [
        "changed: serial_mode True -> False, learning_rate 0.001 -> 0.0005, reward_clip inf -> 2",
        "kept: num_workers=1, num_envs_per_worker=4, batch_size=64, gamma=0.9, encoder_mlp_layers=32 16"]


# ---- what cannot go together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "name", "value"), [
    *(({}, name, value) for name, value in (
        ("env", "Acrobot-v1"), ("algo", "IMPALA"), ("num_policies", 4), ("seed", 1), ("nonlinearity", "relu"),
        ("env_kwargs", '{"sutton_barto_reward": true}'), ("obs_subtract_mean", 1.0), ("obs_scale", 5.0),
        ("normalize_returns", False), ("normalize_input_keys", ["obs"]))),
    ({"seed": 3}, "seed", 0), ({"num_policies": 4}, "num_policies", 1)])
def test_a_run_of_another_kind_or_whose_weights_would_mean_something_else_is_refused(
        tmp_path: Path, saved: dict[str, Any], name: str, value: Any) -> None:
    save(tmp_path, **saved)
    with pytest.raises(UserError, match=f"holds a run of --{name}="):
        start(tmp_path, **{name: value})
    for helps in ({"experiment": "other"}, {"restart_behavior": "restart"}):
        assert start(tmp_path, **{name: value} | helps)


@pytest.mark.parametrize("num_policies", [3, 5])
def test_a_population_that_is_tended_may_grow_and_shrink(tmp_path: Path, num_policies: int) -> None:
    save(tmp_path, num_policies=4, with_pbt=True)
    assert start(tmp_path, num_policies=num_policies).num_policies == num_policies


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    with APPO("CartPole-v1", **SMALL, train_dir=str(folder), experiment="run", serial_mode=True, use_rnn=True,
              rnn_size=8, train_for_env_steps=200) as appo:
        appo.train()
    return folder / "run"


@pytest.mark.parametrize(("given", "changed"), [
    ({"encoder": "examples.custom_encoder:FourierEncoder", "learning_rate": 0.1},
     "encoder none -> examples.custom_encoder:FourierEncoder"),
    ({"core": "examples.custom_core:LeakyCore", "use_rnn": False},
     "core none -> examples.custom_core:LeakyCore, use_rnn True -> False"),
    ({"rnn_size": 16}, "rnn_size 8 -> 16"), ({"normalize_input": False}, "normalize_input True -> False")])
def test_another_network_is_refused_by_the_settings_that_changed(finished: Path, given: dict[str, Any],
                                                                 changed: str) -> None:
    before = sorted(finished.rglob("*"))
    with pytest.raises(UserError, match=f"holds a run of another network: {changed};"):
        APPO("CartPole-v1", train_dir=str(finished.parent), experiment="run", serial_mode=True, **given)
    assert sorted(finished.rglob("*")) == before


@pytest.mark.parametrize(("flags", "status", "complaint"), [
    ([], 0, "--train_for_env_steps=400"),
    (["--train_for_env_steps=1000", "--train_for_seconds=0.001"], 0, r"--train_for_seconds=\d+"),
    (["--train_for_seconds=0.001"], 0, r"--train_for_env_steps=400 --train_for_seconds=\d+"),
    (["--trace_sec=5"], 2, "")])
def test_a_finished_run_says_how_it_could_go_on(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
                                                flags: list[str], status: int, complaint: str) -> None:
    """A trace of no training would be empty, so that a run of which one is asked cannot do what it should."""
    run_dir = Path(shutil.copytree(finished, tmp_path / "run"))
    argv = ["--env=CartPole-v1", f"--train_dir={tmp_path}", "--experiment=run", "--serial_mode", *flags]
    assert train(argv) == status
    captured = capsys.readouterr()
    (line,) = [line for line in (captured.out + captured.err).splitlines() if "nothing to do" in line]
    assert re.search(complaint, line)
    assert (line in captured.err.splitlines()) == bool(status)
    names = {path.name for path in run_dir.iterdir()}
    assert names == {path.name for path in finished.iterdir()}, "no empty trace is left"
    assert (run_dir / "config.json").read_text() == (finished / "config.json").read_text()
