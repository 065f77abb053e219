"""Make the documentation a site: the hooks that MkDocs calls for `mkdocs build` and `mkdocs serve` (`mkdocs.yml`).

README.md and SECURITY.md become pages beside those of `docs/`. So does every source file that a page links to: its
lines are numbered, `file.py#L10` leads to line 10, and `file.py#L10-L20` marks these lines. All links are written for
GitHub; here they are turned into those of the site. Nothing is fetched from elsewhere.
"""

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "SECURITY.md": "security.md"}  # outside docs/, and their place in the site
PICTURES = {".png", ".gif", ".svg", ".jpg"}
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\)| \")")
HEAD = """---
title: {path}
search: {{exclude: true}}
hide: [toc]
---
# `{path}`

"""


def origin(place: str) -> str:
    """Return the path in the repository of what lies at this place in the site."""
    outside = {there: here for here, there in PAGES.items()}
    return outside.get(place, f"docs/{place}")


def target(page: str, path: str) -> str:
    """Return the path in the repository to which a link of the page (its path in the repository) leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def is_source(path: str) -> bool:
    """Tell whether this path in the repository is a file that is neither a page nor a picture."""
    return (ROOT / path).is_file() and Path(path).suffix not in {".md", *PICTURES}


def place_of(path: str) -> str | None:
    """Return the place in the site of a path in the repository; None: it has none."""
    if is_source(path):
        return f"source/{path}.md"
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def number_lines(path: str, anchors: set[str]) -> str:
    """Return the Markdown page of a source file, with an anchor for each line and for each of `anchors`."""
    code = (ROOT / path).read_text()
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    ranges = {anchor: match for anchor in anchors if (match := re.fullmatch(r"L(\d+)-L(\d+)", anchor))}
    lines = []
    for number, line in enumerate(highlight(code, lexer, HtmlFormatter(nowrap=True)).splitlines(), 1):
        lines += [f'<a id="{anchor}"></a>' for anchor, match in sorted(ranges.items()) if int(match[1]) == number]
        lines.append(f'<span id="L{number}"><a class="number" href="#L{number}">{number}</a>{line}</span>')
    styles = [f'.source a[id="{anchor}"]:target ~ span:nth-of-type(-n+{match[2]}) '
              "{ background: var(--md-accent-fg-color--transparent); }" for anchor, match in sorted(ranges.items())]
    style = f"<style>{' '.join(styles)}</style>" if styles else ""
    return f'{HEAD.format(path=html.escape(path))}<div class="source highlight">{style}<pre><code>' + \
        f"{''.join(lines)}</code></pre></div>\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs/`, and those of all source files that pages link to."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    sources: dict[str, set[str]] = {}  # the anchors that links name, by the path
    for page in files.documentation_pages():
        for link in LINK.finditer(page.content_string):
            path = target(origin(page.src_uri), link["path"])
            if is_source(path):
                sources.setdefault(path, set()).add((link["anchor"] or "").removeprefix("#"))
    for path, anchors in sources.items():
        files.append(File.generated(config, f"source/{path}.md", content=number_lines(path, anchors)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn the page's links into those of the site; what has no place there is left, and MkDocs reports it."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def turn(link: re.Match[str]) -> str:
        place = place_of(target(origin(here), link["path"]))
        if place is None:
            return link[0]
        return posixpath.relpath(place, posixpath.dirname(here) or ".") + (link["anchor"] or "")

    return LINK.sub(turn, markdown)
