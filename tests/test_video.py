"""`evaluate.py --record_video`: a film of the true picture, its contact sheet, and refusals of one line."""

import re
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from PIL import Image

import evaluate
from appo import APPO
from runtime.user_error import UserError
from tools.video import VideoWriter, contact_sheet

HEIGHT, WIDTH = 400, 600  # of CartPole's picture
GAP = 4  # pixels between the pictures of a contact sheet


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train_dir = tmp_path_factory.mktemp("video")
    with APPO("CartPole-v1", train_dir=str(train_dir), num_workers=1, num_envs_per_worker=4, batch_size=128,
              num_batches_per_epoch=1, serial_mode=True) as appo:
        appo.train(200)
    return train_dir


def record(trained: Path, video: Path, *flags: str) -> int:
    return evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), "--record_video", str(video), *flags])


def read_mp4(path: Path) -> tuple[list[np.ndarray], float]:
    """Return all frames [H, W, 3] in RGB, and frames per second, of a film that every browser plays."""
    video = cv2.VideoCapture(str(path))
    codec, pixels = (int(video.get(what)).to_bytes(4, "little")
                     for what in (cv2.CAP_PROP_FOURCC, cv2.CAP_PROP_CODEC_PIXEL_FORMAT))
    assert (codec, pixels) == (b"h264", b"I420")  # I420: yuv420p
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "it can begin before all has come"
    frames = []
    while True:
        good, frame = video.read()
        if not good:
            return frames, video.get(cv2.CAP_PROP_FPS)
        frames.append(frame[:, :, ::-1])


def read_gif(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Return all frames [H, W, 3], and their durations in milliseconds."""
    with Image.open(path) as gif:
        frames, durations = [], []
        for index in range(gif.n_frames):
            gif.seek(index)
            frames.append(np.asarray(gif.convert("RGB")))
            durations.append(gif.info["duration"])
    return frames, durations


def num_steps(out: str) -> int:
    """Read the number of env_steps of all episodes off the score."""
    episodes, length = re.search(r"(\d+) episodes: .* length ([\d.]+) \+-", out).groups()
    return round(int(episodes) * float(length))


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
@pytest.mark.parametrize("num_episodes", [1, 2])
def test_records_every_frame_and_a_contact_sheet(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 suffix: str, num_episodes: int) -> None:
    video = tmp_path / "new" / "folder" / f"cartpole.{suffix}"
    assert record(trained, video, f"--episodes={num_episodes}") == 0
    out = capsys.readouterr().out
    assert f"recorded {video} and {video.with_suffix('.png')}" in out
    # the first picture, one for each step, and one for the reset between two episodes
    num_frames = 1 + num_steps(out) + num_episodes - 1
    if suffix == "mp4":
        frames, frames_per_sec = read_mp4(video)
        assert len(frames) == num_frames
        assert frames_per_sec == 50, "as fast as a person would see it"
    else:  # a GIF holds a picture that does not change once, for a longer time
        frames, durations = read_gif(video)
        assert len(frames) <= num_frames
        assert sum(durations) == num_frames * 1000 // 50
    assert all(frame.shape == (HEIGHT, WIDTH, 3) for frame in frames)
    assert frames[0].std() > 1, "the picture shows something"
    assert (frames[0] != frames[-1]).any()
    sheet = np.asarray(Image.open(video.with_suffix(".png")))
    assert sheet.shape[1] == 4 * (WIDTH + GAP) - GAP
    assert sheet[:HEIGHT, :WIDTH].std() > 1
    assert sorted(path.name for path in video.parent.iterdir()) == [video.name, "cartpole.png"]


def test_watching_changes_no_episode(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampling and environment are seeded, so the first episode is the same, recorded or not."""
    flags = ["--episodes=1", "--deterministic", "--seed=8"]
    assert record(trained, tmp_path / "a.gif", *flags) == 0
    recorded = capsys.readouterr().out
    assert record(trained, tmp_path / "b.gif", *flags) == 0
    again = capsys.readouterr().out
    assert num_steps(recorded) == num_steps(again)
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(trained), *flags]) == 0
    assert num_steps(capsys.readouterr().out) == num_steps(recorded)


@pytest.mark.parametrize(("name", "hint"), [
    ("film.avi", "ends in .mp4 or .gif"), ("film", "ends in .mp4 or .gif"),
    ("new/film.MP4.png", "ends in .mp4 or .gif"), ("a_file/film.mp4", "choose another folder"),
    ("a_file/film.gif", "choose another folder"), ("a_folder.gif", "choose another folder")])
