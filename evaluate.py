"""Load a policy, predict, play, score, film: `python evaluate.py --env PongNoFrameskip-v4` plays the best checkpoint.

    load(run) -> Policy             a trained policy, in this process
    Policy.predict(obs)             the actions for observations as an environment gives them
    play(env, players, episodes)    episodes of a vector environment; each `Player` acts for some of its agents
    Evaluator                       the process that scores the newest weights while the training goes on
    main                            the command; it prints the mean and the standard deviation of the true returns

The command's exit status is 0, 2 for bad input (one line), or 1 when the environment failed.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from imageio_ffmpeg import write_frames
from torch import Tensor

from algorithms import algorithm_class
from config import Config, Values, known_of, make_config
from envs.families import make_env, make_vector_env, probe
from envs.flat_spaces import Observation
from envs.vector_env import EnvInfo, Step, VectorEnv
from pbt import assign_kinds
from runtime import checkpoint as checkpoints
from runtime import utils
from runtime.command_line import OneLineParser
from runtime.machine import choose_device
from runtime.processes import STEPS, Report
from runtime.utils import EVALUATION, UserError, derive_seed, exit_status, left_alone, run_command, seed_all
from shared_buffers import SAVE_BEST, SharedBuffers, SharedWeights

MAX_ENVS = 20  # that play in parallel

# ---- load --------------------------------------------------------------------------------------------------------


@left_alone()
def load(path: str | os.PathLike, *, env: Any = None, policy: int = 0, checkpoint: str = "best", device: str = "cpu",
         trust_run: bool = False) -> "Policy":
    """Load a trained policy, without starting a process. The environment is made once, to learn its spaces.

    Args:
        path: a run's folder, or a checkpoint file.
        env: the environment, where the run's is code of your own (an id, a function or class); empty: that of the run.
        policy: which of a population.
        checkpoint: of a run: best (else latest), latest, or a file.
        device: where it computes.
        trust_run: import the code that the settings of the run name (SECURITY.md).

    Raises `UserError` when there is none, or when its settings name code that was not asked for.
    """
    run_dir = path = Path(path if checkpoint in ("best", "latest") else checkpoint).resolve()
    if checkpoint == "best":
        path = checkpoints.find_checkpoint(run_dir, "best", policy) or run_dir
    if path.is_file():
        state = checkpoints.load_checkpoint(path)
    else:
        path, state, damaged = checkpoints.load_newest(run_dir, policy)
        for other in damaged:
            print(f"checkpoint {other} is damaged, the one before plays", file=sys.stderr)
    if state is None:
        raise UserError(f"{run_dir} holds no checkpoint of policy {policy}; train first, or name another")
    if run_dir.is_dir():
        state["config"] = checkpoints.load_saved(run_dir / "config.json")  # which may have been changed
    saved = state["config"]
    trained_in = checkpoints.run_dir_of(*(saved.get(name, "") for name in ("train_dir", "experiment", "env")))
    given = utils.recall(trained_in, saved) | {"device": device, "trust_run": trust_run}
    if env:
        given["env"] = utils.reference(env)
    utils.check_trusted(saved, given, path)
    cfg = make_config(known_of(saved | given))
    info = probe(cfg)
    kind = assign_kinds(cfg, info)[check_policy(policy, cfg)]
    info.kinds[kind].obs_space = info.kinds[kind].as_trained(state, path)
    loaded = Policy(cfg, info, kind, choose_device(device, policy))
    checkpoints.load_weights(loaded.model, state, path, cfg.algo)
    loaded.source = f"{path} ({state['env_steps']:,} env_steps)"
    return loaded


def check_policy(policy: Any, cfg: Config) -> int:
    """Return the number of a policy. Raises `UserError` when there is none of it."""
    if policy not in range(cfg.num_policies):
        raise UserError(f"there is no policy {policy!r}; there are 0 to {cfg.num_policies - 1}")
    return policy


# ---- predict -----------------------------------------------------------------------------------------------------


class Policy:
    """A policy that acts for agents of one kind, in this process, in float32."""

    def __init__(self, cfg: Config, info: EnvInfo, kind: int, device: torch.device) -> None:
        """Make it for a kind of agents of an environment, with new weights."""
        self.cfg, self.device, self.kind = cfg, device, info.kinds[kind]
        self.algorithm = algorithm_class(cfg.algo)(cfg)
        self.model = self.algorithm.make_model(self.kind.obs_space, self.kind.action_space).to(device).eval()
        self.state_size = self.model.state_size
        self.version = -1  # of its weights, where they are `SharedWeights`
        self.source = ""  # of its weights, in words
        self.deterministic = cfg.eval_deterministic  # whether a `Player` takes the most likely actions

    def refresh(self, weights: SharedWeights) -> None:
        """Copy newer weights, if there are some."""
        if weights.version != self.version:
            self.version = weights.refresh(self.model)

    def make_env(self, render_mode: str | None = None) -> Any:
        """Make one environment as the policy knows it, with the preprocessing of its family."""
        return make_env(self.cfg, render_mode)

    @torch.inference_mode()
    def act(self, obs: Observation, rnn_states: Tensor, new_episode: np.ndarray, *,
            deterministic: bool) -> tuple[np.ndarray, Tensor]:
        """Choose actions.

        Args:
            obs: the leaves of B observations, {name: [B, ...]}.
            rnn_states: [B, state_size] float32. new_episode: [B] bool, where they count as 0.
            deterministic: take the most likely actions instead of drawing them.

        Returns rows of numbers, [B, num_columns] float32 (`flat_spaces.py`), and the next rnn_states.
        """
        tensors = {name: torch.as_tensor(value).to(self.device) for name, value in obs.items()}
        columns, rnn_states = self.algorithm.act(
            self.model, tensors, rnn_states.to(self.device), torch.as_tensor(new_episode).to(self.device),
            deterministic=deterministic)
        return columns["actions"].cpu().numpy(), rnn_states.cpu()

    def predict(self, obs: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False,
                action_mask: Any = None) -> tuple[Any, Tensor]:
        """Choose an action, or those of a batch.

        Args:
            obs: one observation, or a batch of B: a list of observations, or arrays with one axis more in front. An
                action mask in it counts.
            state: what the last call returned, for a policy with a memory; None: the beginning of an episode.
            episode_start: a bool, or [B]: where it is true the memory is empty.
            deterministic: take the most likely action instead of drawing one by PyTorch's generator.
            action_mask: of an environment that gives it in its infos; one (None: all is allowed), or a list of B.

        Returns the action in the form of the environment, or a batch of them, and the next state, [state_size] or
        [B, state_size] float32.
        """
        space = self.kind.space
        is_one = is_single(space, obs)
        if is_one:
            obs = [obs]
        if isinstance(obs, list):
            obs = concatenate(space, obs, create_empty_array(space, len(obs)))
        masks = [action_mask] if is_one else action_mask
        leaves = self.kind.flatten(obs, () if masks is None else masks)
        num_obs = len(next(iter(leaves.values())))
        states = torch.as_tensor(0.0 if state is None else state).expand(num_obs, self.state_size)
        new_episode = np.full(num_obs, episode_start, bool)
        rows, states = self.act(leaves, states, new_episode, deterministic=deterministic)
        actions = self.kind.actions(rows)
        if is_one:
            return next(iter(iterate(batch_space(self.kind.action_space), actions))), states[0]
        return actions, states


def is_single(space: spaces.Space, obs: Any) -> bool:
    """Return whether this is one observation of a space, and not a batch: its first part decides."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        key = next(iter(space.spaces)) if isinstance(space, spaces.Dict) else 0
        return not isinstance(obs, list) and is_single(space[key], obs[key])
    return np.ndim(obs) == len(space.shape or ())  # a text has none


