"""Check your solutions of the exercises.

    python -m docs.exercises.check            all of them, as a table
    python -m docs.exercises.check 4          one; what it expects is told where it is not met
    python -m docs.exercises.check 4 FILE     another file than the one in docs/exercises/start

Exit status: 0 when solved, 1 when not yet, 2 for an exercise or a file that does not exist.
"""

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


def own_traceback(error: BaseException, path: Path) -> str:
    """Write down where in one file an error came from, and the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    what = "".join(traceback.format_exception_only(error)).rstrip()
    if not frames and not isinstance(error, SyntaxError):
        return f"the check cannot use what {path.name} returns: {what}"
    return f"{path.name} fails:\n{''.join(traceback.format_list(frames))}{what}"


def judge(number: int, path: Path) -> tuple[str, str]:
    """Check one exercise; return `SOLVED`, `NOT_YET` or `ERROR`, and what to tell the student."""
    torch.manual_seed(number)
    try:
        return SOLVED, importlib.import_module(f"docs.exercises.checks.{NAMES[number]}").check(load(path))
    except NotYet as missing:
        return NOT_YET, str(missing)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the student's code raises
        return ERROR, own_traceback(error, path)


def check_all() -> int:
    """Print a table of all exercises; return the exit status."""
    num_solved = 0
    for number, name in NAMES.items():
        status, text = judge(number, FOLDER / "start" / f"{name}.py")
        num_solved += status == SOLVED
        print(f"{number}  {name[3:]:10} {status:8} {text.splitlines()[-1 if status == ERROR else 0]}", flush=True)
    print(f"{num_solved} of {len(NAMES)} solved")
    return num_solved < len(NAMES)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    if not arguments:
        return check_all()
    number = int(arguments[0]) if arguments[0].isdecimal() else 0
    if number not in NAMES or len(arguments) > 2:
        print(f"check: there is no exercise '{' '.join(arguments)}'; give a number from 1 to {max(NAMES)}, and a file "
              "if yours is not the one in docs/exercises/start", file=sys.stderr)
        return 2
    path = Path(arguments[1]).resolve() if arguments[1:] else FOLDER / "start" / f"{NAMES[number]}.py"
    if not path.is_file() or path.suffix != ".py":
        print(f"check: there is no Python file {path}; its name must end in .py", file=sys.stderr)
        return 2
    status, text = judge(number, path)
    print(f"exercise {number}, {status}: {text}")
    return status != SOLVED


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
