"""PQL: parallel Q-learning for continuous control. Actor, V-learner and P-learner are processes of their own.

    V-learner   y_t  = R_t + discount_t * min_k Q'_k(x', clip(pi'(x') + epsilon))    x' = x_{t+m}, as in `replay.py`
                loss = sum over k of mean((y_t - Q_k(x_t, a_t))^2)                   (clipped double Q-learning)
    P-learner   loss = -mean(min_k Q_k(x_t, pi(x_t)))
    actor       a    = clip(pi(x) + sigma_i * noise),  sigma_i from the smallest to the largest by agent i of N

Actions are within [-1, 1]. Q' and pi' follow Q and pi: each V-update moves them by tau. Both learners have a replay,
that of the P-learner holds observations alone: the V-learner passes each trajectory on to it. They exchange their
networks through the weights that learners share (`runtime/several.py`); each writes its own part. Two ratios are held:
transitions that V-updates train on to transitions sampled (`replay_ratio`), P-updates to V-updates (`policy_ratio`).

Source: arXiv 2307.12983. Departures, for a machine with few cores instead of a GPU with thousands of environments:
one step instead of three, minibatches of 256 instead of 8192, and their learning rate; less noise (16 environments are
too few to waste half of them); noise epsilon on the targets' actions (TD3, arXiv 1802.09477). Policy workers copy all
networks, though they need the policy alone. There is no entropy term.
"""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from algorithm import Data, Loss, MaskedMean, Outputs
from algorithms.q_learning import ReplayAlgorithm, ReplaySettings, follow, frozen_copy
from algorithms.replay import ReplayFeed
from config import FRACTION, NOT_NEGATIVE, POSITIVE, Config, Values, option, settings
from envs.flat_spaces import action_leaves, is_bounded, num_columns
from model import NONLINEARITIES, ActorCritic, LeafEncoders, mlp
from normalizers import expanded_space
from runtime.several import SGD_STEPS
from runtime.utils import UserError
from shared_buffers import SLOTS, WITH_WORKER, Spec

V, P = "v", "p"  # the learners of a policy
POLL_SEC = 0.001  # the learners look at each other's counts so often
NOISE_MIN = 0.05  # deviation of the first agent's noise
TARGET_NOISE, TARGET_NOISE_CLIP = 0.2, 0.5  # on the actions of targets


@settings(rollout=16, batch_size=256, num_batches_per_epoch=8, learning_rate=1e-3, max_grad_norm=0.0,
          replay_size=300_000, replay_warmup=5_000, replay_ratio=256.0, replay_alpha=0.0, n_step=1)
class Settings(ReplaySettings):
    """The settings of PQL."""

    roles: ClassVar[tuple[str, ...]] = (V, P)
    unused: ClassVar[Values] = ReplaySettings.unused | {"squash_actions": False, "adaptive_stddev": False}
    policy_ratio: float = option(0.5, "pql", "P-updates for each V-update", bounds=POSITIVE)
    noise_max: float = option(0.3, "pql", "deviation of the last agent's noise; actions are in [-1, 1]",
                              bounds=NOT_NEGATIVE, tune=(0.01, 2.0))
    target_tau: float = option(0.005, "pql", "share of the way to the networks that a V-update moves the targets",
                               bounds=FRACTION)


COMMON: Values = {"num_envs": 16, "encoder_mlp_layers": (256, 256), "nonlinearity": "relu"}
IMAGES = COMMON | {"replay_size": 50_000}
PROFILES: dict[str, Values] = {
    "mujoco": COMMON, "pettingzoo": COMMON, "other": COMMON, "atari": IMAGES, "minigrid": IMAGES, "vizdoom": IMAGES,
    "box2d": COMMON | {"replay_size": 100_000},  # CarRacing has images
    "classic_control": COMMON | {"replay_warmup": 2_048, "replay_size": 100_000, "noise_max": 0.8},
}


