"""A script in another folder, with PYTHONPATH and no main guard; several systems in it; where environments go."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from evaluate import main as evaluate
from train import main as train

ROOT = Path(__file__).parent.parent

# no main guard
SCRIPT = '''
import os, threading
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
    print("left by the exception:", processes_of(raises), raises.cfg.env, raises.cfg.encoder, raises.env_steps)

one, two = make("one"), make("two", make_env := lambda: Local())
for system in one, two, one:
    system.train(300)
threads = [threading.Thread(target=system.train, args=(300,)) for system in (one, two)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("trained:", one.env_steps >= 900, two.env_steps >= 600)
for system in one, two, one, two:
    system.close()
shared = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
print("left:", processes_of(one, two), shared)
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
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    told = [line for line in result.stdout.splitlines() if line.startswith(("left", "trained", "loaded"))]
    assert told[0].startswith("left by the exception: [] my_script:Local my_part:MyEncoder ")
    assert told[1:] == ["trained: True True", "left: [] []", "loaded: True"]
    assert (tmp_path / "train_dir" / "raises" / "checkpoints" / "policy_00").exists()


class Wanders(CartPoleEnv):
    """Goes to another folder when it is made, and writes there."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        os.chdir(folder)

    def reset(self, **kwargs: Any) -> Any:
        Path("episodes").touch()
        return super().reset(**kwargs)


@pytest.mark.parametrize("mode", ["--async_rl", "--serial_mode"])
def test_files_lie_where_the_command_was_typed_wherever_environments_go(tmp_path: Path, mode: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    env = ["--env=test_anywhere:Wanders", "--experiment=run"]
    assert train(["--num_workers=1", "--num_envs_per_worker=4", "--rollout=16", "--batch_size=64", mode, *env,
                  "--train_for_env_steps=500", "--eval_every_env_steps=250", "--eval_episodes=2",
                  f'--env_kwargs={{"folder": "{tmp_path / "elsewhere"}"}}']) == 0
    assert Path.cwd() == tmp_path
    best = "train_dir/run/checkpoints/policy_00/best.pt"
    assert evaluate([*env, "--episodes=2", f"--checkpoint={best}", "--record_video=film.gif"]) == 0
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"episodes"}
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "train_dir", "film.gif"}
