"""Score a trained policy: `python evaluate.py --env PongNoFrameskip-v4` plays the run's best checkpoint.

Environments play in parallel in this process. Prints the mean, the standard deviation and the length of the true
returns. In an environment of several agents `--tournament` lets the run's policies play each other, and prints a matrix
of results and Elo ratings. Exit status: 0, or 2 for bad input (one line), 1 when the environment failed.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from algorithms import algorithm_class
from config import Config, make_config, without_gone
from envs.families import find_spec, make_vector_env
from envs.vector_env import VectorEnv, describe
from pbt import assign_kinds
from runtime import checkpoint
from runtime.by_name import check_trusted
from runtime.command_line import OneLineParser, parse_bool
from runtime.evaluator import MAX_ENVS, Episode, Player, RandomPlayer, evaluation_seeds, play
from runtime.files import load_saved, run_dir_of
from runtime.generators import seed_all
from runtime.guard import take_programs_along
from runtime.machine import body_dtype, choose_device
from runtime.policy import best_policy, find_policy
from runtime.seeding import EVALUATION, derive_seed
from runtime.stop import end
from runtime.user_error import UserError
from tools import tournament
from tools.video import VideoWriter


def in_full(name: str) -> str:
    """Return a checkpoint file's full path, which stays right when an environment changes the working folder."""
    return os.path.abspath(name) if name.endswith(".pt") else name


def make_arguments() -> OneLineParser:
    """Make the command line."""
    parser = OneLineParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--env", default="", help="environment id [that of the run, with --experiment]")
    parser.add_argument("--train_dir", type=os.path.abspath, default="train_dir", metavar="FOLDER",
                        help="folder that holds all runs [train_dir]")
    parser.add_argument("--experiment", default="", help="name of the run's folder; empty: the environment id")
    parser.add_argument("--checkpoint", type=in_full, default="", help="best, latest, a file, or random: random "
                        "actions for comparison [best, else latest; after self-play and in a tournament latest]")
    parser.add_argument("--policy", type=int, default=-1, metavar="NUMBER",
                        help="which policy of a population plays [the one with the best score]")
    switch = {"type": parse_bool, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}
    parser.add_argument("--tournament", **switch,
                        help="let all policies of the run play each other, --episodes games each two [False]")
    parser.add_argument("--against", type=in_full, nargs="+", default=[], metavar="FILE",
                        help="other entries of the tournament: checkpoints of this run, or random")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play [20]")
    parser.add_argument("--seed", type=int, default=1_000_000,
                        help="seed of the environments and of sampling, another than that of training [1000000]")
    parser.add_argument("--deterministic", help="take the most likely action instead of sampling [False]", **switch)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... [auto]")
    parser.add_argument("--trust_run", help="import code that the run's settings name [False]", **switch)
    parser.add_argument("--render", help="show the game in a window, one environment [False]", **switch)
    parser.add_argument("--record_video", type=lambda name: Path(name).absolute(), metavar="FILE",
                        help="record one environment's true picture as FILE.mp4 or FILE.gif")
    return parser


def load_run(args: argparse.Namespace) -> Config:
    """Find the run's settings. Raises `UserError` when there are none."""
    if args.env or not args.experiment:
        find_spec(args.env)
    run_dir = run_dir_of(args.train_dir, args.experiment, args.env)
    if not checkpoint.holds_run(run_dir):
        experiment = f" --experiment {args.experiment}" if args.experiment else ""
        raise UserError(f"{run_dir} holds no checkpoint; train first: python train.py --env {args.env or 'ID'}"
                        f"{experiment}")
    saved = load_saved(run_dir / "config.json")
    check_trusted(saved, {name: value for name, value in vars(args).items() if value}, run_dir)
    if args.env not in ("", saved["env"]):
        raise UserError(f"{run_dir} holds a run of {saved['env']}: add --env {saved['env']}")
    settings = algorithm_class(saved.get("algo", Config.algo)).Settings
    cfg = make_config(settings, without_gone(saved, settings))
    if not -1 <= args.policy < cfg.num_policies:
        raise UserError(f"--policy={args.policy} is unknown; the run has policies 0 to {cfg.num_policies - 1}")
    # a run may have been moved since
    return dataclasses.replace(cfg, train_dir=args.train_dir, experiment=args.experiment, device=args.device,
                               seed=args.seed)


def find_checkpoint(cfg: Config, which: str, policy: int) -> Path:
    """Find a policy's checkpoint (`find_policy`); tell of damaged ones."""
    path, damaged = find_policy(cfg, which, policy)
    if which == "best" and path.name != checkpoint.BEST:
        print(f"{path.parent} has no {checkpoint.BEST} yet: the newest weights play")
    for other in damaged:
        print(f"evaluate.py: checkpoint {other} is damaged, the one before plays", file=sys.stderr)
    return path


