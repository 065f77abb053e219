"""What the user can mend, said in one line."""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, never a traceback."""


def nearest(word: Any, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known word closest to a misspelled one, else an empty string."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


class ComponentError(RuntimeError):
    """A component failed; the text names it and holds its traceback."""