class QNetwork(nn.Module):
    """The value of an action: images through encoders of their own, everything else and the action as they are."""

    def __init__(self, cfg: Config, obs_space: Mapping[str, spaces.Box], num_actions: int) -> None:
        super().__init__()
        images = {name: space for name, space in obs_space.items() if len(space.shape) == 3}
        self.vectors = [name for name in obs_space if name not in images]
        self.encoder = LeafEncoders(cfg, images) if images else None
        size = sum(obs_space[name].shape[0] for name in self.vectors) + num_actions
        sizes = [size + (self.encoder.out_size if images else 0), *cfg.encoder_mlp_layers]
        self.body = nn.Sequential(mlp(sizes, NONLINEARITIES[cfg.nonlinearity]), nn.Linear(sizes[-1], 1))

    def forward(self, normalized: Data, actions: Tensor) -> Tensor:
        """Return Q-values [B] of normalized observations and actions [B, n]."""
        features = [normalized[name].float() for name in self.vectors]
        if self.encoder is not None:
            features.append(self.encoder(normalized).float())
        with torch.autocast(actions.device.type, enabled=False):
            return self.body(torch.cat([*features, actions], -1)).squeeze(-1)


class ActorAndQ(ActorCritic):
    """A deterministic policy, two Q-networks, and frozen copies of all three that follow them slowly."""

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> None:
        super().__init__(cfg, obs_space, action_space)
        num_actions = num_columns(action_space)
        del self.value_head
        self.policy_head = nn.Linear(self.core.out_size, num_actions)
        nn.init.uniform_(self.policy_head.weight, -3e-3, 3e-3)
        nn.init.zeros_(self.policy_head.bias)
        expanded = {name: expanded_space(space) for name, space in self.leaves.items()}
        self.q = nn.ModuleList(QNetwork(cfg, expanded, num_actions) for _ in range(2))
        self.target_policy = frozen_copy(self.policy)
        self.target_q = frozen_copy(self.q)
        self.register_buffer("exploration", torch.tensor([NOISE_MIN, cfg.noise_max]))  # deviations, for who acts

    @property
    def policy(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.policy_head])


def actions_of(policy: nn.ModuleList, normalized: Data) -> Tensor:
    """Return the actions [B, n] in [-1, 1] that a policy takes."""
    encoder, head = policy
    features = encoder(normalized).float()
    with torch.autocast(features.device.type, enabled=False):
        return head(features).tanh()


def smaller(q: nn.ModuleList, normalized: Data, actions: Tensor) -> Tensor:
    """Return the smaller one of both Q-values, [B]."""
    return torch.minimum(*(network(normalized, actions) for network in q))


class PairedFeed(ReplayFeed):
    """The feed of one of two learners, which count each other's updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = self.buffers.policies[self.policy].shared_training.counts[SGD_STEPS]
        self.before = self.counts.clone()  # in earlier starts of the run

    def updates(self) -> list[int]:
        """Return the V-updates and the P-updates since the start (a copy of another policy counts as a V-update)."""
        return (self.counts - self.before).tolist()


class FeedOfV(PairedFeed):
    """Passes each trajectory on to the P-learner, and waits when that falls behind."""

    def free_slots(self, slots: Any) -> None:
        self.buffers.policies[self.policy].passed_on[0].put((SLOTS, *slots))

    def draw(self) -> None:
        while self.is_ahead() and not self.buffers.stopping:
            time.sleep(POLL_SEC)
        super().draw()

    def is_ahead(self) -> bool:
        """Return whether the P-updates are two datasets behind."""
        cfg, (of_v, of_p) = self.cfg, self.updates()
        # in serial mode its turn comes later
        return not cfg.serial_mode and cfg.policy_ratio * of_v - of_p >= 2 * cfg.num_batches_per_epoch


class FeedOfP(PairedFeed):
    """Keeps observations alone, and draws for so many updates of the V-learner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inbox = self.buffers.policies[self.policy].passed_on[0]

    def take(self, kind: int, *slots: int) -> None:
        self.insert(slots)

    def serve(self) -> None:
        if not self.inbox.empty(POLL_SEC):
            super().serve()
        self.is_inserting = True
        self.deliver_due()
        self.is_inserting = False

    def turn(self) -> None:
        super().turn()
        self.deliver_due()

    def is_idle(self) -> bool:
        """Return whether there is nothing to train on. Asked after the V-learner has finished: all come from there."""
        return not ((self.slot_place[self.own] != WITH_WORKER).any() or self.is_due()) and super().is_idle()

    def is_due(self) -> bool:
        """Return whether the V-updates so far ask for another dataset."""
        cfg, (of_v, _) = self.cfg, self.updates()
        allowed = cfg.policy_ratio * of_v * cfg.batch_size
        return self.inserted > 0 and self.drawn + cfg.samples_per_dataset <= allowed


