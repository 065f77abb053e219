"""Show an agent learn: checkpoints of a run play the same game side by side, in one GIF, with the score so far.

    python train.py --env PongNoFrameskip-v4 --experiment untrained --train_for_env_steps 64
    python train.py --env PongNoFrameskip-v4 --save_milestones_sec 15
    python -m tools.learning_gif UNTRAINED MILESTONE MILESTONE MILESTONE docs/pictures/pong.gif \\
        --labels untrained "1 minute" "2 minutes" "4 minutes" --seconds 30

Checkpoints lie in train_dir/RUN/checkpoints/policy_00. Every panel has the same seed, and actions are sampled, as in
training. An episode that has ended stays as it is. Pong is shown at 3.3 times the speed at which people play it.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

import evaluate
from config import make_config
from envs.families import make_vector_env
from envs.flat_spaces import num_columns
from runtime.by_name import check_trusted
from runtime.checkpoint import load_checkpoint
from runtime.command_line import OneLineParser
from runtime.evaluator import evaluation_seeds
from runtime.seeding import EVALUATION, derive_seed
from runtime.user_error import EnvironmentFailure, UserError
from tools import style

GAP, TOP, COLORS = 10, 44, 64  # pixels between panels, and above them; colors of the GIF
Frame = tuple[Image.Image, float]  # a picture of the game, and the score so far


def film(path: Path, width: int, num_frames: int, args: argparse.Namespace) -> list[Frame]:
    """Let a checkpoint play one episode; return a frame for each decision, num_frames of them."""
    saved = load_checkpoint(path)["config"]
    check_trusted(saved, vars(args), path)
    cfg = make_config(saved | {"device": "cpu"})
    torch.manual_seed(derive_seed(args.seed, EVALUATION, part=1))
    env, frames, score, fresh = make_vector_env(cfg, 1, "rgb_array"), [], 0.0, np.ones(1, bool)
    with contextlib.closing(env):
        step = env.reset(evaluation_seeds(args.seed, 1))
        if len(env.agents) > 1:
            raise UserError(f"{path} plays {cfg.env}, of several agents; choose an environment of one")
        player = evaluate.load_entry(cfg, args, path, env)(env, env.kinds[0].index)
        while len(frames) < num_frames:
            picture = Image.fromarray(np.ascontiguousarray(env.render()))
            height = round(width * picture.height / picture.width)
            frames.append((picture.resize((width, height), Image.Resampling.BOX), score))
            if (step.terminated | step.truncated).any():
                break
            actions = [np.zeros((1, num_columns(env.kinds[0].action_space)), np.float32)]
            player.act(step, fresh, actions)
            step, fresh = env.step(actions), np.zeros(1, bool)
            score += float(step.rewards.sum())
    return frames + [frames[-1]] * (num_frames - len(frames))


def compose(panels: Sequence[Frame], labels: Sequence[str]) -> Image.Image:
    """Lay the pictures of one moment side by side, with a label and the score above each."""
    width, height = panels[0][0].size
    page = Image.new("RGB", (len(panels) * (width + GAP) - GAP, TOP + height), "white")
    draw = ImageDraw.Draw(page)
    small, bold = (ImageFont.truetype(font_manager.findfont(f"DejaVu Sans:{weight}"), size)
                   for weight, size in (("regular", 15), ("bold", 20)))
    for number, ((picture, score), label) in enumerate(zip(panels, labels, strict=True)):
        left = number * (width + GAP)
        page.paste(picture, (left, TOP))
        draw.text((left + 2, TOP - 12), label, style.INK, small, "ls")
        color = style.LEARNER if score > 0 else style.WARN if score < 0 else style.SOFT
        draw.text((left + width - 2, TOP - 12), f"{score:+g}" if score else "0", color, bold, "rs")
    return page


def write_gif(pages: Sequence[Image.Image], path: Path, frames_per_sec: float) -> None:
    """Write an endless GIF, with the same few colors in all its pictures."""
    moments = np.vstack([np.asarray(pages[part * (len(pages) - 1) // 3]) for part in range(4)])  # have all colors
    palette = Image.fromarray(moments).quantize(COLORS, Image.Quantize.MAXCOVERAGE)  # white stays white
    first, *others = (page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages)
    first.save(path, save_all=True, append_images=others, loop=0, duration=round(100 / frames_per_sec) * 10)


def make_arguments() -> OneLineParser:
    """Make the command line."""
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.set_defaults(deterministic=False)
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="who plays, a panel each")
    parser.add_argument("output", type=Path, metavar="FILE", help="file to write, for example pong.gif")
    parser.add_argument("--labels", nargs="+", default=[], help="what stands above each panel [the files' names]")
    parser.add_argument("--seconds", type=float, default=18.0, help="length of the film [18]")
    parser.add_argument("--fps", type=float, default=50.0, help="decisions shown in a second, at most 50 [50]")
    parser.add_argument("--width", type=int, default=800, help="pixels [800]")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of each game and of sampling [1000000]")
    parser.add_argument("--trust_run", action="store_true", help="import code that a checkpoint's settings name")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    try:
        args = make_arguments().parse(argv)
        labels = args.labels or [path.stem for path in args.checkpoints]
        if args.output.suffix != ".gif" or not args.output.parent.is_dir():
            raise UserError(f"{args.output} cannot be written; choose a file in a folder that exists, ending in .gif")
        if len(labels) != len(args.checkpoints):
            raise UserError(f"--labels: {len(labels)} for {len(args.checkpoints)} checkpoints; give one each")
        width = (args.width + GAP) // len(labels) - GAP  # of a panel
        if not 0 < args.seconds < 1000 or not 1 <= args.fps <= 50 or width < 60:
            raise UserError(f"--seconds={args.seconds:g}, --fps={args.fps:g} (1 to 50) or --width={args.width} is too "
                            "small or too large")
        films = [film(path, width, max(1, round(args.seconds * args.fps)), args) for path in args.checkpoints]
        write_gif([compose(panels, labels) for panels in zip(*films, strict=True)], args.output, args.fps)
    except (UserError, EnvironmentFailure) as error:
        print(f"learning_gif.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, EnvironmentFailure) else 2
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
