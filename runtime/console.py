"""The console, which may go away: a closed terminal or pipe ends the output, not the training."""

import os
import shutil
import sys


def say(text: str, end: str = "\n") -> None:
    """Print; when nobody can read it, send what is left and all that comes nowhere."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_progress(line: str) -> bool:
    """Show how far the training has come; return whether the line is open: a terminal's takes the place of the last."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns - 1
    say("\r" + line[:width].ljust(width) if is_terminal else line, end="" if is_terminal else "\n")
    return is_terminal
