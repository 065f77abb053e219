"""The console, which may go away: a closed terminal or pipe ends the output, not the training."""

import io
import os
import shutil
import sys


class Forgiving(io.FileIO):
    """A file that loses what it cannot write."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def forgive() -> None:
    """Replace the outputs of this process by ones that never fail: environments print, too."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            file = io.BufferedWriter(Forgiving(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, errors="backslashreplace", line_buffering=True))


def say(text: str, end: str = "\n") -> None:
    """Print; once nobody reads it, discard this and all that follows."""
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:  # the console has fewer letters
        say(text.encode("ascii", "backslashreplace").decode(), end)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_progress(line: str) -> bool:
    """Show how far the training has come; return whether the line is open: a terminal's takes the place of the last."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns - 1
    say("\r" + line[:width].ljust(width) if is_terminal else line, end="" if is_terminal else "\n")
    return is_terminal
