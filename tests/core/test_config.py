"""The configuration: what the command line accepts, what is refused and with which advice, layers, saving, help."""

import dataclasses
import math
import multiprocessing
import re
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
from appo import Settings
from config import Config, max_workers
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


def refusal(settings: dict[str, Any]) -> str:
    """Return the one line with which settings are refused."""
    with pytest.raises(UserError) as refused:
        make_config(settings)
    return one_line(refused)


def parse_refusal(*argv: str) -> str:
    """Return the one line with which a command line is refused."""
    with pytest.raises(UserError) as refused:
        parse(*argv)
    return one_line(refused)


def one_line(refused: pytest.ExceptionInfo[UserError]) -> str:
    text = str(refused.value)
    assert text
    assert "\n" not in text
    return text


# ---- what the command line accepts -------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "value"), [
    (["--async_rl"], True), (["--async_rl=True"], True), (["--async_rl", "true"], True), (["--async_rl=1"], True),
    (["--async_rl", "yes"], True), (["--async_rl=False"], False), (["--async_rl", "False"], False),
    (["--async_rl=0"], False), (["--async_rl", "no"], False),
])
def test_boolean_forms(argv: list[str], value: bool) -> None:
    assert parse(*argv) == {"async_rl": value}
    assert parse(*argv, "--seed", "3") == {"async_rl": value, "seed": 3}


@pytest.mark.parametrize(("flag", "text", "value"), [
    ("train_for_env_steps", "10000000", 10_000_000), ("train_for_env_steps", "1e7", 10_000_000),
    ("train_for_env_steps", "2.5e3", 2500), ("train_for_seconds", "1e-3", 0.001), ("train_for_seconds", "1", 1.0),
    ("train_for_seconds", "inf", math.inf)])
def test_numbers(flag: str, text: str, value: float) -> None:
    given = parse(f"--{flag}", text)
    assert given == {flag: value}
    assert type(given[flag]) is type(value)


@pytest.mark.parametrize(("argv", "value"), [
    (["--encoder_mlp_layers", "64", "32"], (64, 32)), (["--encoder_mlp_layers=64"], (64,)),
    (["--encoder_mlp_layers"], ()),
])
def test_tuples(argv: list[str], value: tuple[int, ...]) -> None:
    assert make_config(parse(*argv)).encoder_mlp_layers == value


def test_tuples_of_names() -> None:
    assert make_config(parse("--normalize_input_keys", "pose", "camera/left")).normalize_input_keys == (
        "pose", "camera/left")
    assert make_config(parse()).normalize_input_keys == ()


@pytest.mark.parametrize(("flag", "text"), [
    ("async_rl", "maybe"), ("async_rl", ""), ("batch_size", "x"), ("batch_size", "1.5"), ("batch_size", "1e-3"),
    ("batch_size", ""), ("batch_size", "inf"), ("batch_size", "1e400"), ("batch_size", "nan"), ("gamma", "nan"),
    ("gamma", "x"), ("encoder_mlp_layers", "64.5"),
])
def test_nonsense_is_refused_naming_flag_and_value(flag: str, text: str) -> None:
    refused = parse_refusal(f"--{flag}={text}")
    assert f"--{flag}" in refused
    assert text in refused
    assert "_parse" not in refused, "the name of a function of ours tells the user nothing"


@pytest.mark.parametrize(("argv", "meant"), [
    (["--num_worker", "2"], "--num_workers"), (["--batchsize=64"], "--batch_size"),
    (["--learning-rate", "1e-3"], "--learning_rate"), (["--async-rl"], "--async_rl"), (["--rolout=8"], "--rollout"),
    (["--seed", "1", "--devise", "cpu"], "--device"), (["--frameskip=4"], "--env_frameskip"), (["--seeds=1"], "--seed"),
    (["--train_for_env=5"], "--train_for_env_steps"),  # an abbreviation
])
def test_unknown_flag_names_the_nearest(argv: list[str], meant: str) -> None:
    assert f"did you mean {meant}?" in parse_refusal(*argv)


def test_flags_that_resemble_none_are_refused_too_all_at_once() -> None:
    assert parse_refusal("--xyzzyqqq", "1", "--seed", "2", "--rolout=8", "--rmsprop_eps", "1", "--n_step=3") == (
        "unknown argument --xyzzyqqq, --rolout (did you mean --rollout?), --rmsprop_eps (gone), "
        "--n_step (a setting of --algo=apex and pql, name that too)")
    assert parse_refusal("CartPole-v1") == "unknown argument CartPole-v1; an environment is named with --env"
    with pytest.raises(UserError, match=r"--num_workers \(a setting of train.py\), --tournment \(did you mean"):
        make_arguments().parse(["--num_workers=2", "--tournment"])


