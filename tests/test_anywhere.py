"""A script in another folder, without a main guard; and machines without what only Linux has."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from running import ROOT, SMALL, Run, newest_state, run_train

from evaluate import main as evaluate
from train import main as train

# no main guard
SCRIPT = '''
import gc
import threading
from pathlib import Path
import my_part
from gymnasium.envs.classic_control import CartPoleEnv
from appo import AsyncPPO, Settings
from trainer import APPO, load

class Local(CartPoleEnv):
    pass

class MySettings(Settings):
    pass

class Mine(AsyncPPO):
    Settings = MySettings

def make(name, env="CartPole-v1", **settings):
    return APPO(env, experiment=name, num_workers=1, num_envs_per_worker=8, rollout=16, batch_size=128,
                encoder_mlp_layers=(8,), **settings)

def alive(processes):
    return [process for process in processes if process.is_alive()]

try:
    with make("raises", Local, encoder=my_part.MyEncoder, algo=Mine) as raises:
        raises.train(500)
        raise ValueError("mine")
except ValueError:
    print("left by the exception:", alive(raises.crew.processes), raises.cfg.env, raises.cfg.encoder)

one, two = make("one"), make("two", make_env := lambda: Local())
one.train(300)
threads = [threading.Thread(target=system.train, args=(300,)) for system in (one, two)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("trained:", one.env_steps >= 600, two.env_steps >= 300)
of_two, pipes = two.crew.processes, [Path(inbox.name) for inbox in two.buffers.worker_inboxes]
print("there:", alive(of_two) == of_two, all(pipe.exists() for pipe in pipes))
del two
gc.collect()
print("left of the one that is forgotten:", alive(of_two), any(pipe.exists() for pipe in pipes))
print("the other one:", alive(one.crew.processes) == one.crew.processes)
one.close()
one.close()
print("left:", alive(one.crew.processes))
print("loaded:", load("train_dir/raises").predict([0.0] * 4, deterministic=True)[0] in (0, 1))
'''
PART = """
from torch import nn

class MyEncoder(nn.Module):
    def __init__(self, cfg, obs_space):
        super().__init__()
        self.out_size = 4

    def forward(self, obs):
        return obs["obs"] * 2
"""


def test_a_script_without_a_guard_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    (tmp_path / "my_part.py").write_text(PART)
    result = subprocess.run([sys.executable, "my_script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                            check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stderr) == (0, "")
    assert re.findall("^(?:left|trained|there|the other|loaded).*", result.stdout, re.MULTILINE) == [
        "left by the exception: [] my_script:Local my_part:MyEncoder", "trained: True True", "there: True True",
        "left of the one that is forgotten: [] False", "the other one: True", "left: []", "loaded: True"]
    assert (tmp_path / "train_dir" / "raises" / "checkpoints" / "policy_00").exists()


class Wanders(CartPoleEnv):
    """Goes to another folder when it is made, and writes there."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        os.chdir(folder)

    def reset(self, **kwargs: Any) -> Any:
        Path("episodes").touch()
        return super().reset(**kwargs)


def test_files_lie_where_the_command_was_typed_wherever_environments_go(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    env = ["--env=test_anywhere:Wanders", "--experiment=run"]
    assert train([*SMALL, *env, "--serial_mode", "--train_for_env_steps=500", "--eval_every_env_steps=250",
                  "--eval_episodes=2", f'--env_kwargs={{"folder": "{tmp_path / "elsewhere"}"}}']) == 0
    os.chdir(tmp_path)  # they have gone elsewhere in this process
    best = "train_dir/run/checkpoints/policy_00/best.pt"
    assert evaluate([*env, "--episodes=2", f"--checkpoint={best}", "--record_video=film.gif"]) == 0
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"episodes"}
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "train_dir", "film.gif"}


# Every Python process of a run imports this first: our code (but not a library) finds only what POSIX has.
WITHOUT_LINUX = f"""
import ctypes, fcntl, os, sys

del os.pidfd_open, os.sched_getaffinity, os.sched_setaffinity, fcntl.F_SETPIPE_SZ, fcntl.F_GETPIPE_SZ

class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)

def is_of_python(file):
    return file.startswith(("<", os.__file__[:-5])) and "-packages" not in file

def refuse(event, args):
    if event in ("open", "os.listdir") and str(args[0]).startswith(("/proc", "/dev/shm", "/sys")):
        frame = sys._getframe(1)
        while is_of_python(frame.f_code.co_filename) and frame.f_back:
            frame = frame.f_back
        if frame.f_code.co_filename.startswith({str(ROOT)!r}) and "-packages" not in frame.f_code.co_filename:
            raise FileNotFoundError(2, "not on this machine", args[0])

ctypes.CDLL = CDLL
sys.addaudithook(refuse)
"""


def test_what_only_linux_has_is_not_needed(tmp_path: Path) -> None:
    """A population learns, a worker that crashes is replaced, Ctrl-C saves, and the run is resumed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    flags = (*SMALL, "--env=checked:Telling", "--num_policies=2", "--with_pbt", "--pbt_period_env_steps=200",
             "--pbt_start_mutation=200")
    with Run(tmp_path, *flags, "--train_for_env_steps=1e9") as run:
        assert run.learns()
        (tmp_path / "new").write_text("crash")
        (tmp_path / "new").rename(tmp_path / "fault")
        assert run.until(lambda: run.blamed() == {"rollout_worker_0"}), "it is not replaced"
        assert run.learns(), "it does not go on"
        os.killpg(run.process.pid, signal.SIGINT)
    assert (run.status, run.err) == (0, "")
    assert len((run.run_dir / "population.jsonl").read_text().splitlines()) > 1
    steps = newest_state(run.run_dir)["env_steps"]
    resumed = run_train(tmp_path, *flags, "--serial_mode", f"--train_for_env_steps={steps + 500}")
    assert (resumed.status, resumed.err) == (0, "")
    assert newest_state(run.run_dir)["env_steps"] > steps
