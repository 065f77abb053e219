"""docs/coming_from.md: our settings and defaults are as it says, its commands are ours.

What it says of the other systems was read in their source; they are not installed here.
"""

import ast
import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from parts import make_config

import evaluate
from appo import Settings
from config import Config
from runtime.command_line import make_parser
from runtime.machine import Machine, defaults

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
    return make_config(defaults(given["env"], given, MACHINE), given)


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
    cfg = make_config({"env": ENVS[env]}, defaults(ENVS[env], {}, MACHINE))
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
