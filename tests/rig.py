"""One learner in this process, fed with trajectories that a real `PolicyWorker` acted; an algorithm for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from one_policy import CPU, drain, make_buffers
from parts import ONE_STEP, make_config
from torch import Tensor

from algorithm import Loss, MaskedMean
from algorithms import algorithm_class
from appo import AsyncPPO
from feed import Dataset
from learner import Learner
from model import ActorCritic
from policy_worker import PolicyWorker
from runtime import checkpoint
from runtime.several import ALONE
from shared_buffers import CURRENT, SPLIT

OBS_SPACE = {"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32)}
DISCRETE = spaces.Discrete(3)
CONTINUOUS = spaces.Box(-1, 1, (2,), np.float32)
TRAJECTORIES = 4  # of one minibatch


class Rig:
    """A learner, the buffers it shares, a policy worker, and whatever the learner reported."""

    def __init__(self, action_space: spaces.Space = DISCRETE, obs_space: dict[str, spaces.Space] = OBS_SPACE,
                 number: int = 0, resume_from: Path | None = None, **settings: Any) -> None:
        """Make them; number: of the learner among those of its policy."""
        defaults = {"env": "test", "device": "cpu", "num_workers": 1, "num_envs_per_worker": TRAJECTORIES,
                    "worker_num_splits": 1, "rollout": 8, "batch_size": 8 * TRAJECTORIES, "learning_rate": 1e-3,
                    "encoder_mlp_layers": (16,), "serial_mode": True} | ONE_STEP
        self.cfg = make_config(defaults, settings)
        torch.manual_seed(self.cfg.seed)
        model = algorithm_class(self.cfg.algo)(self.cfg).make_model(obs_space, action_space)
        self.buffers = make_buffers(self.cfg, obs_space, action_space, model)
        self.shared, self.trajectories = self.buffers.policies[0], self.buffers.trajectories_of(0)
        if resume_from:
            state = checkpoint.load_checkpoint(resume_from)
            model.load_state_dict(state["model"])
            self.buffers.env_steps[0] = state["env_steps"]
            self.shared.weights.publish(model, state["sgd_steps"])
        self.reports: list[tuple] = []
        self.learner = Learner(self.cfg, self.buffers, 0, number, CPU, resume_from, self.reports.append)
        self.feed = self.learner.feed
        self.policy_worker = PolicyWorker(self.cfg, self.buffers, 0, CPU)

    def act(self, seed: int = 0, end: float = 0.15) -> None:
        """Fill all slots with trajectories of random observations, rewards and ends, acted by the newest weights."""
        rng, data = torch.Generator().manual_seed(seed), self.trajectories
        data["obs/obs"].copy_(2 * torch.randn(data["obs/obs"].shape, generator=rng) + 1)
        data["rewards"].copy_(torch.randn(data["rewards"].shape, generator=rng))
        data["new_episode"][:, 0] = True
        resetting = torch.zeros(self.buffers.num_slots, dtype=torch.bool)
        for t, ends in enumerate(torch.rand(self.cfg.rollout, len(resetting), generator=rng)):
            data["terminated"][:, t] = ~resetting & (ends < end)
            data["truncated"][:, t] = ~resetting & (end <= ends) & (ends < 2 * end)
            data["valid"][:, t] = ~resetting
            data["new_episode"][:, t + 1] = resetting
            resetting = data["terminated"][:, t] | data["truncated"][:, t]
        torch.manual_seed(seed)
        self.play()

    def play(self) -> None:
        """Let the policy worker act on the observations in the slots, one for each agent."""
        self.buffers.awaited_policy.fill_(0)
        self.buffers.agent_snapshot.fill_(CURRENT)
        self.buffers.agent_slot.copy_(torch.arange(self.buffers.num_slots).view_as(self.buffers.agent_slot))
        for t in range(self.cfg.rollout):
            self.buffers.agent_t.fill_(t)
            self.policy_worker.serve([(SPLIT, split) for split in range(self.cfg.num_splits)])
        for inbox in self.buffers.worker_inboxes:
            drain(inbox)

    def minibatch(self, seed: int = 0, end: float = 0.15) -> dict[str, Tensor]:
        """Return fresh trajectories, [B, T(+1), ...], as `loss` and `sgd_step` take them."""
        self.act(seed, end)
        return clone(self.trajectories) | self.prepared(self.trajectories)

    def prepared(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the learner adds to a dataset."""
        with torch.no_grad():
            return self.learner.algorithm.prepare(self.learner.model, clone(data), self.learner.evaluate)

    def dataset(self, seed: int = 0) -> Dataset:
        """Return a dataset of fresh trajectories."""
        dataset = Dataset(self.buffers.specs[0], self.cfg.trajectories_per_dataset)
        parts = [self.minibatch(seed + part) for part in range(self.cfg.num_batches_per_epoch)]
        for name, tensor in dataset.tensors.items():
            torch.cat([part[name] for part in parts], out=tensor)
        return dataset

    def train(self, dataset: Dataset | int = 0) -> dict[str, float]:
        """Train on a dataset, or on fresh trajectories of a seed; return what the learner reports."""
        self.learner.train_on_dataset(self.dataset(dataset) if isinstance(dataset, int) else dataset)
        kind, policy, summary = self.reports[-1]
        assert (kind, policy) == ("trained", 0)
        return summary

    def loss(self, data: dict[str, Tensor]) -> Loss:
        """Compute the loss of a minibatch, with gradient."""
        return self.learner.loss(self.learner.unroll(data), {name: x.transpose(0, 1) for name, x in data.items()})

    def gradients(self, data: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradient of every parameter that has one, and the statistics of a minibatch."""
        self.learner.model.zero_grad(set_to_none=True)
        loss = self.loss(clone(data))
        loss.total.backward()
        grads = {name: p.grad for name, p in self.learner.model.named_parameters() if p.grad is not None}
        return grads, {"loss": loss.total.detach()} | {name: x.detach() for name, x in loss.statistics.items()}

    def before_each_sgd_step(self, look: Callable[[dict[str, Tensor]], Any]) -> None:
        """Call a function with the minibatch of every SGD step, just before it."""
        sgd_step = self.learner.sgd_step

        def step(data: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
            look(data)
            return sgd_step(data, **more)

        self.learner.sgd_step = step


def clone(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in data.items()}


class ByUpdate(AsyncPPO):
    """APPO, in SGD steps of its own."""

    def update(self, model: ActorCritic, data: dict[str, Tensor], descend: Callable[..., None]) -> dict[str, Tensor]:
        starts, obs = data["new_episode"], {"obs": data["obs/obs"].flatten(0, 1)}
        outputs = self.evaluate(model, obs, torch.zeros(starts.numel(), 0), starts.reshape(-1, 1))
        outputs = tuple(rows.unflatten(0, starts.shape) for rows in outputs)
        data = data | self.targets(model, outputs, data)
        loss = self.loss(model, outputs, data, MaskedMean(data["valid"], ALONE))
        descend(loss.total, model.parameters())
        return {"loss": loss.total} | loss.statistics
