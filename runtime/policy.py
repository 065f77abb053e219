"""A policy that acts on observations as its environment gives them: `load(run).predict(obs)`.

Nothing here starts a process. Used by `trainer.py` (the newest parameters of a system), `evaluate.py` and
`tools/export.py`.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from torch import Tensor, nn

from algorithms import algorithm_class
from config import Config, make_config, without_gone
from envs.families import make_env, make_vector_env
from envs.flat_spaces import ACTION_MASK, AgentKind
from envs.vector_env import EnvInfo, describe
from pbt import assign_kinds
from runtime.by_name import check_trusted, recall, reference
from runtime.checkpoint import find_checkpoint, holds_run, load_checkpoint, load_newest, load_weights, policy_dir
from runtime.files import load_saved, run_dir_of
from runtime.generators import OwnNumbers, fork_rng, left_alone
from runtime.machine import body_dtype, choose_device
from runtime.records import read_summary
from runtime.seeding import EVALUATION, derive_seed
from runtime.user_error import UserError
from shared_buffers import SharedWeights


class Policy:
    """A trained policy, for the agents of one kind, in this process."""

    def __init__(self, cfg: Config, kind: AgentKind, model: nn.Module, device: torch.device) -> None:
        """Act with a copy of a model's weights."""
        self.cfg = cfg
        self.kind = kind
        self.device = device
        self.version = -1
        self.source, self.number = "", 0  # where the weights come from, and which of a population these are
        self.algorithm = algorithm_class(cfg.algo)(cfg)
        self.numbers = OwnNumbers(derive_seed(cfg.seed, EVALUATION, part=2), device)
        with fork_rng([device]):  # what trains in this process must draw the same numbers as without
            self.model = self.algorithm.make_model(kind.obs_space, kind.action_space)
        self.model.load_state_dict(model.state_dict())
        self.model = self.model.to(device).body_to(body_dtype(cfg, device, kind.obs_space)).eval()

    @classmethod
    def of_info(cls, cfg: Config, info: EnvInfo, kind_number: int, model: nn.Module, device: torch.device) -> "Policy":
        """Make it for a kind of agents of an environment that was described."""
        kind = AgentKind(cfg.env, info.obs_spaces[kind_number], info.kinds[kind_number][1], np.arange(1),
                         squash_actions=cfg.squash_actions)
        if ACTION_MASK in info.kinds[kind_number][0] and not kind.has_mask:
            kind.add_mask(in_info=True)
        kind.obs_space = info.kinds[kind_number][0]  # in the order of the training
        return cls(cfg, kind, model, device)

    def refresh(self, weights: SharedWeights) -> None:
        """Take over newer weights, if there are some."""
        if weights.version != self.version:
            self.version = weights.refresh(self.model)

    def make_env(self, render_mode: str | None = None) -> Any:
        """Make one environment as the policy knows it, with the preprocessing of its family."""
        return make_env(self.cfg, render_mode)

    def predict(self, obs: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False,
                action_mask: Any = None) -> tuple[Any, Tensor]:
        """Choose actions.

        Args:
            obs: one observation, or a batch of B: a list of observations, or arrays with one axis more in front. An
                action mask in it counts.
            state: what the last call returned, for a policy with a memory; None: the beginning of an episode.
            episode_start: a bool, or [B]: where it is true the memory is empty.
            deterministic: take the most likely action instead of drawing one.
            action_mask: of an environment that gives it in its infos; one, or a list of B.

        Returns the action in the form of the environment, or a batch of them, and the next state, [state_size] or
        [B, state_size] float32. Raises `UserError` for an observation that is not of the environment's space.
        """
        is_single, leaves = self._leaves(obs)
        count = len(next(iter(leaves.values())))
        if self.kind.has_mask:
            given = action_mask if self.kind.mask_in_info else list(leaves[ACTION_MASK])
            given = [given] if is_single and self.kind.mask_in_info else [None] * count if given is None else given
            leaves[ACTION_MASK] = self.kind.join_masks(given)
        elif action_mask is not None:
            raise UserError(f"action_mask: {self.kind.name} has none in its infos")
        if fault := self.kind.find_fault(leaves):
            raise UserError(f"{self.kind.name}: {fault[1]}")
        actions, states = self._act(leaves, count, state, episode_start, deterministic)
        if is_single:
            return next(iter(iterate(batch_space(self.kind.action_space, 1), actions))), states[0]
        return actions, states

    @torch.inference_mode()
    def _act(self, leaves: Mapping[str, np.ndarray], count: int, state: Any, episode_start: Any, deterministic: bool,
             ) -> tuple[Any, Tensor]:
        size = self.model.state_size
        states, new = torch.zeros(count, size), np.zeros(count, bool)
        try:
            if state is not None:
                given = torch.stack(list(state)) if isinstance(state, list | tuple) else torch.as_tensor(state)
                if given.shape not in ((count, size), (size,)[: count == 1]):
                    raise ValueError(f"its shape is {tuple(given.shape)}, not {(count, size)}")
                states = given.float().reshape(count, size)
            if episode_start is not None:
                new = np.broadcast_to(np.asarray(episode_start, bool), count)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"state or episode_start does not belong to {count} observations: {error}") from error
        tensors = {name: torch.as_tensor(value).to(self.device) for name, value in leaves.items()}
        with self.numbers.drawn():
            columns, states = self.algorithm.act(
                self.model, tensors, states.reshape(count, size).to(self.device),
                torch.tensor(new).to(self.device), deterministic=deterministic)
        return self.kind.actions(columns["actions"].cpu().numpy()), states.cpu()

    def _leaves(self, obs: Any) -> tuple[bool, dict[str, np.ndarray]]:
        """Tell one observation from a batch; turn either into named arrays of a batch."""
        space = self.kind.space
        try:
            is_single = is_one(space, obs)
            return is_single, self.kind.flatten(as_batch(space, [obs] if is_single else obs))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UserError(f"the observation is not one, nor a batch, of {space}: {error}") from error


