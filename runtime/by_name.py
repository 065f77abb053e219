"""Functions and classes by name, "module:name": so the command line, saved settings and every process can find them.

One that is given from Python goes along with its name into every process, where a notebook's could not be imported.
"""

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import gymnasium as gym

from runtime.user_error import UserError, nearest

IMPORTED = ("env", "algo", "model", "encoder", "core", "policy_mapping")  # settings that may name code
NO_MODULE = "by_value"  # in names of what no other program can import
_USED: dict[Path, dict[str, Any]] = {}  # by the systems of this program, by the folders of their runs


class Named(str):
    """The name of a function or class, or the id of an environment, which takes along what it names.

    Pickled, that is by reference, but what a notebook or the running script defines goes by value, as it is now: no
    other process runs these again.
    """

    def __new__(cls, name: str, value: Any = None, pickled: bytes | Exception | None = None) -> "Named":
        named = super().__new__(cls, name)
        named._value, named._pickled = value, pickled or _pickle(value)
        return named

    @property
    def value(self) -> Any:
        """What is named. Raises `UserError` when it cannot be made in this process."""
        if self._value is None:
            try:
                self._value, registered = cloudpickle.loads(self._pickled)
            except Exception as error:
                raise UserError(f"{self} cannot be made in another process: {type(error).__name__}: {error}") from error
            for name, spec in registered.items():
                gym.registry.setdefault(name, spec)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._pickled, Exception):
            raise UserError(f"{self} cannot be sent to other processes: {self._pickled}; make what it uses inside of "
                            "it, or use serial_mode=True") from self._pickled
        return Named, (str(self), None, self._pickled)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Named":
        return self


def _pickle(value: Any) -> bytes | Exception:
    for registered in _registered(), {}:
        try:
            return cloudpickle.dumps((value, registered))
        except Exception as error:  # noqa: BLE001  whatever; it may never be sent
            reason = error
    return reason


def _registered() -> dict[str, Any]:
    """Return the environments that this program has registered with gymnasium; all processes have those of Atari."""
    return {name: spec for name, spec in gym.registry.items() if not str(spec.entry_point).startswith("ale_py.")}


def reference(value: Any) -> Any:
    """Name a function or class, or the id of an environment that this program has registered, for every process.

    A function of the running script is named by the file of the script. What the command line could not find again
    later is named "by_value:name". Anything else is returned as it is.
    """
    if isinstance(value, str) and value in _registered():
        return Named(value, gym.registry[value])
    if not callable(value):
        return value
    inner = getattr(value, "func", value)  # of a partial()
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = sys.modules.get(getattr(value, "__module__", None))
    if getattr(module, name, None) is value:
        found = module.__name__
        if found == "__main__":
            found = module.__spec__.name if module.__spec__ else Path(getattr(module, "__file__", None) or "").stem
        if found:
            return Named(f"{found}:{name}", value)
    name = re.sub(r"\W", "", name.rpartition(".")[2])  # of <lambda>
    return Named(f"{NO_MODULE}:{name}", value)


def remember(run_dir: Path, settings: Mapping[str, Any]) -> None:
    """Note what code a system in this program was made of: its run may be loaded here without more trust."""
    _USED[run_dir] = {flag: settings[flag] for flag in IMPORTED}


def recall(run_dir: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's settings whose code this program has used for it; run_dir: where it was trained."""
    return {flag: code for flag, code in _USED.get(run_dir, {}).items() if code == saved.get(flag)}


def check_trusted(saved: Mapping[str, Any], given: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse to import what only the settings in a run's folder ask for: who sends a folder would run code here.

    Args:
        saved: the settings of the run. given: those of the command line.
    """
    if wrong := [name for name in IMPORTED if not isinstance(saved.get(name, ""), str)]:
        raise UserError(f"{run_dir}: {wrong[0]} is no name in its settings; use --restart_behavior=restart")
    unnamed = [flag for flag in IMPORTED if ":" in saved.get(flag, "") and flag not in given]
    for flag in unnamed:
        check_importable(flag, saved[flag])
    if unnamed and not given.get("trust_run"):
        raise UserError(f"{run_dir} asks to import {' '.join(f'--{flag}={saved[flag]}' for flag in unnamed)}; add "
                        "--trust_run if you know what that code does (in Python trust_run=True)")


def check_importable(flag: str, name: str) -> None:
    """Raise `UserError` for the name of what can only be given from Python."""
    if name.startswith(f"{NO_MODULE}:"):
        raise UserError(f"--{flag}={name}: '{name.partition(':')[2]}' comes from a notebook or from inside a function; "
                        f"give it from Python again, as {flag}=..., or put it into a file of its own and name that")


def import_module(name: str) -> ModuleType:
    """Import a user's module. From then on the working directory is searched too, as the last folder."""
    if not name or name.startswith("."):
        raise ModuleNotFoundError(f"no module is called '{name}'", name=name)
    if "" not in sys.path:
        sys.path.append("")
    return importlib.import_module(name)


def check_not_imported() -> None:
    """Raise `UserError` when a system is being made by a module that is imported to find something in it."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    importing = [index for index, frame in enumerate(frames) if frame.f_code is import_module.__code__]
    if importing:
        script = next(frame for frame in frames[: importing[0]][::-1] if frame.f_code.co_name == "<module>")
        raise UserError(f"{Path(script.f_code.co_filename).name}: put what starts the training under 'if __name__ == "
                        "\"__main__\":', since this file is imported by name")


def find_function(flag: str, name: str) -> Callable:
    """Find the function or class that "module:name" names. Raises `UserError` when there is none."""
    if isinstance(name, Named):
        return name.value
    check_importable(flag, name)
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"--{flag}={name}: there is no module '{error.name}'; run it from the folder of its file, "
                        "or set PYTHONPATH to that folder") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        others = [other for other, value in vars(module).items() if callable(value)]
        raise UserError(f"--{flag}={name}: module '{module_name}' has no function or class '{attribute}'"
                        f"{nearest(attribute, others)}")
    return function