def test_file_that_cannot_be_written_is_refused_with_one_line(
        trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "a_folder.gif").mkdir()
    assert record(trained, tmp_path / name, "--episodes=1") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--record_video={tmp_path / name}" in error
    assert hint in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "a_folder.gif"]


# ---- the parts -------------------------------------------------------------------------------------------------------


def picture(index: int) -> np.ndarray:
    """Make a small picture whose gray tells its number."""
    return np.full((16, 24, 3), index, np.uint8)


@pytest.mark.parametrize(("num_pictures", "chosen"), [
    (1, [0]), (5, [0, 1, 2, 3, 4]), (16, list(range(16))), (31, list(range(0, 31, 2)))])
def test_contact_sheet_shows_pictures_evenly_chosen_in_reading_order(num_pictures: int, chosen: list[int]) -> None:
    sheet = np.asarray(contact_sheet([picture(index) for index in range(num_pictures)], 4, 4))
    rows = -(-len(chosen) // 4)
    assert sheet.shape == (rows * (16 + GAP) - GAP, 4 * (24 + GAP) - GAP, 3)
    corners = sheet[:: 16 + GAP, :: 24 + GAP, 0].ravel()
    assert corners.tolist() == chosen + [255] * (len(corners) - len(chosen))
    assert (sheet[:16, :24] == 0).all()


def test_writer_keeps_few_pictures_of_a_long_film(tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "film.mp4", 30.0)
    for index in range(100):
        writer.add(SimpleNamespace(render=lambda index=index: picture(2 * index)))
        assert len(writer.sheet) < 32
    writer.close()
    frames, frames_per_sec = read_mp4(tmp_path / "film.mp4")
    assert (len(frames), frames_per_sec) == (100, 30)
    shown = np.asarray(Image.open(tmp_path / "film.png"))[:: 16 + GAP, :: 24 + GAP, 0].ravel() // 2
    assert (len(shown), shown[0]) == (16, 0)
    assert (np.diff(shown.astype(int)) > 0).all()
    assert shown[-1] >= 90, "the sheet covers the whole film"


@pytest.mark.parametrize(("height", "width"), [(30, 30), (31, 45)])
def test_mp4_shows_the_pictures_in_their_size(tmp_path: Path, height: int, width: int) -> None:
    """A film of an odd size gets one more row or column, a copy of the last."""
    y, x = np.mgrid[:height, :width]
    still = np.stack([250 * y // height, 250 * x // width, 255 - 250 * y // height], -1).astype(np.uint8)
    pictures = [still, still[::-1], still[:, ::-1]]
    writer = VideoWriter(tmp_path / "film.mp4", 100 / 7)
    for shown in pictures:
        writer.add(SimpleNamespace(render=lambda shown=shown: shown))
    writer.close()
    frames, frames_per_sec = read_mp4(tmp_path / "film.mp4")
    assert frames_per_sec == pytest.approx(100 / 7, abs=0.01)
    for frame, shown in zip(frames, pictures, strict=True):
        assert frame.shape == (height + height % 2, width + width % 2, 3)
        np.testing.assert_allclose(frame[:height, :width].astype(int), shown, atol=45)  # colors are of 2 x 2 pixels
        assert abs(frame[:height, :width].astype(int) - shown).mean() < 8


def test_an_mp4_that_fails_is_one_line_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    writer = VideoWriter(tmp_path / "film.mp4", 30.0)
    with pytest.raises(UserError, match=r"try a file that ends in \.gif"):
        writer.add(SimpleNamespace(render=lambda: picture(0)))
    writer.close()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_a_film_without_a_picture_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    VideoWriter(tmp_path / "film.mp4", 30.0).close()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_long_gif_is_cut_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VideoWriter, "MAX_GIF_FRAMES", 5)
    writer = VideoWriter(tmp_path / "film.gif", 50.0)
    for index in range(8):
        writer.add(SimpleNamespace(render=lambda index=index: picture(10 * index)))
    writer.close()
    frames, _ = read_gif(tmp_path / "film.gif")
    assert [frame[0, 0, 0] // 10 for frame in frames] == [0, 1, 2, 3, 4]
    assert "(its first 5 frames)" in capsys.readouterr().out
