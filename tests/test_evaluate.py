"""Playing checkpoints: episodes are counted fairly, one seed gives one score, every frame is filmed."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import tiny_envs
from counting_env import episode_length, number_of, reward_code
from parts import SMALL, make_config
from PIL import Image

import evaluate
from envs.families import make_vector_env
from envs.vector_env import Step
from evaluate import evaluation_seeds, film, play
from runtime.checkpoint import find_checkpoint, load_checkpoint
from trainer import APPO, load

Command = Callable[..., tuple[int, str]]

@pytest.mark.parametrize("num_episodes", [1, 2, 3, 8, 11])
def test_play_spreads_episodes_evenly_with_their_true_returns(num_episodes: int) -> None:
    env, told_rightly = make_vector_env(make_config({"env": "counting_env:Counting"}), 3), []

    def act(step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        """Take action 0; note whether one is told rightly that a new episode begins."""
        told_rightly.append((fresh == (step.obs[0]["obs"][:, 2] == 0)).all())

    steps = list(play(env, [SimpleNamespace(act=act)], num_episodes, 5))
    episodes = [(episode.env, *episode.returns, *episode.lengths) for episode in itertools.chain.from_iterable(steps)]
    expected, num_steps = [], []
    for i, number in enumerate(map(number_of, evaluation_seeds(5, 3))):
        num_own = num_episodes // 3 + (i < num_episodes % 3)
        lengths = [episode_length(number, episode) for episode in range(num_own)]
        expected += [(i, reward_code(number, episode, np.arange(length), 0).sum(), length)
                     for episode, length in enumerate(lengths)]
        num_steps.append(sum(lengths) + num_own)  # one step more resets
    assert sorted(episodes) == sorted(expected)
    assert len(steps) == 1 + max(num_steps), "the first observation, then each step until the last reset"
    assert all(told_rightly), "memory is reset with the episode"


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of CartPole."""
    with APPO("CartPole-v1", train_dir=str(tmp_path_factory.mktemp("evaluate")), serial_mode=True, **SMALL) as appo:
        appo.train(500)
    return appo.cfg.run_dir


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls the command for a run and returns its exit status and what it printed."""
    def call(run_dir: Path, *argv: str) -> tuple[int, str]:
        status = evaluate.main([f"--train_dir={run_dir.parent}", f"--experiment={run_dir.name}", *argv])
        return status, "".join(capsys.readouterr())
    return call


def test_one_seed_gives_one_score_also_where_the_run_was_moved(trained: Path, tmp_path: Path, command: Command) -> None:
    status, first = command(trained, "--episodes=25")
    assert status == 0
    assert "\n25 episodes: return " in first
    assert command(trained, "--episodes=25", "--env=CartPole-v1")[1] == first
    moved = Path(shutil.copytree(trained, tmp_path / "moved"))
    assert command(moved, "--episodes=25")[1] == first.replace(str(trained), str(moved))


def test_what_cannot_be_played_is_refused_in_one_line(trained: Path, tmp_path: Path, command: Command) -> None:
    evil = Path(shutil.copytree(trained, tmp_path / "evil"))
    path = evil / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"env": "evil:Env"}))
    for run_dir, argv, line in (
            (trained, ["--env=Acrobot-v1"], "was trained with other spaces"),
            (trained, ["--policy=1"], "holds no checkpoint"), (tmp_path / "nothing", [], "holds no checkpoint"),
            (evil, [], "asks to import --env=evil:Env; add --trust_run if")):
        status, printed = command(run_dir, *argv)
        assert status == 2
        assert re.search(f"^evaluate.py: .*{line}.*\n\\Z", printed, re.MULTILINE)


def test_a_score_is_the_same_while_training_by_the_command_and_by_hand(tmp_path: Path, command: Command) -> None:
    with APPO("tiny_envs:ReadsMultiDiscrete", train_dir=str(tmp_path), seed=3, serial_mode=True,
              **SMALL | {"eval_every_env_steps": 500, "eval_episodes": 5, "eval_deterministic": True}) as appo:
        appo.train(1500)
    run_dir = appo.cfg.run_dir
    score = load_checkpoint(find_checkpoint(run_dir, "best"))["score"]
    printed = command(run_dir, "--env=tiny_envs:ReadsMultiDiscrete", "--seed=3", "--episodes=5", "--deterministic")[1]
    assert f"5 episodes: return {score:.2f} +- " in printed
    policy, total = load(run_dir, env=tiny_envs.ReadsMultiDiscrete), 0.0
    for seed in evaluation_seeds(3, 5):
        env, over = policy.make_env(), False
        obs, _ = env.reset(seed=seed)
        while not over:
            obs, reward, over, *_ = env.step(policy.predict(obs, deterministic=True)[0])
            total += reward
    assert np.isclose(total / 5, score)


# ---- films -----------------------------------------------------------------------------------------------------------


def read_mp4(path: Path) -> tuple[list[np.ndarray], float]:
    """Return all frames [H, W, 3] in RGB, and frames per second, of a film that every browser plays."""
    video = cv2.VideoCapture(str(path))
    codec, pixels = (int(video.get(what)).to_bytes(4, "little")
                     for what in (cv2.CAP_PROP_FOURCC, cv2.CAP_PROP_CODEC_PIXEL_FORMAT))
    assert (codec, pixels) == (b"h264", b"I420")  # I420: yuv420p
    frames = []
    while (frame := video.read()[1]) is not None:
        frames.append(frame[:, :, ::-1])
    return frames, video.get(cv2.CAP_PROP_FPS)


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_every_frame_is_recorded(trained: Path, tmp_path: Path, command: Command, suffix: str) -> None:
    path = tmp_path / f"cartpole.{suffix}"
    status, printed = command(trained, f"--record_video={path}", "--episodes=2")
    assert status == 0
    length = float(re.search(r"length ([\d.]+)", printed)[1])
    num_frames = 1 + round(2 * length) + 2  # the first picture, one for each step, and one for each reset
    if suffix == "mp4":
        frames, frames_per_sec = read_mp4(path)
        assert (len(frames), frames_per_sec) == (num_frames, 50), "as fast as a person would see it"
        assert frames[0].shape == (400, 600, 3)
        assert frames[0].std() > 1
        assert (frames[0] != frames[-1]).any()
    else:  # a GIF holds a picture that does not change once, for a longer time
        with Image.open(path) as gif:
            shown = [gif.seek(index) or gif.info["duration"] for index in range(gif.n_frames)]
        assert sum(shown) == num_frames * 1000 // 50  # ms


def test_pictures_get_an_even_number_of_rows_and_columns(tmp_path: Path) -> None:
    y, x = np.mgrid[:135, :45]
    picture = np.stack([250 * y // 135, 250 * x // 45, 255 - 250 * y // 135], -1).astype(np.uint8)
    env = SimpleNamespace(render=lambda: picture)
    assert list(film(iter([[1], [2]]), env, tmp_path / "film.mp4", 100 / 7)) == [[1], [2]]
    frames, frames_per_sec = read_mp4(tmp_path / "film.mp4")
    assert frames_per_sec == pytest.approx(100 / 7, abs=0.01)
    assert [frame.shape for frame in frames] == [(136, 46, 3)] * 2
    assert abs(frames[0][:135, :45].astype(int) - picture).mean() < 8
