"""The pages of the documentation: commands, sessions, excerpts and links are true.

Commands run, made short, in the order of the pages, in one folder like the repository's, since later pages use the
runs of earlier ones.
"""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from python_server import DEADLINE_SEC, ENVIRONMENT, ROOT, python

from docs import excerpts

# ---- what is typed, made short ---------------------------------------------------------------------------------------

LINKED = [path for path in ROOT.glob("[!.]*") if path.name not in ("tests", "train_dir")]
# whoever runs the tests has done these
NOT_RUN = ("python3 -m venv", "pip install", "-m pytest", "source .venv/bin/activate")

SIZES = {"num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 1,
         "num_epochs": 1}
GOAL = 200  # env_steps of a run
FLAGS = " ".join(f"--{name} {value}" for name, value in (SIZES | {"train_for_env_steps": GOAL}).items())
RESUMED = "python train.py --env PongNoFrameskip-v4"  # the one command that goes on with a run, which README says
PARALLEL = ("examples.averaged_parameters", "script_README_0")  # with processes
# runs a page's module or script as Python does, but with these settings of a system
SHORT = f"""
import runpy
import sys
from trainer import Trainer

System = Trainer
init, train, short = System.__init__, Trainer.train, {SIZES}
if sys.argv[1] not in {PARALLEL}:
    short["serial_mode"] = True
if "experiments" not in sys.argv[1]:  # these have --seconds
    Trainer.train = lambda self, steps=None, **more: train(self, steps and {GOAL}, **more)
    short["train_for_env_steps"] = {GOAL}
System.__init__ = lambda self, *args, **settings: init(self, *args, **settings | short)
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
STUDY = f"""
flags = "--env CartPole-v1 {FLAGS}"
max_minutes = 5.0
seeds = [10]
[settings]
default = ""
"""

# how a command is made short: what is replaced in it, and by what; all patterns that are found count
SHORTER = [
    (r" train\.py (?!--help).*$", rf"\g<0> {FLAGS}"),
    (r"^python train\.py (?!.*(--help|--async_rl|traced)).*$", r"\g<0> --serial_mode"),  # others start processes
    (rf"^{re.escape(RESUMED)} --num_workers.*$", rf"\g<0> --train_for_env_steps {2 * GOAL}"),
    (r"--algo (APEX|PQL) .*$", r"\g<0> --replay_size 1000 --replay_warmup 64 --replay_ratio 1"),
    (r" --self_play.*$", r"\g<0> --self_play_snapshot_every_env_steps 100"),
    (r"(--save_milestones_sec) 60", r"\1 0.1"),
    (r"^python -m tools\.tournament .*--episodes 200 ", r"\g<0>--episodes 2 "),
    (r"^python evaluate\.py .*$", r"\g<0> --episodes 1"),
    (r"^python -m tools\.benchmark throughput .*$", rf"\g<0> {FLAGS} --serial_mode --seconds 0.3"),
    (r"^(python -m tools\.study) docs/studies/pong\.toml ", r"\1 short.toml "),
    (r"^(python -m docs\.experiments\.synchronous) --seconds 20$", r"\1 --seconds 0.1 --num_envs 4"),
    (r"^python -m (docs\.experiments\.\w+)( --seconds )\d+$", r"python short.py \1\g<2>0.1"),
    (r"^tensorboard .*$", r"\g<0> --inspect"),  # lists what it would show, and ends
    (r"^python -m (examples\.\w+)$", r"python short.py \1"),
    (r"^python (script_\w+)\.py$", r"python short.py \1"),
    # short as they are
    (r"^python (train\.py --help|-m (tools\.(plot|export|timeline)|docs\.experiments\.(weight_once|kill)) ?.*)$",
     r"\g<0>"),
]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the kind ("bash" or "python") and the text of each block of a page that is typed by its reader.

    Excerpts of the source are not.
    """
    return re.findall(r"(?<!-->\n)^```(bash|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def scripts(page: Path) -> dict[str, str]:
    """Return the Python blocks of a page by the names of their files: one that begins with a comment, or the page's."""
    name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
    texts = [text for kind, text in blocks(page) if kind == "python"]
    own = [re.match(r"# (\w+\.py)\n", text) for text in texts]
    return {match[1] if match else f"script_{name}_{number}.py": text
            for number, (text, match) in enumerate(zip(texts, own, strict=True))}


def commands(page: Path) -> list[str]:
    """Return the commands of a page, each with the shell's variables set before.

    A Python block is a script, but for those with a name of their own: commands use them.
    """
    found, told, files = [], "", iter(scripts(page))
    for kind, block in blocks(page):
        if kind == "python":
            file = next(files)
            found += [f"python {file}"] if file.startswith("script_") else []
            continue
        for typed in block.replace("\\\n", "").splitlines():
            line = " ".join(re.sub(r"(^|\s)#.*", "", typed).split())
            if re.match(r"\w+=", line):
                told += f"{line}\n"
            else:
                found += [told + part for part in line.split(" && ") if part and not any(s in part for s in NOT_RUN)]
    return found


def run(folder: Path, command: str) -> tuple[int, str]:
    """Run a command of `commands` in the folder, shortened; return its exit status, and what it has said.

    A plain `python ...` runs in a fork, since PyTorch takes seconds to import; everything else in a shell.
    """
    *told, short = command.splitlines()
    assert any(re.search(pattern, short) for pattern, _ in SHORTER), f"{short}: say in SHORTER how it is made short"
    for pattern, by in SHORTER:
        short = re.sub(pattern, by, short)
    if re.fullmatch(r"(\.venv/bin/)?python [^|&;<>*?~$()]*", short) and not told:
        return python(shlex.split(short)[1:], folder)
    done = subprocess.run(  # train.py is a link, its folder another one
        ["bash", "-c", "\n".join(["source .venv/bin/activate", *told, short])], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_SEC, check=False,
        env=ENVIRONMENT | {"PYTHONPATH": str(folder)})
    return done.returncode, done.stdout


# ---- the pages -------------------------------------------------------------------------------------------------------

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in (
    "usage", "python", "performance", "multi_agent", "algorithms", "forking", "walkthrough", "health_gathering",
    "exercises/README"))]
