"""IMPALA: the policy gradient with V-trace, one pass over each dataset.

    rho_t   = min(rho_bar, pi/mu)        c_t = min(c_bar, pi/mu)        (lambda = 1)
    vs      = the V-trace targets (`vtrace.py`)
    A_t     = rho_t * (r_t + gamma_t * vs_{t+1} - V(x_t))
    loss    = -mean(log pi(a_t|x_t) * A_t) + value_loss_coeff * mean((vs_t - V(x_t))^2)
              - exploration_loss_coeff * mean(H(pi(.|x_t)))

`appo.py` clips a ratio; here rho weights the advantage. That corrects the gradient for the policy lag, but nothing
bounds how far the policy moves. gamma_t is 0 after a termination; across a time limit, and at the end of a trajectory,
V(x_{t+1}) stands for vs_{t+1}.

Source: arXiv 1802.01561, sections 4.1 and 4.2. Departures: means instead of sums, so that no coefficient depends on the
size of a batch. So the limit of the gradient's norm is 1, and the epsilon of RMSProp 2e-5 (with 1e-3 Pong was at 2.7
when with 2e-5 it was learned). The learning rate is constant unless --lr_schedule says otherwise. With
--normalize_returns values and advantages are in units of the returns.
"""

from collections.abc import Iterable

import torch
from torch import nn

from algorithm import Algorithm, Data, Loss, MaskedMean, Outputs, describe, moments_of
from config import NOT_NEGATIVE, POSITIVE, Config, Values, option, settings
from vtrace import vtrace


@settings(max_grad_norm=1.0)
class PolicyGradientSettings(Config):
    """The settings of a policy gradient beside those of every algorithm."""

    value_loss_coeff: float = option(0.5, "policy gradient", "weight of the value loss", bounds=NOT_NEGATIVE,
                                     tune=(1e-4, 100.0))
    exploration_loss_coeff: float = option(0.01, "policy gradient", "weight of the entropy", bounds=NOT_NEGATIVE,
                                           tune=(1e-8, 1.0))
    optimizer: str = option("rmsprop", "policy gradient", "what moves the weights", ("rmsprop", "adam"))


@settings(rollout=64, batch_size=512, learning_rate=1e-3)
class Settings(PolicyGradientSettings):
    """The settings of IMPALA."""

    vtrace_rho: float = option(1.0, "impala", "rho_bar, the truncation of the weights of TD errors and advantages",
                               bounds=POSITIVE)
    vtrace_c: float = option(1.0, "impala", "c_bar, the truncation of the V-trace traces", bounds=POSITIVE)


# measured for Atari and classic control without a memory (docs/tried.md), for the others not
PROFILES: dict[str, Values] = {
    "atari": {"rollout": 16, "normalize_returns": False},
    "classic_control": {"rollout": 32, "batch_size": 256, "learning_rate": 2e-3},
    "box2d": {"gamma": 0.995},
    "mujoco": {"batch_size": 1024, "exploration_loss_coeff": 0.0},
    "minigrid": {"max_grad_norm": 0.5},
    "vizdoom": {"rollout": 32, "batch_size": 1024},
    "pettingzoo": {"rollout": 32, "batch_size": 1024},
}


class PolicyGradient(Algorithm):
    """The loss and the optimizer of IMPALA and A3C, which differ in `targets`."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        cfg = self.cfg
        if cfg.optimizer == "adam":
            return super().make_optimizer(parameters)
        parameters = list(parameters)
        is_on_gpu = parameters[0].device.type != "cpu"  # then its counter and its rate are there too
        return torch.optim.RMSprop(parameters, cfg.learning_rate, alpha=0.99, eps=2e-5, capturable=is_on_gpu)

    def loss(self, model: nn.Module, outputs: Outputs, data: Data, mean: MaskedMean) -> Loss:
        cfg = self.cfg
        policy = model.distribution(outputs[0][:-1])
        values = outputs[1][:-1]
        returns = model.returns
        advantages, targets = mean.masked(data["advantages"]), mean.masked(data["targets"])  # without nan
        moments = moments_of(mean, advantages, targets, returns.denormalize(values.detach()))
        advantages = advantages / returns.deviation
        targets = returns.normalize_targets(targets)

        policy_loss = -mean(policy.log_prob(data["actions"]) * advantages)
        value_loss = mean((values - targets).square())
        entropy = mean(policy.entropy())
        total = policy_loss + cfg.value_loss_coeff * value_loss - cfg.exploration_loss_coeff * entropy

        with torch.no_grad():
            kl = mean(model.distribution(data["action_parameters"]).kl(policy))
        return Loss(total, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl": kl,
                            **describe(moments)})


class VTraceGradient(PolicyGradient):
    """The policy gradient with V-trace."""

    Settings = Settings
    profiles = PROFILES

    def targets(self, model: nn.Module, outputs: Outputs, data: Data) -> Data:
        cfg, (parameters, values) = self.cfg, outputs
        log_ratios = model.distribution(parameters[:-1]).log_prob(data["actions"]) - data["log_probs"]
        log_ratios = log_ratios.clamp(-20, 20)
        values = model.returns.denormalize(values)
        targets, advantages = vtrace(log_ratios, data["rewards"], values, data["terminated"], data["truncated"],
                                     cfg.gamma, 1.0, cfg.vtrace_rho, cfg.vtrace_c)
        return {"targets": targets, "advantages": log_ratios.exp().clamp(max=cfg.vtrace_rho) * advantages}
