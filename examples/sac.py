"""Soft actor-critic, an algorithm with several losses: `python -m examples.sac` learns Pendulum.

    y        = r + gamma * (min_k Q'_k(x', a') - alpha * log pi(a'|x')),  a' from pi(.|x')
    Q_k      follows y; Q'_k follows Q_k slowly, by tau of the way each time
    pi       minimizes alpha * log pi(a|x) - min_k Q_k(x, a),  a from pi(.|x)
    alpha    minimizes -alpha * (log pi(a|x) + H),  H = -(number of actions)

Source: arXiv 1812.05905, algorithm 1. A step of each follows from one minibatch of the replay, so this is an `update`
instead of a `loss`. The same from the command line:
`python train.py --env HalfCheetah-v5 --algo examples.sac:SoftActorCritic`.
"""

import torch
from torch import nn

from algorithms.pql import COMMON, QNetwork, smaller
from algorithms.q_learning import ReplayAlgorithm, ReplaySettings, follow, frozen_copy
from config import FRACTION, option, settings
from envs.flat_spaces import num_columns
from model import ActorCritic
from normalizers import expanded_space
from trainer import Trainer


@settings(squash_actions=True, adaptive_stddev=True, replay_alpha=0.0, n_step=1, replay_size=300_000,
          replay_warmup=5_000, replay_ratio=256.0, rollout=16, batch_size=256, num_batches_per_epoch=8,
          learning_rate=3e-4, max_grad_norm=0.0, normalize_input=False)
class Settings(ReplaySettings):
    """The settings of SAC beside those of a replay."""

    unused = ReplaySettings.unused | {"squash_actions": True, "adaptive_stddev": True, "replay_alpha": 0.0}

    target_tau: float = option(0.005, "sac", "share of the way to the critics that a step moves the targets",
                               bounds=FRACTION)


class ActorAndCritics(ActorCritic):
    """The policy, two critics with targets that follow them, and the logarithm of the temperature alpha."""

    def __init__(self, cfg, obs_space, action_space):
        super().__init__(cfg, obs_space, action_space)
        del self.value_head
        self.num_actions = num_columns(action_space)
        expanded = {name: expanded_space(space) for name, space in self.leaves.items()}
        self.critics = nn.ModuleList(QNetwork(cfg, expanded, self.num_actions) for _ in range(2))
        self.target_critics = frozen_copy(self.critics)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def act(self, normalized):
        """Return unsquashed actions [B, n], drawn from the policy with gradient, their log-densities [B]; the most
        likely actions [B, n]."""
        policy = self.distribution(self.policy_head(self.encoder(normalized).float()))
        actions = policy.sample()
        return actions, policy.log_prob(actions), policy.mode()

    def actor_parameters(self):
        return [*self.encoder.parameters(), *self.policy_head.parameters()]


class SoftActorCritic(ReplayAlgorithm):
    """SAC with a learned temperature."""

    Settings = Settings
    profiles = dict.fromkeys(("mujoco", "box2d", "other"), COMMON) | {
        "classic_control": COMMON | {"replay_warmup": 2_048, "replay_size": 100_000}}

    def make_model(self, obs_space, action_space):
        return ActorAndCritics(self.cfg, obs_space, action_space)

    def act(self, model, obs, rnn_states, new_episode, *, deterministic=False, agent_rank=None):
        drawn, _, likely = model.act(model.normalize(obs))
        return {"actions": likely if deterministic else drawn}, rnn_states

    def update(self, model, data, descend):
        obs, following = ({name.removeprefix(prefix): data[name][0] for name in data if name.startswith(prefix)}
                          for prefix in ("obs/", "following_obs/"))
        obs, following, alpha = model.normalize(obs), model.normalize(following), model.log_alpha.detach().exp()
        with torch.no_grad():
            next_actions, next_log_probs, _ = model.act(following)
            next_values = smaller(model.target_critics, following, next_actions.tanh()) - alpha * next_log_probs
            targets = data["rewards"][0] + data["discounts"][0] * next_values
        values = [critic(obs, data["actions"][0].tanh()) for critic in model.critics]
        critic_loss = sum((value - targets).square().mean() for value in values) / 2
        descend(critic_loss, model.critics.parameters())

        actions, log_probs, _ = model.act(obs)
        actor_loss = (alpha * log_probs - smaller(model.critics, obs, actions.tanh())).mean()
        descend(actor_loss, model.actor_parameters())

        alpha_loss = -model.log_alpha.exp() * (log_probs.detach() - model.num_actions).mean()
        descend(alpha_loss, [model.log_alpha])
        follow(model.target_critics, model.critics, self.cfg.target_tau)
        return {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha": alpha, "q": values[0].mean(),
                "entropy": -log_probs.mean()}


if __name__ == "__main__":
    with Trainer("Pendulum-v1", algo=SoftActorCritic, experiment="sac") as system:
        system.train(40_000)
