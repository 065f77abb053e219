"""What Ape-X and PQL have in common: the settings of a replay, networks without a memory, target networks.

Read next: `apex.py`.
"""

import copy
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from algorithm import Algorithm, Data, Outputs
from algorithms.replay import ReplayFeed
from config import FRACTION, POSITIVE, Config, Values, option, settings
from runtime.utils import UserError
from shared_buffers import SharedBuffers, Spec


@settings(normalize_returns=False)
class ReplaySettings(Config):
    """The settings of a replay beside those of every algorithm."""

    # settings that a replay makes no use of, and what they must be
    unused: ClassVar[Values] = {
        "num_epochs": 1, "num_learners": 1, "async_rl": True, "use_rnn": False, "core": "", "model": "",
        "recurrence": 0, "normalize_returns": False, "max_policy_lag": Config.max_policy_lag}

    replay_size: int = option(200_000, "replay", "transitions that are kept", bounds=POSITIVE)
    replay_warmup: int = option(10_000, "replay", "transitions before the first SGD step", bounds=POSITIVE)
    replay_ratio: float = option(8.0, "replay", "transitions trained on for each one sampled; divided by batch_size it "
                                 "is the SGD steps", bounds=POSITIVE)
    replay_alpha: float = option(0.6, "replay", "exponent of the priorities; 0: all alike", bounds=FRACTION)
    replay_beta: float = option(0.4, "replay", "exponent of the importance weights", bounds=FRACTION)
    n_step: int = option(3, "replay", "rewards in a return before a value stands for the rest", bounds=POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_schedule == "kl_adaptive":
            raise UserError(f"--algo={self.algo} has no KL that --lr_schedule=kl_adaptive could follow; use constant")
        for name, needed in self.unused.items():
            if getattr(self, name) != needed:
                raise UserError(f"--algo={self.algo} has no use for --{name}={getattr(self, name)}; leave it at "
                                f"{needed!r}")

    @property
    def samples_per_dataset(self) -> int:
        return self.batch_size * self.num_batches_per_epoch


class ReplayAlgorithm(Algorithm):
    """What Ape-X and PQL have in common."""

    datasets_at_once = 8
    feeds: ClassVar[dict[str, type[ReplayFeed]]] = {}  # of roles that have another one
    # like `evaluate`: the values of the observations that follow, for targets that are computed once a dataset
    evaluate_following: Callable[..., Outputs] | None = None

    def columns(self, action_space: spaces.Space) -> dict[str, Spec]:
        return {}

    def make_feed(self, buffers: SharedBuffers, policy: int, learner: int) -> ReplayFeed:
        return self.feeds.get(self.role, ReplayFeed)(self, buffers, policy, learner)

    def prepare(self, model: nn.Module, data: Data, ask: Callable[..., Outputs]) -> Data:
        if self.evaluate_following is None or "rewards" not in data:
            return {}
        rows = {name.removeprefix("following_"): data[name] for name in data if name.startswith("following_")}
        rows |= {name: data[name] for name in ("rnn_states", "new_episode")}
        return {"targets": data["rewards"] + data["discounts"] * ask(rows, self.evaluate_following)[0]}

    def first_priorities(self, trajectories: Data) -> Tensor:
        """Return the priorities [B, T] float32 with which transitions begin; nan: the largest so far."""
        return torch.full_like(trajectories["rewards"], torch.nan)

    def row_specs(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        """List the columns of a replay, from those of a trajectory."""
        kept = {name: Spec(spec.shape[1:], spec.dtype) for name, spec in specs.items()
                if name.startswith("obs/") or name == "actions"}
        return kept | {
            "rewards": Spec((), torch.float32),
            "discounts": Spec((), torch.float32),
            "steps": Spec((), torch.int64),
            "policy_lag": Spec((), torch.int64),
        }


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
