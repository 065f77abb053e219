"""What a run takes of a GPU: computed beforehand, and compared with what a pretended GPU counts."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from appo import APPO
from config import algorithm_class, make_config
from encoders import LeafEncoders
from envs.families import profile
from envs.vector_env import EnvInfo
from runtime import checkpoint, device_memory
from runtime.device_memory import DeviceMemory, plan_device_memory, ranks_on
from runtime.user_error import UserError
from tools.pretend_gpu import PretendGPU

VECTOR, IMAGE = {"obs": spaces.Box(-1, 1, (4,), np.float32)}, {"obs": spaces.Box(0, 255, (84, 84, 4), np.uint8)}
SHORT = {"num_envs_per_worker": 4, "rollout": 16, "batch_size": 64, "num_epochs": 1, "num_batches_per_epoch": 2}
PONG = SHORT | {"env": "PongNoFrameskip-v4"}
SELF_PLAY = {"num_policies": 2, "self_play_past_fraction": 0.5, "self_play_snapshots": 3,
             "self_play_snapshot_every_env_steps": 50, "rollout": 8}


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no checkpoints: they have no part in it."""
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda state, path: None)


def compute(env: str, obs_space: dict[str, spaces.Space] = VECTOR, num_devices: int = 1,
            **given: Any) -> list[DeviceMemory]:
    """Compute what a run takes of some GPUs, without making it."""
    cfg = make_config(profile(env, given), {"env": env, "num_workers": 1}, given)
    action_space = spaces.Box(-1, 1, (2,)) if cfg.algo == "pql" else spaces.Discrete(3)
    info = EnvInfo(["ann", "bob"], [0, 0], [(obs_space, action_space)], None)
    model = algorithm_class(cfg.algo)(cfg).make_model(obs_space, action_space)
    policies = range(cfg.num_policies)
    return plan_device_memory(cfg, info, [0 for _ in policies], [model for _ in policies],
                              [torch.device("pretend", policy % num_devices) for policy in policies])


@pytest.mark.parametrize(("settings", "env_steps"), [
    (SHORT | {"env": "CartPole-v1"}, 140),
    (SHORT | {"env": "Pendulum-v1"}, 140),
    (PONG | {"encoder_conv_architecture": "convnet_atari"}, 140),
    (PONG | {"use_rnn": True, "rnn_type": "lstm", "rnn_size": 64, "recurrence": 8}, 140),
    (PONG | {"algo": "apex", "batch_size": 32, "replay_warmup": 64, "replay_size": 500,
             "replay_ratio": 2.0}, 140),
    (SHORT | SELF_PLAY | {"env": "tiny_games:HigherWins"}, 200),
    (PONG | {"encoder_conv_architecture": "convnet_atari", "cuda_graphs": True}, 500)],
    ids=["mlp", "box", "cnn", "lstm", "apex", "self-play", "cnn with graphs"])
def test_a_run_takes_what_was_computed_at_most_a_third_less(
        settings: dict[str, Any], env_steps: int, tmp_path: Path) -> None:
    with PretendGPU() as gpu:
        system = APPO(**settings, device="pretend", precision="float32", serial_mode=True, num_workers=1,
                      train_dir=str(tmp_path))
        with contextlib.closing(system):
            system.train(env_steps)
        assert sum(system.versions), "it has trained"
        (memory,) = plan_device_memory(system.cfg, system.buffers.info, system.buffers.kind_of_policy, system.models,
                                       system.devices)
    assert not memory.bound
    assert gpu.peak_bytes <= memory.num_bytes - device_memory.CONTEXT_BYTES <= 1.35 * gpu.peak_bytes + 200_000
    first = next(tmp_path.glob("*/log.txt")).read_text()
    assert f"{memory}; records in" in first and memory.describe() in first


@pytest.mark.parametrize(("given", "cure"), [
    ({"batch_size": 4096}, "lower --batch_size or --num_batches_per_epoch"),
    ({"num_envs_per_worker": 1000, "batch_size": 32}, "lower --num_envs_per_worker"),
    ({"num_envs_per_worker": 1000, "batch_size": 32, "policy_workers_per_policy": 2},
     "lower --policy_workers_per_policy or --num_envs_per_worker"),
    ({"encoder_mlp_layers": (256, 256), "batch_size": 32}, "use a smaller network, or use --device=cpu"),
    ({"encoder_mlp_layers": (256, 256), "batch_size": 32, "num_policies": 2}, "or lower --num_policies"),
    (SELF_PLAY | {"self_play_snapshots": 30}, "lower --self_play_snapshots"),
    ({"eval_every_env_steps": 1, "eval_episodes": 20, "num_envs_per_worker": 1, "batch_size": 32,
      "encoder_mlp_layers": (1,)}, "lower --")])
