"""What the user can mend, said in one line, and what has failed."""

import difflib
import itertools
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENVS = Path(__file__).parent.parent / "envs"


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, never a traceback."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # what was typed may hold anything


def nearest(word: Any, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known word closest to a misspelled one, else an empty string."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


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
