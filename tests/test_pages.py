"""The pages of the documentation: their commands work as typed, their links lead somewhere.

The commands run in the order of the pages, in one folder, since later pages use the runs of earlier ones.
"""

import re
from pathlib import Path

import pages
import pytest
from pages import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *(DOCS / f"{name}.md" for name in (
    "usage", "python", "performance", "multi_agent", "algorithms", "forking"))]
BY_OTHER_TESTS = {DOCS / "walkthrough.md", DOCS / "coming_from.md"}
MARKDOWN = [README, ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
NEEDED = {"pettingzoo:mpe2": "mpe2", "custom_mapping": "mpe2", "pettingzoo:classic": "pettingzoo",
          "HalfCheetah": "mujoco", "script_docs_usage_0": "wandb"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the pages' commands can be typed."""
    folder = tmp_path_factory.mktemp("pages")
    pages.make_folder(folder, PAGES)
    return folder


@pytest.mark.parametrize("command", dict.fromkeys(command for page in PAGES for command in pages.commands(page)),
                         ids=lambda command: command.splitlines()[-1])
def test_a_command_works_as_typed(folder: Path, command: str) -> None:
    for text, package in NEEDED.items():
        if text in command:
            pytest.importorskip(package)
    result = pages.run(folder, command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "nothing to do" not in result.stdout
    last = command.splitlines()[-1]
    if " train.py " in last or "-m examples" in last:
        assert ("resumed at" in result.stdout) == (last == pages.RESUMED), result.stdout


def test_the_commands_of_every_page_are_run() -> None:
    typed = {page for page in DOCS.glob("*.md") if pages.commands(page)}
    assert typed - BY_OTHER_TESTS <= {*PAGES}, "add the page to PAGES"
    assert len(pages.commands(README)) >= 7


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{number}" if number else slug)
    return {*found}


def why_broken(page: Path, link: str) -> str | None:
    """Say what is wrong with a relative link; None: it leads to a file, a heading, or lines that exist."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return "no such file"
    if anchor and target.suffix == ".md":
        return None if anchor in anchors(target) else "no such heading"
    if anchor:
        lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", anchor)
        if not lines:
            return "neither a heading nor lines"
        first, last = int(lines[1]), int(lines[2] or lines[1])
        return None if 1 <= first <= last <= len(target.read_text().splitlines()) else "no such lines"
    return None


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r'\]\(\s*([^)\s]+)(?:\s+"[^"]*")?\s*\)', re.sub(r"`[^`\n]*`", "", text))
    broken = {link: why for link in links if ":" not in link and (why := why_broken(page, link))}
    assert not broken
