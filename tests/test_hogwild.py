"""Tests of several learners that change the same weights without a lock: `reducer.Hogwild`, `--num_learners`."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from one_policy import CPU
from rig import Rig
from torch import nn

from learner import Learner
from reducer import Hogwild, Reducer, SharedTraining
from runtime import checkpoint

ROOT = Path(__file__).resolve().parent.parent


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, 0.01, 0.9, 1e-3)


def set_gradients(model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=rng)


def test_one_learner_gives_the_numbers_of_a_plain_loop() -> None:
    """The loop is written from the paper: g = alpha g + (1 - alpha) d^2, theta = theta - eta d / sqrt(g)."""
    model = nn.Linear(3, 2)
    weights = [parameter.detach().double().clone() for parameter in model.parameters()]
    squares = [torch.zeros_like(weight) for weight in weights]
    learner = Hogwild(SharedTraining(model, rmsprop, 1), 0)
    optimizer = learner.make_optimizer(model, rmsprop)
    for step in range(20):
        set_gradients(model, step)
        for number, parameter in enumerate(model.parameters()):
            gradient = parameter.grad.double()
            squares[number] = 0.9 * squares[number] + 0.1 * gradient**2
            weights[number] = weights[number] - 0.01 * gradient / (squares[number].sqrt() + 1e-3)
        learner.step(model, optimizer, float("inf"))
    for weight, parameter in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=1e-5, atol=1e-6)


def test_two_learners_share_weights_and_statistics_and_see_each_others_steps() -> None:
    """In turns they are one learner that takes all the steps."""
    start = nn.Linear(3, 2)
    shared = SharedTraining(start, rmsprop, 2)
    models = [nn.Linear(3, 2) for _ in range(2)]
    learners = [Hogwild(shared, number) for number in range(2)]
    optimizers = [learner.make_optimizer(model, rmsprop) for learner, model in zip(learners, models, strict=True)]
    alone, plain = nn.Linear(3, 2), Reducer()
    alone.load_state_dict(start.state_dict())
    optimizer = plain.make_optimizer(alone, rmsprop)
    for step in range(10):
        turn = step % 2
        for model in (models[turn], alone):
            set_gradients(model, step)
        learners[turn].copy_weights()
        learners[turn].step(models[turn], optimizers[turn], 1.0)
        plain.step(alone, optimizer, 1.0)
        torch.testing.assert_close(models[turn].state_dict(), alone.state_dict())
    assert [learner.add_sgd_step(0) for learner in (*learners, learners[0])] == [1, 2, 3]
    assert [learner.add_decisions(0, more) for learner, more in zip(learners, (100, 20), strict=True)] == [100, 120]


def test_a_checkpoint_restores_the_shared_statistics() -> None:
    model = nn.Linear(3, 2)
    learner = Hogwild(SharedTraining(model, rmsprop, 1), 0)
    optimizer = learner.make_optimizer(model, rmsprop)
    set_gradients(model, 0)
    learner.step(model, optimizer, 1.0)
    saved = optimizer.state_dict()
    again = SharedTraining(model, rmsprop, 2)
    first, second = Hogwild(again, 0), Hogwild(again, 1)
    loading, watching = (learner.make_optimizer(model, rmsprop) for learner in (first, second))
    loading.load_state_dict(saved)
    torch.testing.assert_close(watching.state_dict()["state"], saved["state"])
    set_gradients(model, 1)
    first.step(model, loading, 1.0)
    assert watching.state_dict()["state"][0]["step"] == 2, "what was loaded is shared, and stays so"


class Pausing(torch.optim.SGD):
    """Waits in the middle of its step, when asked to."""

    inside = go_on = None

    def step(self) -> None:
        if self.inside:
            self.inside.set()
            assert self.go_on.wait(60)
        super().step()


def test_a_learner_in_the_middle_of_its_step_keeps_no_other_from_taking_one() -> None:
    start = nn.Linear(3, 2)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Pausing(parameters, 1.0)

    shared = SharedTraining(start, make, 2)
    before = shared.flat.clone()
    models, learners = [nn.Linear(3, 2) for _ in range(2)], [Hogwild(shared, number) for number in range(2)]
    optimizers = [learner.make_optimizer(model, make) for learner, model in zip(learners, models, strict=True)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizers[0].inside, optimizers[0].go_on = threading.Event(), threading.Event()
    stepping = threading.Thread(target=learners[0].step, args=(models[0], optimizers[0], math.inf))
    stepping.start()
    assert optimizers[0].inside.wait(60)
    learners[1].step(models[1], optimizers[1], math.inf)
    torch.testing.assert_close(shared.flat, before - 1)
    optimizers[0].go_on.set()
    stepping.join()
    torch.testing.assert_close(shared.flat, before - 2)


# ---- learners ----------------------------------------------------------------------------------------------------


def test_the_first_learner_publishes_and_keeps_snapshots_of_what_both_have_learned(tmp_path: Path) -> None:
    folder = checkpoint.policy_dir(tmp_path / "test", 0)
    folder.mkdir(parents=True)
    rig = Rig(algo="a3c", num_learners=2, serial_mode=False, self_play_past_fraction=0.5,
              self_play_snapshot_every_env_steps=1000, train_dir=str(tmp_path))
    first, weights = rig.learner, rig.shared.weights
    (folder / "snapshot_000000009_00000000000.pt").touch()  # another learner does not touch it
    second = Learner(rig.cfg, rig.buffers, 0, 1, CPU, None, rig.reports.append)
    before = list(folder.iterdir())
    rig.buffers.policy_steps[0] = 5000
    second.train(rig.batch())
    assert (weights.version, weights.num_snapshots, list(folder.iterdir())) == (0, 1, before)
    steps_of_second = second.state.sgd_steps
    first.train(rig.batch(seed=1))
    assert weights.version == first.state.sgd_steps == 2 * steps_of_second
    assert weights.num_snapshots == 2
    shared = rig.shared.shared_training.tensors()[0]
    published = weights.read()[0]
    for (name, _), weight in zip(first.model.named_parameters(), shared, strict=True):
        torch.testing.assert_close(published[name], weight, rtol=0, atol=0)
    assert any((one != other).any() for one, other in zip(second.model.parameters(), shared, strict=True))


# ---- whole systems -----------------------------------------------------------------------------------------------


def train(folder: Path, *flags: str) -> str:
    command = [sys.executable, "train.py", f"--train_dir={folder}", "--experiment=run", "--device=cpu", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a3c_learns_cartpole_with_two_learners_at_once_and_is_resumed(tmp_path: Path) -> None:
    train(tmp_path, "--env=CartPole-v1", "--algo=a3c", "--num_learners=2", "--train_for_env_steps=60_000",
          "--report_interval_sec=1", "--lr_schedule=linear_decay")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["mean_return"] or 0 for row in rows) >= 150, "22 by chance"
    saved = checkpoint.load_checkpoint(checkpoint.find_checkpoint(tmp_path / "run"))
    output = train(tmp_path, "--env=CartPole-v1", "--train_for_env_steps=65_000")
    assert f"resumed at env_steps={saved['env_steps']:,} sgd_steps={saved['sgd_steps']:,}" in output
    again = checkpoint.load_checkpoint(checkpoint.find_checkpoint(tmp_path / "run"))
    assert again["env_steps"] >= 65_000
    assert again["sgd_steps"] > saved["sgd_steps"]
    assert again["env_steps_trained"] > saved["env_steps_trained"] > 45_000
    assert again["optimizer"]["state"][0]["step"] > saved["optimizer"]["state"][0]["step"]
