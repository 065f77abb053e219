"""Automatic settings: valid on every machine, what was given stays, two cores get the measured ones."""

import math

import pytest
from parts import make_config

from appo import AsyncPPO
from envs.families import FAMILIES
from runtime.machine import Machine, automatic, family_profile
from runtime.user_error import UserError

MACHINES = [Machine(cores, gpus) for cores in (1, 2, 3, 4, 5, 6, 7, 8, 16, 36, 128, 256) for gpus in (0, 1, 2)]


def settings_of(machine: Machine, family: str, given: dict, algo: str = "appo") -> dict:
    return automatic(machine, family_profile(family, algo), given,
                     large_observations=FAMILIES[family].large_observations)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("given", [{}, {"num_workers": 3}, {"num_policies": 4}, {"worker_num_splits": 3}], ids=str)
def test_settings_are_valid_what_was_given_stays_and_environments_are_spread_over_the_workers(
        family: str, machine: Machine, given: dict) -> None:
    settings = settings_of(machine, family, given) | given
    cfg = make_config(settings)
    assert {name: getattr(cfg, name) for name in settings} == settings
    assert cfg.policy_workers_per_policy * cfg.num_policies <= max(machine.cores, cfg.num_policies)
    in_flight = cfg.num_workers * cfg.num_envs_per_worker * cfg.rollout
    dataset = cfg.batch_size * cfg.num_batches_per_epoch
    if not given and FAMILIES[family].large_observations and machine.cores <= 16:
        assert in_flight < 1.6 * dataset, "experience would be old before it is learned from"
    if "num_policies" not in given and (not FAMILIES[family].large_observations or machine == Machine(2, 0)):
        profile = family_profile(family, "appo")
        num_envs = (profile if machine.num_gpus else profile | profile["without_gpu"])["num_envs"]
        batches = 1 if cfg.async_rl else cfg.num_batches_per_epoch  # in turns nothing is left over
        unit = math.lcm(cfg.worker_num_splits, batches // math.gcd(cfg.num_workers, batches))
        assert (abs(cfg.num_workers * cfg.num_envs_per_worker - num_envs) <= cfg.num_workers * unit / 2
                or cfg.num_envs_per_worker == unit), "one for each split is the least"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("algo", ["impala", "a3c"])
def test_other_algorithms_have_valid_settings_and_only_a3c_without_a_gpu_several_learners(
        family: str, machine: Machine, algo: str) -> None:
    cfg = make_config({"algo": algo}, settings_of(machine, family, {}, algo))
    assert cfg.num_learners == (2 if algo == "a3c" and not machine.num_gpus else 1)
    assert cfg.learner_threads * cfg.num_learners < max(machine.cores, 2) + cfg.num_learners


def test_a_profile_of_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncPPO, "profiles", {"classic-control": {}})
    with pytest.raises(UserError, match=r"no family 'classic-control'.*did you mean classic_control"):
        family_profile("atari", "appo")


def test_what_a_profile_says_of_the_workers_counts() -> None:
    profile = family_profile("classic_control", "appo") | {"num_workers": 3, "num_envs_per_worker": 5}
    settings = automatic(Machine(8, 0), profile, {"num_workers": 4}, large_observations=False)
    assert (settings | {"num_workers": 4})["num_envs_per_worker"] == 5


@pytest.mark.parametrize("given", [{"serial_mode": True}, {"async_rl": False}, {"with_pbt": True, "num_policies": 2}],
                         ids=str)
def test_a3c_has_one_learner_where_there_cannot_be_more(given: dict) -> None:
    cfg = make_config({"algo": "a3c"}, settings_of(Machine(2, 0), "atari", given, "a3c"), given)
    assert cfg.num_learners == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("given", [{}, {"num_workers": 3}, {"encoder": "a:b"}, {"async_rl": False}], ids=str)
def test_where_sampling_and_learning_share_the_cores_they_take_turns_and_nothing_is_left_over(
        family: str, machine: Machine, given: dict) -> None:
    cfg = make_config(settings_of(machine, family, given) | given)
    assert cfg.async_rl == given.get("async_rl", machine.num_gpus > 0 or family != "atari")
    if not cfg.async_rl:
        assert cfg.trajectories_per_dataset % (cfg.num_workers * cfg.num_envs_per_worker) == 0
        samples, in_flight = (size * cfg.rollout for size in (
            cfg.trajectories_per_dataset, cfg.num_workers * cfg.num_envs_per_worker))
        overlapping = make_config(settings_of(machine, family, given | {"async_rl": True}) | given)
        usual = overlapping.trajectories_per_dataset * overlapping.rollout
        assert samples == in_flight > usual or 0.6 < samples / usual < 1.5


def test_ranks_do_not_take_turns_and_have_one_learner_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert settings_of(Machine(2, 0), "atari", {})["async_rl"]
    assert "num_learners" not in settings_of(Machine(2, 0), "atari", {}, "a3c")


def test_two_cores_and_16_with_a_gpu_get_what_was_measured_there() -> None:
    fast, standard = (settings_of(Machine(2, 0), "atari", given) for given in (
        {}, {"encoder_conv_architecture": "convnet_atari"}))
    common = {"num_workers": 2, "rollout": 64, "learner_threads": 2, "policy_workers_per_policy": 1,
              "worker_num_splits": 1}
    expected = common | {"num_envs_per_worker": 16, "batch_size": 512, "encoder_conv_architecture": "convnet_a3c",
                         "encoder_conv_mlp_layers": (256,)}
    assert {name: fast[name] for name in expected} == expected
    expected = common | {"num_envs_per_worker": 32, "batch_size": 1024, "encoder_conv_mlp_layers": (512,)}
    assert {name: standard[name] for name in expected} == expected
    on_a_gpu = settings_of(Machine(16, 1), "atari", {})
    assert (on_a_gpu["rollout"], on_a_gpu["batch_size"], on_a_gpu["num_batches_per_epoch"]) == (32, 1024, 8)
    vizdoom = settings_of(Machine(2, 0), "vizdoom", {})
    assert (vizdoom["num_envs_per_worker"], vizdoom["batch_size"], vizdoom["rollout"]) == (8, 512, 32)