def test_unknown_setting_names_the_nearest() -> None:
    assert "did you mean num_workers?" in refusal({"num_worker": 2})


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_unknown_choice_names_the_nearest_and_all(name: str, choice: str) -> None:
    refused = refusal(parse(f"--{name}={choice[:-1]}"))
    assert f"--{name}={choice[:-1]}" in refused
    assert f"did you mean {choice}?" in refused
    assert all(other in refused for other in FIELDS[name].metadata["choices"])
    assert getattr(make_config(parse(f"--{name}={choice}")), name) == choice


# ---- refused values and combinations, and the advice ---------------------------------------------------------------


def advice(text: str) -> list[list[str]]:
    """Return the command lines that a refusal proposes: after the semicolon '--a=1 --b=2', or '1 or 2' for the flag."""
    assert ";" in text, f"no advice in: {text}"
    hint = text.split(";", 1)[1]
    flags = re.findall(r"--\w+=[\w.]+", hint)
    if flags:
        return [flags]
    flag = re.search(r"--\w+", text).group()
    return [[f"{flag}={number}"] for number in re.findall(r"\d+", hint)]


@pytest.mark.parametrize(("flags", "named"), [
    (["--batch_size=100", "--rollout=32"], ["batch_size", "rollout"]),
    (["--batch_size=20", "--rollout=32"], ["batch_size", "rollout"]),
    (["--num_envs_per_worker=1", "--worker_num_splits=2"], ["num_envs_per_worker", "worker_num_splits"]),
    (["--num_envs_per_worker=2", "--worker_num_splits=3"], ["num_envs_per_worker", "worker_num_splits"]),
    (["--num_envs_per_worker=7", "--worker_num_splits=2"], ["num_envs_per_worker", "worker_num_splits"]),
    (["--num_envs_per_worker=8", "--worker_num_splits=3"], ["num_envs_per_worker", "worker_num_splits"]),
    (["--use_rnn", "--recurrence=12", "--rollout=32"], ["recurrence", "rollout"]),
    (["--use_rnn", "--recurrence=64", "--rollout=32"], ["recurrence", "rollout"]),
])
def test_impossible_combination_is_refused_with_advice_that_works(flags: list[str], named: list[str]) -> None:
    text = refusal(parse(*flags))
    assert all(f"--{name}" in text for name in named)
    proposals = advice(text)
    assert proposals, f"no value to use in: {text}"
    for proposal in proposals:
        make_config(parse(*flags, *proposal))


@pytest.mark.parametrize("name", NUMERIC)
def test_negative_is_refused_naming_the_bound(name: str) -> None:
    one_each = {"rollout": 1, "worker_num_splits": 1}  # so that any value of the other settings divides
    text = refusal(one_each | {name: FIELDS[name].type(-1)})
    assert text.startswith(f"--{name}=-1")
    allowed = [value for bound, values in {"greater than 0": [1], "not be negative": [0], "between 0 and 1": [0, 0.5]}
               .items() if bound in text for value in values]
    assert allowed, f"no bound in: {text}"
    for value in allowed:
        make_config(one_each | {name: FIELDS[name].type(value)})


@pytest.mark.parametrize("algo", NAMES)
def test_only_times_and_what_is_infinite_by_default_may_be_infinite(algo: str) -> None:
    for field in dataclasses.fields(algorithm_class(algo).Settings):
        if field.type is float and (field.default == math.inf or field.name.endswith(("_sec", "_seconds"))):
            assert getattr(make_config({"algo": algo, field.name: math.inf}), field.name) == math.inf
        elif field.type is float:
            assert refusal({"algo": algo, field.name: math.inf}) == f"--{field.name}=inf must be finite, at most 1e18"
        if field.type in (int, float) and not field.name.endswith(("_sec", "_seconds")):
            assert f"--{field.name}=1" in refusal({"algo": algo, field.name: field.type(1e30)})


@pytest.mark.parametrize("name", [".", "..", "a/b"])
def test_names_that_are_no_folder_of_their_own_are_refused(name: str) -> None:
    assert "--experiment" in refusal({"experiment": name})


