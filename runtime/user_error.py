"""What the user can mend, said in one line, and what has failed."""

import difflib
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SIMILAR = 0.75  # share of the letters that two words have in common, in order, which makes them alike
SHORTEST = 4  # letters of an abbreviation


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, never a traceback."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # what was typed may hold anything


def exit_status(main: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
    """Make a command return its exit status: 2 after one line about what the user can mend, else 0."""
    @functools.wraps(main)
    def status(argv: list[str]) -> int:
        try:
            main(argv)
        except UserError as error:
            print(f"{Path(main.__code__.co_filename).name}: {error}", file=sys.stderr)
            return 2
        return 0
    return status


def nearest(word: Any, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known word that is nearly the same, or the only one that begins or ends so.

    Small and capital letters, "-" and "_" are alike. Returns an empty string when nothing is close.
    """
    names, word = {_plain(name): name for name in known}, _plain(str(word))
    longer = [name for name in names if name.startswith(word) or name.endswith(word)]
    close = difflib.get_close_matches(word, names, n=1, cutoff=SIMILAR)
    if not close and len(word) >= SHORTEST and len(longer) == 1:
        close = longer
    return f" (did you mean {names[close[0]]}?)" if close else ""


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "").replace("_", "").lower()


class ComponentError(Exception):
    """A component failed; the text names it and holds its traceback."""


class EnvironmentFailure(ComponentError):
    """An environment raised an error, the cause, or returned numbers that cannot be learned from."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # of whatever was raised
