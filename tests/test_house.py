"""The house: the order in which the files are read, and that each one imports only from lower floors."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "envs", "runtime", "tools")
BESIDE = {"evaluate.py", "benchmark.py",  # commands
          "impala.py", "a3c.py", "replay.py", "replay_feed.py", "q_learning.py", "apex.py", "pql.py"}  # algorithms


def modules() -> dict[str, Path]:
    """Return every file of the product by its module's name."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def imports() -> dict[str, set[str]]:
    """Return what each module imports of the others when it is imported itself."""
    known = modules()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        body = ast.parse(path.read_text()).body
        body += [inner for node in body if isinstance(node, ast.With) for inner in node.body]
        names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        for node in body:
            if isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = names & known.keys()
    return found


def test_reading_on_from_train_visits_every_file_of_the_path_once_and_ends_at_pbt() -> None:
    path = ["train.py"]
    while following := re.search(r"Read next:\s+`(\w+\.py)`", (ROOT / path[-1]).read_text()):
        assert following[1] not in path, f"{path[-1]} leads back"
        path.append(following[1])
    assert path[-1] == "pbt.py"
    assert {*path, *BESIDE} == {file.name for file in ROOT.glob("*.py")}


def test_every_file_imports_only_from_lower_floors() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, naming the files


def test_nothing_that_trains_imports_a_tool() -> None:
    found = imports()
    reached, left = set(), {"train"}
    while left:
        reached |= left
        left = set().union(*(found[name] for name in left)) - reached
    assert not [name for name in reached if name.startswith("tools.")]
