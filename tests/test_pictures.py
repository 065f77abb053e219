"""The drawings of the documentation are those that the command makes: the same bytes, small, in one style."""

import re
from pathlib import Path

import pytest

from docs.pictures import __main__ as pictures


@pytest.mark.parametrize("name", pictures.DRAWINGS)
def test_a_drawing_is_what_the_command_draws(name: str, tmp_path: Path) -> None:
    page, path = pictures.DRAWINGS[name](), tmp_path / "drawn.svg"
    page.save(path)
    drawn = path.read_text()
    assert drawn == pictures.place_of(name).read_text(), f"run python -m docs.pictures {name}"
    assert len(drawn) < 60_000
    assert "<text" not in drawn, "letters are paths: they look the same everywhere"
    assert re.search(r'<path d="M0 [\d.]+L622.5 [^"]*" style="fill:#ffffff"', drawn), "readable on a dark page, too"
    width, height = page.figure.bbox.size
    for text in page.axes.texts:
        box, words = text.get_window_extent(), text.get_text()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, f"{words} is cut off"
        assert text.get_fontsize() * 96 / 72 >= 11, f"{words} is small"


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert pictures.main(["nothing"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pictures: there is no nothing; there are architecture, ")
    assert error.count("\n") == 1
