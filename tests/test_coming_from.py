"""docs/coming_from.md: our settings and defaults are as it says, its commands are possible.

What it says of the other systems was read in their source; they are not installed here.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import evaluate
from appo import Settings
from config import defaults, make_config, parse_settings
from runtime.machine import Machine

PAGE = (Path(__file__).parent.parent / "docs/coming_from.md").read_text()
COMMANDS = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "").splitlines()
MACHINE = Machine(cores=2, num_gpus=0)  # of the columns that end in "here"
ENVS = {"Pong": "PongNoFrameskip-v4", "HalfCheetah": "HalfCheetah-v5", "CartPole": "CartPole-v1"}


def defaults_stated() -> dict[str, dict[str, str]]:
    """Return the rows of the table of settings by their names, each by its columns."""
    lines = PAGE[PAGE.index("\n| here |") + 1 :].partition("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}


def shown(value: Any) -> str:
    """Return a value as the table shows it; numbers as they are read."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value) if isinstance(value, str | bool) else str(float(value))


def test_every_flag_of_the_page_exists() -> None:
    known = {action.dest for action in evaluate.make_arguments()._actions} | Settings.__dataclass_fields__.keys()
    prose = re.sub(r"```(text|py)\n.*?```", "", PAGE, flags=re.DOTALL)
    assert set(re.findall(r"--(\w+)", prose)) <= known


@pytest.mark.parametrize("env", ENVS)
def test_the_defaults_are_those_of_the_table(env: str) -> None:
    cfg = make_config({"env": ENVS[env]}, defaults(ENVS[env], {}, MACHINE))
    stated = {name: row[f"{env} here"] for name, row in defaults_stated().items() if row[f"{env} here"]}
    assert len(stated) > 20
    for name, text in stated.items():
        number = re.fullmatch(r"[\d.,e-]+", text)
        assert (str(float(text.replace(",", ""))) if number else text) == shown(getattr(cfg, name)), name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_of_ours_and_possible(command: str) -> None:
    python, program, *argv = shlex.split(command)
    if program == "evaluate.py":
        evaluate.make_arguments().parse(argv)
        return
    given = parse_settings(argv, "")
    cfg = make_config(defaults(given["env"], given, MACHINE), given)
    assert (python, program) == ("python", "train.py")
    assert cfg.async_rl or cfg.trajectories_per_dataset % (cfg.num_workers * cfg.num_envs_per_worker) == 0
