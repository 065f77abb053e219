"""Score a trained policy: `python evaluate.py --env PongNoFrameskip-v4` plays the run's best checkpoint.

Environments play in parallel in this process. Prints the mean, the standard deviation and the length of the true
returns. Exit status: 0, or 2 for bad input (one line), 1 when the environment failed.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

from envs.families import find_spec, make_vector_env
from envs.vector_env import VectorEnv, describe
from pbt import assign_kinds
from runtime.command_line import OneLineParser, parse_bool
from runtime.evaluator import MAX_ENVS, Episode, Player, RandomPlayer, evaluation_seeds, play
from runtime.files import load_saved, run_dir_of
from runtime.generators import seed_all
from runtime.guard import take_programs_along
from runtime.policy import Policy, load
from runtime.seeding import EVALUATION, derive_seed
from runtime.stop import end
from runtime.user_error import UserError, exit_status
from tools.video import VideoWriter

SWITCH = {"type": parse_bool, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}


def arguments_of_a_run(description: str | None) -> OneLineParser:
    """Make the flags that say which run plays, and how."""
    parser = OneLineParser(description=description, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="", help="environment id [that of the run, with --experiment]")
    parser.add_argument("--train_dir", type=os.path.abspath, default="train_dir", metavar="FOLDER",
                        help="folder that holds all runs [train_dir]")
    parser.add_argument("--experiment", default="", help="name of the run's folder; empty: the environment id")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play; in a tournament each two [20]")
    parser.add_argument("--seed", type=int, default=1_000_000,
                        help="seed of the environments and of sampling, another than that of training [1000000]")
    parser.add_argument("--deterministic", **SWITCH, help="take the most likely action, do not sample")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... [auto]")
    parser.add_argument("--trust_run", **SWITCH, help="import code that the run's settings name")
    return parser


def make_arguments() -> OneLineParser:
    """Make the command line."""
    parser = arguments_of_a_run(__doc__)
    parser.add_argument("--checkpoint", default="", help="best, latest, a file, or random: random "
                        "actions for comparison [best, else latest; after self-play latest]")
    parser.add_argument("--policy", type=int, metavar="NUMBER",
                        help="which policy of a population plays [the one with the best score]")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--render", **SWITCH, help="show the game in a window, one environment")
    shown.add_argument("--record_video", type=lambda name: Path(name).absolute(), metavar="FILE",
                       help="record one environment's true picture as FILE.mp4 or FILE.gif")
    return parser


def load_policy(args: argparse.Namespace, policy: int | None, checkpoint: str) -> Policy:
    """Load a policy of the run. Raises `UserError` when there is none."""
    if args.env or not args.experiment:
        find_spec(args.env)
    run_dir = run_dir_of(args.train_dir, args.experiment, args.env)
    loaded = load(run_dir, env=args.env or None, policy=policy, checkpoint=checkpoint, device=args.device,
                  trust_run=args.trust_run)
    env = load_saved(run_dir / "config.json")["env"]
    if args.env not in ("", env):
        raise UserError(f"{run_dir} holds a run of {env}: add --env {env}")
    return loaded


def make_players(args: argparse.Namespace, loaded: Policy, env: VectorEnv) -> list[Player | RandomPlayer]:
    """Make the players: a policy plays its kind of agents, every other kind is played by its first policy."""
    if args.checkpoint == "random":
        print("playing at random")
        return [RandomPlayer(env, kind.index) for kind in env.kinds]
    kinds = assign_kinds(loaded.cfg, describe(env))
    players = []
    for number, kind in enumerate(env.kinds):
        policy = loaded
        if kinds[loaded.number] != number:  # a file is of the policy that was asked for
            which = args.checkpoint if args.checkpoint in ("best", "latest") else ""
            policy = load_policy(args, kinds.index(number), which)
        print(f"playing {policy.source}")
        players.append(Player(policy.algorithm, policy.model, env, kind.index, deterministic=args.deterministic))
    return players


@exit_status
def main(argv: list[str]) -> None:
    """Play and print the score."""
    args = make_arguments().parse(argv)
    torch.set_num_threads(1)  # several would wait for each other in each small operator
    seed_all(derive_seed(args.seed, EVALUATION, part=1))
    if args.record_video and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's default needs a display
    loaded = load_policy(args, args.policy, "" if args.checkpoint == "random" else args.checkpoint)
    render_mode = "human" if args.render else "rgb_array" if args.record_video else None
    num_envs = 1 if render_mode else min(args.episodes, MAX_ENVS)
    env = make_vector_env(loaded.cfg, num_envs, render_mode)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(env.close)
        env.reset(evaluation_seeds(args.seed, num_envs))  # before the players: now an action mask shows
        players = make_players(args, loaded, env)
        watch = {}
        if args.record_video:
            video = VideoWriter(args.record_video, env.frames_per_sec / loaded.cfg.env_frameskip)
            cleanup.callback(video.close)
            watch = {"on_step": video.add}
        episodes = list(play(env, players, args.episodes, args.seed, **watch))
    report(env, episodes)


def report(env: VectorEnv, episodes: list[Episode]) -> None:
    """Print the returns and lengths: means over the agents, and the returns of each agent."""
    returns = np.array([episode.returns.mean() for episode in episodes])
    lengths = np.array([episode.lengths.mean() for episode in episodes])
    if len(returns) == 1:
        print(f"1 episode: return {returns[0]:.2f}, length {lengths[0]:.1f} env_steps")
    else:
        print(f"{len(returns)} episodes: return {returns.mean():.2f} +- {returns.std():.2f} (standard deviation; "
              f"{returns.min():.2f} to {returns.max():.2f}), length {lengths.mean():.1f} +- {lengths.std():.1f} "
              "env_steps")
    if len(env.agents) > 1:
        means = np.mean([episode.returns for episode in episodes], 0)
        print("of each agent: " + ", ".join(f"{name} {mean:.2f}" for name, mean in zip(env.agents, means, strict=True)))


if __name__ == "__main__":
    take_programs_along()
    end(main(sys.argv[1:]))
