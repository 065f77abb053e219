"""docs/coming_from.md: our settings, defaults and losses are as it says, its commands are ours.

What it says of the other systems was read in their source; they are not installed here.
"""

import ast
import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import make_config

import evaluate
from appo import Settings
from config import Config
from envs.families import profile
from losses import clipped_value_error, ppo_objective
from runtime.command_line import make_parser
from runtime.machine import Machine

PAGE = (Path(__file__).parent.parent / "docs/coming_from.md").read_text()
FIELDS = {field.name for field in dataclasses.fields(Settings)}
OF_EVALUATE = {flag.removeprefix("--") for action in evaluate.make_arguments()._actions
               for flag in action.option_strings}
MACHINE = Machine(cores=2, num_gpus=0)  # of the columns that end in "here"
ENVS = {"Pong": "PongNoFrameskip-v4", "HalfCheetah": "HalfCheetah-v5", "CartPole": "CartPole-v1"}


def table(first: str) -> list[dict[str, str]]:
    """Return the rows of the table whose header begins so, by its columns."""
    begin = PAGE.index(f"\n| {first} |") + 1
    lines = PAGE[begin:PAGE.index("\n\n", begin)].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row, strict=True)) for row in rows]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> list[list[str]]:
    lines = "".join(blocks("bash")).replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines]


def config_of(command: list[str]) -> Config:
    """Return the configuration that a command of train.py gives on the machine of the table."""
    given = vars(make_parser("", algo="appo").parse(command[2:]))
    return make_config(profile(given["env"], given, MACHINE), given)


def equals(text: str, value: Any) -> bool:
    """Tell whether a cell of a table shows a value."""
    if isinstance(value, tuple):
        return text == " ".join(map(str, value))
    if isinstance(value, str | bool):
        return text == str(value)
    return float(text.replace(",", "")) == value


SETTINGS = {re.fullmatch(r"`(\w+)`", row["here"])[1]: row for row in table("here")}


def test_every_flag_and_setting_of_the_page_exists() -> None:
    assert SETTINGS.keys() <= FIELDS
    prose = re.sub(r"```(text|py)\n.*?```", "", PAGE, flags=re.DOTALL)
    assert set(re.findall(r"--(\w+)", prose)) <= FIELDS | OF_EVALUATE
    for block in blocks("python"):
        calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        names = {word.arg for call in calls if getattr(call.func, "id", "") == "APPO" for word in call.keywords}
        assert names
        assert names <= FIELDS


@pytest.mark.parametrize("env", ENVS)
def test_the_defaults_are_those_of_the_table(env: str) -> None:
    cfg = make_config({"env": ENVS[env]}, profile(ENVS[env], {}, MACHINE))
    stated = {name: row[f"{env} here"] for name, row in SETTINGS.items() if row[f"{env} here"]}
    assert len(stated) > 20
    assert not {name: text for name, text in stated.items() if not equals(text, getattr(cfg, name))}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_is_one_of_ours_and_possible(command: list[str]) -> None:
    assert command[0] == "python"
    if command[1] == "evaluate.py":
        evaluate.make_arguments().parse(command[2:])
        return
    assert command[1] == "train.py"
    cfg = config_of(command)
    assert cfg.experiment
    if not cfg.async_rl:  # the same number of every environment
        assert cfg.trajectories_per_dataset % (cfg.num_workers * cfg.num_envs_per_worker) == 0


def test_flags_of_sample_factory_that_the_page_calls_something_else_are_none_here() -> None:
    flags = {flag for row in table("its flags") for flag in re.findall(r"`(\w+)`", row["its flags"])}
    assert len(flags) > 100
    assert flags & FIELDS == {"eval_deterministic"}, "which is another command's there"


def test_our_losses_are_the_numbers_of_the_page() -> None:
    rows = table("what the policy loss raises, and what the value loss adds")
    own = {row["what the policy loss raises, and what the value loss adds"]: [*row.values()][1:5] for row in rows[:2]}
    header = [*rows[0]][1:5]
    inputs = [[float(number) for number in re.findall(r"-?\d[\d.]*", text)] for text in header]
    for words, shown in own.items():
        clip = float(re.search(r"ppo_clip_value ([\d.]+)`", words)[1])
        for (first, second), title, text in zip(inputs, header, shown, strict=True):
            if title.startswith("A"):
                value = ppo_objective(torch.tensor(second), torch.tensor(first), 0.2)
            else:
                value = 0.5 * clipped_value_error(torch.tensor(first), torch.tensor(1.0), torch.tensor(second), clip)
            assert float(value) == pytest.approx(float(text), abs=5e-4), title
