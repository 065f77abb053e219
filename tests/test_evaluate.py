"""Scoring a checkpoint: one seed gives one score, a run is played where it lies."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_envs

import evaluate
from runtime.evaluator import evaluation_seeds
from trainer import APPO, load


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train_dir = tmp_path_factory.mktemp("evaluate")
    with APPO("CartPole-v1", train_dir=str(train_dir), num_workers=1, num_envs_per_worker=4, batch_size=128,
              num_batches_per_epoch=1, serial_mode=True) as appo:
        appo.train(500)
    return train_dir


def test_prints_the_score_of_a_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), "--episodes", "25"]) == 0
    first = capsys.readouterr().out
    assert "25 episodes: return " in first
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), "--episodes", "25"]) == 0
    assert capsys.readouterr().out == first, "the same seed plays the same episodes"


def test_an_experiment_knows_its_environment_but_is_not_trusted_with_code(
        trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = Path(shutil.copytree(trained / "CartPole-v1", tmp_path / "first"))
    argv = [f"--train_dir={tmp_path}", "--experiment=first", "--episodes=1", "--checkpoint=latest"]
    monkeypatch.chdir(tmp_path)
    Path("latest").touch()  # is no checkpoint
    assert evaluate.main(argv) == 0
    assert "1 episode: return " in capsys.readouterr().out
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(settings | {"env": "evil:Env"}))
    for refused, line in ((argv, "asks to import --env=evil:Env; add --trust_run if"), (argv[:1], "--env is missing"),
                          ([*argv, "--env=CartPole-v1"], "holds a run of evil:Env: add --env evil:Env")):
        assert evaluate.main(refused) == 2
        assert line in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["elsewhere/CartPole-v1", "elsewhere/renamed"])
def test_moved_or_renamed_run_is_played_where_it_is(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    folder: str) -> None:
    shutil.copytree(trained / "CartPole-v1", tmp_path / folder)
    experiment = ["--experiment", "renamed"] if folder.endswith("renamed") else []
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(tmp_path / "elsewhere"), "--episodes", "1",
                          *experiment]) == 0
    assert f"playing {tmp_path / folder}/checkpoints/" in capsys.readouterr().out


def test_a_score_is_the_same_while_training_by_the_command_and_by_hand(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with APPO("tiny_envs:ReadsMultiDiscrete", train_dir=str(tmp_path), seed=3, serial_mode=True, num_workers=1,
              num_envs_per_worker=4, rollout=8, batch_size=64, eval_every_env_steps=500, eval_episodes=5,
              eval_deterministic=True) as appo:
        appo.train(1500)
        score = float(appo.buffers.best_score[0])
    assert evaluate.main(["--env=tiny_envs:ReadsMultiDiscrete", f"--train_dir={tmp_path}", "--seed=3", "--episodes=5",
                          "--deterministic"]) == 0
    assert f"5 episodes: return {score:.2f} +- " in capsys.readouterr().out
    policy, total = load(appo.cfg.run_dir, env=tiny_envs.ReadsMultiDiscrete), 0.0
    for seed in evaluation_seeds(3, 5):
        env, over = policy.make_env(), False
        obs, _ = env.reset(seed=seed)
        while not over:
            obs, reward, over, *_ = env.step(policy.predict(obs, deterministic=True)[0])
            total += reward
    assert np.isclose(total / 5, score)
