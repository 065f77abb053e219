"""A3C: several learners that change the same weights without a lock, with n-step returns and no correction.

    R_t     = r_t + gamma_t * R_{t+1},  backwards from R_T = V(x_T); across a time limit R_{t+1} is V(x_{t+1})
    A_t     = R_t - V(x_t)                                              (gamma_t = 0 after a termination)
    loss    = -mean(log pi(a_t|x_t) * A_t) + value_loss_coeff * mean((R_t - V(x_t))^2)
              - exploration_loss_coeff * mean(H(pi(.|x_t)))

The loss is that of `impala.py`. Each learner (`--num_learners`) copies the shared weights, computes a gradient from
trajectories of its own, and applies its step to the shared weights (`runtime/several.py`). The mean squares of RMSProp
are shared too.

Source: arXiv 1602.01783, algorithm S3. Departures: those of `impala.py`; and in the paper each thread acts and learns
in turn, while here the sampler acts all the time. So the data is some SGD steps old, and nothing corrects that: keep
datasets small.
"""

from torch import nn

from algorithm import Data, Outputs
from algorithms.impala import PROFILES as IMPALA
from algorithms.impala import PolicyGradient, PolicyGradientSettings
from config import Values, settings
from vtrace import gae

# measured for Atari and classic control without a memory (docs/tried.md), for the others not
SMALLER_DATASETS: dict[str, Values] = {
    "classic_control": {"rollout": 16, "batch_size": 128, "learning_rate": 1e-3},
    "mujoco": {"batch_size": 512, "exploration_loss_coeff": 0.0},
    "vizdoom": {"batch_size": 512},
    "pettingzoo": {"batch_size": 512},
    "other": {"rollout": 64, "batch_size": 512},
}
PROFILES = {family: profile | {"num_learners": 2} for family, profile in (IMPALA | SMALLER_DATASETS).items()}


@settings(rollout=32, batch_size=256, learning_rate=7e-4)
class Settings(PolicyGradientSettings):
    """The settings of A3C."""


class NStepGradient(PolicyGradient):
    """The policy gradient with n-step returns."""

    Settings = Settings
    profiles = PROFILES

    def targets(self, model: nn.Module, outputs: Outputs, data: Data) -> Data:
        values = model.returns.denormalize(outputs[1])
        returns, advantages = gae(data["rewards"], values, data["terminated"], data["truncated"], self.cfg.gamma, 1.0)
        return {"targets": returns, "advantages": advantages}
