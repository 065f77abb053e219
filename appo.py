"""APPO, asynchronous PPO: the clipped policy loss of PPO on V-trace targets (Sample Factory, arXiv 2006.11751, 3.4).

This file is the whole algorithm: its settings, what they are for each family of environments, its targets and its
loss. V-trace corrects the value targets for the policy lag, the clip bounds how far one dataset moves the policy; each
works without the other. How actions are drawn is the default of `algorithm.py`; the rest is the pipeline.

Read next: `vtrace.py`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from algorithm import Algorithm, Data, Loss, MaskedMean, Outputs, describe, moments_of
from config import FRACTION, NOT_NEGATIVE, POSITIVE, Config, Values, option, settings
from vtrace import gae, vtrace

ADVANTAGE_FLOOR = 0.001  # the least deviation of advantages, in units of the value targets


@settings(rollout=64, batch_size=512, num_batches_per_epoch=4, num_epochs=4, max_grad_norm=1.0, adam_eps=1e-5,
          learning_rate=1e-3, lr_schedule="kl_adaptive", lr_schedule_kl_threshold=0.015, lr_adaptive_max=2e-3)
class Settings(Config):
    """The settings of APPO beside those of every algorithm."""

    gae_lambda: float = option(0.95, "appo", "lambda of the V-trace and GAE targets", bounds=FRACTION)
    with_vtrace: bool = option(True, "appo", "correct value targets for the policy lag; False: plain GAE")
    vtrace_rho: float = option(1.0, "appo", "rho_bar, the truncation of the weights of the V-trace TD errors",
                               bounds=POSITIVE)
    vtrace_c: float = option(1.0, "appo", "c_bar, the truncation of the V-trace traces", bounds=POSITIVE)
    ppo_clip_ratio: float = option(0.2, "appo", "clip pi/mu to [1/(1+eps), 1+eps] in the policy loss; 0: off",
                                   bounds=NOT_NEGATIVE, tune=(1e-3, 1.0))
    ppo_clip_value: float = option(0.0, "appo", "largest change of a value from the one predicted when acting that "
                                   "still gets a gradient, in units of the value head; 0: off", bounds=NOT_NEGATIVE,
                                   tune=(1e-3, 1e3))
    value_loss_coeff: float = option(0.5, "appo", "weight of the value loss", bounds=NOT_NEGATIVE, tune=(1e-4, 100.0))
    exploration_loss: str = option("entropy", "appo", "keep the policy random by its entropy or its symmetric KL to "
                                   "the uniform policy", ("entropy", "symmetric_kl"))
    exploration_loss_coeff: float = option(0.01, "appo", "weight of the exploration loss", bounds=NOT_NEGATIVE,
                                           tune=(1e-8, 1.0))
    kl_loss_coeff: float = option(0.0, "appo", "weight of KL(acting policy || new policy) in the loss",
                                  bounds=NOT_NEGATIVE)


# what learns better in each family; `envs/families.py` has what belongs to the environments
PROFILES: dict[str, Values] = {
    "atari": {
        "batch_size": 1024, "learning_rate": 3e-4, "normalize_returns": False, "value_loss_coeff": 1.0,
        "nonlinearity": "silu", "policy_init_gain": 1.41, "without_gpu": {"batch_size": 512}},
    "classic_control": {"rollout": 32, "batch_size": 256, "kl_loss_coeff": 1.0, "exploration_loss_coeff": 0.0},
    "box2d": {"gamma": 0.995, "gae_lambda": 0.97, "exploration_loss_coeff": 0.005},
    "mujoco": {"gamma": 0.995, "batch_size": 1024, "exploration_loss_coeff": 0.0},
    "minigrid": {
        # A solved task gives a deterministic policy, whose few and sudden changes no KL announces: the rate is at its
        # bound when they come. A penalty on the KL holds the policy where it acted, a large epsilon Adam's steps small.
        "lr_adaptive_max": 1e-3, "adam_eps": 3e-4, "kl_loss_coeff": 1.0, "exploration_loss_coeff": 0.03,
        "max_grad_norm": 0.5},
    "vizdoom": {
        "rollout": 32, "num_batches_per_epoch": 2, "num_epochs": 2, "learning_rate": 3e-4, "lr_adaptive_max": 1e-3},
    "pettingzoo": {"rollout": 32, "batch_size": 1024, "num_batches_per_epoch": 2, "learning_rate": 5e-4},
    "other": {
        "learning_rate": 3e-4, "lr_adaptive_max": 5e-4, "kl_loss_coeff": 1.0, "exploration_loss_coeff": 0.02,
        "max_grad_norm": 0.2, "max_epochs": 32},
}


class AsyncPPO(Algorithm):
    """V-trace and PPO."""

    Settings = Settings
    profiles = PROFILES

    def prepare(self, model: nn.Module, data: Data, ask: Callable[..., Outputs]) -> Data:
        """Compute GAE from the values predicted when acting; where nobody has acted they are asked for here."""
        cfg = self.cfg
        if cfg.with_vtrace:
            return {}
        values = F.pad(data["values"], (0, 1), value=math.nan)
        unknown = values.isnan()
        known = ask({name: column[unknown][:, None] for name, column in data.items() if column.shape[1] > cfg.rollout})
        values[unknown] = model.returns.denormalize(known[1])[:, 0]
        targets, advantages = gae(data["rewards"].T, values.T, data["terminated"].T, data["truncated"].T, cfg.gamma,
                                  cfg.gae_lambda)
        described = torch.stack([advantages, targets, values.T[:-1], targets - values.T[:-1]], -1)
        return {"targets": targets.T, "advantages": advantages.T, "described": described.transpose(0, 1)}

    def targets(self, model: nn.Module, outputs: Outputs, data: Data) -> Data:
        """Compute V-trace with the newest values and ratios; without it, those of `prepare` stay."""
        cfg, (parameters, values) = self.cfg, outputs
        if "targets" in data:
            return {}
        log_ratios = model.distribution(parameters[:-1]).log_prob(data["actions"]) - data["log_probs"]
        targets, advantages = vtrace(log_ratios, data["rewards"], model.returns.denormalize(values),
                                     data["terminated"], data["truncated"], cfg.gamma, cfg.gae_lambda, cfg.vtrace_rho,
                                     cfg.vtrace_c)
        return {"targets": targets, "advantages": advantages}

    def loss(self, model: nn.Module, outputs: Outputs, data: Data, mean: MaskedMean) -> Loss:
        cfg = self.cfg
        policy = model.distribution(outputs[0][:-1])
        values = outputs[1][:-1]
        returns = model.returns
        # invalid rows may hold nan, and 0 x nan would be nan in the gradient: there the ratio is 1, all else 0
        ratios = held_ratios(mean.masked(policy.log_prob(data["actions"]) - data["log_probs"]))  # pi/mu, [T, B]
        advantages = mean.masked(data["advantages"])
        targets = mean.masked(data["targets"])
        moments = moments_of(mean, advantages, targets, returns.denormalize(values.detach()), data.get("sums"))
        advantages = normalize_advantages(advantages, moments)
        targets = returns.normalize_targets(targets)
        old_values = returns.normalize(mean.masked(data["values"])) if cfg.ppo_clip_value else values

        policy_loss = -mean(ppo_objective(ratios, advantages, cfg.ppo_clip_ratio))
        value_loss = mean(clipped_value_error(values, old_values, targets, cfg.ppo_clip_value))
        entropy = mean(policy.entropy())
        exploration = (entropy if cfg.exploration_loss == "entropy" else
                       -mean(policy.symmetric_kl_to_uniform().clamp(max=30)))
        with torch.set_grad_enabled(cfg.kl_loss_coeff > 0):
            kl = mean(model.distribution(data["action_parameters"]).kl(policy))
        total = (policy_loss + cfg.value_loss_coeff * value_loss - cfg.exploration_loss_coeff * exploration
                 + cfg.kl_loss_coeff * kl)

        ratio_min, ratio_max = ratios.detach().aminmax()
        return Loss(total, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl": kl,
                            "ratio_min": ratio_min, "ratio_max": ratio_max, **describe(moments)})


# ---- the terms of the loss, pure functions of [T, B] tensors ----------------------------------------------------


def normalize_advantages(advantages: Tensor, moments: Tensor) -> Tensor:
    """Shift and scale advantages to mean 0 and deviation 1, without amplifying noise.

    A deviation below 0.1 % of the root mean square of targets and advantages counts as that. Once a task is solved, all
    advantages are errors of the value estimates: scaled to 1 they would let the policy walk at random until it fails
    (CartPole: values of 100, a deviation of 0.001, returns of 500 that fell to 160; `docs/tried.md`). The price:
    where the same reward, a hundred times what is to be learned, comes in every step whatever is done, all else counts
    as noise; subtract it.

    moments: what `moments_of` returns.
    """
    center, deviation = moments[:, 0]
    size = torch.linalg.vector_norm(moments[:, :2])  # a mean square is mean^2 + deviation^2
    return (advantages - center) / torch.maximum(deviation, ADVANTAGE_FLOOR * size).clamp(min=1e-30)  # of zeros: 0


def held_ratios(log_ratios: Tensor) -> Tensor:
    """Return pi/mu, held within [0.05, 20] against overflow, as in Sample Factory."""
    return F.hardtanh(log_ratios, math.log(0.05), math.log(20.0)).exp()


def ppo_objective(ratios: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """Compute min(ratio * A, clip(ratio, 1/(1+eps), 1+eps) * A), whose mean PPO raises; clip_ratio = 0: no clipping."""
    objective = ratios * advantages
    if clip_ratio:  # a detached bound has the same gradient, at half the price
        bound = ratios.detach().clamp(1 / (1 + clip_ratio), 1 + clip_ratio) * advantages
        objective = torch.where(objective <= bound, objective, bound)
    return objective


def clipped_value_error(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> Tensor:
    """Compute max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2); clip = 0: no clipping."""
    error = F.mse_loss(values, targets, reduction="none")
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return error
