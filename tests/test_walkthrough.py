"""The walkthrough runs: its commands and examples in its order, in one folder, and its excerpts are the source.

Experiments are shortened; what they print is compared where the page says `<!-- exact -->`.
"""

from pathlib import Path

import pytest
from pages import commands, exact_outputs, make_folder, run
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from docs import excerpts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"
# run by `test_experiments.py`, which looks at their numbers, too
ELSEWHERE = {f"docs.experiments.{name}" for name in ("chain", "lag", "memory", "normalization", "stale_states",
                                                     "time_limits")}
COMMANDS = [command for command in commands(PAGE) if command.split()[-1] not in ELSEWHERE
            and command not in commands(ROOT / "docs" / "usage.md")]  # which `test_pages.py` runs


class Sessions(PythonCodeBlockParser):
    """The ```pycon blocks of a page, as doctests with one namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.codeblock_parser = CodeBlockParser("pycon", PythonEvaluator())


def test_sessions_print_what_the_page_shows() -> None:
    examples = list(Sybil([Sessions()], path=str(ROOT)).parse(PAGE).examples())
    assert len(examples) > 10
    for example in examples:
        example.evaluate()


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walkthrough")
    make_folder(folder, [PAGE])
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_works_and_prints_what_the_page_says_is_exact(folder: Path, command: str) -> None:
    result = run(folder, command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert exact_outputs(PAGE).get(command) in (None, result.stdout)


# ---- excerpts --------------------------------------------------------------------------------------------------------


def test_excerpts_and_links_to_lines_are_those_of_the_source(capsys: pytest.CaptureFixture) -> None:
    assert excerpts.main(["--check"]) == 0, capsys.readouterr()
