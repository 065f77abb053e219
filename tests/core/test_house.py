"""How large the house may be, in which order its files are read, and that each imports only from lower floors.

Code lines are those without docstrings, comments and blank lines. `python tests/core/test_house.py FOLDER` counts those
of any project, folder by folder.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = (".", "algorithms", "envs", "runtime", "services", "tools")
ASIDE = ("tests", "docs", "examples")
BESIDE = {"evaluate.py"}  # a command
# A ratchet: each figure is what was reached. Whoever gets below lowers it; nobody raises one to make room.
LIMITS = {"files at the root": 16, "code lines at the root": 2944, "files": 48, "code lines": 7201,
          "modules that train.py names": 40, "largest file": 330, "largest class": 248, "longest function": 53,
          "tokens a code line": 11.95, "code lines of tests": 9574, "code lines of docs": 1501,
          "exceptions from the linter": 12, "modules of a Pong run": 32}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
NOQA = re.compile(r"#\s*(?:\w+:\s*)?noqa", re.IGNORECASE)


def count(text: str) -> tuple[int, int]:
    """Return the code lines and the tokens of a source."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines, tokens, open_strings = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        open_strings -= kind == "FSTRING_END"  # from Python 3.12 an f-string is many tokens; here one, as before
        if token.type not in NO_CODE and token.start[0] not in documented:
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += not open_strings and kind != "FSTRING_END"
        open_strings += kind == "FSTRING_START"
    return len(lines), tokens


def sources(*folders: str) -> dict[Path, str]:
    """Return the files of the product, or those of some folders."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path: path.read_text() for path in paths or modules().values()}


def names_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return all names that an import may stand for."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


def figures() -> dict[str, float]:
    """Measure everything that is limited."""
    texts = sources()
    sizes = {path: count(text) for path, text in texts.items()}
    lines = {path: size[0] for path, size in sizes.items()}
    nodes = [(path, node) for path, text in texts.items() for node in ast.walk(ast.parse(text))]
    named = [modules()[name] for name in reached_from("train", in_functions=True) - {"train"}]
    return {
        "files at the root": sum(path.parent == ROOT for path in texts),
        "code lines at the root": sum(lines[path] for path in texts if path.parent == ROOT),
        "files": len(texts),
        "code lines": sum(lines.values()),
        "modules that train.py names": sum(lines[path] > 0 for path in named),
        "largest file": max(lines.values()),
        "largest class": max(count(ast.get_source_segment(texts[path], node))[0] for path, node in nodes
                             if isinstance(node, ast.ClassDef) and node.col_offset == 0),
        "longest function": max(node.end_lineno - node.lineno + 1 for _, node in nodes
                                if isinstance(node, ast.FunctionDef)),
        "tokens a code line": sum(size[1] for size in sizes.values()) / sum(lines.values()),
        "code lines of tests": sum(count(text)[0] for text in sources("tests").values()),
        "code lines of docs": sum(count(text)[0] for text in sources("docs").values()),
        "exceptions from the linter": sum(len(NOQA.findall(text)) for text in texts.values()),
        "modules of a Pong run": len(reached_from("train", "trainer", "appo") - {"algorithms"}),  # a package
    }


def test_nothing_grows() -> None:
    measured = figures()
    assert measured.keys() == LIMITS.keys()
    assert not {name: (value, LIMITS[name]) for name, value in measured.items() if value > LIMITS[name]}


def test_all_code_lies_where_it_is_counted() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a repository")
    counted = {path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")} | sources(*ASIDE).keys()
    left = {ROOT / name for name in listed.stdout.splitlines()} - counted
    assert not [path for path in left if path.suffix in (".py", ".sh", ".c", ".cpp", ".pyx", ".js")]


def dense_lines(text: str) -> list[int]:
    """Return the lines with more than one statement, or with the body of the statement that begins on them."""
    begins = Counter(node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    return [line for line, number in begins.items() if number > 1]


def test_a_line_holds_one_statement() -> None:
    assert dense_lines("a = 1; b = 2\nfor c in a:\n    d = c\nif a: b = 1\n") == [1, 4]
    found = {path: lines for path, text in (sources() | sources(*ASIDE)).items() if (lines := dense_lines(text))}
    assert not found


def test_imports_are_absolute_and_packages_are_empty() -> None:
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not getattr(node, "level", 0), f"{path}:{node.lineno}"
                assert not {name.partition(".")[0] for name in names_of(node)} & set(ASIDE), f"{path}:{node.lineno}"
    packages = [path for folder in FOLDERS for path in (ROOT / folder).glob("__init__.py") if path.read_text().strip()]
    assert packages == [ROOT / "algorithms" / "__init__.py"]


def modules() -> dict[str, Path]:
    """Return every file of the product by its module's name."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py") if path.read_text().strip()]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(*, in_functions: bool = False) -> dict[str, set[str]]:
    """Return what each module imports of the others: when it is imported itself, or in functions too."""
    known, found = modules(), {}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        nodes = ast.walk(tree) if in_functions else tree.body
        names = [names_of(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        found[name] = set().union(*names) & known.keys()
    return found


def reached_from(*start: str, in_functions: bool = False) -> set[str]:
    """Return modules and all that they import, directly or through others."""
    found, reached, left = imports(in_functions=in_functions), set(), set(start)
    while left:
        reached |= left
        left = set().union(*(found[name] for name in left)) - reached
    return reached


def test_reading_on_from_train_visits_every_file_of_the_path_once_and_ends_at_pbt() -> None:
    path = ["train.py"]
    while following := re.search(r"Read next:\s+`(\w+\.py)`", (ROOT / path[-1]).read_text()):
        assert following[1] not in path, f"{path[-1]} leads back"
        path.append(following[1])
    assert path[-1] == "pbt.py"
    assert {*path, *BESIDE} == {file.name for file in ROOT.glob("*.py")}


def test_every_file_imports_only_from_lower_floors() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, naming the files
    for folder, floors in (("runtime", ("runtime.",)), ("envs", ("envs.", "runtime.utils"))):
        used = set().union(*(found for name, found in imports().items() if name.startswith(f"{folder}.")))
        assert not [name for name in used if not name.startswith(floors)], folder
    pipeline = ("rollout_worker", "policy_worker", "learner", "feed", "shared_buffers", "evaluate")
    assert not [name for part in pipeline for name in imports()[part] if name.startswith("services.")]


def test_nothing_that_trains_imports_a_tool() -> None:
    assert not [name for name in reached_from("train", "trainer", "appo") if name.startswith("tools.")]


if __name__ == "__main__":
    totals: Counter[str] = Counter()
    top = Path(sys.argv[1])
    for file in top.rglob("*.py"):
        totals[str(Path(*file.relative_to(top).parts[:-1][:1]))] += count(file.read_text())[0]
    print(*(f"{folder} {total:,}" for folder, total in sorted(totals.items())), sep="\n")
