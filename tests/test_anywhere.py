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
from test_train import SMALL, newest_state, read_summary, run_train, wait_until

from evaluate import main as evaluate
from train import main as train

ROOT = Path(__file__).parent.parent

# no main guard
SCRIPT = '''
import threading
import my_part
from appo import AsyncPPO, Settings
from trainer import APPO, load

class Local(my_part.Slow):
    pass

class MySettings(Settings):
    pass

class Mine(AsyncPPO):
    Settings = MySettings

def make(name, env="CartPole-v1", **settings):
    return APPO(env, experiment=name, num_workers=1, num_envs_per_worker=8, rollout=16, batch_size=128,
                encoder_mlp_layers=(8,), **settings)

def processes_of(*systems):
    return [process for system in systems for process in system.crew.processes if process.is_alive()]

try:
    with make("raises", Local, encoder=my_part.MyEncoder, algo=Mine) as raises:
        raises.train(500)
        raise ValueError("mine")
except ValueError:
    print("left by the exception:", processes_of(raises), raises.cfg.env, raises.cfg.encoder)

one, two = make("one"), make("two", make_env := lambda: Local())
one.train(300)
threads = [threading.Thread(target=system.train, args=(300,)) for system in (one, two)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("trained:", one.env_steps >= 600, two.env_steps >= 300)
for system in one, two, one:
    system.close()
print("left:", processes_of(one, two))
print("loaded:", load("train_dir/raises").predict([0.0] * 4, deterministic=True)[0] in (0, 1))
'''
PART = """
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn

class Slow(CartPoleEnv):
    pass

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
    assert re.findall("^(?:left|trained|loaded).*", result.stdout, re.MULTILINE) == [
        "left by the exception: [] my_script:Local my_part:MyEncoder", "trained: True True", "left: []", "loaded: True"]
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
    assert train(["--num_workers=1", "--num_envs_per_worker=4", "--rollout=16", "--batch_size=64", *env,
                  "--train_for_env_steps=500", "--eval_every_env_steps=250", "--eval_episodes=2",
                  f'--env_kwargs={{"folder": "{tmp_path / "elsewhere"}"}}']) == 0
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
TELLS = """
import os
from gymnasium.envs.classic_control import CartPoleEnv

class Tells(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
"""


def test_what_only_linux_has_is_not_needed(tmp_path: Path) -> None:
    """A population learns, a worker that is killed is replaced, Ctrl-C saves, and the run is resumed."""
    def kill_and_stop(process: subprocess.Popen) -> None:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        wait_until(lambda: read_summary(run_dir).get("num_replaced", 0) == 1, "it is not replaced")
        steps = read_summary(run_dir)["sgd_steps"]
        wait_until(lambda: read_summary(run_dir)["sgd_steps"] > steps, "it does not go on")
        os.killpg(process.pid, signal.SIGINT)

    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    (tmp_path / "tells.py").write_text(TELLS)
    flags = (*SMALL[1:], "--env=tells:Tells", "--num_policies=2", "--with_pbt", "--pbt_period_env_steps=200",
             "--pbt_start_mutation=200")
    run_dir = tmp_path / "first"
    stopped = run_train(tmp_path, *flags, "--train_for_env_steps=1e9", disturb=kill_and_stop)
    assert (stopped.status, stopped.err) == (0, "")
    assert len((run_dir / "population.jsonl").read_text().splitlines()) > 1
    steps = newest_state(run_dir)["env_steps"]
    resumed = run_train(tmp_path, *flags, f"--train_for_env_steps={steps + 500}")
    assert (resumed.status, resumed.err) == (0, "")
    assert newest_state(run_dir)["env_steps"] > steps