@pytest.mark.parametrize(("settings", "line"), [
    *(({name: -math.inf}, f"--{name}=-inf must be finite") for name in SIGNED),
    *(({name: 1.0}, f"--{name}=1.0 must be a factor above 1") for name in FACTORS),
    *(({name: math.nan}, f"--{name}=nan") for name in FLOATS),
    ({"gamma": 1.1}, "--gamma=1.1 must lie between 0 and 1"), ({"adam_beta1": 1.0}, "--adam_beta1=1.0 must lie"),
    ({"rollout": 0}, "--rollout=0 must be greater than 0"), ({"seed": 2**200}, "--seed=1606"),
    ({"encoder_mlp_layers": (64, -1)}, "--encoder_mlp_layers must be positive layer sizes"),
    ({"encoder_conv_mlp_layers": (64, 1.5)}, "--encoder_conv_mlp_layers must be positive layer sizes"),
    ({"core": "my_core"}, "--core=my_core must be module:function"),
    ({"model": "m:make", "encoder": "e:make"}, "--model replaces the encoder and the core"),
    ({"core": "c:make", "use_rnn": True}, "--core replaces the recurrent core of --use_rnn"),
    ({"res_w": 64}, "--res_w and --res_h belong together"), ({"env_kwargs": "{"}, "--env_kwargs={ is no JSON object"),
    ({"normalize_input": False, "normalize_input_keys": ("obs",)}, "--normalize_input_keys needs"),
    ({"recurrence": 8}, "--recurrence=8 needs a policy with a memory"),
    ({"with_pbt": True}, "--with_pbt needs a population"),
    ({"num_learners": 2, "serial_mode": True}, "--serial_mode=True needs --num_learners=1"),
    ({"num_policies": 2, "async_rl": False}, "--async_rl=False, where all slots of a policy come back"),
    ({"num_workers": 188}, "--num_workers=188 beside --num_policies=1 is too many; use at most 187"),
    ({"lr_schedule": "kl_adaptive", "lr_adaptive_min": 0.1}, "--lr_adaptive_min=0.1 is above --lr_adaptive_max"),
    *(({name: value}, f"--{name}={value!r} is not of type {kind}") for name, value, kind in (
        ("batch_size", 1024.0, "int"), ("batch_size", None, "int"), ("seed", True, "int"), ("gamma", "0.9", "float"),
        ("gamma", True, "float"), ("async_rl", 1, "bool"), ("env", 3, "str"), ("encoder_mlp_layers", 64, "tuple"))),
])
def test_what_is_impossible_is_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    assert line in refusal(settings)


@pytest.mark.parametrize(("settings", "steps"), [
    ({"use_rnn": True}, 32), ({"use_rnn": True, "recurrence": 8}, 8), ({"core": "c:make"}, 32),
    ({"model": "m:make", "recurrence": 16}, 16),
])
def test_a_memory_is_unrolled_over_the_rollout_or_recurrence(settings: dict[str, Any], steps: int) -> None:
    assert make_config(settings).bptt_steps == steps


# ---- layers and saving ---------------------------------------------------------------------------------------------


def test_later_layers_win() -> None:
    cfg = make_config({"seed": 1, "gamma": 0.5, "rollout": 8}, {"seed": 2, "gamma": 0.6}, {"seed": 3})
    assert (cfg.seed, cfg.gamma, cfg.rollout, cfg.num_epochs) == (3, 0.6, 8, FIELDS["num_epochs"].default)


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


def test_help_shows_every_setting_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # or words would be broken at their hyphens
    entries = re.split(r"\n +--", make_parser("test").format_help())
    helps = {entry.split()[0]: " ".join(entry.split()) for entry in entries}
    default = Settings()
    for name, field in FIELDS.items():
        value = getattr(default, name)
        shown = helps[name].partition(f"{field.metadata['help']} [")[2].split("]")[0]
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert float(shown.replace(",", "")) == value
        else:
            assert shown == ((" ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none")
        assert all(choice in helps[name] for choice in field.metadata["choices"] or ())


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


def test_help_leaves_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse("--help")
    assert left.value.code == 0
    assert "--num_envs_per_worker" in capsys.readouterr().out


@pytest.mark.parametrize("role", ["rollout_worker", "learner", "policy_worker", "evaluator"])
@pytest.mark.parametrize(("policies", "settings"), [(1, {"num_learners": 5}), (60, {"with_pbt": True})])
def test_at_its_limits_a_run_hands_over_no_more_file_descriptors_than_a_child_can_take(
        policies: int, settings: dict[str, Any], role: str) -> None:
    """256 at once are the limit of the fork server, which takes 4 itself; the pipe of the reports is one more."""
    num_workers = max_workers(policies, settings.get("num_learners", 1))
    cfg = make_config({"env": "tiny", "num_policies": policies, "num_workers": num_workers, "num_envs_per_worker": 1,
                       "worker_num_splits": 1, "rollout": 2, "batch_size": 2, "encoder_mlp_layers": (2,),
                       "device": "cpu"}, settings)
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
