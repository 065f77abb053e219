"""The console, which may go away: a closed terminal or pipe ends the output, not the training."""

import contextlib
import os
import sys
from typing import Any


class Forgiving:
    """A stream that nobody need read: environments print, too."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            silence(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


def silence(stream: Any) -> None:
    """Send what is left in a stream, and all that comes, nowhere: else it would fail again when the program ends."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def open_missing() -> None:
    """Open what a program expects to be open: files would else take the place of its input and outputs."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def forgive() -> None:
    """Let nothing that is printed in this process fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            setattr(sys, name, Forgiving(getattr(sys, name)))


def say(text: str, end: str = "\n") -> None:
    """Print, as long as somebody can read it."""
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:
        say(text.encode("ascii", "replace").decode(), end)
    except (OSError, ValueError):
        silence(sys.stdout)


def complain(text: str) -> None:
    """Print to the standard error, if somebody can read it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def show_progress(line: str) -> bool:
    """Show how far the training has come; return whether the line is open: a terminal's takes the place of the last."""
    with contextlib.suppress(OSError, ValueError):  # it has gone away
        if sys.stdout is not None and sys.stdout.isatty():
            width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
            say("\r" + line[:width].ljust(width), end="")
            return True
    say(line)
    return False
