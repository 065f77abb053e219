"""The examples of batched environments, where their packages are installed; PyTorch's everywhere."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from parts import SMALL, make_config

from envs.families import make_vector_env
from examples.batched.torch_pendulum import LIMIT, Pendulums
from services.records import Records
from trainer import APPO, PQL


@pytest.mark.parametrize(("package", "env"), [
    ("envpool", "examples.batched.envpool_atari:Games"), ("pgx_minatar", "examples.batched.pgx_minatar:make"),
    ("brax", "examples.batched.brax_body:make"), ("gymnax", "examples.batched.gymnax_env:make"),
    ("jax", "phys2d/CartPole-v1")])
@pytest.mark.filterwarnings("ignore")  # what is old in their packages
def test_it_is_trained(package: str, env: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    with APPO(env, train_dir=str(tmp_path), serial_mode=True, **SMALL) as system:
        system.train(200)
        assert system.versions[0] > 0


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_pendulum_of_torch_is_that_of_gymnasium(mode: str) -> None:
    """From the same angles and velocities, with the same forces; episodes end at 200 steps."""
    cfg = make_config({"env": "examples.batched.torch_pendulum:Pendulums",
                       "env_kwargs": json.dumps({"autoreset_mode": mode})})
    env = make_vector_env(cfg, 4)
    env.reset(0)
    assert env.spread_ages()
    batch: Pendulums = env._env.unwrapped
    others = [gym.make("Pendulum-v1").unwrapped for _ in range(4)]
    rng = np.random.default_rng(0)
    num_over = 0
    for _ in range(LIMIT + 50):
        for i, other in enumerate(others):
            other.state, other.last_u = np.array([batch.angle[i], batch.velocity[i]], np.float64), None
        forces, ages = rng.uniform(-1, 1, (4, 1)), batch.episode_length_buf.clone()
        step = env.step([forces])
        for i, other in enumerate(others):
            obs, reward, *_ = other.step(2 * forces[i])
            if step.was_reset[i] and mode == "NEXT_STEP":
                assert step.rewards[i] == 0
                continue
            assert step.truncated[i] == (ages[i] == LIMIT - 1)
            assert step.rewards[i] == pytest.approx(reward, abs=1e-4)
            seen = step.obs[0]["obs"][i]
            if step.was_reset[i]:
                seen = step.last["obs"][np.flatnonzero(step.was_reset).tolist().index(i)]
            np.testing.assert_allclose(seen, obs, atol=1e-4)
        num_over += int(step.truncated.sum())
    assert num_over >= 4


def test_first_ages_are_drawn_and_episodes_that_began_in_the_middle_are_not_reported(tmp_path: Path) -> None:
    num_envs = 64
    with APPO(Pendulums, train_dir=str(tmp_path), serial_mode=True, **SMALL | {
            "num_envs_per_worker": num_envs, "batch_size": 512}) as system:
        system.train(num_envs * (2 * LIMIT + LIMIT // 2))
        records = system.find(Records).policies[0]
        assert set(records.lengths) == {LIMIT}
        assert num_envs < system.num_episodes < 2 * num_envs, "some end for the second time"


def test_pql_holds_its_ratios_with_a_thousand_environments(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rollout": 4, "batch_size": 512, "num_batches_per_epoch": 2, "replay_size": 20_000,
                                "replay_warmup": 4096, "replay_ratio": 0.5}
    with PQL(Pendulums, train_dir=str(tmp_path), serial_mode=True, **SMALL | settings | {
            "num_envs_per_worker": 1024}) as system:
        system.train(30_000)
        of_v, of_p = system.buffers.policies[0].shared_training.counts[0].tolist()
        sampled = system.env_steps
        assert 0.5 * (sampled - 4096) - 5 * 1024 <= of_v * 512 <= 0.5 * (sampled - 4096)
        assert abs(of_p - of_v / 2) <= 2