MARKDOWN = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
NEEDED = {"pettingzoo:mpe2": "mpe2", "custom_mapping": "mpe2", "pettingzoo:classic": "pettingzoo",
          "HalfCheetah": "mujoco", "Vizdoom": "vizdoom", "script_docs_usage_0": "wandb"}
# run by `test_experiments.py`, which looks at their numbers, too
ELSEWHERE = [f"python -m docs.experiments.{name}" for name in ("chain", "lag", "memory", "normalization",
                                                               "stale_states", "time_limits")]
COMMANDS = [command for page in PAGES for command in commands(page) if command not in ELSEWHERE]
EXACT = "python -m docs.experiments.weight_once"  # prints what the walkthrough shows, everywhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like the repository's, but without anybody's runs, and with the scripts of the pages."""
    folder = tmp_path_factory.mktemp("pages")
    for path in LINKED:
        (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    for page in PAGES:
        for name, script in scripts(page).items():
            (folder / name).write_text(re.sub(r"\d+_000", str(GOAL), script))  # env_steps
    (folder / "short.py").write_text(SHORT)
    (folder / "short.toml").write_text(STUDY)
    return folder


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS), ids=lambda command: command.splitlines()[-1])
def test_a_command_works_as_typed(folder: Path, command: str) -> None:
    for text, package in NEEDED.items():
        if text in command:
            pytest.importorskip(package)
    status, said = run(folder, command)
    assert status == 0, said
    assert "Traceback" not in said
    assert "nothing to do" not in said
    assert command != EXACT or said in (DOCS / "walkthrough.md").read_text()
    assert command.split()[2:3] != ["tools.benchmark"] or " env_steps/s, " in said
    if " train.py " in command or "-m examples" in command:
        assert ("resumed at" in said) == (command == RESUMED), said


def test_the_commands_of_every_page_are_run() -> None:
    typed = {page for page in MARKDOWN if commands(page) and "results" not in page.parts}
    assert typed - {*PAGES} <= {DOCS / "coming_from.md", ROOT / "CONTRIBUTING.md"}, "add the page to PAGES"


def test_sessions_print_what_the_walkthrough_shows(capsys: pytest.CaptureFixture) -> None:
    text = re.sub(r"^```.*$", "", (DOCS / "walkthrough.md").read_text(), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(text, {}, "walkthrough", None, None)
    assert len(session.examples) > 10
    assert doctest.DocTestRunner().run(session).failed == 0, capsys.readouterr().out


def test_excerpts_and_links_to_lines_are_those_of_the_source(capsys: pytest.CaptureFixture) -> None:
    assert excerpts.main(["--check"]) == 0, capsys.readouterr()


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ +(.*?)\s*#*$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r'\]\(\s*([^)\s:]+)(?:\s+"[^"]*")?\s*\)', text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.suffix != ".md" or not anchor or anchor in anchors(target), link
