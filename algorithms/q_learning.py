"""What Ape-X and PQL have in common: the settings of a replay, networks without a memory, target networks.

Read next: `apex.py`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from algorithm import Algorithm, Data
from algorithms.replay_feed import ReplayFeed
from config import FRACTION, POSITIVE, Config, option
from runtime.user_error import UserError
from shared_buffers import SharedBuffers, Spec

# settings that a replay makes no use of, and what they must be
UNUSED = {"num_epochs": 1, "num_learners": 1, "async_rl": True, "use_rnn": False, "model": "", "recurrence": 0,
          "normalize_returns": False, "max_policy_lag": Config.max_policy_lag}


@dataclass(frozen=True)
class ReplaySettings(Config):
    """The settings of a replay beside those of every algorithm."""

    replay_size: int = option(200_000, "replay", "transitions that are kept", bounds=POSITIVE)
    replay_warmup: int = option(10_000, "replay", "transitions before the first SGD step", bounds=POSITIVE)
    replay_ratio: float = option(8.0, "replay", "transitions trained on for each one sampled; divided by batch_size it "
                                 "is the SGD steps", bounds=POSITIVE)
    replay_alpha: float = option(0.6, "replay", "exponent of the priorities; 0: all alike", bounds=FRACTION)
    replay_beta: float = option(0.4, "replay", "exponent of the importance weights", bounds=FRACTION)
    n_step: int = option(3, "replay", "rewards in a return before a value stands for the rest", bounds=POSITIVE)
    normalize_returns: bool = option(False, "learner", "not used: values are learned in units of the rewards")
    save_replay: bool = option(False, "replay", "save the replay in periodic checkpoints and resume with it")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in UNUSED.items():
            if getattr(self, name) != needed:
                raise UserError(f"--algo={self.algo} learns from a replay and has no use for --{name}="
                                f"{getattr(self, name)}; leave it at {needed!r}")
        if self.lr_schedule == "kl_adaptive":
            raise UserError(f"--lr_schedule=kl_adaptive needs a distribution, which --algo={self.algo} has not; use "
                            "constant or linear_decay")
        if self.n_step > self.rollout:
            raise UserError(f"--n_step={self.n_step} is longer than a trajectory, where returns end; use at most "
                            f"--n_step={self.rollout}, or a longer --rollout")
        if self.replay_size < self.replay_warmup:
            raise UserError(f"--replay_warmup={self.replay_warmup} is larger than --replay_size={self.replay_size}")
        if self.samples_per_dataset > self.replay_warmup:
            raise UserError(f"--batch_size x --num_batches_per_epoch = {self.samples_per_dataset} is more than the "
                            f"--replay_warmup={self.replay_warmup} transitions with which training begins; use "
                            f"--replay_warmup={self.samples_per_dataset}")

    @property
    def samples_per_dataset(self) -> int:
        return self.batch_size * self.num_batches_per_epoch


class ReplayAlgorithm(Algorithm):
    """What Ape-X and PQL have in common."""

    Settings = ReplaySettings
    datasets_at_once = 8
    COLUMNS = ("actions",)  # of a trajectory, which the replay keeps beside the observations

    def make_model(self, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> nn.Module:
        model = self.make_network(obs_space, action_space)
        if model.state_size:
            raise UserError(f"--algo={self.cfg.algo} learns from single transitions; leave out --core, a memory")
        return model

    def make_network(self, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> nn.Module:
        """Make the networks, `model.ActorCritic` or a subclass. Raises `UserError` for spaces that do not fit."""
        raise NotImplementedError

    def make_feed(self, buffers: SharedBuffers, policy: int, learner: int, *, pinned: bool,
                  deliver: Callable[[Any], None] | None) -> ReplayFeed:
        return ReplayFeed(self, buffers, policy, learner, deliver, pinned=pinned)

    def describe(self, trajectory: Data) -> Data:
        """Return first "priorities" [T] float32 for the transitions of a trajectory (nan: the largest so far).

        And other columns, which the replay keeps for the records.
        """
        return {"priorities": torch.full_like(trajectory["rewards"], torch.nan)}

    def row_specs(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        """List the columns of a replay, from those of a trajectory."""
        kept = {name: Spec(spec.shape[1:], spec.dtype) for name, spec in specs.items()
                if name.startswith("obs/") or name in self.COLUMNS}
        return kept | {"rewards": Spec((), torch.float32), "discounts": Spec((), torch.float32),
                       "steps": Spec((), torch.int64), "policy_lag": Spec((), torch.int64)}


def following(data: Data) -> Data:
    """Return what `Learner.ask` needs to evaluate the observations that follow, [B, 1, ...]."""
    rows = {name: data[name] for name in ("rnn_states", "new_episode")}
    return rows | {name.removeprefix("following_"): data[name] for name in data if name.startswith("following_")}


def frozen_copy(module: nn.Module) -> nn.Module:
    """Copy a module for targets: its parameters are buffers there, which no optimizer changes."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach().clone())
    return twin


@torch.no_grad()
def follow(target: nn.Module, module: nn.Module, tau: float) -> None:
    """Move the parameters of a frozen copy by tau of the way to those of the module it was made of."""
    buffers = dict(target.named_buffers())
    names, parameters = zip(*module.named_parameters(), strict=True)
    torch._foreach_lerp_([buffers[name] for name in names], list(parameters), tau)
