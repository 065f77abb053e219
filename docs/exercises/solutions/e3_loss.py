"""Exercise 3, solved: APPO that holds the policies of neighboring steps together."""

from dataclasses import dataclass

from torch import Tensor, nn

from algorithm import Data, Loss, MaskedMean
from appo import AsyncPPO, Settings
from config import NOT_NEGATIVE, option


@dataclass(frozen=True)
class SmoothSettings(Settings):
    """The settings of APPO, and one more."""

    smooth_coeff: float = option(0.1, "smooth", "weight of KL(pi_t || pi_t+1) in the loss", bounds=NOT_NEGATIVE)


class SmoothPPO(AsyncPPO):
    """APPO with one more term."""

    Settings = SmoothSettings

    def loss(self, model: nn.Module, outputs: tuple[Tensor, ...], data: Data, mean: MaskedMean) -> Loss:
        loss = super().loss(model, outputs, data, mean)
        now, following = model.distribution(outputs[0][:-1]), model.distribution(outputs[0][1:])
        is_over = data["terminated"] | data["truncated"]
        change = mean(now.kl(following).masked_fill(is_over, 0.0))
        total = loss.total + self.cfg.smooth_coeff * change
        return Loss(total, loss.statistics | {"smoothness": change})
