"""On a GPU it learns what it learns on a CPU, and its files serve both: on a pretended one, and in short on a real one.

The pretended one refuses to mix devices as CUDA does (`pretend_gpu.py`).
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_envs
import torch
from parts import learners
from pretend_gpu import DEVICE
from torch import nn

import evaluate
from runtime.checkpoint import find_checkpoint, load_checkpoint
from shared_buffers import Spec, num_bytes, views
from trainer import A3C, APEX, APPO, IMPALA, PQL, Trainer, load

ROOT = Path(__file__).parent.parent
SMALL: dict[str, Any] = {
    "serial_mode": True, "num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32,
    "num_batches_per_epoch": 2, "num_epochs": 2, "encoder_mlp_layers": (16,), "encoder_conv_mlp_layers": (16,),
    "rnn_size": 16, "precision": "float32"}
REPLAY: dict[str, Any] = {"num_epochs": 1, "num_batches_per_epoch": 2, "replay_warmup": 128, "replay_ratio": 4.0,
                          "replay_size": 1000}


def weights(trainer: Trainer) -> torch.Tensor:
    """Return what is learned by gradients of all policies, as published, in one vector."""
    parameters = trainer.get_parameters()
    return torch.cat([parameters[policy][name].flatten() for policy, model in enumerate(trainer.models)
                      for name, _ in model.named_parameters()])


def test_what_cuda_refuses_is_refused(tmp_path: Path) -> None:
    x = torch.ones(3, device=DEVICE)
    for wrong in (lambda: x + torch.ones(3), lambda: torch.ones(3) + x, lambda: torch.ones(3).mul_(x),
                  lambda: torch.zeros(()).add_(x.sum()), lambda: torch.cat([x, torch.ones(3)]),
                  lambda: nn.Linear(3, 1)(x), lambda: torch.ones(3)[x.long()],
                  lambda: torch.ones(3).index_select(0, x.long())):
        with pytest.raises(RuntimeError, match="on the same device"):
            wrong()
    with pytest.raises(RuntimeError):
        x.numpy()
    with pytest.raises(RuntimeError, match="written to a file"):
        torch.save({"x": x}, tmp_path / "x.pt")
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number may come from the CPU


@pytest.mark.parametrize(("make", "env", "settings"), [
    (APPO, "CartPole-v1", {"with_vtrace": False, "normalize_returns": False}),
    (APPO, "CartPole-v1", {"lr_schedule": "kl_adaptive", "lr_schedule_kl_threshold": 1e-4}),
    (APPO, "Pendulum-v1", {"squash_actions": True}),
    (APPO, tiny_envs.ReadsDict, {}),
    (APPO, tiny_envs.MasksOfParts, {"exploration_loss": "symmetric_kl"}),
    (APPO, tiny_envs.ReadsImage, {}),
    (APPO, tiny_envs.Recalls, {"use_rnn": True, "rnn_type": "gru"}),
    (APPO, tiny_envs.Recalls, {"use_rnn": True, "rnn_type": "lstm", "recurrence": 4}),
    (APPO, "tiny_games:HigherWins", {"num_policies": 2, "self_play_past_fraction": 0.5,
                                     "self_play_snapshot_every_env_steps": 50}),
    (APPO, "tiny_games:Payday", {
        "num_policies": 2, "with_pbt": True, "pbt_start_mutation": 60, "pbt_period_env_steps": 40,
        "pbt_mutation_rate": 1.0, "pbt_replace_reward_gap": 0.0, "pbt_replace_reward_gap_absolute": 0.0,
        "pbt_replace_fraction": 0.5}),
    (IMPALA, "CartPole-v1", {"optimizer": "adam", "lr_schedule": "kl_adaptive"}),
    (A3C, "CartPole-v1", {"num_learners": 1}),
    (APEX, "CartPole-v1", REPLAY),
    (PQL, "Pendulum-v1", REPLAY | {"replay_alpha": 0.5}),
], ids=str)
def test_the_weights_are_those_learned_on_a_cpu(make: type[Trainer], env: Any, settings: dict[str, Any],
                                                tmp_path: Path) -> None:
    learned = {}
    for device in ("cpu", DEVICE):
        with make(env, train_dir=str(tmp_path), experiment=device, device=device, **SMALL | settings) as trainer:
            before = weights(trainer)
            trainer.train(160)
            learned[device] = weights(trainer)
            assert {parameter.device.type for model in trainer.models for parameter in model.parameters()} == {"cpu"}
    change = (learned["cpu"] - before).norm()
    assert change > 0.003
    assert (learned[DEVICE] - learned["cpu"]).norm() < 1e-4 * change


def test_a_run_goes_on_on_the_other_device_and_back(tmp_path: Path) -> None:
    """Both devices play its checkpoints."""
    ends: list[torch.Tensor] = []
    for device in (DEVICE, "cpu", DEVICE):
        with APPO("CartPole-v1", train_dir=str(tmp_path), device=device, eval_every_env_steps=100, eval_episodes=2,
                  **SMALL) as trainer:
            assert all(torch.equal(weights(trainer), end) for end in ends[-1:])
            trainer.train(160)
            ends.append(weights(trainer))
            run_dir = trainer.cfg.run_dir
    obs, found = torch.randn(20, 4).numpy(), []
    for device in (DEVICE, "cpu"):
        found.append(load(run_dir, device=device).predict(obs, deterministic=True)[0].tolist())
        assert evaluate.main(["--env", "CartPole-v1", "--train_dir", str(tmp_path), "--episodes", "2",
                              "--device", device]) == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("first", range(4))
def test_tensors_of_any_shapes_and_dtypes_lie_one_after_another(first: int) -> None:
    dtypes = [torch.bool, torch.float64, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64]
    tensors = {str(dtype): torch.randint(0, 100, (5, size % 4)).to(dtype) for size, dtype in enumerate(dtypes, first)}
    specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    found = views(torch.empty(num_bytes(specs), dtype=torch.uint8), specs)
    for name, tensor in tensors.items():
        found[name].copy_(tensor)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_compiled_network_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's first half; the second, which takes a minute, only makes machine code of it."""
    learned, compile_module = [], nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    for torch_compile in (False, True):
        with APPO("CartPole-v1", train_dir=str(tmp_path), experiment=str(torch_compile), device="cpu",
                  torch_compile=torch_compile, **SMALL) as trainer:
            trainer.train(160)
            learned.append(weights(trainer))
            assert (learners(trainer)[0].model._compiled_call_impl is not None) == torch_compile
    torch.testing.assert_close(*learned, rtol=1e-3, atol=1e-5)