class ParallelQLearning(ReplayAlgorithm):
    """The V-learner or the P-learner, and the actor."""

    Settings = Settings
    profiles = PROFILES
    feeds: ClassVar[dict[str, type[ReplayFeed]]] = {V: FeedOfV, P: FeedOfP}
    inputs = ("actions",)

    def make_model(self, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> nn.Module:
        if not all(isinstance(leaf, spaces.Box) and is_bounded(leaf).all()
                   for leaf in action_leaves(action_space).values()):
            raise UserError(f"--algo=pql needs bounded continuous actions, not {action_space}; use --algo=appo")
        model = ActorAndQ(self.cfg, obs_space, action_space)
        if self.role:
            (model.policy if self.role == V else model.q).requires_grad_(False)  # the other learner's part
        return model

    def act(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor, *,
            deterministic: bool = False, agent_rank: Tensor | None = None) -> tuple[Data, Tensor]:
        actions = actions_of(model.policy, model.normalize(obs))
        if agent_rank is not None:
            smallest, largest = model.exploration
            deviation = smallest + agent_rank * (largest - smallest)
            actions = (actions + deviation[:, None] * torch.randn_like(actions)).clamp(-1, 1)
        return {"actions": actions}, rnn_states

    # ---- learning ------------------------------------------------------------------------------------------------

    def row_specs(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        """List the columns; the P-learner looks at no transitions, but at single observations."""
        rows = super().row_specs(specs)
        unused = ("rewards", "discounts", "steps") if self.role == P else ()
        return {name: spec for name, spec in rows.items() if name not in unused}

    def evaluate(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor,
                 actions: Tensor) -> Outputs:
        normalized = model.normalize(obs)
        if self.role == P:
            return (smaller(model.q, normalized, actions_of(model.policy, normalized)),)
        return tuple(network(normalized, actions) for network in model.q)

    def evaluate_following(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor) -> Outputs:
        """Return the smaller target Q-value of the target policy's actions."""
        normalized = model.normalize(obs)
        actions = actions_of(model.target_policy, normalized)
        noise = (TARGET_NOISE * torch.randn_like(actions)).clamp(-TARGET_NOISE_CLIP, TARGET_NOISE_CLIP)
        return (smaller(model.target_q, normalized, (actions + noise).clamp(-1, 1)),)

    def loss(self, model: nn.Module, outputs: Outputs, data: Data, mean: MaskedMean) -> Loss:
        if self.role == P:
            loss = -mean(outputs[0])
            return Loss(loss, {"policy_loss": loss})
        errors = [q - data["targets"] for q in outputs]
        loss = sum(mean(data["weights"] * error.square()) for error in errors)
        with torch.no_grad():
            size = torch.stack(errors).abs().mean(0)
            statistics = {"q_loss": loss, "td_error": mean(size), "q": mean(outputs[0]), "q_max": outputs[0].max(),
                          "noise_max": model.exploration[1]}
            return Loss(loss, statistics, priorities=size + 1e-6 if self.cfg.replay_alpha else None)

    def after_sgd_step(self, model: nn.Module, sgd_steps: int) -> None:
        model.exploration[1] = self.cfg.noise_max  # a population changes it
        if self.role == V:
            follow(model.target_q, model.q, self.cfg.target_tau)
            follow(model.target_policy, model.policy, self.cfg.target_tau)