def is_one(space: spaces.Space, obs: Any) -> bool:
    """Tell one observation of a space from a batch."""
    if isinstance(space, spaces.Dict) and isinstance(obs, Mapping):
        name = next(iter(space.spaces))
        return name not in obs or is_one(space[name], obs[name])
    if isinstance(space, spaces.Tuple) and isinstance(obs, tuple) and obs:
        return is_one(space[0], obs[0])
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return False
    if isinstance(space, spaces.Text):
        return isinstance(obs, str)
    return np.ndim(obs) == len(space.shape)


def as_batch(space: spaces.Space, obs: Any) -> Any:
    """Return a batch, a list of observations or already joined, with arrays in it. Raises `ValueError` for others."""
    if isinstance(space, spaces.Dict):
        parts = {name: [each[name] for each in obs] if isinstance(obs, list) else obs[name] for name in space.spaces}
        return {name: as_batch(part, parts[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = [list(part) for part in zip(*obs, strict=True)] if isinstance(obs, list) else obs
        return tuple(as_batch(part, value) for part, value in zip(space.spaces, parts, strict=True))
    if isinstance(space, spaces.Text):
        return obs
    array = np.asarray(obs)
    if array.shape[1:] != space.shape or array.dtype.kind not in "fiub":
        raise ValueError(f"a part is {array.dtype} of shape {array.shape[1:]}, not numbers of shape {space.shape}")
    with np.errstate(all="ignore"):
        converted = array.astype(space.dtype)
    if space.dtype.kind in "iu" and not np.array_equal(converted, array):
        raise ValueError(f"a part holds numbers that are none of {space.dtype}")
    return converted


# ---- from a run ----------------------------------------------------------------------------------------------------


def find_policy(cfg: Config, which: str, policy: int) -> Path:
    """Find a policy's checkpoint: best (else latest), latest, or a file; tell of newer ones that are damaged.

    Raises `UserError` when there is none.
    """
    if which not in ("best", "latest"):
        if not Path(which).is_file():
            raise UserError(f"--checkpoint={which} is neither best, latest, random nor a file")
        return Path(which)
    if which == "best" and (path := find_checkpoint(cfg.run_dir, "best", policy)):
        return path
    path, _, damaged = load_newest(cfg.run_dir, policy)
    if path is None:
        raise UserError(f"{policy_dir(cfg.run_dir, policy)} holds no checkpoint; train on, or choose "
                        "another --policy")
    for other in damaged:
        print(f"checkpoint {other} is damaged, the one before plays", file=sys.stderr)
    return path


def best_policy(cfg: Config, which: str) -> int:
    """Choose the policy with the best score: of best.pt if that plays, else the mean true objective or return."""
    summary = read_summary(cfg.run_dir)
    names = ["best_score", "true_objective", "mean_return"]
    for name in names if which == "best" else names[1:]:
        with contextlib.suppress(TypeError, ValueError):  # somebody has written something else there
            scores = np.array([-np.inf if score is None else score for score in summary.get(name, [])], np.float64)
            if scores.shape == (cfg.num_policies,) and scores.max() > -np.inf:
                return int(scores.argmax())
    return 0


@left_alone()
def load(path: str | os.PathLike, *, env: Any = None, policy: int | None = None, checkpoint: str = "",
         device: str = "cpu", precision: str | None = None, trust_run: bool = False) -> Policy:
    """Load a trained policy, without starting a process. The environment is made once, to learn its spaces.

    Args:
        path: a run's folder, or a checkpoint file.
        env: the environment, where the run's is code of your own (an id, a function or class).
        policy: which of a population; None: of a run the one with the best score.
        checkpoint: of a run: best (else latest), latest, or a file; empty: best, after self-play latest.
        device, precision: where and how it computes; None: as in the run.
        trust_run: import the code that the settings of the run name (SECURITY.md).

    Raises `UserError` when there is none, or when its settings name code that was not asked for.
    """
    path = Path(path).resolve()
    if path.is_dir() and not holds_run(path):
        raise UserError(f"{path} holds no checkpoint; name the folder of a run, or a checkpoint file")
    state = None if path.is_dir() else load_checkpoint(path)
    saved = dict(state["config"]) if state and "config" in state else load_saved(
        (path if state is None else path.parents[2]) / "config.json")
    trained_in = run_dir_of(*(saved.get(name, "") for name in ("train_dir", "experiment", "env")))
    own = recall(trained_in, saved) | ({} if env is None else {"env": reference(env)})
    check_trusted(saved, own | {"trust_run": trust_run}, path)
    saved |= own
    if state is None:  # it may have been moved
        saved |= {"train_dir": str(path.parent), "experiment": path.name}
    settings = algorithm_class(saved.get("algo", Config.algo)).Settings
    cfg = make_config(settings, without_gone(saved, settings), {"device": device},
                      {"precision": precision} if precision else {})
    if state is None:
        checkpoint = checkpoint or ("latest" if cfg.self_play_past_fraction > 0 else "best")
        policy = best_policy(cfg, checkpoint) if policy is None else policy
    policy = check_policy(policy or 0, cfg)
    if state is None:
        path = find_policy(cfg, checkpoint, policy)
        state = load_checkpoint(path)
    with contextlib.closing(make_vector_env(cfg, 1)) as made:
        made.reset([derive_seed(cfg.seed, EVALUATION, part=3)])  # now an action mask shows
        info = describe(made)
    kind = assign_kinds(cfg, info)[policy]
    info.kinds[kind] = info.as_trained(kind, state, path)
    model = algorithm_class(cfg.algo)(cfg).make_model(*info.kinds[kind])
    load_weights(model, state, path, cfg.algo)
    loaded = Policy.of_info(cfg, info, kind, model, choose_device(cfg.device, policy))
    score = f", score {state['score']:.2f}" if "score" in state else ""
    loaded.source = f"{path} ({state['env_steps']:,} env_steps{score})"
    loaded.number = policy
    return loaded


def check_policy(policy: Any, cfg: Config) -> int:
    """Return the number of a policy. Raises `UserError` when there is none of it."""
    if policy not in range(cfg.num_policies):
        raise UserError(f"there is no policy {policy!r}; there are 0 to {cfg.num_policies - 1}")
    return policy
