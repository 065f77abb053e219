"""Files that are always whole, and the settings that a run has saved."""

import contextlib
import errno
import json
import math
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from runtime.by_name import NO_MODULE
from runtime.user_error import UserError

MAX_NAME_BYTES, MAX_PATH_BYTES = 240, 3000  # 255 and 4096 are the system's, and names get endings (_old2)


def check_regular(path: Path) -> Path:
    """Return the path of a regular file, or of none yet.

    Raises `OSError` for a pipe or a device: reading one may never end, and a file would replace it.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to that takes this name when it is whole and on the disk, and else leaves nothing.

    A crash, at whatever moment, leaves the file before or the new one.
    """
    temporary = check_regular(path).with_suffix(".tmp")
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
    return check_name(Path(train_dir) / (experiment or name))


def check_name(path: Path) -> Path:
    """Return the path of a folder that is to be made. Raises `UserError` for a name that not every program can read."""
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in str(path)):
        raise UserError(f"{str(path)!r} has letters that cannot be printed; choose another --experiment or --train_dir")
    if longest := next((part for part in path.parts if len(os.fsencode(part)) > MAX_NAME_BYTES), ""):
        raise UserError(f"the name {longest[:20]}... is too long for a folder; use at most {MAX_NAME_BYTES} bytes in "
                        "--experiment and --train_dir")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UserError(f"--train_dir={str(path)[:20]}... is too long; use at most {MAX_PATH_BYTES} bytes")
    return path


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


def parse_json(text: str) -> Any:
    """Parse JSON. Raises `ValueError`, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line, but not lines that are damaged; none where there is no file."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def read_number(row: Mapping[str, Any], name: str) -> float:
    """Return a number in a row of a file; 0: there is none, or something else."""
    with contextlib.suppress(KeyError, TypeError, OverflowError):
        if math.isfinite(row[name]):
            return row[name]
    return 0


def finite(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write infinity, which JSON does not have, as "inf"."""
    return {name: "inf" if value == math.inf else value for name, value in settings.items()}


def save_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as JSON."""
    write_atomically(path, json.dumps(finite(settings), indent=2) + "\n")


def load_saved(path: Path) -> dict[str, Any]:
    """Read the settings of a run, which `save_settings` wrote. Raises `UserError` when the file is damaged."""
    try:
        saved = parse_json(check_regular(path).read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); use --restart_behavior=restart to begin anew") from error
    if not isinstance(saved, dict) or "env" not in saved:
        raise UserError(f"{path} holds no settings; use --restart_behavior=restart to begin anew")
    return {name: math.inf if value == "inf" else value for name, value in saved.items()}
