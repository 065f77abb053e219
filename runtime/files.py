"""Files that are always whole, and the settings that a run has saved."""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from runtime.by_name import NO_MODULE
from runtime.user_error import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to that takes this name when it is whole and on the disk, and else leaves nothing.

    A crash, at whatever moment, leaves the file before or the new one.
    """
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # never through a link of this name
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # else the new name may be lost; some file systems cannot
            os.fsync(folder)
    finally:
        os.close(folder)


def run_dir_of(train_dir: str, experiment: str, env: str) -> Path:
    """Return the folder of a run, named like its experiment or else its environment. Raises `UserError`."""
    if experiment in (".", "..") or "/" in experiment:
        raise UserError(f"--experiment={experiment} is no plain name; choose the folder with --train_dir")
    name = re.sub(r"[/:]", "_", env.removeprefix(f"{NO_MODULE}:"))
    return Path(train_dir) / (experiment or name)


def remove_unfinished(folder: Path) -> None:
    """Remove what `replacing` had begun to write when its process was killed."""
    with contextlib.suppress(OSError):
        for unfinished in folder.rglob("*.tmp"):
            unfinished.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is always whole, also after a crash. Raises `OSError`."""
    with replacing(path) as file:
        file.write(text.encode())


def add_line(path: Path, line: str) -> None:
    """Add a line to a file, all of it or nothing: a part would spoil the next line too. Raises `OSError`."""
    data = f"{line}\n".encode(errors="backslashreplace")  # an error may name any file
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):  # the disk is full
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line, but not lines that are damaged; none where there is no file."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def finite(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write infinity, which JSON does not have, as "inf"."""
    return {name: "inf" if value == math.inf else value for name, value in settings.items()}


def save_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as JSON."""
    write_atomically(path, json.dumps(finite(settings), indent=2) + "\n")


def load_saved(path: Path) -> dict[str, Any]:
    """Read the settings of a run, which `save_settings` wrote. Raises `UserError` when the file is damaged."""
    try:
        saved = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); use --restart_behavior=restart to begin anew") from error
    if not isinstance(saved, dict) or "env" not in saved:
        raise UserError(f"{path} holds no settings; use --restart_behavior=restart to begin anew")
    return {name: math.inf if value == "inf" else value for name, value in saved.items()}
