"""The pages of the documentation: commands, sessions, excerpts and links are true.

Commands run, made short, in the order of the pages, in one folder, since later pages use the runs of earlier ones.
"""

import re
from pathlib import Path

import pages
import pytest
from pages import ROOT
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from docs import excerpts

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in (
    "usage", "python", "performance", "multi_agent", "algorithms", "forking", "walkthrough", "exercises/README"))]
MARKDOWN = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
NEEDED = {"pettingzoo:mpe2": "mpe2", "custom_mapping": "mpe2", "pettingzoo:classic": "pettingzoo",
          "HalfCheetah": "mujoco", "script_docs_usage_0": "wandb"}
# run by `test_experiments.py`, which looks at their numbers, too
ELSEWHERE = [f"python -m docs.experiments.{name}" for name in ("chain", "lag", "memory", "normalization",
                                                               "stale_states", "time_limits")]
COMMANDS = [command for page in PAGES for command in pages.commands(page) if command not in ELSEWHERE]
EXACT = "python -m docs.experiments.weight_once"  # prints what the walkthrough shows, everywhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the pages' commands can be typed."""
    folder = tmp_path_factory.mktemp("pages")
    pages.make_folder(folder, PAGES)
    return folder


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS), ids=lambda command: command.splitlines()[-1])
def test_a_command_works_as_typed(folder: Path, command: str) -> None:
    for text, package in NEEDED.items():
        if text in command:
            pytest.importorskip(package)
    status, said = pages.run(folder, command)
    assert status == 0, said
    assert "Traceback" not in said
    assert "nothing to do" not in said
    assert command != EXACT or said in (DOCS / "walkthrough.md").read_text()
    assert command.split()[2:3] != ["tools.benchmark"] or " env_steps/s, " in said
    if " train.py " in command or "-m examples" in command:
        assert ("resumed at" in said) == (command == pages.RESUMED), said


def test_the_commands_of_every_page_are_run() -> None:
    typed = {page for page in MARKDOWN if pages.commands(page) and "results" not in page.parts}
    assert typed - {*PAGES} <= {DOCS / "coming_from.md", ROOT / "CONTRIBUTING.md"}, "add the page to PAGES"


class Sessions(PythonCodeBlockParser):
    """The ```pycon blocks of a page, as doctests with one namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.codeblock_parser = CodeBlockParser("pycon", PythonEvaluator())


def test_sessions_print_what_the_walkthrough_shows() -> None:
    examples = list(Sybil([Sessions()], path=str(ROOT)).parse(DOCS / "walkthrough.md").examples())
    assert len(examples) > 10
    for example in examples:
        example.evaluate()


def test_excerpts_and_links_to_lines_are_those_of_the_source(capsys: pytest.CaptureFixture) -> None:
    assert excerpts.main(["--check"]) == 0, capsys.readouterr()


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ +(.*?)\s*#*$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r'\]\(\s*([^)\s:]+)(?:\s+"[^"]*")?\s*\)', text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.suffix != ".md" or not anchor or anchor in anchors(target), link
