"""Films of an environment: mp4 (H.264, which browsers play) or GIF, written frame by frame. Used by `evaluate.py`."""

import math
from pathlib import Path

import numpy as np
from imageio_ffmpeg import write_frames

from envs.vector_env import VectorEnv
from runtime.user_error import UserError

HOW = {".mp4": {"quality": 7, "output_params": ["-movflags", "+faststart"]},  # a browser begins before it has all
       ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "output_params": [  # a palette for each frame
           "-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"]}}
MIN_HEIGHT = 400  # smaller pictures are enlarged


class VideoWriter:
    """Writes the pictures of an environment to an mp4 or GIF file."""

    def __init__(self, path: Path, frames_per_sec: float) -> None:
        if path.suffix not in HOW:
            raise UserError(f"--record_video={path} cannot be written; choose a file that ends in .mp4 or .gif")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.frames_per_sec = frames_per_sec
        self.num_frames = 0

    def add(self, env: VectorEnv) -> None:
        """Append the current picture."""
        picture = env.render()
        times = math.ceil(MIN_HEIGHT / picture.shape[0])
        picture = picture.repeat(times, 0).repeat(times, 1)
        picture = np.pad(picture, ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)), "edge")  # for yuv420p
        if not self.num_frames:  # this one has the size
            self.writer = write_frames(self.path, picture.shape[1::-1], fps=self.frames_per_sec, macro_block_size=1,
                                       ffmpeg_log_level="error", **HOW[self.path.suffix])
            next(self.writer)
        self.writer.send(picture)
        self.num_frames += 1

    def close(self) -> None:
        """Finish the file."""
        if self.num_frames:
            self.writer.close()
            print(f"recorded {self.path}, {self.num_frames} frames")
