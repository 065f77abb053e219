"""Score a trained policy: `python evaluate.py --env PongNoFrameskip-v4` plays the run's best checkpoint.

Environments play in parallel in this process; how many episodes each plays is fixed beforehand, so that short episodes
are not counted more often than long ones. Prints the mean, the standard deviation and the length of the true returns.
Exit status: 0, or 2 for bad input (one line).
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import checkpoint
from config import Config, OneLineParser, UserError, load_saved, make_config, parse_bool, run_dir_of
from envs import VectorEnv, find_spec, make_vector_env
from model import ActorCritic, action_distribution, body_dtype, choose_device

MAX_ENVS = 20


def make_arguments() -> OneLineParser:
    """Make the command line."""
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--env", default="", help="environment id")
    parser.add_argument("--train_dir", default="train_dir", help="folder that holds all runs [train_dir]")
    parser.add_argument("--experiment", default="", help="name of the run's folder; empty: the environment id")
    parser.add_argument("--checkpoint", default="best", help="best, latest, or a file [best, else latest]")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play [20]")
    parser.add_argument("--seed", type=int, default=1_000_000, help="seed of the environments and of sampling")
    parser.add_argument("--deterministic", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                        help="take the most likely action instead of sampling [False]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... [auto]")
    parser.add_argument("--render", type=parse_bool, nargs="?", const=True, default=False, metavar="BOOL",
                        help="show the game in a window, one environment [False]")
    parser.add_argument("--record_video", type=Path, metavar="FILE.mp4", help="record one environment's true picture")
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


class Player:
    """A trained policy that turns observations of N environments into actions."""

    def __init__(self, cfg: Config, path: Path, env: VectorEnv, *, deterministic: bool) -> None:
        self.device = choose_device(cfg.device)
        self.dtype = body_dtype(cfg, self.device, env.obs_space)
        self.model = ActorCritic(cfg, env.obs_space, env.action_space)
        state = checkpoint.load_checkpoint(path)
        checkpoint.load_weights(self.model, state, path)
        self.env_steps: int = state["env_steps"]
        self.model.to(self.device).body_to(self.dtype)
        self.deterministic = deterministic
        self.rnn_states = torch.zeros(env.num_envs, self.model.core.state_size, device=self.device)

    @torch.inference_mode()
    def act(self, obs: dict[str, np.ndarray], new_episode: np.ndarray) -> np.ndarray:
        """Choose actions for observations {name: [N, ...]}; agents in a new episode forget what they remember."""
        self.rnn_states[torch.from_numpy(new_episode)] = 0.0
        tensors = {name: torch.as_tensor(value, device=self.device) for name, value in obs.items()}
        normalized = self.model.normalize(tensors, self.dtype)
        parameters, _, self.rnn_states = self.model(normalized, self.rnn_states)
        distribution = action_distribution(self.model.action_space, parameters)
        actions = distribution.mode() if self.deterministic else distribution.sample()
        return actions.cpu().numpy()


def play(env: VectorEnv, player: Player, num_episodes: int, seed: int,
         on_step: Callable[[VectorEnv], None] = lambda env: None) -> Iterator[tuple[float, int]]:
    """Play episodes, as evenly spread over the environments as can be; yield each one's true return and length."""
    obs = env.reset(seed)
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    left = num_episodes // env.num_envs + (np.arange(env.num_envs) < num_episodes % env.num_envs)
    resetting = np.zeros(env.num_envs, bool)  # this step only resets; the observation before it was the last one
    new_episode = np.ones(env.num_envs, bool)
    while left.any():
        obs, rewards, terminated, truncated = env.step(player.act(obs, new_episode))
        on_step(env)
        new_episode = resetting
        returns += np.where(resetting, 0.0, rewards)
        lengths += ~resetting
        resetting = terminated | truncated
        for i in np.flatnonzero(resetting):
            if left[i]:
                left[i] -= 1
                yield float(returns[i]), int(lengths[i])
            returns[i], lengths[i] = 0.0, 0


class VideoWriter:
    """Writes the pictures of an environment to an mp4 file."""

    def __init__(self, path: Path, frames_per_sec: float) -> None:
        self.path, self.frames_per_sec = path, frames_per_sec
        self.writer = None

    def add(self, env: VectorEnv) -> None:
        """Append the current picture."""
        import cv2  # noqa: PLC0415  slow to import

        picture = env.render()
        if self.writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            size = (picture.shape[1], picture.shape[0])
            self.writer = cv2.VideoWriter(str(self.path), cv2.VideoWriter_fourcc(*"mp4v"), self.frames_per_sec, size)
            if not self.writer.isOpened():
                raise UserError(f"--record_video={self.path} cannot be written; choose a file that ends in .mp4")
        self.writer.write(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        """Finish the file."""
        if self.writer is not None:
            self.writer.release()
            print(f"recorded {self.path}")


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
    env = make_vector_env(cfg, num_envs, render_mode)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(env.close)
        player = Player(cfg, path, env, deterministic=args.deterministic)
        print(f"playing {path} ({player.env_steps:,} env_steps)")
        on_step: Callable[[VectorEnv], None] = lambda env: None  # noqa: E731
        if args.record_video:
            video = VideoWriter(args.record_video, 60 / cfg.env_frameskip if cfg.env_frameskip > 1 else 30)
            cleanup.callback(video.close)
            on_step = video.add
        episodes = list(play(env, player, args.episodes, cfg.seed, on_step))
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