def test_a_run_that_does_not_fit_is_refused_and_the_largest_part_is_named(
        given: dict[str, Any], cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "CONTEXT_BYTES", 0)
    with PretendGPU() as gpu:
        gpu.total_bytes = 1000
        with pytest.raises(UserError, match=cure) as raised:
            compute("CartPole-v1", **given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("given", "cure"), [
    ({"policy_workers_per_policy": 4}, r"6 processes .* 3.0 .*lower --policy_workers_per_policy, or use --serial"),
    ({"num_policies": 3}, r"7 processes alone 3.5 of them; .*lower --num_policies"),
    ({"serial_mode": True}, r"1 process alone 0.5 of them; .*end what else uses it, or use --device=cpu")])
def test_each_process_has_a_context(given: dict[str, Any], cure: str) -> None:
    with PretendGPU() as gpu:
        gpu.total_bytes = 0
        with pytest.raises(UserError, match=cure):
            compute("CartPole-v1", **given)


def test_a_refused_run_has_allocated_and_written_nothing(tmp_path: Path) -> None:
    with PretendGPU() as gpu:
        gpu.total_bytes = 1 << 29
        with pytest.raises(UserError, match=r"a dataset and a training pass .* lower --batch_size"):
            APPO(**PONG | {"batch_size": 8192}, device="pretend", serial_mode=True, num_workers=1,
                 train_dir=str(tmp_path))
        assert gpu.peak_bytes < 100
    assert not list(tmp_path.iterdir())


def test_policies_on_several_gpus_and_ranks_on_one_have_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendGPU() as gpu:
        (alone,) = compute("CartPole-v1", num_envs_per_worker=8)
        both = compute("CartPole-v1", num_envs_per_worker=8, num_devices=2, num_policies=2)
        assert [memory.device.index for memory in both] == [0, 1]
        sizes = [[part[:3] for part in memory.parts] for memory in (alone, *both)]
        assert sizes[0] == sizes[1] == sizes[2]
        assert [memory.contexts for memory in (alone, *both)] == [3, 5, 5]
        assert alone.available == gpu.total_bytes + device_memory.CONTEXT_BYTES
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert compute("CartPole-v1")[0].available == alone.available // 3
        monkeypatch.setattr(torch.get_device_module("pretend"), "device_count", lambda: 2)
        assert ranks_on(torch.device("pretend", 1), "auto") == 1
        monkeypatch.setenv("LOCAL_RANK", "2")
        assert ranks_on(torch.device("pretend", 0), "auto") == 2


@pytest.mark.parametrize(("env", "obs_space", "given"), [
    ("Pendulum-v1", VECTOR, {"algo": "pql"}), ("PongNoFrameskip-v4", IMAGE, {"precision": "bfloat16"}),
    ("CartPole-v1", VECTOR, {"algo": "impala"}), ("CartPole-v1", VECTOR, {"with_vtrace": False}),
    ("CartPole-v1", {"obs": spaces.Discrete(5), "bits": spaces.MultiBinary(3)}, {"algo": "a3c"})], ids=str)
def test_every_algorithm_is_rehearsed(env: str, obs_space: dict[str, spaces.Space], given: dict[str, Any]) -> None:
    with PretendGPU():
        assert not compute(env, obs_space, **given)[0].bound


class NotOnMeta(LeafEncoders):
    """An encoder of a user that the meta device does not run."""

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        if obs["obs"].is_meta:
            raise NotImplementedError("a kernel of my own")
        return super().forward(obs)


@pytest.mark.parametrize(("env", "obs_space"), [("CartPole-v1", VECTOR), ("PongNoFrameskip-v4", IMAGE)])
def test_a_network_that_cannot_be_rehearsed_has_a_bound(env: str, obs_space: dict[str, spaces.Space]) -> None:
    with PretendGPU():
        (exact,), (bound,) = (compute(env, obs_space, encoder=encoder)
                              for encoder in ("", "test_device_memory:NotOnMeta"))
    assert "NotImplementedError" in bound.describe()
    assert exact.num_bytes <= bound.num_bytes
