"""Exercise 8: advantage-weighted regression (Peng et al. 2019, arXiv 1910.00177), an algorithm in one file.

As it stands it imitates all of its actions alike, so it learns nothing, and its values estimate themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from algorithm import Algorithm, Data, Loss, MaskedMean
from config import FRACTION, POSITIVE, Config, option


@dataclass(frozen=True)
class Settings(Config):
    """The settings of AWR beside those of every algorithm."""

    awr_lambda: float = option(0.95, "awr", "lambda of the TD(lambda) returns", bounds=FRACTION)
    temperature: float = option(0.5, "awr", "the smaller, the more the best actions count", bounds=POSITIVE)
    largest_weight: float = option(20.0, "awr", "no action counts more", bounds=POSITIVE)


PROFILES = {"classic_control": {"rollout": 32, "batch_size": 512, "num_batches_per_epoch": 2, "num_epochs": 4,
                                "learning_rate": 1e-3}}


class AWR(Algorithm):
    """Imitates its own actions, the better ones more."""

    Settings = Settings
    profiles: Mapping[str, Mapping[str, Any]] = PROFILES

    def targets(self, model: nn.Module, outputs: tuple[Tensor, ...], data: Data) -> Data:
        values = model.returns.denormalize(outputs[1])  # [T+1, B], in units of the rewards
        return {"targets": values[:-1], "advantages": torch.zeros_like(values[:-1])}

    def loss(self, model: nn.Module, outputs: tuple[Tensor, ...], data: Data, mean: MaskedMean) -> Loss:
        policy, values = model.distribution(outputs[0][:-1]), outputs[1][:-1]
        policy_loss = -mean(policy.log_prob(data["actions"]))
        value_loss = mean((values - model.returns.normalize_targets(data["targets"])).square())
        total = policy_loss + 0.5 * value_loss
        return Loss(total, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": mean(policy.entropy())})
