"""README's commands, in its order, in one folder: each really runs, shortened, and none is in the way of a later one.

Not run are those that install Python packages or run these tests: whoever runs this file has just done both.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = [*ROOT.glob("*.py"), *(ROOT / name for name in ("docs", "envs", "examples", "runtime", "tools"))]
DEADLINE_SEC = 300.0  # stands for "does not hang", also on a busy machine
NOT_RUN = ("python3 -m venv", "pip install", "-m pytest")

SIZES = {"num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 1,
         "num_epochs": 1, "decorrelate_experience_max_seconds": 0}
GOAL = 200  # env_steps of a run
FLAGS = " ".join(f"--{name} {value}" for name, value in (SIZES | {"train_for_env_steps": GOAL}).items())
LONGER = f"--train_for_env_steps {2 * GOAL}"
SERIAL = "--serial_mode"  # where the algorithm or the game is new, not the processes
REPLAY = "--replay_size 1000 --replay_warmup 64"
RESUMED = "python train.py --env PongNoFrameskip-v4"  # the one command that goes on with a run, which README says
# runs README's module or script as Python does, but with these settings of a system
SHORT = f"""
import runpy
import sys
from supervisor import Supervisor
from trainer import Trainer

train = Trainer.train
Trainer.train = lambda self, steps=None, **more: train(self, steps and {GOAL}, **more)
init, short = Supervisor.__init__, {SIZES | {"train_for_env_steps": GOAL}}
Supervisor.__init__ = lambda self, *args, **settings: init(self, *args, **settings | short)
if __name__ == "__main__":
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""
STUDY = f"""
flags = "--env CartPole-v1 {FLAGS}"
max_minutes = 5.0
seeds = [10]
[settings]
default = ""
"""

# how a command is made short: what is replaced in it, and by what; the first pattern that is found counts
SHORTER = [
    (r"^python train\.py --help$", r"\g<0>"),
    (rf"^{re.escape(RESUMED)}$", rf"\g<0> {FLAGS} {LONGER}"),
    (r" train\.py .*--algo APEX$", rf"\g<0> {FLAGS} {SERIAL} {REPLAY}"),
    (r" train\.py .*--algo PQL .*$", rf"\g<0> {FLAGS} {SERIAL} {REPLAY} --replay_ratio 1"),
    (r" train\.py .*self_play.*$", rf"\g<0> {FLAGS} {SERIAL} --self_play_snapshot_every_env_steps 100"),
    (r" train\.py .*(--algo IMPALA|pettingzoo:|--encoder ).*$", rf"\g<0> {FLAGS} {SERIAL}"),
    (r" train\.py .*$", rf"\g<0> {FLAGS}"),
    (r"^python evaluate\.py .*--tournament --episodes 200 ", r"\g<0>--episodes 2 "),
    (r"^python evaluate\.py .*$", r"\g<0> --episodes 1"),
    (r"^python benchmark\.py throughput .*$", rf"\g<0> {FLAGS} --seconds 0.6"),
    (r"^(python -m tools\.study) docs/studies/pong\.toml ", r"\1 short.toml "),
    (r"^python -m tools\.(plot|export) .*$", r"\g<0>"),
    (r"^tensorboard .*$", r"\g<0> --inspect"),  # lists what it would show, and ends
    (r"^python -m (examples\.\w+)$", r"python short.py \1"),
    (r"^python (script_\d)\.py$", r"python short.py \1"),
]


def commands() -> list[str]:
    """Return the commands of README, each with what its shell was told before; a Python block is a script."""
    found, told = [], ""  # told: variables, and where Python is
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        if kind == "python":
            found.append(f"{told}python script_{sum('script_' in command for command in found)}.py")
            continue
        for typed in block.replace("\\\n", "").splitlines():
            line = " ".join(re.sub(r"\s#.*", "", typed).split())
            if line.startswith("source ") or re.match(r"\w+=", line):
                told += f"{line}\n"
            else:
                found += [told + part for part in line.split(" && ") if not any(text in part for text in NOT_RUN)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that looks like the repository's, but without anybody's runs."""
    folder = tmp_path_factory.mktemp("readme")
    for path in LINKED:
        (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    for number, script in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)):
        (folder / f"script_{number}.py").write_text(re.sub(r"\d+_000", str(GOAL), script))  # env_steps
    (folder / "short.py").write_text(SHORT)
    (folder / "short.toml").write_text(STUDY)
    return folder


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.splitlines()[-1])
def test_a_command_of_readme_works_as_typed(folder: Path, command: str) -> None:
    for text, package in (("pettingzoo:mpe2", "mpe2"), ("pettingzoo:classic", "pettingzoo"), ("HalfCheetah", "mujoco"),
                          ("script_1", "wandb")):
        if text in command:
            pytest.importorskip(package)
    *told, last = command.splitlines()
    short = next((re.sub(pattern, by, last) for pattern, by in SHORTER if re.search(pattern, last)), None)
    assert short, f"{last}: say in SHORTER how it is made short"
    result = subprocess.run(
        ["bash", "-c", "\n".join([*told, short])], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SEC,
        check=False, env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "nothing to do" not in result.stdout
    if " train.py " in last or "-m examples" in last:
        assert ("resumed at" in result.stdout) == (last == RESUMED), result.stdout
