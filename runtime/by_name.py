"""Functions and classes by name, "module:name": so the command line, saved settings and every process can find them."""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.user_error import UserError, nearest

IMPORTED = ("algo", "model", "encoder", "core", "policy_mapping")  # settings that may name code, beside `env`


def reference(function: Callable) -> str:
    """Name a function or class so that every process can find it: "module:name".

    A function of the running script is named by the file of the script, which must guard its main part with
    `if __name__ == "__main__"`. Raises `UserError` for one that cannot be found by name.
    """
    module, name = function.__module__, getattr(function, "__qualname__", "")  # a partial() has none
    if module == "__main__":
        main = sys.modules["__main__"]
        module = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", "")).stem
    if not module or not name or "<" in name or "." in name:
        raise UserError(f"{function!r} must be defined at the top level of a file, so that other processes can find it")
    return f"{module}:{name}"


def check_trusted(saved: Mapping[str, Any], given: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse to import what only the settings in a run's folder ask for: who sends a folder would run code here.

    Args:
        saved: the settings of the run. given: those of the command line.
    """
    unnamed = [f"--{flag}={saved[flag]}" for flag in IMPORTED if ":" in str(saved.get(flag, "")) and flag not in given]
    if unnamed and not given.get("trust_run"):
        raise UserError(f"{run_dir} asks to import {' '.join(unnamed)}; add --trust_run if you know what that code "
                        "does")


def find_function(flag: str, name: str) -> Callable:
    """Import the function or class that "module:name" names. Raises `UserError` when there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"--{flag}={name}: there is no module '{error.name}'; run it from the folder of its file, or "
                        "set PYTHONPATH to that folder") from error
    except (ImportError, ValueError) as error:
        raise UserError(f"--{flag}={name}: module '{module_name}' cannot be imported: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"--{flag}={name}: module '{module_name}' has no function or class '{attribute}'"
                        f"{nearest(attribute, vars(module))}")
    return function