def load_entry(cfg: Config, args: argparse.Namespace, path: Path, env: VectorEnv, kind: int = 0,
               policy: int = 0) -> tournament.MakePlayer:
    """Load a checkpoint for the agents of a kind; return what makes players of it. Print its age and score."""
    device = choose_device(cfg.device, policy)
    state = checkpoint.load_checkpoint(path)
    obs_space, action_space = describe(env).as_trained(kind, state, path)
    algorithm = algorithm_class(cfg.algo)(cfg)
    model = algorithm.make_model(obs_space, action_space)
    checkpoint.load_weights(model, state, path, cfg.algo)
    score = f", score {state['score']:.2f}" if "score" in state else ""
    print(f"playing {path} ({state['env_steps']:,} env_steps{score})")
    model = model.to(device).body_to(body_dtype(cfg, device, obs_space)).eval()
    return partial(Player, algorithm, model, deterministic=args.deterministic)


def load_players(cfg: Config, args: argparse.Namespace, env: VectorEnv) -> list[Player | RandomPlayer]:
    """Make the players: the policy asked for plays its kind, every other kind is played by its first policy."""
    if args.checkpoint == "random":
        print("playing at random")
        return [RandomPlayer(env, kind.index) for kind in env.kinds]
    kinds = assign_kinds(cfg, describe(env))
    policy = args.policy if args.policy >= 0 else best_policy(cfg, args.checkpoint)
    players = []
    for number, kind in enumerate(env.kinds):
        plays = policy if kinds[policy] == number else kinds.index(number)
        is_file = args.checkpoint not in ("best", "latest")  # of the policy asked for
        path = find_checkpoint(cfg, "best" if is_file and plays != policy else args.checkpoint, plays)
        players.append(load_entry(cfg, args, path, env, number, plays)(env, kind.index))
    return players


def run_tournament(cfg: Config, args: argparse.Namespace, env: VectorEnv) -> None:
    """Let all policies, and the entries of `--against`, play each other; print the results."""
    if len(env.agents) < 2 or len(env.kinds) > 1:
        raise UserError(f"--tournament needs an environment of several agents with the same spaces, not {cfg.env}")
    names, entries = [], []
    for policy in range(cfg.num_policies):
        names.append(f"policy_{policy:02}")
        entries.append(load_entry(cfg, args, find_checkpoint(cfg, args.checkpoint, policy), env))
    for name in args.against:
        if name == "random":
            entries.append(RandomPlayer)
        elif Path(name).is_file():
            entries.append(load_entry(cfg, args, Path(name), env))
        else:
            raise UserError(f"--against: {name} is neither random nor a file")
        names.append(name.removeprefix(f"{cfg.run_dir}/checkpoints/").removesuffix(".pt"))
    if len(entries) < 2:
        raise UserError("--tournament needs two entries; add --against random, or checkpoints such as "
                        f"{cfg.run_dir}/checkpoints/policy_00/snapshot_*.pt")
    print(f"{len(entries)} entries, {args.episodes} games each two")
    print(tournament.describe(names, tournament.play_all(env, entries, args.episodes, cfg.seed)))


def evaluate(args: argparse.Namespace) -> None:
    """Play and print the score."""
    if args.episodes < 1:
        raise UserError(f"--episodes={args.episodes} must be at least 1")
    if args.render and args.record_video:
        raise UserError("--render and --record_video exclude each other; choose one")
    if args.tournament and (args.render or args.record_video):
        raise UserError("--tournament shows no games; leave out --render and --record_video")
    if args.against and not args.tournament:
        raise UserError("--against needs --tournament")
    if args.tournament and args.checkpoint not in ("", "best", "latest"):
        raise UserError(f"--checkpoint={args.checkpoint} is no entry of a tournament; use --against {args.checkpoint}")
    if args.tournament and args.policy >= 0:
        raise UserError("--policy: all policies play in a tournament; leave it out")
    cfg = load_run(args)
    no_return_is_best = args.tournament or cfg.self_play_past_fraction > 0
    args.checkpoint = args.checkpoint or ("latest" if no_return_is_best else "best")
    render_mode = "human" if args.render else "rgb_array" if args.record_video else None
    num_envs = 1 if render_mode else min(args.episodes, MAX_ENVS)
    torch.set_num_threads(1)  # several would wait for each other in each small operator
    seed_all(derive_seed(cfg.seed, EVALUATION, part=1))
    if args.record_video and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's default needs a display
    env = make_vector_env(cfg, num_envs, render_mode)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(env.close)
        env.reset(evaluation_seeds(cfg.seed, num_envs))  # before the players: now an action mask shows
        if args.tournament:
            run_tournament(cfg, args, env)
            return
        players = load_players(cfg, args, env)
        watch = {}
        if args.record_video:
            video = VideoWriter(args.record_video, env.frames_per_sec / cfg.env_frameskip)
            cleanup.callback(video.close)
            watch = {"on_step": video.add}
        episodes = list(play(env, players, args.episodes, cfg.seed, **watch))
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


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    try:
        evaluate(make_arguments().parse(argv))
    except UserError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    take_programs_along()
    end(main(sys.argv[1:]))
