"""The documentation as a site: built without a warning, its links lead to lines, and it needs no network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")

from tools.site import ROOT, number_lines, place_of

FETCHED = r'<(?:script|link|img|iframe|source)\b[^>]*\s(?:src|href)="?((?:https?:)?//[^"\s>]+)'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as with `mkdocs build --strict`."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                           capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert built.returncode == 0, built.stderr
    return folder


def test_readme_is_the_first_page_and_the_others_are_there(site: Path) -> None:
    first = (site / "index.html").read_text()
    assert ">nano-sample-factory" in first
    assert 'href="performance.html#beside-other-systems"' in first
    for name in ("usage", "security", "results/index", "source/losses.py"):
        assert (site / f"{name}.html").is_file()


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert not {page.name: found for page in pages if (found := re.findall(FETCHED, page.read_text()))}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//", styles) + re.findall(r"@import[^;]*//", styles)
    assert re.findall(FETCHED, '<link rel="stylesheet" href="https://fonts.com/css">') == ["https://fonts.com/css"]


def test_links_between_pages_and_to_lines_exist(site: Path) -> None:
    links = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its addresses are those of a server
            continue
        for link in re.findall(r'<(?:a|img)\b[^>]*\s(?:src|href)="?([^"\s>]+)', page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if ":" in link or not anchor:
                assert ":" in link or target.exists(), (page, link)
                continue
            assert f'id="{anchor}"' in target.read_text(), (page, link)
            links += 1
    assert links > 1000  # the numbers of lines are links, too


def test_lists_and_tables_are_not_left_as_text(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        assert not re.findall(r"<p>[^<]*\n(?:[-*] |\|)[^\n]*", text), page
        assert "](" not in re.sub(r"<code>.*?</code>|<script.*?</script>", "", text, flags=re.DOTALL), page


def test_the_lines_that_a_link_names_are_marked() -> None:
    page = number_lines("vtrace.py", {"L10-L20", "L3"})
    assert page.count("<span id=") == len((ROOT / "vtrace.py").read_text().splitlines())
    assert page.index('id="L9"') < page.index('<a id="L10-L20"></a>') < page.index('id="L10"')
    assert 'a[id="L10-L20"]:target ~ span:nth-of-type(-n+20)' in page


@pytest.mark.parametrize(("path", "place"), [
    ("README.md", "index.md"), ("docs/usage.md", "usage.md"), ("docs/results/pong-fast/curve.png",
     "results/pong-fast/curve.png"), ("docs/studies/pong.toml", "source/docs/studies/pong.toml.md"),
    ("LICENSE", "source/LICENSE.md"), ("nowhere.py", None),
])
def test_every_path_of_the_repository_has_its_place(path: str, place: str | None) -> None:
    assert place_of(path) == place