# ---- play --------------------------------------------------------------------------------------------------------


class Player:
    """A policy that acts for some agents of a vector environment, all of one kind."""

    def __init__(self, policy: Policy, env: VectorEnv, kind: int, places: Any = slice(None)) -> None:
        """Play agents of a kind: all, or those at these places within the kind, [M of the kind] bool."""
        self.policy = policy
        self.kind = kind
        self.places = places
        self.agents = env.kinds[kind].index[places]  # [B], numbers within M
        self.rnn_states = torch.zeros(len(self.agents), policy.state_size)

    def act(self, step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        """Write the actions for a step into those of the agents' kind; an episode begins where fresh [M] is true."""
        obs = {name: value[self.places] for name, value in step.obs[self.kind].items()}
        rows, rnn_states = self.policy.act(obs, self.rnn_states, fresh[self.agents],
                                           deterministic=self.policy.deterministic)
        active = torch.as_tensor(step.active[self.agents, None])
        self.rnn_states = torch.where(active, rnn_states, self.rnn_states)  # the others see nothing
        actions[self.kind][self.places] = rows


class Episode(NamedTuple):
    """What an episode of one environment brought its agents."""

    env: int
    returns: np.ndarray  # [A] true returns
    lengths: np.ndarray  # [A] decisions
    objectives: np.ndarray  # [A] true objectives, nan where the environment has none


def play(env: VectorEnv, players: Sequence[Player], num_episodes: int, seed: int) -> Iterator[list[Episode]]:
    """Play episodes, as evenly spread over the environments as can be; after each step yield those that have ended.

    Yields once before the first step, too. An episode has ended when its environment is reset. How many episodes each
    environment plays is fixed beforehand, so that short episodes are not counted more often than long ones.
    """
    step = env.reset(evaluation_seeds(seed, env.num_envs))
    yield []
    num_agents = len(env.agents)
    fresh = np.ones(env.num_envs * num_agents, bool)  # not acted yet in this episode
    totals = np.zeros((3, len(fresh)))  # returns, lengths, objectives so far
    of_envs = totals.reshape(3, env.num_envs, num_agents)  # the same
    left = np.bincount(np.arange(num_episodes) % env.num_envs, minlength=env.num_envs)  # to play, of each environment
    while left.any():
        actions = env.no_actions()
        for player in players:
            player.act(step, fresh, actions)
        fresh &= ~step.active
        totals[1] += step.active
        step = env.step(actions)
        totals[0] += step.rewards
        totals[2] += np.where(step.terminated | step.truncated, step.objectives, 0.0)
        ended = np.flatnonzero(step.was_reset & (left > 0))
        left[ended] -= 1
        yield [Episode(i, *of_envs[:, i].copy()) for i in ended]
        of_envs[:, step.was_reset] = 0.0
        fresh |= np.repeat(step.was_reset, num_agents)


def cast(env: VectorEnv, kinds: Sequence[int], policy: int, find: Callable[[int], Policy]) -> list[Player]:
    """Return who plays: a policy all agents of its kind, and every other kind its first policy.

    Args:
        kinds: of each policy. find: find(number) returns a policy.
    """
    numbers = [kinds.index(kind) for kind in range(len(env.kinds))]
    numbers[kinds[policy]] = policy
    return [Player(find(number), env, kind) for kind, number in enumerate(numbers)]


def evaluation_seeds(seed: int, num_envs: int) -> list[int]:
    """Return the seeds of the environments that are played, others than those of any training."""
    return [derive_seed(seed, EVALUATION, index=i) for i in range(num_envs)]


# ---- score, while others train -----------------------------------------------------------------------------------


class Evaluator:
    """Scores the newest weights on its own environments. One process; shares `SharedBuffers`."""

    SPANS = ("evaluate", "evaluate"), ("env.step", "step")  # what `tools/timeline.py` records

    @left_alone()  # in serial mode training must draw the same numbers as without
    def __init__(self, cfg: Config, buffers: SharedBuffers, devices: Sequence[torch.device], report: Report) -> None:
        """Make the environments, and every policy on its device.

        report(("evaluated", policy, {name: number})) is called after each evaluation, and before it
        report(("saved", policy, SAVE_BEST, name, seconds)) when its weights were saved as the best.
        """
        self.cfg = cfg
        self.buffers = buffers
        self.report = report
        self.env = make_vector_env(cfg, min(cfg.eval_episodes, MAX_ENVS))
        self.policies = [Policy(cfg, buffers.info, kind, device)
                         for kind, device in zip(buffers.kind_of_policy, devices, strict=True)]

    def run(self) -> None:
        """Evaluate whenever asked, until told to stop."""
        while self.buffers.evaluations.serve(self.evaluate):
            pass
        self.close()

    def turn(self) -> None:
        """Do all there is to do (serial mode)."""
        while not self.buffers.evaluations.empty():
            self.buffers.evaluations.serve(self.evaluate)

    @left_alone()
    def evaluate(self, kind: int, policy: int) -> None:
        """Score the newest weights of a policy, always on the same episodes; give up when the run is stopping.

        While it plays the learner goes on, so it is the evaluator that saves the best: the weights that have the score.
        """
        cfg, inbox, kinds = self.cfg, self.buffers.evaluations, self.buffers.kind_of_policy
        env_steps = int(self.buffers.env_steps.sum())
        seed_all(derive_seed(cfg.seed, EVALUATION, part=1))
        episodes: list[Episode] = []
        for ended in play(self.env, cast(self.env, kinds, policy, self.newest), cfg.eval_episodes, cfg.seed):
            inbox.beat(STEPS)
            if self.buffers.stopping:
                return
            episodes += ended
        inbox.beat()
        own = np.array(self.env.kind_of_agent) == kinds[policy]
        result = scores(episodes, own)
        result |= {"eval_env_steps": env_steps, "eval_sgd_steps": self.policies[policy].version}
        self.save_best(policy, result)
        self.report(("evaluated", policy, result))

    def newest(self, number: int) -> Policy:
        """Return a policy with its newest weights."""
        self.policies[number].refresh(self.buffers.policies[number].weights)
        return self.policies[number]

    def save_best(self, policy: int, result: Values) -> None:
        """Save weights as the best ones if they are; of equal ones those that have learned longer."""
        buffers = self.buffers
        score = result.get("eval_true_objective", result["eval_return"])
        sort = checkpoints.sort_of_score(is_objective="eval_true_objective" in result, is_evaluation=True)
        best = float(buffers.best_score[policy]), int(buffers.best_sort[policy])
        if not checkpoints.is_better(score, sort, *best) and (score, sort) != best:
            return
        state = buffers.origin(self.cfg, policy) | {
            "model": self.policies[policy].model.state_dict(),
            "sgd_steps": result["eval_sgd_steps"], "env_steps": result["eval_env_steps"],
            "score": score, "sort_of_score": sort,
        }
        try:
            checkpoints.save_checkpoint(state, checkpoints.policy_dir(self.cfg.run_dir, policy) / checkpoints.BEST)
        except OSError as error:
            self.report(("unsaved", policy, SAVE_BEST, error.strerror or str(error)))
        else:
            buffers.best_score[policy], buffers.best_sort[policy] = score, sort
            self.report(("saved", policy, SAVE_BEST, checkpoints.BEST, 0.0))

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def scores(episodes: Sequence[Episode], own: np.ndarray) -> Values:
    """Return the scores of agents `own` [A] bool: over the E episodes, of the means over these agents."""
    returns, lengths, objectives = np.stack([episode[1:] for episode in episodes], 1)[:, :, own]  # [E, agents] each
    found = {"eval_return": returns.mean(), "eval_return_std": returns.mean(1).std(), "eval_length": lengths.mean()}
    if not np.isnan(objectives).all():
        found["eval_true_objective"] = np.nanmean(objectives)
    return {name: float(score) for name, score in found.items()}


# ---- the command -------------------------------------------------------------------------------------------------


@exit_status
def main(argv: list[str]) -> None:
    """Play and print the score."""
    args = make_arguments().parse(argv)
    torch.set_num_threads(1)  # several would wait for each other in each small operator
    render_mode = "human" if args.render else None
    if args.record_video:  # an environment may go to another folder
        render_mode, path = "rgb_array", args.record_video.resolve()
        if path.suffix not in (".mp4", ".gif") or not path.parent.is_dir():
            raise UserError(f"--record_video={path} must be FILE.mp4 or FILE.gif in a folder that exists")
    loaded = load_policy(args, args.policy, args.checkpoint)
    seed_all(derive_seed(args.seed, EVALUATION, part=1))
    num_envs = 1 if render_mode else min(args.episodes, MAX_ENVS)
    with contextlib.closing(make_vector_env(loaded.cfg, num_envs, render_mode)) as env:
        players = cast(env, assign_kinds(loaded.cfg, env), args.policy,
                       lambda number: loaded if number == args.policy else load_policy(
                           args, number, "latest" if args.checkpoint == "latest" else "best"))
        for player in players:
            print(f"playing {player.policy.source}")
        steps = play(env, players, args.episodes, args.seed)
        if args.record_video:
            steps = film(steps, env, path, env.frames_per_sec / loaded.cfg.env_frameskip)
        episodes = [episode for ended in steps for episode in ended]
    score = scores(episodes, np.ones(len(env.agents), bool))
    print(f"{len(episodes)} episode{'s' * (len(episodes) != 1)}: return {score['eval_return']:.2f} +- "
          f"{score['eval_return_std']:.2f} (standard deviation), length {score['eval_length']:.1f} env_steps")


def make_arguments() -> OneLineParser:
    """Make the command line."""
    parser = arguments_of_a_run(__doc__)
    parser.add_argument("--checkpoint", default="best", help="best (else latest), latest, or a file [best]")
    parser.add_argument("--policy", type=int, default=0, help="which policy of a population plays [0]")
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument("--render", action="store_true", help="show the game in a window, one environment")
    pictures.add_argument("--record_video", type=Path, metavar="FILE",
                          help="record one environment's true picture as FILE.mp4 or FILE.gif")
    return parser


def arguments_of_a_run(description: str) -> OneLineParser:
    """Make the flags that say which run plays, and how."""
    parser = OneLineParser(description)
    parser.add_argument("--env", default="", help="environment id [that of the run, with --experiment]")
    parser.add_argument("--train_dir", default="train_dir", metavar="FOLDER", help="folder of all runs [train_dir]")
    parser.add_argument("--experiment", default="", help="name of the run's folder; empty: the environment id")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play; in a tournament each two [20]")
    parser.add_argument("--seed", type=int, default=1_000_000,
                        help="seed of the environments and of sampling, another than that of training [1000000]")
    parser.add_argument("--deterministic", action="store_true", help="take the most likely action, do not sample")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... [auto]")
    parser.add_argument("--trust_run", action="store_true", help="import code that the run's settings name")
    return parser


def load_policy(args: argparse.Namespace, policy: int, checkpoint: str) -> Policy:
    """Load a policy of the run. Raises `UserError` when there is none."""
    if args.episodes < 1 or args.seed < 0:
        raise UserError("--episodes must be at least 1, and --seed not negative")
    run_dir = checkpoints.run_dir_of(args.train_dir, args.experiment, args.env)
    loaded = load(run_dir, env=args.env, policy=policy, checkpoint=checkpoint, device=args.device,
                  trust_run=args.trust_run)
    loaded.deterministic = args.deterministic
    return loaded


# ---- film --------------------------------------------------------------------------------------------------------

MP4 = {"quality": 7, "macro_block_size": 2}  # H.264, of an even number of rows and columns
GIF = {"codec": "gif", "pix_fmt_out": "pal8", "macro_block_size": 1, "output_params": [  # with a palette a frame
    "-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"]}


def film(steps: Iterator[list[Episode]], env: VectorEnv, path: Path, frames_per_sec: float) -> Iterator[list[Episode]]:
    """Film what `play` plays: pass its steps on, and write a picture for each."""
    writer = None
    for ended in steps:
        picture = np.ascontiguousarray(env.render())
        if writer is None:  # the first picture has the size
            options = GIF if path.suffix == ".gif" else MP4
            writer = write_frames(path, picture.shape[1::-1], fps=frames_per_sec, **options)
            next(writer)
        writer.send(picture)
        yield ended
    writer.close()
    print(f"recorded {path}")


if __name__ == "__main__":
    run_command(main)
