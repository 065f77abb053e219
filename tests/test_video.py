"""`evaluate.py --record_video`: a film of the true picture, and every frame of it."""

import re
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from PIL import Image

import evaluate
from runtime.user_error import UserError
from tools.video import VideoWriter
from trainer import APPO


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train_dir = tmp_path_factory.mktemp("video")
    with APPO("CartPole-v1", train_dir=str(train_dir), num_workers=1, num_envs_per_worker=4, batch_size=128,
              num_batches_per_epoch=1, serial_mode=True) as appo:
        appo.train(200)
    return train_dir


def record(trained: Path, film: Path, *flags: str) -> int:
    return evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), "--record_video", str(film), *flags])


def read_mp4(path: Path) -> tuple[list[np.ndarray], float]:
    """Return all frames [H, W, 3] in RGB, and frames per second, of a film that every browser plays."""
    film = cv2.VideoCapture(str(path))
    codec, pixels = (int(film.get(what)).to_bytes(4, "little")
                     for what in (cv2.CAP_PROP_FOURCC, cv2.CAP_PROP_CODEC_PIXEL_FORMAT))
    assert (codec, pixels) == (b"h264", b"I420")  # I420: yuv420p
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat"), "it can begin before all has come"
    frames = []
    while (frame := film.read()[1]) is not None:
        frames.append(frame[:, :, ::-1])
    return frames, film.get(cv2.CAP_PROP_FPS)


def durations_of(film: Path) -> list[float]:
    """Return how long each picture of a GIF is shown, in ms."""
    with Image.open(film) as gif:
        return [gif.seek(index) or gif.info["duration"] for index in range(gif.n_frames)]


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_every_frame_is_recorded(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                 suffix: str) -> None:
    film = tmp_path / "new" / "folder" / f"cartpole.{suffix}"
    assert record(trained, film, "--episodes=2") == 0
    out = capsys.readouterr().out
    length = float(re.search(r"length ([\d.]+) \+-", out)[1])
    num_frames = 1 + round(2 * length) + 1  # the first picture, one for each step, and one for the reset in between
    assert f"recorded {film}, {num_frames} frames" in out
    if suffix == "mp4":
        frames, frames_per_sec = read_mp4(film)
        assert (len(frames), frames_per_sec) == (num_frames, 50), "as fast as a person would see it"
        assert frames[0].shape == (400, 600, 3)
        assert frames[0].std() > 1
        assert (frames[0] != frames[-1]).any()
    else:  # a GIF holds a picture that does not change once, for a longer time
        assert sum(durations_of(film)) == num_frames * 1000 // 50
    assert [*film.parent.iterdir()] == [film]


def test_an_mp4_of_an_odd_size_gets_one_more_row_and_column(tmp_path: Path) -> None:
    y, x = np.mgrid[:401, :45]
    still = np.stack([250 * y // 401, 250 * x // 45, 255 - 250 * y // 401], -1).astype(np.uint8)
    writer = VideoWriter(tmp_path / "film.mp4", 100 / 7)
    for shown in (still, still[::-1]):
        writer.add(SimpleNamespace(render=lambda shown=shown: shown))
    writer.close()
    frames, frames_per_sec = read_mp4(tmp_path / "film.mp4")
    assert frames_per_sec == pytest.approx(100 / 7, abs=0.01)
    for frame, shown in zip(frames, (still, still[::-1]), strict=True):
        assert frame.shape == (402, 46, 3)
        assert abs(frame[:401, :45].astype(int) - shown).mean() < 8


def test_a_film_of_another_format_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ends in \.mp4 or \.gif"):
        VideoWriter(tmp_path / "film.avi", 30.0)
    assert not [*tmp_path.iterdir()]