# ---- a real one ------------------------------------------------------------------------------------------------------

RUNS = {"pong": "--env PongNoFrameskip-v4", "lstm": "--env CartPole-v1 --use_rnn --rnn_type lstm",
        "apex": "--env CartPole-v1 --algo APEX", "pql": "--env Pendulum-v1 --algo PQL"}


def test_it_runs_on_a_real_gpu(tmp_path: Path) -> None:
    """Each for 20 s; one goes on on the CPU, one is evaluated."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ["REAL_GPU"]}

    def run(command: str) -> None:
        subprocess.run([sys.executable, *command.split(), "--train_dir", str(tmp_path)], cwd=ROOT, env=environment,
                       check=True)

    if not torch.backends.cuda.is_built() or subprocess.run(
            [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"], env=environment,
            check=False).returncode:
        pytest.skip("there is no GPU")
    for name, flags in RUNS.items():
        run(f"train.py {flags} --experiment {name} --device cuda --train_for_seconds 20")
    before = {name: load_checkpoint(find_checkpoint(tmp_path / name)) for name in RUNS}
    for state in before.values():
        assert state["sgd_steps"] > 10
        assert all(tensor.isfinite().all() for tensor in state["model"].values())
    run("train.py --env CartPole-v1 --experiment lstm --device cpu --train_for_seconds 25")
    assert load_checkpoint(find_checkpoint(tmp_path / "lstm"))["sgd_steps"] > before["lstm"]["sgd_steps"]
    run("evaluate.py --env PongNoFrameskip-v4 --experiment pong --device cuda --episodes 1")
