"""The drawings of the documentation are those that the command makes, byte by byte."""

from pathlib import Path

import pytest

from docs.pictures import __main__ as pictures


@pytest.mark.parametrize("name", pictures.DRAWINGS)
def test_a_drawing_is_what_the_command_draws(name: str, tmp_path: Path) -> None:
    path = tmp_path / "drawn.svg"
    pictures.DRAWINGS[name]().save(path)
    assert path.read_text() == pictures.place_of(name).read_text(), f"run python -m docs.pictures {name}"
