"""What the user can mend, said in one line, and what has failed."""

import difflib
import itertools
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENVS = Path(__file__).parent.parent / "envs"
SIMILAR = 0.75  # share of the letters that two words have in common, in order, which makes them alike
SHORTEST = 4  # letters of an abbreviation


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, never a traceback."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # what was typed may hold anything


def nearest(word: Any, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known word that a misspelled one surely means, else an empty string."""
    close = closest(str(word), known)
    return f" (did you mean {close}?)" if close else ""


def closest(word: str, known: Iterable[str], *, shortened: bool = True) -> str | None:
    """Return the known word that is nearly the same, or else, shortened, the only one that begins or ends so.

    Small and capital letters, "-" and "_" are alike. None: nothing is close.
    """
    names, word = {_plain(name): name for name in known}, _plain(word)
    longer = [name for name in names if name.startswith(word) or name.endswith(word)]
    close = difflib.get_close_matches(word, names, n=1, cutoff=SIMILAR)
    if not close and shortened and len(word) >= SHORTEST and len(longer) == 1:
        close = longer
    return names[close[0]] if close else None


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "").replace("_", "").lower()


class ComponentError(Exception):
    """A component failed; the text names it and holds its traceback."""


class EnvironmentFailure(ComponentError):
    """An environment raised an error or returned numbers that cannot be learned from."""

    frames: str | None = None  # of one that comes from another process

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # of whatever was raised

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"frames": self.where()}

    def where(self) -> str:
        """Return the part of the traceback that lies in the environment's own code; "": nothing was raised there."""
        if self.frames is not None:
            return self.frames
        frames = traceback.extract_tb(self.__cause__.__traceback__) if self.__cause__ else []
        ours = [number for number, frame in enumerate(frames) if ENVS in Path(frame.filename).parents]
        frames = frames[ours[-1] + 1 :] if ours else []
        own = itertools.dropwhile(lambda frame: f"{os.sep}gymnasium{os.sep}" in frame.filename, frames)  # its wrappers
        return "".join(traceback.format_list(list(own) or frames))
