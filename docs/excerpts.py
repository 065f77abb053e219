"""Fill the excerpts of the documentation from the source, and renew its links to lines: `python -m docs.excerpts`.

Nothing in a page that shows code is typed by hand. A page says which lines it wants by what stands on them,

    <!-- excerpt: vtrace.py `ratios = log_ratios.exp()` `return values[:-1]` -->

and this tool writes the block below that line, and the link below the block. The first text must stand on one line of
the file only; the second is looked for from there on. A link to a line carries the text of that line as its title,

    [the trace is cut](../vtrace.py#L74 "discounts.masked_fill(truncated")

and gets its number anew. With `--check` nothing is written: the exit status is 1 if anything would change.
"""

import os
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXCERPT = re.compile(
    r"^<!-- excerpt: (?P<file>\S+) `(?P<first>[^`\n]+)` `(?P<last>[^`\n]+)` -->\n"
    r"(?:```\w*\n(?:(?!```).*\n)*```\n(?:\n\[`.*\n)?)?", re.MULTILINE)
LINK = re.compile(r'\]\((?P<path>[\w./-]+)#L(?P<begin>\d+)(?:-L(?P<end>\d+))? "(?P<text>[^"\n]+)"\)')


class Stale(ValueError):
    """A page names something that is not in the source, or is there more than once."""


def find_line(path: Path, text: str) -> int:
    """Return the number, from 1, of the only line of a file that holds a text. Raises `Stale`."""
    if not path.is_file():
        raise Stale(f"there is no file {os.path.relpath(path, ROOT)}")
    found = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    if len(found) != 1:
        raise Stale(f"{os.path.relpath(path, ROOT)} has {len(found)} lines with {text!r}, not one")
    return found[0]


def excerpt(page: Path, match: re.Match) -> str:
    """Return a directive with the block and the link that belong below it."""
    path = ROOT / match["file"]
    first = find_line(path, match["first"])
    lines = path.read_text().splitlines()
    last = next((number for number in range(first, len(lines) + 1) if match["last"] in lines[number - 1]), None)
    if last is None:
        raise Stale(f"{match['file']} has no {match['last']!r} after line {first}")
    code = textwrap.dedent("\n".join(lines[first - 1 : last]))
    where = f"lines {first} to {last}" if last > first else f"line {first}"
    anchor = f"L{first}-L{last}" if last > first else f"L{first}"
    return (f"<!-- excerpt: {match['file']} `{match['first']}` `{match['last']}` -->\n"
            f"```python\n{code}\n```\n\n"
            f"[`{match['file']}`, {where}]({os.path.relpath(path, page.parent)}#{anchor})\n")


def link(page: Path, match: re.Match) -> str:
    """Return a link with the number of the line on which its title stands; a range keeps its length."""
    first = find_line((page.parent / match["path"]).resolve(), match["text"])
    end = f"-L{first + int(match['end']) - int(match['begin'])}" if match["end"] else ""
    return f']({match["path"]}#L{first}{end} "{match["text"]}")'


def renewed(page: Path) -> str:
    """Return the text of a page as it should be. Raises `Stale`."""
    text = page.read_text()
    if len(EXCERPT.findall(text)) != len(re.findall(r"^<!-- excerpt:", text, re.MULTILINE)):
        raise Stale("an excerpt is not written as <!-- excerpt: FILE `first line` `last line` -->")
    text = EXCERPT.sub(lambda match: excerpt(page, match), text)
    return LINK.sub(lambda match: link(page, match), text)


def main(argv: list[str]) -> int:
    """Renew all pages, or only say which are stale; return the exit status."""
    status = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        try:
            text = renewed(page)
        except Stale as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            status = 1
            continue
        if text != page.read_text():
            print(f"{page.relative_to(ROOT)}: {'stale' if '--check' in argv else 'renewed'}")
            if "--check" in argv:
                status = 1
            else:
                page.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
