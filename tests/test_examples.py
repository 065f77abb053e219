"""The extension points: what is in `examples/`; a script's own parts are in `test_anywhere.py`."""

import json
from pathlib import Path

import pytest

from evaluate import main as evaluate
from train import main as train

ROOT = Path(__file__).parent.parent
QUICK = ["--num_workers=1", "--num_envs_per_worker=8", "--train_for_env_steps=3000", "--rollout=16", "--batch_size=128",
         "--num_batches_per_epoch=1"]


@pytest.mark.parametrize(("flag", "name", "env"), [
    ("--env", "custom_env:make_corridor", ""),
    ("--encoder", "custom_encoder:FourierEncoder", "CartPole-v1"),
    ("--core", "custom_core:LeakyCore", "CartPole-v1"),
    ("--model", "custom_model:SeparateNetworks", "CartPole-v1"),
    ("--policy_mapping", "custom_mapping:chasers_and_chased", "pettingzoo:mpe2.simple_tag_v3"),
    ("--algo", "custom_loss:CalmPPO", "CartPole-v1"),
    ("--algo", "custom_algorithm:Reinforce", "CartPole-v1"),
    ("--algo", "sac:SoftActorCritic", "Pendulum-v1"),
])
def test_an_example_is_trained_and_played_by_its_name(flag: str, name: str, env: str, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture) -> None:
    if env.startswith("pettingzoo:"):
        pytest.importorskip("mpe2")
    chosen = ["--env", env or f"examples.{name}", f"--train_dir={tmp_path}"]
    part = [f"{flag}=examples.{name}"] if env else []
    part += ["--num_policies=3"] if flag == "--policy_mapping" else []
    part += ["--replay_ratio=8"] if name.startswith("sac") else []
    assert train([*chosen, *part, *QUICK]) == 0
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["env_steps"] >= 3000
    assert summary["sgd_steps"] > 5
    assert evaluate([*chosen, "--episodes=2", *(["--trust_run"] if env else [])]) == 0
    assert "2 episodes: return" in capsys.readouterr().out
