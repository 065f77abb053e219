"""The configuration: what the command line accepts, what is refused and with which advice, layers, saving, help."""

import dataclasses
import math
import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from parts import make_config

from algorithms import NAMES, algorithm_class
from config import Config, max_workers, without_gone
from envs.vector_env import EnvInfo
from evaluate import make_arguments
from model import make_model
from runtime.command_line import make_parser, parse_settings, show_default
from runtime.files import load_saved
from runtime.run_folder import configure
from runtime.user_error import UserError
from shared_buffers import SharedBuffers

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
SIGNED = ["obs_subtract_mean", "stop_at_return"]
FACTORS = ["pbt_perturb_min", "pbt_perturb_max"]  # refused together
NUMERIC = [name for name, field in FIELDS.items() if field.type in (int, float) and name not in SIGNED + FACTORS]
FLOATS = [name for name, field in FIELDS.items() if field.type is float]
CHOICES = [(name, choice) for name, field in FIELDS.items() for choice in field.metadata["choices"] or ()]


def parse(*argv: str) -> dict[str, Any]:
    """Return the settings given on a command line."""
    return vars(make_parser("test").parse(argv))


def refusal(function: Callable[..., Any], *args: Any) -> str:
    """Return the one line with which a function refuses its arguments."""
    with pytest.raises(UserError) as refused:
        function(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- what the command line accepts -------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "name", "value"), [
    *((["--async_rl", *more], "async_rl", True) for more in ([], ["true"], ["yes"], ["1"])),
    *(([f"--async_rl={text}"], "async_rl", text == "True") for text in ("True", "False", "0", "no")),
    (["--train_for_env_steps", "1e7"], "train_for_env_steps", 10_000_000),
    (["--train_for_env_steps", "2.5e3"], "train_for_env_steps", 2500),
    (["--train_for_seconds", "1"], "train_for_seconds", 1.0),
    (["--train_for_seconds", "inf"], "train_for_seconds", math.inf),
    (["--encoder_mlp_layers", "64", "32"], "encoder_mlp_layers", (64, 32)),
    (["--encoder_mlp_layers=64"], "encoder_mlp_layers", (64,)), (["--encoder_mlp_layers"], "encoder_mlp_layers", ()),
    (["--normalize_input_keys", "pose", "camera/left"], "normalize_input_keys", ("pose", "camera/left"))], ids=str)
def test_a_setting_is_given_in_the_usual_forms(argv: list[str], name: str, value: Any) -> None:
    given = make_config(parse(*argv, "--seed", "3"), {"gamma": 0.6}, {"gamma": 0.5})
    assert (getattr(given, name), given.seed, given.gamma) == (value, 3, 0.5), "later layers win"
    assert type(getattr(given, name)) is type(value)


@pytest.mark.parametrize(("flag", "text"), [
    ("async_rl", "maybe"), ("async_rl", ""), ("batch_size", "x"), ("batch_size", "1.5"), ("batch_size", "1e-3"),
    ("batch_size", ""), ("batch_size", "inf"), ("batch_size", "1e400"), ("batch_size", "nan"), ("gamma", "nan"),
    ("gamma", "x"), ("encoder_mlp_layers", "64.5"),
])
def test_nonsense_is_refused_naming_flag_and_value(flag: str, text: str) -> None:
    refused = refusal(parse, f"--{flag}={text}")
    assert f"--{flag}" in refused
    assert text in refused


@pytest.mark.parametrize(("argv", "meant"), [
    (["--num_worker", "2"], "--num_workers"), (["--batchsize=64"], "--batch_size"),
    (["--learning-rate", "1e-3"], "--learning_rate"), (["--async-rl"], "--async_rl"), (["--rolout=8"], "--rollout"),
    (["--seed", "1", "--devise", "cpu"], "--device"), (["--frameskip=4"], "--env_frameskip"), (["--seeds=1"], "--seed"),
    (["--train_for_env=5"], "--train_for_env_steps")])  # an abbreviation
