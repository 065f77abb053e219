"""Automatic settings: valid on every machine, what was given stays, two cores get the measured ones; the cores."""

import itertools
from pathlib import Path

import pytest

import config
from config import Config, defaults, make_config
from envs.families import FAMILIES
from runtime import machine
from runtime.machine import Machine

MACHINES = [Machine(cores, gpus) for cores in (1, 2, 3, 5, 8, 16, 36, 128, 256) for gpus in (0, 1, 2)]
everywhere = pytest.mark.parametrize(("family", "on"), list(itertools.product(FAMILIES, MACHINES)), ids=str)


@pytest.fixture(autouse=True)
def a_family_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name no environment of it, which may not be installed."""
    monkeypatch.setattr(config, "family", lambda env: env)


def made_on(on: Machine, family: str, given: dict) -> Config:
    return make_config(defaults(family, given, on), given)


@everywhere
@pytest.mark.parametrize("given", [{}, {"num_workers": 3}, {"num_policies": 4}, {"worker_num_splits": 3}], ids=str)
def test_what_was_given_stays_and_experience_does_not_age(family: str, on: Machine, given: dict) -> None:
    cfg = made_on(on, family, given)
    assert given.items() <= vars(cfg).items()
    assert cfg.policy_workers_per_policy * cfg.num_policies <= max(on.cores, cfg.num_policies)
    in_flight = cfg.num_workers * cfg.num_envs_per_worker * cfg.rollout
    if not given and FAMILIES[family].large_observations and on.cores <= 16:
        assert in_flight < 1.6 * cfg.batch_size * cfg.num_batches_per_epoch, "experience would be old"


@everywhere
@pytest.mark.parametrize("given", [{}, {"num_workers": 3}, {"encoder": "a:b"}], ids=str)
def test_in_turns_nothing_is_left_over(family: str, on: Machine, given: dict) -> None:
    usual, cfg = made_on(on, family, given), made_on(on, family, given | {"async_rl": False})
    in_flight = cfg.num_workers * cfg.num_envs_per_worker
    assert cfg.trajectories_per_dataset % in_flight == 0
    samples, overlapping = cfg.trajectories_per_dataset * cfg.rollout, usual.trajectories_per_dataset * usual.rollout
    assert samples == in_flight * cfg.rollout > overlapping or 0.6 < samples / overlapping < 1.5


@everywhere
@pytest.mark.parametrize("algo", ["impala", "a3c"])
def test_only_a3c_without_a_gpu_has_several_learners(family: str, on: Machine, algo: str) -> None:
    cfg = made_on(on, family, {"algo": algo})
    assert cfg.num_learners == (2 if algo == "a3c" and not on.num_gpus else 1)
    assert cfg.learner_threads * cfg.num_learners < max(on.cores, 2) + cfg.num_learners


def test_ranks_have_one_learner_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert "num_learners" not in defaults("atari", {"device": "cpu", "algo": "a3c"})


def test_two_cores_and_16_with_a_gpu_get_what_was_measured_there() -> None:
    fast, standard = (defaults("atari", given, Machine(2, 0)) for given in (
        {}, {"encoder_conv_architecture": "convnet_atari"}))
    common = {"num_workers": 2, "rollout": 64, "learner_threads": 2, "policy_workers_per_policy": 1,
              "worker_num_splits": 1}
    assert fast.items() >= (common | {
        "num_envs_per_worker": 16, "batch_size": 512, "encoder_conv_architecture": "convnet_a3c",
        "encoder_conv_mlp_layers": (256,)}).items()
    assert standard.items() >= (common | {
        "num_envs_per_worker": 32, "batch_size": 1024, "encoder_conv_mlp_layers": (512,)}).items()
    on_a_gpu, vizdoom = defaults("atari", {}, Machine(16, 1)), defaults("vizdoom", {}, Machine(2, 0))
    assert on_a_gpu.items() >= {"rollout": 32, "batch_size": 1024, "num_batches_per_epoch": 8}.items()
    assert vizdoom.items() >= {"num_envs_per_worker": 8, "batch_size": 512, "rollout": 32}.items()


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 9), (None, 9)])
def test_the_cores_of_a_container_are_those_of_its_control_group(
        limit: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(machine, "own_cores", lambda: range(9))
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert machine.cpu_cores() == cores
    assert make_config({"env": "CartPole-v1"}).num_workers == cores
