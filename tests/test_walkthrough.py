"""The walkthrough runs: its commands and examples in its order, in one folder, and its excerpts are the source.

Experiments are shortened. What they print must have the form that the page shows, number for number where it says
`<!-- exact -->`.
"""

from pathlib import Path

import pytest
from pages import commands, form, make_folder, outputs, run
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
def test_a_command_works_and_prints_what_the_page_shows(folder: Path, command: str) -> None:
    result = run(folder, command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    shown, exact = outputs(PAGE).get(command, ("", False))
    if exact:
        assert result.stdout == shown
    elif shown:
        assert form(result.stdout) == form(shown)


def test_every_output_belongs_to_a_command_that_is_run() -> None:
    assert outputs(PAGE).keys() <= set(commands(PAGE))
    assert any(exact for _, exact in outputs(PAGE).values())


# ---- excerpts --------------------------------------------------------------------------------------------------------


def test_excerpts_and_links_to_lines_are_those_of_the_source(capsys: pytest.CaptureFixture) -> None:
    assert excerpts.main(["--check"]) == 0, capsys.readouterr()


SOURCE = "import math\n\n\ndef area(r):\n    square = r**2\n    return math.pi * square\n"
STALE = """<!-- excerpt: circle.py `square = r` `return` -->
[The square](../circle.py#L1 "square = r"), [both lines](../circle.py#L1-L2 "square = r").
"""
FRESH = """<!-- excerpt: circle.py `square = r` `return` -->
```python
square = r**2
return math.pi * square
```

[`circle.py`, lines 5 to 6](../circle.py#L5-L6)
[The square](../circle.py#L5 "square = r"), [both lines](../circle.py#L5-L6 "square = r").
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a page of a small repository."""
    monkeypatch.setattr(excerpts, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").touch()
    (tmp_path / "circle.py").write_text(SOURCE)
    page = tmp_path / "docs" / "page.md"
    page.write_text(STALE)
    return page


def test_excerpts_are_filled_and_links_get_their_numbers(page: Path) -> None:
    assert excerpts.main(["--check"]) == 1
    assert page.read_text() == STALE
    assert excerpts.main([]) == 0
    assert page.read_text() == FRESH
    assert excerpts.main(["--check"]) == 0


def test_they_follow_the_source(page: Path) -> None:
    excerpts.main([])
    source = page.parent.parent / "circle.py"
    source.write_text("# A circle.\n" + SOURCE.replace("r**2", "r * r"))
    assert excerpts.main(["--check"]) == 1
    assert excerpts.main([]) == 0
    assert page.read_text() == FRESH.replace("r**2", "r * r").replace("5", "6").replace("L6-L6", "L6-L7").replace(
        "lines 6 to 6", "lines 6 to 7")


def test_a_lost_link_is_put_back_and_no_prose_is_lost(page: Path) -> None:
    excerpts.main([])
    link = "\n[`circle.py`, lines 5 to 6](../circle.py#L5-L6)\n"
    page.write_text((FRESH + "Prose.\n\n" + FRESH).replace(link, "", 1))
    excerpts.main([])
    assert page.read_text() == FRESH + "Prose.\n\n" + FRESH


@pytest.mark.parametrize(("before", "after", "what"), [
    ("`square = r`", "`cube = r`", "0 lines with 'cube = r'"),
    ("`square = r`", "`r`", "lines with 'r'"),
    ("`return`", "`yield`", "no 'yield' after line 5"),
    ('"square = r")', '"cube = r")', "0 lines with 'cube = r'"),
    ("(../circle.py#L1 ", "(../square.py#L1 ", "there is no file square.py"),
    ("excerpt: circle.py", "excerpt: square.py", "there is no file square.py"),
    ("`return` -->", "`return`-->", "an excerpt is not written as")])
def test_what_is_not_in_the_source_once_is_refused(page: Path, capsys: pytest.CaptureFixture, before: str, after: str,
                                                   what: str) -> None:
    text = STALE.replace(before, after, 1)
    page.write_text(text)
    assert excerpts.main([]) == 1
    assert what in capsys.readouterr().err
    assert page.read_text() == text


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("-h", 0), ("--chek", 2), ("docs/page.md", 2)])
def test_any_other_argument_is_answered_and_changes_nothing(page: Path, capsys: pytest.CaptureFixture, argument: str,
                                                            status: int) -> None:
    assert excerpts.main([argument]) == status
    out, err = capsys.readouterr()
    assert "--check" in (err if status else out)
    assert page.read_text() == STALE
