"""With which settings a run is resumed, what is said of them, and what is refused because it cannot go together."""

from pathlib import Path
from typing import Any

import pytest

import config
from config import MODES, Config, changes, configure
from runtime.checkpoint import policy_dir, save_settings
from runtime.machine import Machine
from runtime.utils import UserError
from trainer import APPO

SMALL = {"num_workers": 1, "num_envs_per_worker": 4, "rollout": 16, "batch_size": 64}
MODES_GIVEN = {"trust_run": True, "device": "cpu", "serial_mode": True, "policy_workers_per_policy": 3,
               "set_workers_cpu_affinity": True, "learner_threads": 5, "trace_sec": 2.0, "tf32": True,
               "torch_compile": True}


def start(folder: Path, **given: Any) -> Config:
    """Configure a run as `Trainer` does."""
    return configure({"env": "CartPole-v1", "train_dir": str(folder), "experiment": "run"} | given)


def save(folder: Path, **given: Any) -> Config:
    """Leave what a run leaves, as far as the settings of its resumption depend on it."""
    cfg = start(folder, **given)
    policy_dir(cfg.run_dir).mkdir(parents=True)
    save_settings(cfg.run_dir / "config.json", vars(cfg))
    (policy_dir(cfg.run_dir) / "checkpoint_000000001_00000000064.pt").touch()
    return cfg


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
    monkeypatch.setattr(config, "this_machine", lambda device: Machine(16, 0))
    resumed = start(tmp_path, env="PongNoFrameskip-v4")
    assert (resumed.learner_threads, resumed.policy_workers_per_policy) == (12, 2)
    for name in ("num_workers", "num_envs_per_worker", "worker_num_splits", "rollout", "batch_size"):
        assert getattr(resumed, name) == getattr(saved, name), "they shape what is learned"
    given = start(tmp_path, env="PongNoFrameskip-v4", learner_threads=3)
    assert (given.learner_threads, given.policy_workers_per_policy) == (3, 2)


def test_a_resumption_says_what_has_changed(tmp_path: Path) -> None:
    save(tmp_path, **SMALL, encoder_mlp_layers=(32, 16), gamma=0.9, serial_mode=True)
    assert [*changes(start(tmp_path, learning_rate=5e-4, rollout=16, reward_clip=2)).values()] == [
        "serial_mode True -> False", "learning_rate 0.001 -> 0.0005", "reward_clip inf -> 2"]
    assert changes(start(tmp_path, gamma=0.5, restart_behavior="overwrite")) == {}


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
    assert start(tmp_path, **{name: value, "experiment": "other"})
    assert start(tmp_path, **{name: value, "restart_behavior": "restart"})


def test_a_population_that_is_tended_may_grow_and_shrink(tmp_path: Path) -> None:
    save(tmp_path, num_policies=4, with_pbt=True)
    assert [start(tmp_path, num_policies=number).num_policies for number in (3, 5)] == [3, 5]


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
