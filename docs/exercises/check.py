"""Check your solutions of the exercises.

    python -m docs.exercises.check            all of them, as a table
    python -m docs.exercises.check 4          one; what it expects is told where it is not met
    python -m docs.exercises.check 4 FILE     another file than the one in docs/exercises/start

Exit status: 0 when solved, else 1.
"""

import argparse
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

from docs.exercises.expect import NotYet

FOLDER = Path(__file__).parent
NAMES = {int(path.stem[1]): path.stem for path in sorted((FOLDER / "checks").glob("e?_*.py"))}
SOLVED, NOT_YET, ERROR = "solved", "not yet", "error"


def load(path: Path) -> ModuleType:
    """Run a file as a module of its own, under a name that no other module has."""
    name = f"exercise_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(number: int, path: Path) -> tuple[str, str]:
    """Check one exercise; return `SOLVED`, `NOT_YET` or `ERROR`, and what to tell the student."""
    torch.manual_seed(number)
    try:
        return SOLVED, importlib.import_module(f"docs.exercises.checks.{NAMES[number]}").check(load(path))
    except NotYet as missing:
        return NOT_YET, str(missing)
    except Exception:  # noqa: BLE001  whatever the student's code raises
        return ERROR, traceback.format_exc().rstrip()


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", choices=NAMES)
    parser.add_argument("file", type=Path, nargs="?")
    args = parser.parse_args(argv)
    numbers = NAMES if args.number is None else [args.number]
    all_solved = True
    for number in numbers:
        status, text = judge(number, (args.file or FOLDER / "start" / f"{NAMES[number]}.py").resolve())
        all_solved &= status == SOLVED
        line = text.splitlines()[-1 if status == ERROR else 0]
        print(f"{number}  {NAMES[number][3:]:10} {status:8} {line if len(numbers) > 1 else text}", flush=True)
    return not all_solved


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
