"""What a run says at its start: six lines, with what was chosen and why."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from config import Config, algorithm_class, make_config
from envs.families import profile
from envs.vector_env import EnvInfo
from runtime.banner import WIDTH, describe_details, describe_run
from runtime.memory import replay_bytes
from runtime.plan import Plan

IMAGE, VECTOR = {"obs": spaces.Box(0, 255, (84, 84, 4), np.uint8)}, {"obs": spaces.Box(-1, 1, (17,), np.float32)}
KEYS = {"red": spaces.Box(-1, 1, (3,), np.float32), "green": spaces.Box(-1, 1, (2,), np.float32)}


def make(obs_space: dict[str, spaces.Space], **given: Any) -> tuple[Config, Plan]:
    """Return the settings of a run and what it is made of; two kinds of agents if there are two policies."""
    cfg = make_config(profile(given["env"], given), given)
    kinds = [(obs_space, spaces.Discrete(6)), (KEYS, spaces.Discrete(2))][: cfg.num_policies]
    info = EnvInfo(["ann", "bob", "cal"][: 2 * len(kinds) - 1], [0, 1, 1][: 2 * len(kinds) - 1], kinds, None)
    models = [algorithm_class(cfg.algo)(cfg).make_model(*kind) for kind in kinds]
    number = list(range(len(kinds)))
    return cfg, Plan(info, [None], 3 << 30, replay_bytes(cfg, info, number, models), [torch.device("cpu")] * len(kinds),
                     number, models, [], [], [])


@pytest.mark.parametrize(("obs_space", "given"), [
    (IMAGE, {"env": "PongNoFrameskip-v4"}), (VECTOR, {"env": "HalfCheetah-v5"}),
    (IMAGE, {"env": "PongNoFrameskip-v4", "algo": "apex"}), (VECTOR, {"env": "CartPole-v1", "num_policies": 2}),
    (IMAGE, {"env": "PongNoFrameskip-v4", "use_rnn": True, "worker_num_splits": 2, "serial_mode": True})], ids=str)
def test_six_short_lines_tell_what_was_chosen(obs_space: dict[str, spaces.Space], given: dict[str, Any]) -> None:
    cfg, plan = make(obs_space, **given)
    lines = describe_run(cfg, plan, given)
    assert len(lines) == 6
    assert all(len(line) <= WIDTH for line in lines), "\n".join(lines)
    assert str(cfg.run_dir) in lines[1]
    assert f"{cfg.num_workers} workers x {cfg.num_envs_per_worker} environments" in lines[2]
    assert f"{cfg.batch_size}" in lines[4]
    assert f"{sum(p.numel() for p in plan.models[0].parameters()):,} parameters" in lines[5]


def test_a_reason_stands_beside_what_was_chosen_but_not_beside_what_was_given() -> None:
    given: dict[str, Any] = {"env": "PongNoFrameskip-v4", "device": "cpu"}
    reasons = ("a worker for each core", "defaults of atari", "small, without a GPU")
    text = "\n".join(describe_run(*make(IMAGE, **given), given))
    assert all(reason in text for reason in reasons)
    given |= {"num_workers": 3, "batch_size": 256, "num_batches_per_epoch": 1, "num_epochs": 1,
              "encoder_conv_architecture": "convnet_atari"}
    cfg, plan = make(IMAGE, **given)
    text = "\n".join(describe_run(cfg, plan, given))
    assert not any(reason in text for reason in reasons)
    assert "for" not in "\n".join(describe_run(cfg, plan, None)), "a resumed run has chosen nothing"


def test_the_log_has_the_spaces_of_all_agents_and_the_exact_bytes() -> None:
    cfg, plan = make(VECTOR, env="CartPole-v1", num_policies=2, algo="apex")
    assert "2 kinds of agents" in describe_run(cfg, plan, {})[0]
    ann, others, trajectories, replay = describe_details(cfg, plan, 1_234_567)
    assert ann == "ann: obs 17 -> Discrete(6)"
    assert others == "bob, cal: red 3, green 2 -> Discrete(2)"
    assert "1.2 MB" in trajectories
    assert f"{plan.replay_bytes:,} bytes" in replay
