"""Ape-X: Q-learning from a prioritized replay that many actors fill, each with its own epsilon.

    y_t     = R_t + discount_t * Q_target(x', argmax_a Q(x', a))          x' = x_{t+m}, R and discount as in `replay.py`
    loss    = mean(w_t * (y_t - Q(x_t, a_t))^2) / 2                       (double Q-learning, n-step)
    Q(x, a) = V(x) + A(x, a) - mean of A(x, .) over the allowed actions   (dueling)
    epsilon = 0.4^(1 + 7 i / (N - 1)) of agent i of N

A transition's priority is |y - Q(x, a)|: first as of the networks that acted, where the trajectory shows x', and then
that of the last SGD step it took part in. The target network is part of the model: a copy made every so many SGD steps.
The targets of a dataset are computed at once, before its few SGD steps.

Source: arXiv 1803.00933. Departures: Adam instead of RMSProp; a fixed ratio of transitions trained on to transitions
sampled, where in the paper actors and learner run as fast as they can.
"""

import torch
from gymnasium import spaces
from torch import Tensor, nn

from algorithm import Data, Loss, MaskedMean, Outputs
from algorithms.q_learning import ReplayAlgorithm, ReplaySettings, follow, frozen_copy
from config import POSITIVE, Config, Values, option, settings
from distributions import FORBIDDEN
from model import ActorCritic
from runtime.utils import UserError
from shared_buffers import Spec

# epsilon of the first agent; the last agent's is that to the power of 1 + EPSILON_POWER
EPSILON_BASE, EPSILON_POWER = 0.4, 7.0


@settings(rollout=32, batch_size=128, num_batches_per_epoch=4, learning_rate=2.5e-4, max_grad_norm=40.0)
class Settings(ReplaySettings):
    """The settings of Ape-X."""

    target_every_sgd_steps: int = option(100, "apex", "SGD steps between two copies of the target network",
                                         bounds=POSITIVE)


PROFILES: dict[str, Values] = {
    "vizdoom": {"replay_size": 100_000},
    "classic_control": {
        "rollout": 16, "batch_size": 64, "learning_rate": 3e-4, "replay_size": 50_000, "replay_warmup": 1_024,
        "replay_ratio": 16.0}}


class QNetwork(ActorCritic):
    """Q-values of every action, from a value and advantages that share encoder and core; and a target network."""

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> None:
        super().__init__(cfg, obs_space, action_space)
        self.target = frozen_copy(self)
        self.register_buffer("exploration", torch.tensor([EPSILON_BASE, EPSILON_POWER]))  # for who acts

    def forward(self, normalized: Data, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q-values [B * L, A] (forbidden actions: `FORBIDDEN`), values [B * L], hidden states (none)."""
        advantages, values, rnn_states = super().forward(normalized, rnn_states, new_episode)
        allowed = advantages > FORBIDDEN / 2
        mean = (advantages * allowed).sum(-1) / allowed.sum(-1)
        return torch.where(allowed, advantages + (values - mean)[:, None], FORBIDDEN), values, rnn_states


class ApeX(ReplayAlgorithm):
    """Distributed prioritized double Q-learning."""

    Settings = Settings
    profiles = PROFILES

    def make_model(self, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> nn.Module:
        if not isinstance(action_space, spaces.Discrete):
            raise UserError(f"--algo=apex needs one discrete action, not {action_space}; use --algo=appo")
        return QNetwork(self.cfg, obs_space, action_space)

    # ---- acting --------------------------------------------------------------------------------------------------

    def columns(self, action_space: spaces.Space) -> dict[str, Spec]:
        return {"q_taken": Spec((), torch.float32), "q_best": Spec((), torch.float32)}

    def act(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor, *,
            deterministic: bool = False, agent_rank: Tensor | None = None) -> tuple[Data, Tensor]:
        q, _, rnn_states = model(model.normalize(obs), rnn_states, new_episode[:, None])
        best, actions = q.max(-1, keepdim=True)
        if agent_rank is not None:
            base, power = model.exploration
            explores = torch.rand_like(agent_rank) < base ** (1 + power * agent_rank)
            # multinomial() would wait for a GPU, to check what it is given
            any_allowed = torch.rand_like(q).masked_fill_(q <= FORBIDDEN / 2, -1.0).argmax(-1, keepdim=True)
            actions = torch.where(explores[:, None], any_allowed, actions)
        return {"actions": actions.float(), "q_taken": q.gather(-1, actions)[:, 0], "q_best": best[:, 0]}, rnn_states

    # ---- learning ------------------------------------------------------------------------------------------------

    def first_priorities(self, trajectories: Data) -> Tensor:
        """Compute |y - Q(x, a)| where the best Q-value of x' is known: not after the last row (nan there)."""
        best, discounts = trajectories["q_best"], trajectories["discounts"]
        last = best.shape[-1] - 1
        later = torch.arange(last + 1) + trajectories["steps"]
        follows = torch.where(later <= last, best.gather(-1, later.clamp(max=last)), torch.nan)
        targets = trajectories["rewards"] + torch.where(discounts > 0, discounts * follows, 0.0)
        return (targets - trajectories["q_taken"]).abs() + 1e-6

    def evaluate(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor) -> Outputs:
        return model(model.normalize(obs), rnn_states, new_episode)[:1]

    def evaluate_following(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor) -> Outputs:
        """Return the target network's Q-values of the actions that the newest one prefers."""
        normalized = model.normalize(obs)
        best = model(normalized, rnn_states, new_episode)[0].argmax(-1, keepdim=True)
        return (model.target(normalized, rnn_states, new_episode)[0].gather(-1, best)[:, 0],)

    def loss(self, model: nn.Module, outputs: Outputs, data: Data, mean: MaskedMean) -> Loss:
        q = outputs[0].gather(-1, data["actions"].long())[..., 0]
        errors = (q - data["targets"]).abs()
        loss = mean(data["weights"] * errors.square()) / 2
        with torch.no_grad():
            statistics = {"td_error": mean(errors), "q": mean(q), "q_max": q.max(), "epsilon_max": model.exploration[0]}
            return Loss(loss, statistics, priorities=errors.detach() + 1e-6)

    def after_sgd_step(self, model: nn.Module, sgd_steps: int) -> None:
        if sgd_steps % self.cfg.target_every_sgd_steps == 0:
            follow(model.target, model, 1.0)
