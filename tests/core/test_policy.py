"""Policies that predict: observations of every form, memories, masks; loaded without a process or code unasked."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_envs
import torch
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from parts import SMALL, make_config

from envs.families import make_env, probe
from evaluate import Policy
from runtime import utils
from runtime.utils import UserError
from trainer import APPO, load

NAMES = [name for name, value in vars(tiny_envs).items() if isinstance(value, type) and value is not tiny_envs.Reading
         and hasattr(value, "observation_space") and value.__module__ == "tiny_envs"]


def make_policy(env: str, **settings: Any) -> Policy:
    """Make a policy with new weights, but decided actions."""
    small = {"encoder_mlp_layers": (16,), "encoder_conv_architecture": "convnet_small", "rnn_size": 8,
             "encoder_conv_mlp_layers": (16,)}
    cfg = make_config({"env": env}, small, settings)
    torch.manual_seed(3)
    policy = Policy(cfg, probe(cfg), 0, torch.device("cpu"))
    policy.model.policy_head.weight.data.mul_(100)
    return policy


@pytest.mark.parametrize("name", NAMES)
def test_every_observation_and_action_goes_alone_and_in_batches(name: str) -> None:
    """The environments refuse what is not of their action space, and what is forbidden."""
    policy = make_policy(f"tiny_envs:{name}")
    env, space = make_env(policy.cfg), policy.kind.space
    obs, info = env.reset(seed=1)
    seen, masks, chosen = [], [], []
    over = cut = False
    while not (over or cut):
        mask = info.get("action_mask")
        action, _ = policy.predict(obs, deterministic=True, action_mask=mask)
        assert env.action_space.contains(policy.predict(obs, action_mask=mask)[0])
        seen.append(obs)
        masks.append(mask)
        chosen.append(action)
        obs, _, over, cut, info = env.step(action)
    wanted = concatenate(env.action_space, chosen, create_empty_array(env.action_space, len(chosen)))
    as_numbers = functools.partial(flatten, batch_space(env.action_space, len(chosen)))
    for batch in (seen, concatenate(space, seen, create_empty_array(space, len(seen)))):
        actions, _ = policy.predict(batch, deterministic=True, action_mask=masks)
        np.testing.assert_allclose(as_numbers(actions), as_numbers(wanted), rtol=1e-5)
        policy.predict(batch)  # without masks all is allowed


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
def test_a_memory_goes_from_step_to_step_and_is_empty_where_an_episode_starts(rnn_type: str) -> None:
    """As the same network sees the whole sequence at once."""
    policy = make_policy("CartPole-v1", use_rnn=True, rnn_type=rnn_type)
    obs = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)  # [T, B, 4]
    starts = np.zeros((6, 3), bool)
    starts[0], starts[4, 1] = True, True
    model, sequences = policy.model, torch.from_numpy(obs).transpose(0, 1)
    with torch.no_grad():
        parameters, _, _ = model(model.normalize({"obs": sequences.flatten(0, 1)}),
                                 torch.zeros(3, model.state_size), torch.from_numpy(starts.T.copy()))
    expected = parameters.unflatten(0, (3, 6)).argmax(-1).T
    assert 0 < expected.sum() < 18
    state = alone = None
    for t in range(6):
        actions, state = policy.predict(obs[t], state, starts[t], deterministic=True)
        assert actions.tolist() == expected[t].tolist()
        action, alone = policy.predict(obs[t, 1], alone, bool(starts[t, 1]), deterministic=True)
        assert alone.shape == (model.state_size,)
        assert action == expected[t, 1]
    with pytest.raises(RuntimeError):
        policy.predict(obs[0], state.T)


def test_drawn_actions_follow_the_distribution() -> None:
    policy = make_policy("CartPole-v1")
    obs = np.full((4000, 4), 0.05, np.float32)
    with torch.no_grad():
        parameters, *_ = policy.model(policy.model.normalize({"obs": torch.from_numpy(obs)}), torch.zeros(4000, 0),
                                      torch.zeros(4000, 1, dtype=torch.bool))
    actions, again = (policy.predict(obs)[0] for _ in range(2))
    assert actions.mean() == pytest.approx(float(parameters.softmax(-1)[0, 1]), abs=0.03)
    assert not np.array_equal(actions, again)


@pytest.mark.parametrize(("env", "obs"), [
    ("CartPole-v1", np.zeros(3)), ("tiny_envs:ReadsImage", np.full((6, 6, 3), 0.5)),
    ("tiny_envs:ReadsDict", {"other": 1})])
def test_what_is_no_observation_is_refused(env: str, obs: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        make_policy(env).predict(obs)


def test_a_run_plays_without_a_process_and_runs_no_code_unasked(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with APPO("tiny_envs:ReadsVector", train_dir=str(tmp_path), experiment="mine", serial_mode=True, **SMALL) as appo:
        appo.train(1000)
        appo.save(tmp_path / "alone.pt")
        expected = appo.predict(np.ones(2, np.float32), deterministic=True)[0]
    (tmp_path / "mine").rename(tmp_path / "moved")
    same = {"env": utils.reference(tiny_envs.ReadsVector)}  # given itself
    utils.remember(appo.cfg.run_dir, vars(appo.cfg) | same)
    assert load(tmp_path / "moved").predict(np.ones(2, np.float32), deterministic=True)[0] == expected, "used here"
    monkeypatch.setattr(utils, "_USED", {})  # as in another program
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for path in (tmp_path / "moved", str(tmp_path / "alone.pt"), *tmp_path.glob("moved/checkpoints/*/checkpoint_*")):
        with pytest.raises(UserError, match=r"asks to import --env=tiny_envs:ReadsVector; add --trust_run"):
            load(path)
        for policy in (load(path, env=tiny_envs.ReadsVector, checkpoint="latest"), load(path, trust_run=True)):
            assert policy.predict(np.ones(2, np.float32), deterministic=True)[0] == expected
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    with pytest.raises(UserError, match="there is no policy 4"):
        load(tmp_path / "alone.pt", env=tiny_envs.ReadsVector, policy=4)
    with pytest.raises(UserError, match="holds no checkpoint"):
        load(tmp_path / "nothing")


def test_atari_is_played_as_it_was_learned() -> None:
    policy = make_policy("PongNoFrameskip-v4", env_frameskip=4, env_framestack=4)
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    assert obs.shape == (84, 84, 4)
    obs, *_ = env.step(policy.predict(obs)[0])
    assert obs.any()
    env.close()
