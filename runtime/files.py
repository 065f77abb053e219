"""Files that are always whole, and the settings that a run has saved."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.user_error import UserError


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is always whole, also after a crash: to a temporary name on the disk, then rename."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
