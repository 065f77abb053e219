"""The GIF of an agent that learns: its panels, labels and scores, and refusals of one line."""

from pathlib import Path

import numpy as np
import pytest
from test_video import read_gif

from appo import APPO
from tools import learning_gif
from tools.learning_gif import GAP, TOP

PANEL, FRAMES = 150, 12  # pixels; pictures, 50 ms each


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    train_dir = tmp_path_factory.mktemp("gif")
    with APPO("CartPole-v1", train_dir=str(train_dir), num_workers=1, num_envs_per_worker=4, batch_size=128,
              num_batches_per_epoch=1, serial_mode=True) as appo:
        appo.train(200)
    return str(next(train_dir.glob("CartPole-v1/checkpoints/policy_00/checkpoint_*.pt")))


def make(output: Path, *argv: str) -> tuple[list[np.ndarray], list[int]]:
    """Make a GIF of small panels; return its frames [H, W, 3], and their durations in milliseconds."""
    assert learning_gif.main([*argv, "--fps", "20", "--seconds", str(FRAMES / 20)]) == 0
    return read_gif(output)


def test_panels_play_the_same_game_below_their_labels_and_scores(checkpoint: str, tmp_path: Path) -> None:
    output = tmp_path / "out.gif"
    frames, durations = make(output, checkpoint, checkpoint, str(output), "--labels", "one", "another",
                             "--width", str(2 * PANEL + GAP))
    assert len(frames) == FRAMES
    assert durations == [50] * FRAMES
    assert {frame.shape for frame in frames} == {(TOP + PANEL * 400 // 600, 2 * PANEL + GAP, 3)}
    left, right = ([frame[:, begin : begin + PANEL] for frame in frames] for begin in (0, PANEL + GAP))
    for one, another in zip(left, right, strict=True):
        assert (one[TOP:] == another[TOP:]).all(), "the same seed, the same weights"
    assert (left[0][TOP:] != left[-1][TOP:]).any(), "it moves"
    labels = [panel[0][:TOP, : PANEL // 2] for panel in (left, right)]
    assert all(label.min() < 100 for label in labels)
    assert (labels[0] != labels[1]).any()
    assert (left[0][:TOP, : PANEL // 2] == left[-1][:TOP, : PANEL // 2]).all(), "a label stays"
    assert (left[0][:TOP, PANEL // 2 :] != left[-1][:TOP, PANEL // 2 :]).any(), "a score does not"


def test_the_score_is_the_reward_so_far_and_the_end_of_an_episode_stays(checkpoint: str) -> None:
    args = learning_gif.make_arguments().parse([checkpoint, "out.gif"])
    scores = [score for _, score in learning_gif.film(Path(checkpoint), 60, 600, args)]
    assert len(scores) == 600
    assert scores[:10] == list(range(10)), "CartPole pays 1 a step"
    assert scores[-1] == max(scores) < 500
    assert scores.index(scores[-1]) == scores[-1]


@pytest.mark.parametrize(("argv", "fragment"), [
    (["{file}", "{tmp}/out.png"], "ending in .gif"), (["{file}", "{tmp}/none/out.gif"], "a folder that exists"),
    (["{tmp}/none.pt", "{tmp}/out.gif"], "{tmp}/none.pt cannot be read"), (["{tmp}/out.gif"], "FILE"),
    (["{file}", "{tmp}/out.gif", "--labels", "a", "b"], "--labels: 2 for 1"),
    (["{file}", "{tmp}/out.gif", "--fps", "60"], "--fps=60"),
    (["{file}", "{tmp}/out.gif", "--seconds", "0"], "--seconds=0"),
    (["{file}", "{file}", "{tmp}/out.gif", "--width", "120"], "--width=120")], ids=str)
def test_bad_input_is_one_line(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str],
                               fragment: str) -> None:
    assert learning_gif.main([word.format(file=checkpoint, tmp=tmp_path) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("learning_gif.py: ")
    assert error.count("\n") == 1
    assert fragment.format(tmp=tmp_path) in error
    assert not list(tmp_path.iterdir())
