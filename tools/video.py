"""Films of an environment: mp4 (H.264, which browsers play) or GIF, written frame by frame. Used by `evaluate.py`."""

import math
from pathlib import Path

import numpy as np
from imageio_ffmpeg import write_frames

from envs.vector_env import VectorEnv
from runtime.user_error import EnvironmentFailure, UserError

HOW = {".mp4": {"quality": 7, "output_params": ["-movflags", "+faststart"]},  # a browser begins before it has all
       ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "output_params": [  # a palette for each frame
           "-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"]}}
MIN_HEIGHT = 400  # smaller pictures are enlarged


class VideoWriter:
    """Writes the pictures of an environment to an mp4 or GIF file."""

    def __init__(self, path: Path, frames_per_sec: float) -> None:
        if path.suffix not in HOW:
            raise UserError(f"--record_video={path} cannot be written; choose a file that ends in .mp4 or .gif")
        try:  # now rather than after hours of play
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise UserError(f"--record_video={path} cannot be written ({error.strerror})") from error
        self.path, self.frames_per_sec, self.num_frames, self.shape = path, frames_per_sec, 0, ()

    def add(self, env: VectorEnv) -> None:
        """Append the current picture."""
        try:
            picture = np.ascontiguousarray(env.render())
        except EnvironmentFailure as error:
            raise UserError(f"--record_video: {error}") from error
        if picture.dtype != np.uint8 or picture.shape != (self.shape or (*picture.shape[:2], 3)):
            raise UserError("--record_video: this environment's render() gives no pictures of bytes [height, width, 3]")
        self.shape = picture.shape
        times = math.ceil(MIN_HEIGHT / picture.shape[0])
        picture = picture.repeat(times, 0).repeat(times, 1)
        picture = np.pad(picture, ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)), "edge")  # for yuv420p
        try:
            if not self.num_frames:  # this one has the size
                self.writer = write_frames(self.path, picture.shape[1::-1], fps=self.frames_per_sec, macro_block_size=1,
                                           ffmpeg_log_level="error", **HOW[self.path.suffix])
                next(self.writer)
            self.writer.send(picture)
        except (OSError, RuntimeError) as error:  # ffmpeg has said why; or there is none
            self.num_frames = 0
            self.path.unlink()
            raise UserError(f"--record_video={self.path} cannot be written; is there another ffmpeg for "
                            "IMAGEIO_FFMPEG_EXE?") from error
        self.num_frames += 1

    def close(self) -> None:
        """Finish the file."""
        if self.num_frames:
            self.writer.close()
            print(f"recorded {self.path}, {self.num_frames} frames")
        elif self.path.exists() and not self.path.stat().st_size:  # else it was there before
            self.path.unlink()
