"""The extension points: what is in `examples/`; a script's own parts are in `test_anywhere.py`."""

import json
from pathlib import Path

import pytest

from evaluate import main as evaluate
from train import main as train

ROOT = Path(__file__).parent.parent
QUICK = ["--num_workers=1", "--num_envs_per_worker=8", "--train_for_env_steps=3000", "--rollout=16", "--batch_size=128",
         "--num_batches_per_epoch=1"]


@pytest.mark.parametrize(("env", "flags"), [
    ("examples.custom_env:make_corridor", []),
    ("CartPole-v1", ["--encoder=examples.custom_encoder:FourierEncoder"]),
    ("CartPole-v1", ["--core=examples.custom_core:LeakyCore"]),
    ("CartPole-v1", ["--model=examples.custom_model:SeparateNetworks"]),
    ("pettingzoo:mpe2.simple_tag_v3", ["--policy_mapping=examples.custom_mapping:chasers_and_chased",
                                       "--num_policies=3"]),
    ("CartPole-v1", ["--algo=examples.custom_loss:CalmPPO"]),
    ("CartPole-v1", ["--algo=examples.custom_algorithm:Reinforce"]),
    ("Pendulum-v1", ["--algo=examples.sac:SoftActorCritic", "--replay_ratio=8"])], ids=str)
def test_an_example_is_trained_and_played_by_its_name(env: str, flags: list[str], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture) -> None:
    if env.startswith("pettingzoo:"):
        pytest.importorskip("mpe2")
    chosen = [f"--env={env}", f"--train_dir={tmp_path}"]
    assert train([*chosen, *flags, *QUICK]) == 0
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["env_steps"] >= 3000
    assert summary["sgd_steps"] > 5
    assert evaluate([*chosen, "--episodes=2", *(["--trust_run"] if flags else [])]) == 0
    assert "2 episodes: return" in capsys.readouterr().out
