"""An algorithm of your own, REINFORCE with a baseline: `python -m examples.custom_algorithm` learns CartPole.

Acting, trajectories, several processes and records are those of every algorithm; only the targets and the loss are
here. A return is cut at the end of a trajectory, where the value of the next observation stands for the rest. The same
from the command line: `python train.py --env CartPole-v1 --algo examples.custom_algorithm:Reinforce`.
"""

from dataclasses import dataclass

from algorithm import Algorithm, Loss
from config import NOT_NEGATIVE, Config, option
from trainer import Trainer
from vtrace import gae


@dataclass(frozen=True)
class Settings(Config):
    """The settings of REINFORCE beside those of every algorithm."""

    baseline_coeff: float = option(0.5, "reinforce", "weight of the baseline's loss", bounds=NOT_NEGATIVE)


PROFILES = {"classic_control": {"learning_rate": 2e-3, "lr_schedule": "linear_decay", "rollout": 64,
                                "batch_size": 1024, "max_grad_norm": 1.0}}


class Reinforce(Algorithm):
    """Policy gradient with the return of the rest of the trajectory (Williams, 1992)."""

    Settings = Settings
    profiles = PROFILES

    def targets(self, model, outputs, data):
        _, values = outputs
        returns, advantages = gae(data["rewards"], model.returns.denormalize(values), data["terminated"],
                                  data["truncated"], self.cfg.gamma, lambda_=1.0)
        return {"targets": returns, "advantages": advantages}

    def loss(self, model, outputs, data, mean):
        parameters, values = outputs
        policy = model.distribution(parameters[:-1])
        advantages = data["advantages"] / mean.std(data["advantages"]).clamp(min=1e-6)
        policy_loss = -mean(policy.log_prob(data["actions"]) * advantages)
        baseline_loss = mean((values[:-1] - model.returns.normalize(data["targets"])).square())
        total = policy_loss + self.cfg.baseline_coeff * baseline_loss
        return Loss(total, {"policy_loss": policy_loss, "baseline_loss": baseline_loss,
                            "entropy": mean(policy.entropy())})


if __name__ == "__main__":
    with Trainer("CartPole-v1", algo=Reinforce, experiment="reinforce") as system:
        system.train()
