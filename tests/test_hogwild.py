"""Tests of several learners that change the same weights without a lock: `several.Hogwild`, `--num_learners`."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from one_policy import CPU
from rig import Rig
from torch import nn

from learner import Learner
from runtime.checkpoint import find_checkpoint, load_checkpoint
from runtime.several import DECISIONS, Hogwild, SharedTraining
from services.records import Records
from trainer import A3C


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, 0.01, 0.9, 1e-3)


class Worker:
    """A learner of shared weights, with a model of its own."""

    def __init__(self, shared: SharedTraining, learner: int) -> None:
        self.model, self.reducer = nn.Linear(3, 2), Hogwild(shared, learner)
        self.optimizer = self.reducer.make_optimizer(self.model, rmsprop)

    def step(self, seed: int) -> None:
        self.reducer.take_over()
        rng = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        self.reducer.step(self.optimizer, math.inf, {})


def test_two_learners_in_turns_are_one_that_takes_all_the_steps() -> None:
    """The oracle is written from the paper: g = alpha g + (1 - alpha) d^2, theta = theta - eta d / sqrt(g)."""
    start = nn.Linear(3, 2)
    weights = [parameter.detach().double().clone() for parameter in start.parameters()]
    squares = [torch.zeros_like(weight) for weight in weights]
    shared = SharedTraining(start, rmsprop, 2)
    workers = [Worker(shared, number) for number in range(2)]
    for step in range(20):
        worker = workers[step % 2]
        worker.step(step)
        for number, parameter in enumerate(worker.model.parameters()):
            gradient = parameter.grad.double()
            squares[number] = 0.9 * squares[number] + 0.1 * gradient**2
            weights[number] = weights[number] - 0.01 * gradient / (squares[number].sqrt() + 1e-3)
            torch.testing.assert_close(parameter.double(), weights[number], rtol=1e-5, atol=1e-6)
    assert [workers[number].reducer.count(DECISIONS, 0, more) for number, more in ((0, 100), (1, 20))] == [100, 120]


def test_a_checkpoint_restores_the_shared_statistics() -> None:
    model = nn.Linear(3, 2)
    alone = Worker(SharedTraining(model, rmsprop, 1), 0)
    alone.step(0)
    saved = alone.optimizer.state_dict()
    again = SharedTraining(model, rmsprop, 2)
    first, second = Worker(again, 0), Worker(again, 1)
    first.optimizer.load_state_dict(saved)
    torch.testing.assert_close(second.optimizer.state_dict()["state"], saved["state"])
    first.step(1)
    assert second.optimizer.state_dict()["state"][0]["step"] == 2, "what was loaded is shared, and stays so"


# ---- learners ----------------------------------------------------------------------------------------------------


def test_the_first_learner_publishes_and_keeps_snapshots_of_what_both_have_learned() -> None:
    rig = Rig(algo="a3c", num_learners=2, serial_mode=False, self_play_past_fraction=0.5,
              self_play_snapshot_every_env_steps=1000)
    first, weights = rig.learner, rig.shared.weights
    second = Learner(rig.cfg, rig.buffers, 0, 1, CPU, None, rig.reports.append)
    rig.buffers.policy_steps[0] = 5000
    second.train_on_dataset(rig.dataset())
    assert (weights.version, weights.num_snapshots) == (0, 1)
    steps_of_second = second.sgd_steps
    rig.train(1)
    assert weights.version == first.sgd_steps == 2 * steps_of_second
    assert weights.num_snapshots == 2
    shared = rig.shared.shared_training.tensors()[0]
    published = weights.read()[0]
    for (name, _), weight in zip(first.model.named_parameters(), shared, strict=True):
        torch.testing.assert_close(published[name], weight, rtol=0, atol=0)
    assert any((one != other).any() for one, other in zip(second.model.parameters(), shared, strict=True))


# ---- whole systems -----------------------------------------------------------------------------------------------


def test_a3c_learns_cartpole_with_two_learners_at_once_and_is_resumed(tmp_path: Path) -> None:
    """What both have learned when parameters are set or saved is in `test_trainer.py`."""
    with A3C("CartPole-v1", num_learners=2, train_dir=str(tmp_path), device="cpu") as system:
        policy = system.find(Records).policies[0]
        system.train(100_000, should_stop=lambda: len(policy.returns) == 100 and policy.mean_return >= 100)
        assert policy.mean_return >= 100, "22 by chance"
    saved = load_checkpoint(find_checkpoint(system.cfg.run_dir))
    with A3C("CartPole-v1", num_learners=2, train_dir=str(tmp_path), device="cpu") as system:
        assert (system.env_steps, sum(system.versions)) == (saved["env_steps"], saved["sgd_steps"])
        system.train(2_000)
    again = load_checkpoint(find_checkpoint(system.cfg.run_dir))
    for name in ("env_steps", "sgd_steps", "env_steps_trained"):
        assert again[name] > saved[name] > 0, name
    assert again["optimizer"]["state"][0]["step"] > saved["optimizer"]["state"][0]["step"]
