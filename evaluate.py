"""Score a trained policy: `python evaluate.py --env PongNoFrameskip-v4` plays the run's best checkpoint.

Environments play in parallel in this process. Prints the mean, the standard deviation and the length of the true
returns. Exit status: 0, or 2 for bad input (one line), 1 when the environment failed.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import checkpoint
from config import Config, OneLineParser, UserError, load_saved, make_config, parse_bool, run_dir_of
from envs import VectorEnv, find_spec, make_vector_env
from evaluator import MAX_ENVS, SEED_OFFSET, Player, play
from model import body_dtype, choose_device, make_model


def make_arguments() -> OneLineParser:
    """Make the command line."""
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--env", default="", help="environment id")
    parser.add_argument("--train_dir", default="train_dir", help="folder that holds all runs [train_dir]")
    parser.add_argument("--experiment", default="", help="name of the run's folder; empty: the environment id")
    parser.add_argument("--checkpoint", default="best", help="best, latest, or a file [best, else latest]")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play [20]")
    parser.add_argument("--seed", type=int, default=SEED_OFFSET, help="seed of the environments and of sampling")
    parser.add_argument("--deterministic", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                        help="take the most likely action instead of sampling [False]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... [auto]")
    parser.add_argument("--render", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                        help="show the game in a window, one environment [False]")
    parser.add_argument("--record_video", type=Path, metavar="FILE", help="record one environment's true picture as "
                        "FILE.mp4 or FILE.gif, and a contact sheet as FILE.png")
    return parser


def load_run(args: argparse.Namespace) -> tuple[Config, Path]:
    """Find the run's settings and the checkpoint asked for. Raises `UserError` when there is none."""
    find_spec(args.env)
    run_dir = run_dir_of(args.train_dir, args.experiment, args.env)
    if args.checkpoint in ("best", "latest"):
        path = checkpoint.find_checkpoint(run_dir, args.checkpoint) or checkpoint.find_checkpoint(run_dir)
        if path is None:
            raise UserError(f"{run_dir} holds no checkpoint; train first: python train.py --env {args.env}")
    else:
        path = Path(args.checkpoint)
        if not path.is_file():
            raise UserError(f"--checkpoint={path} is neither best, latest nor a file")
    cfg = make_config(load_saved(run_dir / "config.json"))
    if cfg.env != args.env:
        raise UserError(f"{run_dir} holds a run of {cfg.env}: add --env {cfg.env}")
    return dataclasses.replace(cfg, device=args.device, seed=args.seed), path


def load_player(cfg: Config, path: Path, env: VectorEnv, *, deterministic: bool) -> tuple[Player, int]:
    """Make the player of a checkpoint for environments that were reset, and tell the env_steps it was trained for."""
    device = choose_device(cfg.device)
    model = make_model(cfg, env.obs_space, env.action_space)
    state = checkpoint.load_checkpoint(path)
    checkpoint.load_weights(model, state, path)
    dtype = body_dtype(cfg, device, env.obs_space)
    player = Player(model.to(device).body_to(dtype).eval(), dtype, env.num_envs, deterministic=deterministic)
    return player, state["env_steps"]


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
        self.mp4: Any = None
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
        if not self.num_frames:
            self._open(picture)
        if self.mp4 is not None:
            self.mp4.write(picture[:, :, ::-1])  # OpenCV wants BGR
        elif self.num_frames < self.MAX_GIF_FRAMES:
            self.gif.append(Image.fromarray(picture).quantize())
        if self.num_frames % self.sheet_every == 0:
            self.sheet.append(picture.copy())
            if len(self.sheet) == 2 * self.SHEET_COLUMNS * self.SHEET_ROWS:
                self.sheet, self.sheet_every = self.sheet[::2], 2 * self.sheet_every
        self.num_frames += 1

    def _open(self, picture: np.ndarray) -> None:
        if self.path.suffix == ".mp4":
            import cv2  # noqa: PLC0415  slow to import

            size = (picture.shape[1], picture.shape[0])
            self.mp4 = cv2.VideoWriter(str(self.path), cv2.VideoWriter_fourcc(*"mp4v"), self.frames_per_sec, size)
            if not self.mp4.isOpened():
                raise UserError(f"--record_video={self.path} cannot be written; choose another folder")

    def close(self) -> None:
        """Finish the files."""
        if not self.num_frames:
            self.path.unlink()
            return
        if self.mp4 is not None:
            self.mp4.release()
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


def evaluate(args: argparse.Namespace) -> None:
    """Play and print the score."""
    if args.episodes < 1:
        raise UserError(f"--episodes={args.episodes} must be at least 1")
    if args.render and args.record_video:
        raise UserError("--render and --record_video exclude each other; choose one")
    cfg, path = load_run(args)
    watched = args.render or args.record_video is not None
    render_mode = "human" if args.render else "rgb_array" if args.record_video else None
    num_envs = 1 if watched else min(args.episodes, MAX_ENVS)
    torch.set_num_threads(1)  # several would wait for each other in each small operator
    torch.manual_seed(cfg.seed)
    if args.record_video and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's default needs a display
    env = make_vector_env(cfg, num_envs, render_mode)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(env.close)
        env.reset(cfg.seed)  # before the player: only now is it known whether there is an action mask
        player, env_steps = load_player(cfg, path, env, deterministic=args.deterministic)
        print(f"playing {path} ({env_steps:,} env_steps)")
        watch = {}
        if args.record_video:
            video = VideoWriter(args.record_video, env.frames_per_sec / cfg.env_frameskip)
            cleanup.callback(video.close)
            watch = {"on_step": video.add}
        episodes = list(play(env, player, args.episodes, cfg.seed, **watch))
    returns, lengths = np.array(episodes, dtype=np.float64).T
    print(f"{len(returns)} episodes: return {returns.mean():.2f} +- {returns.std():.2f} (standard deviation; "
          f"{returns.min():.2f} to {returns.max():.2f}), length {lengths.mean():.1f} +- {lengths.std():.1f} env_steps")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    try:
        evaluate(make_arguments().parse(argv))
    except UserError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
