"""Scoring a checkpoint: every environment plays as many episodes, returns are true, bad input is one line."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from counting_env import CountingEnv, episode_length, reward_code

import evaluate
from appo import APPO
from evaluator import play


class ZeroPlayer:
    """Always takes action 0 and notes where it was told that a new episode begins."""

    def __init__(self) -> None:
        self.new_episode: list[np.ndarray] = []
        self.t: list[np.ndarray] = []

    def act(self, obs: dict[str, np.ndarray], new_episode: np.ndarray) -> np.ndarray:
        self.new_episode.append(new_episode.copy())
        self.t.append(obs["obs"][:, 2])
        return np.zeros((len(new_episode), 1), np.float32)


def test_every_environment_plays_its_share_of_episodes_with_their_true_returns() -> None:
    player = ZeroPlayer()
    episodes = list(play(CountingEnv(3), player, 11, seed=5))
    expected = []
    for env, num_episodes in ((5, 4), (6, 4), (7, 3)):
        for episode in range(num_episodes):
            t = np.arange(episode_length(np.array(env), np.array(episode)))
            expected.append((float(reward_code(np.array(env), np.array(episode), t, 0).sum()), len(t)))
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
    (["--checkpoint", "/no/such/file"], "neither best, latest nor a file"), (["--episode", "3"], "--episodes"),
])
def test_bad_input_is_one_line(trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                               hint: str) -> None:
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
