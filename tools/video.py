"""Videos of an environment: mp4 (H.264, which browsers play) or GIF, and a contact sheet. Used by `evaluate.py`."""

from collections.abc import Generator
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image

from envs.vector_env import VectorEnv
from runtime.user_error import UserError


class VideoWriter:
    """Writes the pictures of an environment to an mp4 or GIF file, and a contact sheet of some of them beside it."""

    SHEET_COLUMNS, SHEET_ROWS = 4, 4
    MAX_GIF_FRAMES = 3000  # a GIF is kept in memory until it is written

    def __init__(self, path: Path, frames_per_sec: float) -> None:
        if path.suffix not in (".mp4", ".gif"):
            raise UserError(f"--record_video={path} cannot be written; choose a file that ends in .mp4 or .gif")
        try:  # now rather than after hours of play
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise UserError(f"--record_video={path} cannot be written ({error.strerror}); choose another folder"
                            ) from error
        self.path, self.frames_per_sec = path, frames_per_sec
        self.mp4: Generator[None, np.ndarray, None] | None = None  # takes pictures
        self.gif: list[Image.Image] = []
        self.sheet: list[np.ndarray] = []  # every `sheet_every`-th picture
        self.sheet_every, self.num_frames = 1, 0

    def add(self, env: VectorEnv) -> None:
        """Append the current picture."""
        try:
            picture = np.ascontiguousarray(env.render())
        except NotImplementedError:
            picture = np.zeros(0)
        if picture.ndim != 3 or picture.shape[2] != 3:
            raise UserError("--record_video: this environment does not draw itself (its render() gives no picture of "
                            "height x width x 3)")
        if self.path.suffix == ".gif":
            if self.num_frames < self.MAX_GIF_FRAMES:
                self.gif.append(Image.fromarray(picture).quantize())
        else:
            self._add_to_mp4(picture)
        if self.num_frames % self.sheet_every == 0:
            self.sheet.append(picture.copy())
            if len(self.sheet) == 2 * self.SHEET_COLUMNS * self.SHEET_ROWS:
                self.sheet, self.sheet_every = self.sheet[::2], 2 * self.sheet_every
        self.num_frames += 1

    def _add_to_mp4(self, picture: np.ndarray) -> None:
        height, width = picture.shape[:2]
        even = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), "edge")  # yuv420p has no odd sizes
        try:
            if self.mp4 is None:
                self.mp4 = imageio_ffmpeg.write_frames(
                    self.path, (even.shape[1], even.shape[0]), fps=self.frames_per_sec, codec="libx264", quality=7,
                    macro_block_size=1, ffmpeg_log_level="error",
                    output_params=["-movflags", "+faststart"])  # a browser begins before it has all
                self.mp4.send(None)
            self.mp4.send(even)
        except (OSError, RuntimeError) as error:  # ffmpeg has said why; or there is none
            self.num_frames, self.mp4 = 0, None  # `close` removes the file
            raise UserError(f"--record_video={self.path} cannot be written; try a file that ends in .gif") from error

    def close(self) -> None:
        """Finish the files."""
        if not self.num_frames:
            self.path.unlink(missing_ok=True)
            return
        if self.mp4 is not None:
            self.mp4.close()  # waits for ffmpeg
        else:
            self.gif[0].save(self.path, save_all=True, append_images=self.gif[1:], loop=0,
                             duration=round(1000 / self.frames_per_sec))
        sheet = self.path.with_suffix(".png")
        contact_sheet(self.sheet, self.SHEET_COLUMNS, self.SHEET_ROWS).save(sheet)
        cut = f" (its first {self.MAX_GIF_FRAMES} frames)" if len(self.gif) == self.MAX_GIF_FRAMES else ""
        print(f"recorded {self.path}{cut} and {sheet}")


def contact_sheet(pictures: list[np.ndarray], columns: int, rows: int) -> Image.Image:
    """Lay at most columns x rows pictures [H, W, 3], evenly chosen in time, side by side in reading order."""
    chosen = np.unique(np.linspace(0, len(pictures) - 1, columns * rows).round().astype(int))
    height, width = pictures[0].shape[:2]
    gap = 4
    rows = -(-len(chosen) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for place, index in enumerate(chosen):
        corner = (place % columns * (width + gap), place // columns * (height + gap))
        sheet.paste(Image.fromarray(pictures[index]), corner)
    return sheet
