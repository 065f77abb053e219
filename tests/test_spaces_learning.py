"""Every kind of observation and action learns: tiny environments whose chance level is known, trained in this process.

Each run is short and exactly repeatable (`serial_mode`). Scores are fractions of what a perfect policy gets; a run must
come `FAR` from the chance level to 1.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tiny_envs
import torch
from parts import learners
from torch import Tensor

from services.records import Records
from trainer import APPO

FAR = 0.8
TINY: dict[str, Any] = {
    "serial_mode": True, "async_rl": False, "device": "cpu", "precision": "float32",
    "num_workers": 1, "num_envs_per_worker": 16, "worker_num_splits": 1, "rollout": 16,
    "batch_size": 128, "num_batches_per_epoch": 2, "num_epochs": 4, "learning_rate": 1e-2, "lr_schedule": "constant",
    "ppo_clip_ratio": 0.2, "ppo_clip_value": 1.0, "exploration_loss_coeff": 0.003, "adam_eps": 1e-6,
    "max_grad_norm": 1.0, "gamma": 0.0,  # every step is a task of its own
    "initial_stddev": 0.5, "encoder_mlp_layers": (32,),
    "encoder_conv_mlp_layers": (32,)}


def learn(env: Callable, train_dir: Path, env_steps: int, goal: float = np.inf, **settings: Any) -> float:
    """Train until the last 100 episodes reach the goal, for so many env_steps at most; return their score.

    The first SGD step of a dataset learns from what the same weights have acted: there every ratio is 1.
    """
    steps: list[dict[str, Tensor]] = []
    with APPO(env, train_dir=str(train_dir), **TINY | settings) as appo:
        for learner in learners(appo):  # none where it is a process
            learner.sgd_step = functools.partial(watch, learner.sgd_step, steps)
        (policy,) = appo.find(Records).policies
        scale = getattr(env, "reward_scale", 1.0)
        appo.train(env_steps, should_stop=lambda: len(policy.returns) == 100 and policy.mean_return > goal * scale)
    for step in steps[:: TINY["num_batches_per_epoch"] * TINY["num_epochs"]]:
        zero_lag = step["ratio_min"] - 1, step["ratio_max"] - 1, step["kl"]
        torch.testing.assert_close(torch.stack(zero_lag), torch.zeros(3), rtol=0, atol=1e-5)
    return policy.mean_return / scale


def watch(sgd_step: Callable, steps: list[dict], data: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    steps.append(sgd_step(data, **more))
    return steps[-1]


def assert_learns(env: Callable, train_dir: Path, env_steps: int, **settings: Any) -> None:
    """Train until far from the chance level."""
    goal = env.chance + FAR * (1 - env.chance)
    assert learn(env, train_dir, env_steps, goal, **settings) > goal, f"by chance {env.chance:.3f}"


def names(prefix: str) -> list[type[gym.Env]]:
    return [env for name, env in inspect.getmembers(tiny_envs, inspect.isclass) if name.startswith(prefix)]


# ---- the environments themselves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [*names("Reads"), *names("Acts"), *names("Masks"), tiny_envs.Recalls])
def test_random_actions_get_the_chance_level(env: type[gym.Env]) -> None:
    """And observations are of the space; otherwise the tests below would prove little."""
    env, score = env(), 0.0
    env.action_space.seed(0)
    num_episodes = 6_000 // env.length
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=0 if episode == 0 else None)
        over = False
        while not over:
            assert env.observation_space.contains(obs)
            obs, reward, over, _, _ = env.step(env.action_space.sample(allowed(env)))
            score += reward
    assert score / num_episodes == pytest.approx(env.chance, abs=0.03)


def allowed(env: gym.Env) -> Any:
    """Return the mask in the form of `Space.sample`."""
    if isinstance(env, tiny_envs.MasksOfParts):
        first, second = (mask.astype(np.int8) for mask in env.masks)
        return first, None, second
    return getattr(env, "mask", None)


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", names("Reads"))
def test_learns_from_every_kind_of_observation(env: type[gym.Env], tmp_path: Path) -> None:
    is_image = issubclass(env, tiny_envs.ReadsImage)
    assert_learns(env, tmp_path, 3072 if is_image else 4096, learning_rate=3e-3 if is_image else 1e-2)


@pytest.mark.parametrize("env", names("Acts"))
def test_learns_every_kind_of_action(env: type[gym.Env], tmp_path: Path) -> None:
    assert_learns(env, tmp_path, 6144)


@pytest.mark.parametrize("settings", [{"squash_actions": True}, {"adaptive_stddev": True},
                                      {"squash_actions": True, "adaptive_stddev": True}])
def test_learns_continuous_actions_of_every_kind(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_learns(tiny_envs.ActsBox, tmp_path, 6144, **settings)


@pytest.mark.parametrize("env", names("Masks"))
def test_learns_with_action_masks_and_never_chooses_what_is_forbidden(env: type[gym.Env], tmp_path: Path) -> None:
    assert_learns(env, tmp_path, 4096)  # the environment raises at a forbidden action


def test_acting_and_learning_processes_handle_masks_and_nested_spaces(tmp_path: Path) -> None:
    """The same in processes of their own, which find the environment by its name."""
    assert_learns(tiny_envs.MasksOfParts, tmp_path, 12_288, serial_mode=False, async_rl=True, rollout=8,
                  worker_num_splits=2, stall_timeout_sec=60.0)


# ---- memory ----------------------------------------------------------------------------------------------------------

# an episode takes 7 rows, its reset included; so trajectories cut episodes everywhere
RECALL: dict[str, Any] = {"rollout": 16, "gamma": 0.95, "rnn_size": 32, "learning_rate": 5e-3}


@pytest.mark.parametrize("memory", [{"rnn_type": "lstm"}, {"rnn_type": "gru", "rnn_num_layers": 2},
                                    {"rnn_type": "gru", "recurrence": 8}])
def test_a_recurrent_policy_recalls_the_beginning_of_an_episode(memory: dict[str, Any], tmp_path: Path) -> None:
    assert_learns(tiny_envs.Recalls, tmp_path, 12_288, use_rnn=True, **RECALL | memory)


def test_without_a_memory_nothing_is_recalled(tmp_path: Path) -> None:
    score = learn(tiny_envs.Recalls, tmp_path, 12_288, **RECALL)
    assert score < tiny_envs.Recalls.chance + 0.2  # of the last 100 episodes: 4.6 standard deviations


# ---- the size of rewards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_learns_the_same_whatever_the_size_of_the_rewards(with_vtrace: bool, tmp_path: Path) -> None:
    """The first values, which are random, must not be taken for returns either."""
    scores = {}
    for env in (tiny_envs.ReadsVector, tiny_envs.HugeRewards, tiny_envs.TinyRewards):
        scores[env] = learn(env, tmp_path, 4096, gamma=0.9, with_vtrace=with_vtrace)
        assert scores[env] > env.chance + FAR * (1 - env.chance)
    assert scores == pytest.approx(dict.fromkeys(scores, scores[tiny_envs.ReadsVector]), abs=0.05)
