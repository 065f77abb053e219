"""Our modules beside a user's own `config.py`, `model.py` or `envs/`, which lie in the folder of the script.

Python knows one module of each name. Where one of ours and one of theirs have the same, it means ours while our modules
are imported and while their functions travel between processes, and theirs at all other times. Where there is no such
pair, nothing here does anything. Used by the files that users import (`appo.py`, ...), `crew.py` and `apart.py`.
"""

import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
NAMES = {path.stem for path in ROOT.glob("*.py")} | {"envs", "tools"}
OWN_PATH = f"{ROOT}/."  # an entry of `sys.path` that nobody else makes


class OwnModules:
    """What the names mean in this process: `with OWN_MODULES:` they mean our modules."""

    def __init__(self) -> None:
        self.clashing: set[str] = set()
        self.others: dict[str, ModuleType] = {}  # of these names, those that they do not mean now
        self.depth, self.lock = 0, threading.RLock()

    def importing(self) -> "OwnModules":
        """Look for names that clash, before our modules are imported: `with OWN_MODULES.importing():`."""
        if self.depth == 0:
            self.clashing |= {name for name in NAMES if is_theirs(name)}
        return self

    def __enter__(self) -> None:
        self.lock.acquire()
        self.depth += 1
        if self.depth == 1 and self.clashing:
            self._swap()
            sys.path.insert(0, OWN_PATH)

    def __exit__(self, *exc: object) -> None:
        if self.depth == 1 and self.clashing:
            sys.path.remove(OWN_PATH)
            self._swap()
        self.depth -= 1
        self.lock.release()

    def enter_child(self) -> None:
        """Let the names mean in this child what they mean in the process that started it, among our modules."""
        if OWN_PATH in sys.path:
            sys.path.remove(OWN_PATH)
            self.clashing = {name for name in NAMES if is_theirs(name)}
            self._swap()

    def _swap(self) -> None:
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in self.clashing}
        sys.modules.update(self.others)
        self.others = taken


def is_theirs(name: str) -> bool:
    """Tell whether a user's module has this name: it was imported, or would be, rather than ours."""
    loaded = sys.modules.get(name)
    spec = PathFinder.find_spec(name)
    files = getattr(loaded, "__file__", None), spec.origin if spec else None  # a folder without __init__.py has none
    return any(file is not None and ROOT not in Path(file).resolve().parents for file in files)


OWN_MODULES = OwnModules()  # the modules are of the whole process
