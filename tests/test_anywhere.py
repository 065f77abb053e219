"""Wherever people work: a script of a folder of its own, with modules named as ours; several systems in one program."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from runtime.own_modules import NAMES

ROOT = Path(__file__).parent.parent

# no main guard
SCRIPT = '''
import os, sys, threading
import config
from appo import APPO, AsyncPPO, Settings
from envs import Slow
from model import ActorCritic, MyEncoder

class Local(Slow):
    pass

class MySettings(Settings):
    pass

class Mine(AsyncPPO):
    Settings = MySettings

def make(name, env="CartPole-v1", **settings):
    return APPO(env, experiment=name, num_workers=1, num_envs_per_worker=8, rollout=16, batch_size=128,
                encoder_mlp_layers=(8,), decorrelate_experience_max_seconds=0, **settings)

def processes_of(*systems):
    return [process for system in systems for process in system.crew.processes if process.is_alive()]

assert ActorCritic == "mine" and sys.modules["model"].__file__.startswith(os.getcwd())
try:
    with make("raises", Local, encoder=MyEncoder, algo=Mine) as raises:
        raises.train(config.STEPS)
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
import learner
print("left:", processes_of(one, two), shared, learner.MINE)
'''
MODULES = {
    "config.py": "STEPS = 500\n", "learner.py": "MINE = 'mine'\n", "a3c.py": "", "supervisor.py": "",
    "model.py": "import config\nfrom torch import nn\nActorCritic = 'mine'\nclass MyEncoder(nn.Module):\n"
                "    def __init__(self, cfg, obs_space):\n        super().__init__()\n        self.out_size = 4\n"
                "    def forward(self, obs):\n        return obs['obs'] * config.STEPS\n",
    "envs/__init__.py": "from gymnasium.envs.classic_control import CartPoleEnv\nclass Slow(CartPoleEnv):\n    pass\n"}


def test_a_script_without_a_guard_beside_modules_named_as_ours(tmp_path: Path) -> None:
    for name, text in (MODULES | {"my_script.py": SCRIPT}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result = subprocess.run([sys.executable, "my_script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                            check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    told = [line for line in result.stdout.splitlines() if line.startswith(("left", "trained"))]
    assert told[0].startswith("left by the exception: [] my_script:Local model:MyEncoder ")
    assert told[1:] == ["trained: True True", "left: [] [] mine"]
    assert (tmp_path / "train_dir" / "raises" / "checkpoints" / "policy_00").exists()


def test_an_installation_brings_every_module() -> None:
    brought = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert brought["py-modules"] == sorted(path.stem for path in ROOT.glob("*.py"))
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert brought["packages"] == packages
    assert {*brought["py-modules"], *packages} - NAMES == {"runtime"}
