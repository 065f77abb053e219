"""One learner in this process, fed with trajectories that a real `PolicyWorker` acted; two small algorithms for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from one_policy import CPU, drain, make_buffers
from parts import ONE_STEP, make_config
from torch import Tensor

from algorithm import Algorithm, Loss, MaskedMean
from feed import Dataset
from learner import Learner
from model import ActorCritic, make_model
from policy_worker import PolicyWorker
from runtime import checkpoint
from shared_buffers import SPLIT

OBS_SPACE = {"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32)}
DISCRETE = spaces.Discrete(3)
CONTINUOUS = spaces.Box(-1, 1, (2,), np.float32)
TRAJECTORIES = 4  # of one minibatch


class Rig:
    """A learner, the buffers it shares, a policy worker, and whatever the learner reported."""

    def __init__(self, action_space: spaces.Space = DISCRETE, resume_from: Path | None = None,
                 **settings: Any) -> None:
        defaults = {"env": "test", "device": "cpu", "num_workers": 1, "num_envs_per_worker": TRAJECTORIES,
                    "worker_num_splits": 1, "rollout": 8, "batch_size": 8 * TRAJECTORIES, "learning_rate": 1e-3,
                    "encoder_mlp_layers": (16,), "serial_mode": True} | ONE_STEP
        self.cfg = make_config(defaults, settings)
        torch.manual_seed(self.cfg.seed)
        model = make_model(self.cfg, OBS_SPACE, action_space)
        state = checkpoint.load_checkpoint(resume_from) if resume_from else None
        if state is not None:
            model.load_state_dict(state["model"])
        self.buffers = make_buffers(self.cfg, OBS_SPACE, action_space, model)
        self.shared, self.trajectories = self.buffers.policies[0], self.buffers.trajectories_of(0)
        if state is not None:
            self.buffers.env_steps[0] = state["env_steps"]
            self.shared.weights.publish(model, state["sgd_steps"])
        self.reports: list[tuple] = []
        self.learner = Learner(self.cfg, self.buffers, 0, 0, CPU, resume_from, self.reports.append)
        self.state, self.feed = self.learner.state, self.learner.feed
        self.policy_worker = PolicyWorker(self.cfg, self.buffers, 0, CPU)

    def act(self, slots: list[int], seed: int = 0, end: float = 0.15) -> None:
        """Fill slots with trajectories of random observations and rewards, acted by the newest weights."""
        assert len(slots) == self.buffers.agent_slot.numel()
        rng = torch.Generator().manual_seed(seed)
        data = self.trajectories
        shape = (len(slots), self.cfg.rollout)
        data["obs/obs"][slots] = 2 * torch.randn(len(slots), self.cfg.rollout + 1, 4, generator=rng) + 1
        data["rewards"][slots] = torch.randn(shape, generator=rng)
        self.buffers.awaited_policy.fill_(0)
        self.buffers.agent_slot[:] = torch.tensor(slots).view_as(self.buffers.agent_slot)
        torch.manual_seed(seed)
        resetting = torch.zeros(len(slots), dtype=torch.bool)
        data["new_episode"][slots, 0] = True
        for t in range(self.cfg.rollout):
            self.buffers.agent_t[:] = t
            self.policy_worker.serve([(SPLIT, split) for split in range(self.cfg.num_splits)])
            ends = torch.rand(len(slots), generator=rng)
            data["terminated"][slots, t] = ~resetting & (ends < end)
            data["truncated"][slots, t] = ~resetting & (end <= ends) & (ends < 2 * end)
            data["valid"][slots, t] = ~resetting
            data["new_episode"][slots, t + 1] = resetting
            resetting = data["terminated"][slots, t] | data["truncated"][slots, t]
        for inbox in self.buffers.worker_inboxes:
            drain(inbox)

    def minibatch(self, seed: int = 0, end: float = 0.15) -> dict[str, Tensor]:
        """Return fresh trajectories, [B, T(+1), ...], as `loss` and `sgd_step` take them."""
        slots = list(range(TRAJECTORIES))
        self.act(slots, seed, end)
        data = {name: tensor[slots].clone() for name, tensor in self.trajectories.items()}
        if not getattr(self.cfg, "with_vtrace", True):
            data |= self.prepared(data)
        return data

    def prepared(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the learner adds to a dataset."""
        with torch.no_grad():
            return self.learner.algorithm.prepare(self.learner.model, clone(data), self.learner.evaluate)

    def dataset(self, seed: int = 0) -> Dataset:
        """Return a dataset of fresh trajectories."""
        dataset = Dataset(self.buffers.specs[0], self.cfg.trajectories_per_dataset)
        for part in range(self.cfg.num_batches_per_epoch):
            data = self.minibatch(seed + part)
            for name, tensor in dataset.tensors.items():
                tensor[TRAJECTORIES * part : TRAJECTORIES * (part + 1)] = data[name]
        return dataset

    def train(self, dataset: Dataset | int = 0) -> dict[str, float]:
        """Train on a dataset, or on fresh trajectories of a seed; return what the learner reports."""
        self.learner.train_on_dataset(self.dataset(dataset) if isinstance(dataset, int) else dataset)
        return self.trained()

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

        def step(data: dict[str, Tensor]) -> dict[str, Tensor]:
            look(data)
            return sgd_step(data)

        self.learner.sgd_step = step

    def trained(self) -> dict[str, float]:
        """Return the last statistics that the learner reported."""
        kind, policy, summary = self.reports[-1]
        assert (kind, policy) == ("trained", 0)
        return summary


def clone(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in data.items()}


class PolicyGradient(Algorithm):
    """Has no use for the values."""

    def targets(self, model: ActorCritic, outputs: tuple[Tensor, ...], data: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"targets": data["rewards"]}

    def loss(self, model: ActorCritic, outputs: tuple[Tensor, ...], data: dict[str, Tensor], mean: MaskedMean) -> Loss:
        total = -mean(model.distribution(outputs[0][:-1]).log_prob(data["actions"]) * data["targets"])
        return Loss(total, {})


class ByUpdate(PolicyGradient):
    """The same, in SGD steps of its own."""

    def update(self, model: ActorCritic, data: dict[str, Tensor], descend: Callable[..., None]) -> dict[str, Tensor]:
        starts, obs = data["new_episode"], {"obs": data["obs/obs"].flatten(0, 1)}
        parameters, _ = self.evaluate(model, obs, torch.zeros(starts.numel(), 0), starts.reshape(-1, 1))
        policy = model.distribution(parameters.unflatten(0, starts.shape)[:-1])
        loss = -(policy.log_prob(data["actions"]) * data["rewards"])[data["valid"]].mean()
        descend(loss, model.parameters())
        return {"loss": loss}
