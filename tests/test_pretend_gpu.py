"""The whole system on a pretended GPU: it learns there what it learns on a CPU, and its files serve both.

What CUDA would refuse fails here (`tools/pretend_gpu.py`); the first tests show that it does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_envs
import torch
from parts import learners
from torch import nn

import evaluate
from a3c import A3C
from apex import APEX
from appo import APPO, load
from impala import IMPALA
from pql import PQL
from runtime.checkpoint import find_checkpoint, load_checkpoint
from tools.pretend_gpu import Counts, PretendGPU
from trainer import Trainer

SMALL: dict[str, Any] = {
    "serial_mode": True, "num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32,
    "num_batches_per_epoch": 2, "num_epochs": 2, "encoder_mlp_layers": (16,), "encoder_conv_mlp_layers": (16,),
    "rnn_size": 16, "precision": "float32"}
REPLAY: dict[str, Any] = {"num_epochs": 1, "num_batches_per_epoch": 2, "replay_warmup": 128, "replay_ratio": 4.0,
                          "replay_size": 1000}


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as gpu:
        yield gpu


def system(make: type[Trainer], env: Any, folder: Path, device: str, **settings: Any) -> Trainer:
    return make(env, train_dir=str(folder), experiment=device, device=device, **SMALL | settings)


def weights(trainer: Trainer, policy: int = 0) -> torch.Tensor:
    """Return what is learned by gradients of a policy, as published, in one vector."""
    model = trainer.models[policy]
    trained = {name for name, _ in model.named_parameters()}
    return torch.cat([tensor.flatten() for name, tensor in trainer.get_parameters()[policy].items() if name in trained])


# ---- the device itself -----------------------------------------------------------------------------------------------


def test_what_cuda_refuses_is_refused(gpu: PretendGPU, tmp_path: Path) -> None:
    x = torch.ones(3, device="pretend")
    for wrong in (lambda: x + torch.ones(3), lambda: torch.ones(3) + x, lambda: torch.ones(3).mul_(x),
                  lambda: torch.zeros(()).add_(x.sum()), lambda: torch.cat([x, torch.ones(3)]),
                  lambda: nn.Linear(3, 1)(x), lambda: torch.ones(3)[x.long()],
                  lambda: torch.ones(3).index_select(0, x.long())):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(RuntimeError):
        x.numpy()
    with pytest.raises(RuntimeError, match="written to a file"):
        torch.save({"x": x}, tmp_path / "x.pt")
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number may come from the CPU


def test_what_costs_time_is_counted(gpu: PretendGPU) -> None:
    x = torch.ones(4, 6).to("pretend")
    assert gpu.take_counts() == Counts(up=1, waits=1)
    y = (x.view(24)[:12].reshape(3, 4) * 2).t().contiguous()
    assert gpu.take_counts() == Counts(launches=2)  # a product and a copy
    assert float(y.sum()) == 24
    assert gpu.take_counts() == Counts(launches=1, down=1, waits=1)
    pinned = torch.zeros(24).pin_memory()
    z = pinned.to("pretend", non_blocking=True)
    assert gpu.take_counts() == Counts(up=1)
    y[y > 0]
    assert gpu.take_counts() == Counts(launches=2, waits=1)  # the comparison; the choice, whose size nobody knows
    parameters = [nn.Parameter(torch.ones(3, device="pretend")) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(parameters, fused=True)
    optimizer.step()
    gpu.take_counts()
    optimizer.step()
    assert gpu.take_counts() == Counts(launches=2)  # the numbers of the steps, and all weights
    assert z.shape == (24,)


def test_copies_that_do_not_wait_take_their_time(gpu: PretendGPU) -> None:
    to, source = torch.zeros(3).pin_memory(), torch.ones(3).pin_memory()
    x = source.to("pretend", non_blocking=True)
    to.copy_(x, non_blocking=True)
    assert to.sum() == 0, "not there yet"
    torch.get_device_module("pretend").synchronize()
    assert to.sum() == 3
    source.to("pretend", non_blocking=True)
    source.zero_()
    with pytest.raises(RuntimeError, match="written to while a copy of it was under way"):
        x.sum().item()


def test_memory_is_counted_until_the_last_view_is_gone(gpu: PretendGPU) -> None:
    x = torch.zeros(1000, device="pretend")
    view = x[10:]
    assert gpu.bytes == gpu.peak_bytes == 4000
    del x
    assert gpu.bytes == 4000
    del view
    assert gpu.bytes == 0


# ---- the whole system ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "env", "settings"), [
    (APPO, "CartPole-v1", {}),
    (APPO, "CartPole-v1", {"with_vtrace": False, "normalize_returns": False}),
    (APPO, "Pendulum-v1", {"squash_actions": True}),
    (APPO, tiny_envs.ReadsDict, {}),
    (APPO, tiny_envs.MasksInObs, {}),
    (APPO, tiny_envs.MasksOfParts, {"exploration_loss": "symmetric_kl"}),
    (APPO, tiny_envs.ReadsImage, {}),
    (APPO, tiny_envs.Recalls, {"use_rnn": True, "rnn_type": "gru"}),
    (APPO, tiny_envs.Recalls, {"use_rnn": True, "rnn_type": "lstm", "recurrence": 4}),
    (IMPALA, "CartPole-v1", {}),
    (A3C, "CartPole-v1", {"num_learners": 1}),
    (APEX, "CartPole-v1", REPLAY),
    (PQL, "Pendulum-v1", REPLAY),
], ids=str)
def test_the_weights_are_those_learned_on_a_cpu(make: type[Trainer], env: Any, settings: dict[str, Any],
                                                tmp_path: Path, gpu: PretendGPU) -> None:
    learned = {}
    for device in ("cpu", "pretend"):
        with system(make, env, tmp_path, device, **settings) as trainer:
            before = weights(trainer)
            trainer.train(160)
            learned[device] = weights(trainer)
            feed = learners(trainer)[0].feed
            assert all(x.is_pinned() == (device != "cpu") for x in getattr(feed, "spare", feed).tensors.values())
    assert gpu.counts.launches > 500
    change, difference = (learned["cpu"] - before).norm(), (learned["pretend"] - learned["cpu"]).norm()
    assert change > 0.003
    assert difference < 0.01 * change


@pytest.mark.parametrize(("env", "settings"), [
    ("CartPole-v1", {"precision": "bfloat16"}),
    (tiny_envs.ReadsImage, {"precision": "bfloat16", "use_rnn": True}),
    ("tiny_games:HigherWins", {"num_policies": 2, "self_play_past_fraction": 0.5,
                               "self_play_snapshot_every_env_steps": 50}),
    ("tiny_games:HunterAndPrey", {"num_policies": 2}),
], ids=str)
def test_it_also_learns_in_bfloat16_and_with_several_policies(env: Any, settings: dict[str, Any], tmp_path: Path,
                                                              gpu: PretendGPU) -> None:
    with system(APPO, env, tmp_path, "pretend", eval_every_env_steps=60, eval_episodes=2, **settings) as trainer:
        policies = range(settings.get("num_policies", 1))
        before = [weights(trainer, policy) for policy in policies]
        trainer.train(160)
        for policy in policies:
            assert (weights(trainer, policy) - before[policy]).norm() > 0.01
    for policy in policies:
        assert "score" in load_checkpoint(find_checkpoint(trainer.cfg.run_dir, "best", policy)), "of an evaluation"


def test_a_population_copies_weights_and_optimizers(tmp_path: Path, gpu: PretendGPU) -> None:
    with system(APPO, "tiny_games:Payday", tmp_path, "pretend", num_policies=2, with_pbt=True, pbt_start_mutation=60,
                pbt_period_env_steps=40, pbt_mutation_rate=1.0, pbt_replace_reward_gap=0.0, num_batches_per_epoch=1,
                pbt_replace_reward_gap_absolute=0.0, pbt_replace_fraction=0.5, num_epochs=1) as trainer:
        trainer.train(500)
        events = [json.loads(line) for line in (trainer.cfg.run_dir / "population.jsonl").read_text().splitlines()]
    assert any(event.get("donor") is not None for event in events)


def test_a_run_goes_on_on_the_other_device_and_back(tmp_path: Path, gpu: PretendGPU) -> None:
    """With its weights and optimizer; both devices play its checkpoints."""
    ends, steps = [], [0.0]
    for device in ("pretend", "cpu", "pretend"):
        with APPO("CartPole-v1", train_dir=str(tmp_path), device=device, eval_every_env_steps=100, eval_episodes=2,
                  **SMALL) as trainer:
            assert all(torch.equal(weights(trainer), end) for end in ends[-1:])
            trainer.train(160)
            ends.append(weights(trainer))
            run_dir = trainer.cfg.run_dir
        state = load_checkpoint(find_checkpoint(run_dir))
        steps.append(max(float(of_one["step"]) for of_one in state["optimizer"]["state"].values()))
        assert steps[-2] < steps[-1] == state["sgd_steps"], "of Adam"
    for device in ("pretend", "cpu"):
        assert load(run_dir, device=device).predict([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
        assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(tmp_path), "--episodes", "2",
                              "--device", device]) == 0
