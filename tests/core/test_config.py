"""The configuration: what the command line accepts, what is refused and with which advice, layers, saving, help."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config import Config, configure, make_config, parse_settings
from evaluate import make_arguments
from runtime.checkpoint import load_saved, save_settings
from runtime.command_line import as_typed
from runtime.utils import UserError

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
SIGNED = ["obs_subtract_mean", "stop_at_return"]
NUMERIC = [name for name, field in FIELDS.items() if field.type in (int, float) and name not in SIGNED]
FLOATS = [name for name in NUMERIC if FIELDS[name].type is float]
CHOICES = [(name, choice) for name, field in FIELDS.items() for choice in field.metadata["choices"] or ()]


def parse(*argv: str) -> dict[str, Any]:
    """Return the settings given on a command line."""
    return parse_settings(argv, "test")


def refusal(function: Callable[..., Any], *args: Any) -> str:
    """Return the one line with which a function refuses its arguments."""
    with pytest.raises(UserError) as refused:
        function(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "name", "value"), [
    *((["--async_rl", *more], "async_rl", True) for more in ([], ["true"], ["yes"], ["1"])),
    *(([f"--async_rl={text}"], "async_rl", text == "True") for text in ("True", "False", "0", "no")),
    (["--train_for_env_steps", "1e7"], "train_for_env_steps", 10_000_000),
    (["--train_for_seconds", "1"], "train_for_seconds", 1.0), (["--gamma=.5"], "gamma", 0.5),
    (["--train_for_seconds", "inf"], "train_for_seconds", math.inf),
    (["--encoder_mlp_layers", "64", "32"], "encoder_mlp_layers", (64, 32)),
    (["--encoder_mlp_layers=64"], "encoder_mlp_layers", (64,)), (["--encoder_mlp_layers"], "encoder_mlp_layers", ()),
    (["--normalize_input_keys", "pose", "camera/left"], "normalize_input_keys", ("pose", "camera/left"))], ids=str)
def test_a_setting_is_given_in_the_usual_forms(argv: list[str], name: str, value: Any) -> None:
    given = make_config({name: None, "seed": 4}, parse(*argv, "--seed", "3"))
    assert (getattr(given, name), given.seed) == (value, 3), "later layers win"
    assert type(getattr(given, name)) is type(value)


@pytest.mark.parametrize(("flag", "text"), [
    ("async_rl", "maybe"), ("batch_size", "x"), ("batch_size", "1.5"), ("batch_size", ""), ("batch_size", "1e400"),
    ("batch_size", "nan"), ("gamma", "x"), ("encoder_mlp_layers", "64.5"), ("encoder_conv_architecture", "resnet")])
def test_nonsense_is_refused_naming_flag_and_value(flag: str, text: str) -> None:
    refused = refusal(lambda: make_config(parse(f"--{flag}={text}")))
    assert f"--{flag}" in refused
    assert text in refused


@pytest.mark.parametrize(("argv", "meant"), [
    (["--num_worker", "2"], "did you mean --num_workers?"), (["--batchsize=64"], "did you mean --batch_size?"),
    (["--learning-rate", "1e-3"], "did you mean --learning_rate?"), (["--seeds=1"], "did you mean --seed?"),
    (["--seed", "1", "--devise", "cpu"], "did you mean --device?"), (["CartPole-v1"], "name an environment by --env"),
    (["--frameskip=4"], "did you mean --env_frameskip?")])
def test_an_unknown_flag_is_refused_with_what_it_may_be(argv: list[str], meant: str) -> None:
    assert meant in refusal(parse, *argv)
    assert "did you mean num_workers?" in refusal(make_config, {"num_worker": 2})
    assert "--rendr" in refusal(make_arguments().parse, ["--rendr"])


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_unknown_choice_names_the_nearest_and_all(name: str, choice: str) -> None:
    refused = refusal(make_config, parse(f"--{name}={choice[:-1]}"))
    assert all(other in refused for other in (f"did you mean {choice}?", *FIELDS[name].metadata["choices"]))
    assert getattr(make_config(parse(f"--{name}={choice}")), name) == choice


@pytest.mark.parametrize(("argv", "values"), [
    (["--env", "PongNoFrameskip-v4"], {"env": "PongNoFrameskip-v4", "env_frameskip": "4", "reward_clip": "1"}),
    (["--env=CartPole-v1", "--gamma=0.5"], {"train_for_env_steps": "500000", "nonlinearity": "tanh", "gamma": "0.5"}),
    (["--env", "CartPole-v1", "--algo", "apex"], {"batch_size": "64", "replay_size": "50000"}),
    ([], {"env": "none", "env_frameskip": "1", "train_for_env_steps": "10000000", "nonlinearity": "elu"})], ids=str)
def test_help_shows_the_values_that_an_environment_gets(
        argv: list[str], values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    argv = [*argv, f"--train_dir={tmp_path}"]
    with pytest.raises(SystemExit) as left:
        parse(*argv, "--help")
    assert left.value.code == 0
    entries = [entry.partition("\n\n")[0] for entry in re.split(r"\n +--", capsys.readouterr().out)[1:]]
    shown = {entry.split()[0]: re.search(r"\[([^[]*)\]$", entry)[1] for entry in entries}
    assert {name: shown[name] for name in values} == values
    if argv[1:]:
        made = vars(configure(parse(*argv)))
        assert shown == {name: as_typed(value) for name, value in made.items()}


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "flag"), [
    *(({name: value}, name) for names, value in ((NUMERIC, -1), (FLOATS, math.nan)) for name in names),
    *(({name: value}, name) for name, value in (
        ("gamma", 1.1), ("adam_beta1", 1.0), ("rollout", 0), ("seed", 2**200), ("encoder_mlp_layers", (64, -1)),
        ("encoder_conv_mlp_layers", (64, 1.5)), ("core", "my_core"), ("res_w", 64), ("env_kwargs", "{"),
        ("env_kwargs", "[]"), ("experiment", "a/b"), ("experiment", ".."), ("with_pbt", True),
        ("batch_size", 100), ("num_envs_per_worker", 15), ("batch_size", 1024.0),
        ("batch_size", None), ("seed", True), ("gamma", "0.9"), ("async_rl", 1), ("env", 3),
        ("encoder_mlp_layers", 64))),
    ({"model": "m:make", "encoder": "e:make"}, "model"), ({"core": "c:make", "use_rnn": True}, "core"),
    ({"use_rnn": True, "recurrence": 12}, "recurrence"), ({"num_learners": 2, "serial_mode": True}, "num_learners"),
    ({"num_policies": 2, "async_rl": False}, "async_rl")], ids=lambda _: "")
def test_what_is_impossible_is_refused_by_its_flag(settings: dict[str, Any], flag: str) -> None:
    one_each = {"rollout": 1, "worker_num_splits": 1} if -1 in settings.values() else {}  # any other value divides
    assert f"--{flag}" in refusal(make_config, one_each | settings)


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {}, {"train_for_seconds": 2.5, "save_milestones_sec": 1.0, "stall_timeout_sec": math.inf, "device": "cuda:1"},
    {"env": "ALE/Pong-v5", "encoder_mlp_layers": (7, 8, 9), "encoder_conv_mlp_layers": (), "async_rl": False,
     "num_workers": 1, "num_envs_per_worker": 2, "batch_size": 64, "learning_rate": 1 / 3}])
def test_saved_settings_come_back_equal(tmp_path: Path, settings: dict[str, Any]) -> None:
    cfg = make_config(settings)
    save_settings(tmp_path / "config.json", vars(cfg))
    assert make_config(load_saved(tmp_path / "config.json")) == cfg
