"""A term of your own in the loss: `python -m examples.custom_loss` keeps the policy head small on CartPole."""

from dataclasses import dataclass

from algorithm import Loss
from appo import AsyncPPO, Settings
from config import NOT_NEGATIVE, option
from trainer import Trainer


@dataclass(frozen=True)
class CalmSettings(Settings):
    """The settings of APPO, and one more."""

    calm_coeff: float = option(1e-3, "calm", "weight of the mean square of the action parameters", bounds=NOT_NEGATIVE)


class CalmPPO(AsyncPPO):
    """APPO with one more term."""

    Settings = CalmSettings

    def loss(self, model, outputs, data, mean):
        loss = super().loss(model, outputs, data, mean)
        size = mean(outputs[0][:-1].square().mean(-1))
        total = loss.total + self.cfg.calm_coeff * size
        return Loss(total, loss.statistics | {"parameter_size": size})


if __name__ == "__main__":
    with Trainer("CartPole-v1", algo=CalmPPO, experiment="custom_loss") as system:
        system.train()