def test_unknown_flag_names_the_nearest(argv: list[str], meant: str) -> None:
    assert f"did you mean {meant}?" in refusal(parse, *argv)
    assert "did you mean num_workers?" in refusal(make_config, {"num_worker": 2})
    assert "--rendr" in refusal(make_arguments().parse, ["--rendr"])


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_unknown_choice_names_the_nearest_and_all(name: str, choice: str) -> None:
    refused = refusal(make_config, parse(f"--{name}={choice[:-1]}"))
    assert all(other in refused for other in (f"did you mean {choice}?", *FIELDS[name].metadata["choices"]))
    assert getattr(make_config(parse(f"--{name}={choice}")), name) == choice


# ---- refused values and combinations, and the advice ---------------------------------------------------------------


@pytest.mark.parametrize("algo", NAMES)
def test_only_times_and_what_is_infinite_by_default_may_be_infinite(algo: str) -> None:
    for field in dataclasses.fields(algorithm_class(algo).Settings):
        if field.type is float and (field.default == math.inf or field.name.endswith(("_sec", "_seconds"))):
            assert getattr(make_config({"algo": algo, field.name: math.inf}), field.name) == math.inf
        elif field.type is float:
            assert f"--{field.name}=inf" in refusal(make_config, {"algo": algo, field.name: math.inf})
        if field.type in (int, float) and not field.name.endswith(("_sec", "_seconds")):
            assert f"--{field.name}=1" in refusal(make_config, {"algo": algo, field.name: field.type(1e30)})


@pytest.mark.parametrize("name", [".", "..", "a/b"])
def test_names_that_are_no_folder_of_their_own_are_refused(name: str) -> None:
    assert "--experiment" in refusal(make_config, {"experiment": name})


@pytest.mark.parametrize(("settings", "flag"), [
    *(({name: value}, name) for names, value in ((NUMERIC, -1), (SIGNED, -math.inf), (FACTORS, 1.0), (FLOATS, math.nan))
      for name in names),
    *(({name: value}, name) for name, value in (
        ("gamma", 1.1), ("adam_beta1", 1.0), ("rollout", 0), ("seed", 2**200), ("encoder_mlp_layers", (64, -1)),
        ("encoder_conv_mlp_layers", (64, 1.5)), ("core", "my_core"), ("res_w", 64), ("env_kwargs", "{"),
        ("recurrence", 8), ("with_pbt", True), ("num_workers", 188),
        ("batch_size", 100), ("batch_size", 20), ("worker_num_splits", 7),
        ("batch_size", 1024.0), ("batch_size", None), ("seed", True), ("gamma", "0.9"), ("gamma", True),
        ("async_rl", 1), ("env", 3), ("encoder_mlp_layers", 64))),
    ({"model": "m:make", "encoder": "e:make"}, "model"), ({"core": "c:make", "use_rnn": True}, "core"),
    ({"normalize_input": False, "normalize_input_keys": ("obs",)}, "normalize_input_keys"),
    ({"use_rnn": True, "recurrence": 12}, "recurrence"), ({"num_learners": 2, "serial_mode": True}, "serial_mode"),
    ({"num_policies": 2, "async_rl": False}, "async_rl"),
    ({"lr_schedule": "kl_adaptive", "lr_adaptive_min": 0.1}, "lr_adaptive_min")], ids=lambda _: "")
def test_what_is_impossible_is_refused_by_its_flag(settings: dict[str, Any], flag: str) -> None:
    one_each = {"rollout": 1, "worker_num_splits": 1} if -1 in settings.values() else {}  # any other value divides
    assert f"--{flag}" in refusal(make_config, one_each | settings)


@pytest.mark.parametrize(("settings", "steps"), [
    ({"use_rnn": True}, 64), ({"use_rnn": True, "recurrence": 8}, 8), ({"core": "c:make"}, 64),
    ({"model": "m:make", "recurrence": 16}, 16),
])
def test_a_memory_is_unrolled_over_the_rollout_or_recurrence(settings: dict[str, Any], steps: int) -> None:
    assert make_config(settings).bptt_steps == steps


# ---- layers and saving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {},
    {"env": "ALE/Pong-v5", "encoder_mlp_layers": (7, 8, 9), "encoder_conv_mlp_layers": (), "async_rl": False,
     "num_workers": 1, "num_envs_per_worker": 2, "batch_size": 64, "learning_rate": 1 / 3},
    {"train_for_seconds": 2.5, "save_milestones_sec": 1.0, "stall_timeout_sec": math.inf, "device": "cuda:1"},
])
def test_saved_settings_come_back_equal(tmp_path: Path, settings: dict[str, Any]) -> None:
    cfg = make_config(settings)
    cfg.save(tmp_path / "config.json")
    assert make_config(load_saved(tmp_path / "config.json")) == cfg


