"""Scoring a checkpoint: every environment plays as many episodes, returns are true, bad input is one line."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from counting_env import CountingEnv, episode_length, number_of, reward_code

import evaluate
from appo import APPO
from envs.vector_env import Step
from runtime.evaluator import play
from runtime.seeding import EVALUATION, derive_seed


class ZeroPlayer:
    """Always takes action 0 and notes where it was told that a new episode begins."""

    def __init__(self) -> None:
        self.new_episode: list[np.ndarray] = []
        self.t: list[np.ndarray] = []

    def act(self, step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        self.new_episode.append(fresh.copy())
        self.t.append(step.obs[0]["obs"][:, 2])
        actions[0][:] = 0


def test_every_environment_plays_its_share_of_episodes_with_their_true_returns() -> None:
    player = ZeroPlayer()
    episodes = [(episode.env, episode.returns.tolist(), episode.lengths.tolist())
                for episode in play(CountingEnv(3), [player], 11, seed=5)]
    expected = []
    for i, num_episodes in enumerate((4, 4, 3)):
        for episode in range(num_episodes):
            env = np.array(number_of(derive_seed(5, EVALUATION, index=i)))
            t = np.arange(episode_length(env, np.array(episode)))
            expected.append((i, [float(reward_code(env, np.array(episode), t, 0).sum())], [len(t)]))
    assert sorted(episodes) == sorted(expected)
    assert (np.stack(player.new_episode) == (np.stack(player.t) == 0)).all(), "memory is reset with the episode"


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


@pytest.mark.parametrize("folder", ["elsewhere/CartPole-v1", "elsewhere/renamed"])
def test_moved_or_renamed_run_is_played_where_it_is(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    folder: str) -> None:
    shutil.copytree(trained / "CartPole-v1", tmp_path / folder)
    experiment = ["--experiment", "renamed"] if folder.endswith("renamed") else []
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(tmp_path / "elsewhere"), "--episodes", "1",
                          *experiment]) == 0
    assert f"playing {tmp_path / folder}/checkpoints/" in capsys.readouterr().out


def test_records_a_video_of_the_true_picture(trained: Path, tmp_path: Path) -> None:
    video = tmp_path / "new" / "cartpole.mp4"
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), "--episodes", "1",
                          "--record_video", str(video)]) == 0
    frames = cv2.VideoCapture(str(video))
    good, picture = frames.read()
    assert good
    assert picture.shape == (400, 600, 3)
    assert picture.std() > 1, "the picture shows something"


@pytest.mark.parametrize(("arguments", "hint"), [
    (["--experiment", "nothing_here"], "train first"), (["--episodes", "0"], "at least 1"),
    (["--checkpoint", "/no/such/file"], "neither best, latest, random nor a file"), (["--episode", "3"], "--episodes"),
    (["--policy", "1"], "--policy=1 is unknown"), (["--against", "random"], "needs --tournament"),
    (["--tournament", "--checkpoint", "x.pt"], "--against x.pt"), (["--tournament", "--policy", "0"], "leave it out"),
    (["--tournament"], "several agents"), (["--tournament", "--render"], "shows no games"),
])
def test_bad_input_is_one_line(trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                               hint: str) -> None:
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
