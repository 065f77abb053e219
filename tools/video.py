"""Videos of an environment: mp4 (H.264, which browsers play) or GIF. Used by `evaluate.py`."""

from pathlib import Path

import imageio.v2 as imageio
import numpy as np

from envs.vector_env import VectorEnv
from runtime.user_error import UserError

MP4 = {"macro_block_size": 1, "quality": 7, "ffmpeg_log_level": "error",
       "output_params": ["-movflags", "+faststart"]}  # a browser begins before it has all
MAX_GIF_FRAMES = 3000  # a GIF is kept in memory until it is written


class VideoWriter:
    """Writes the pictures of an environment to an mp4 or GIF file."""

    def __init__(self, path: Path, frames_per_sec: float) -> None:
        if path.suffix not in (".mp4", ".gif"):
            raise UserError(f"--record_video={path} cannot be written; choose a file that ends in .mp4 or .gif")
        try:  # now rather than after hours of play
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise UserError(f"--record_video={path} cannot be written ({error.strerror})") from error
        self.path, self.num_frames, self.is_gif = path, 0, path.suffix == ".gif"
        how = {"duration": 1000 / frames_per_sec, "loop": 0} if self.is_gif else {"fps": frames_per_sec} | MP4
        self.writer = imageio.get_writer(path, **how)

    def add(self, env: VectorEnv) -> None:
        """Append the current picture."""
        try:
            picture = np.ascontiguousarray(env.render())
        except NotImplementedError:
            picture = np.zeros(0)
        if picture.ndim != 3 or picture.shape[2] != 3:
            raise UserError("--record_video: this environment's render() gives no picture [height, width, 3]")
        if self.is_gif and self.num_frames == MAX_GIF_FRAMES:
            return
        if not self.is_gif:  # yuv420p has no odd sizes
            picture = np.pad(picture, ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)), "edge")
        try:
            self.writer.append_data(picture)
        except (OSError, RuntimeError) as error:  # ffmpeg has said why; or there is none
            self.num_frames = 0  # `close` removes the file
            raise UserError(f"--record_video={self.path} cannot be written; try a file that ends in .gif") from error
        self.num_frames += 1

    def close(self) -> None:
        """Finish the file."""
        self.writer.close()
        if self.num_frames:
            print(f"recorded {self.path}, {self.num_frames} frames")
        else:
            self.path.unlink(missing_ok=True)