# ---- help and use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "values"), [
    (["--env", "PongNoFrameskip-v4"], {"env": "PongNoFrameskip-v4", "env_frameskip": "4", "reward_clip": "1"}),
    (["--env=CartPole-v1", "--gamma=0.5"], {"train_for_env_steps": "500,000", "nonlinearity": "tanh", "gamma": "0.5"}),
    (["--env", "CartPole-v1", "--algo", "apex"], {"batch_size": "64", "replay_size": "50,000"}),
    ([], {"env": "none", "env_frameskip": "1", "train_for_env_steps": "10,000,000", "nonlinearity": "elu"})], ids=str)
def test_help_shows_the_values_that_an_environment_gets(
        argv: list[str], values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    argv = [*argv, f"--train_dir={tmp_path}"]
    with pytest.raises(SystemExit) as left:
        parse_settings([*argv, "--help"], "test")
    assert left.value.code == 0
    entries = [entry.partition("\n\n")[0] for entry in re.split(r"\n +--", capsys.readouterr().out)[1:]]
    shown = {entry.split()[0]: re.search(r"\[([^[]*)\]$", entry)[1] for entry in entries}
    assert {name: shown[name] for name in values} == values
    if argv[1:]:
        made = vars(configure(parse_settings(argv, "")))
        assert shown == {name: show_default(value) for name, value in made.items()}


def test_a_setting_is_gone_only_where_the_algorithm_has_none_of_its_name(capsys: pytest.CaptureFixture) -> None:
    saved = {"target_noise": 0.1, "gamma": 0.9}
    mine = dataclasses.make_dataclass("Mine", [("target_noise", float, 0.2)], bases=(Config,), frozen=True)
    assert without_gone(saved, mine) == saved
    assert capsys.readouterr().out == ""
    assert without_gone(saved, Config) == {"gamma": 0.9}
    assert capsys.readouterr().out == "settings of an earlier version that are gone: target_noise\n"


@pytest.mark.parametrize("role", ["rollout_worker", "learner", "policy_worker", "evaluator"])
@pytest.mark.parametrize(("policies", "settings"), [(1, {"num_learners": 5}), (60, {"with_pbt": True})])
def test_at_its_limits_a_run_hands_over_no_more_file_descriptors_than_a_child_can_take(
        policies: int, settings: dict[str, Any], role: str) -> None:
    """256 at once are the limit of the fork server, which takes 4 itself; the pipe of the reports is one more."""
    num_workers = max_workers(policies, settings.get("num_learners", 1))
    cfg = make_config({"env": "tiny", "num_policies": policies, "num_workers": num_workers, "num_envs_per_worker": 1,
                       "worker_num_splits": 1, "rollout": 2, "batch_size": 2, "encoder_mlp_layers": (2,),
                       "lr_schedule": "constant", "device": "cpu"}, settings)
    obs_space = {"obs": spaces.Box(-1, 1, (1,), np.float32), "action_mask": spaces.MultiBinary(2)}
    model = make_model(cfg, obs_space, spaces.Discrete(2))
    info = EnvInfo(["agent"], [0], [(obs_space, spaces.Discrete(2))], {"pay": 1.0})
    buffers = SharedBuffers(cfg, algorithm_class(cfg.algo)(cfg), info, [0] * policies, [model] * policies,
                            [torch.device("cpu")] * policies, multiprocessing.get_context("forkserver"))
    handed_over = []

    class Child:
        @staticmethod
        def duplicate_for_child(descriptor: int) -> int:
            handed_over.append(descriptor)
            return descriptor

        DupFd = staticmethod(int)

    set_spawning_popen(Child())
    try:
        ForkingPickler.dumps((cfg, buffers.seen_by(role, 0)))
    finally:
        set_spawning_popen(None)
    assert 10 < len(handed_over) <= 256 - 4 - 1 - 10, "and a recurrent policy or a larger observation has some more"
