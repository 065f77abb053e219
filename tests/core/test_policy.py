"""Policies that play: observations of every form, memories, masks; from a run or a checkpoint, without a process."""

import itertools
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_envs
import torch
from gymnasium.vector.utils import concatenate, create_empty_array
from parts import make_config

from algorithms import algorithm_class
from envs.families import make_env, probe
from runtime import by_name
from runtime.policy import Policy, is_one
from runtime.user_error import UserError
from trainer import APPO, load

CPU = torch.device("cpu")
NAMES = [name for name, value in vars(tiny_envs).items() if isinstance(value, type) and value is not tiny_envs.Reading
         and hasattr(value, "observation_space") and value.__module__ == "tiny_envs"]


def make_policy(env: str, **settings: Any) -> Policy:
    """Make a policy with the first weights of an environment."""
    small = {"encoder_mlp_layers": (16,), "encoder_conv_architecture": "convnet_small", "rnn_size": 8}
    cfg = make_config({"env": env}, small, settings)
    info = probe(cfg)
    torch.manual_seed(3)
    model = algorithm_class(cfg.algo)(cfg).make_model(*info.kinds[0])
    with torch.no_grad():
        model.policy_head.weight.mul_(100)  # decided actions
    return Policy.of_info(cfg, info, 0, model, CPU)


@pytest.mark.parametrize("name", NAMES)
def test_every_observation_and_action_goes_alone_and_in_batches(name: str) -> None:
    """The environments refuse what is not of their action space, and what is forbidden."""
    policy = make_policy(f"tiny_envs:{name}")
    env = make_env(policy.cfg)
    obs, info = env.reset(seed=1)
    seen, masks, chosen = [], [], []
    for _ in range(tiny_envs.STEPS):
        in_info = {"action_mask": info["action_mask"]} if policy.kind.mask_in_info else {}
        action, _ = policy.predict(obs, deterministic=True, **in_info)
        drawn, _ = policy.predict(obs, **in_info)
        assert env.action_space.contains(drawn)
        seen.append(obs)
        masks.append(in_info.get("action_mask"))
        chosen.append(action)
        obs, _, over, cut, info = env.step(action)
        if over or cut:
            break
    more = {"action_mask": masks} if policy.kind.mask_in_info else {}
    arrays = concatenate(policy.kind.space, seen, create_empty_array(policy.kind.space, len(seen)))
    for batch in (seen, arrays):
        assert not is_one(policy.kind.space, batch)
        actions, _ = policy.predict(batch, deterministic=True, **more)
        expected = concatenate(env.action_space, chosen, create_empty_array(env.action_space, len(chosen)))
        for one, other in zip(flat(actions), flat(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def flat(actions: Any) -> list[Any]:
    if isinstance(actions, dict):
        return list(itertools.chain.from_iterable(map(flat, actions.values())))
    return list(itertools.chain.from_iterable(map(flat, actions))) if isinstance(actions, tuple) else [actions]


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
    state = None
    for t in range(6):
        actions, state = policy.predict(obs[t], state, starts[t], deterministic=True)
        assert actions.tolist() == expected[t].tolist()
    alone = None
    for t in range(6):  # one row, whose state has one axis less
        action, alone = policy.predict(obs[t, 1], alone, bool(starts[t, 1]), deterministic=True)
        assert alone.shape == (model.state_size,)
        assert action == expected[t, 1]
    again, _ = policy.predict(list(obs[5]), list(state), deterministic=True)  # each one's by itself
    assert again.shape == (3,)
    for wrong in ({"state": torch.zeros(3)}, {"state": state.T}, {"state": "empty"}, {"episode_start": [True] * 2}):
        with pytest.raises(UserError, match="does not belong to 3 observations"):
            policy.predict(obs[0], **wrong)


def test_drawn_actions_follow_the_distribution_and_disturb_no_other_generator() -> None:
    policy = make_policy("CartPole-v1")
    obs = np.full(4, 0.05, np.float32)
    with torch.no_grad():
        model = policy.model
        parameters, *_ = model(model.normalize({"obs": torch.from_numpy(obs)[None]}), torch.zeros(1, 0),
                               torch.zeros(1, 1, dtype=torch.bool))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    actions, _ = policy.predict(np.tile(obs, (4000, 1)))
    assert actions.mean() == pytest.approx(float(parameters.softmax(-1)[0, 1]), abs=0.03)
    again, _ = policy.predict(np.tile(obs, (4000, 1)))
    assert not np.array_equal(actions, again)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("env", "obs", "complaint"), [
    ("CartPole-v1", np.zeros(3), r"not one, nor a batch, of Box.*\(4,\)"),
    ("CartPole-v1", np.full(4, np.nan), "observation 'obs' is not finite"),
    ("tiny_envs:ReadsImage", np.full((6, 6, 3), 0.5), "numbers that are none of uint8")])
def test_what_is_no_observation_is_refused_in_one_line(env: str, obs: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as refused:
        make_policy(env).predict(obs)
    assert "\n" not in str(refused.value)


def test_a_run_plays_without_a_process_and_runs_no_code_unasked(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with APPO("tiny_envs:ReadsVector", train_dir=str(tmp_path), experiment="mine", serial_mode=True, num_workers=1,
              num_envs_per_worker=4, rollout=8, batch_size=32, num_batches_per_epoch=1) as appo:
        appo.train(1000)
        appo.save(tmp_path / "alone.pt")
        expected = appo.predict(np.ones(2, np.float32), deterministic=True)[0]
    (tmp_path / "mine").rename(tmp_path / "moved")
    same = {"env": by_name.reference(tiny_envs.ReadsVector)}  # given itself
    by_name.remember(appo.cfg.run_dir, vars(appo.cfg) | same)
    assert load(tmp_path / "moved").predict(np.ones(2, np.float32), deterministic=True)[0] == expected, "used here"
    monkeypatch.setattr(by_name, "_USED", {})  # as in another program
    for path in (tmp_path / "moved", str(tmp_path / "alone.pt"), *tmp_path.glob("moved/checkpoints/*/checkpoint_*")):
        with pytest.raises(UserError, match=r"asks to import --env=tiny_envs:ReadsVector; add --trust_run"):
            load(path)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        for policy in (load(path, env=tiny_envs.ReadsVector, checkpoint="latest"), load(path, trust_run=True)):
            assert policy.predict(np.ones(2, np.float32), deterministic=True)[0] == expected
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not multiprocessing.active_children()
    with pytest.raises(UserError, match="there is no policy 4"):
        load(tmp_path / "alone.pt", env=tiny_envs.ReadsVector, policy=4)
    for nothing, complaint in ((tmp_path / "nothing.pt", "cannot be read"), (tmp_path, "holds no checkpoint; name")):
        with pytest.raises(UserError, match=complaint):
            load(nothing)


def test_atari_is_played_as_it_was_learned() -> None:
    policy = make_policy("PongNoFrameskip-v4", env_frameskip=4, env_framestack=4,
                         encoder_conv_architecture="convnet_a3c")
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    assert obs.shape == (84, 84, 4)
    obs, *_ = env.step(policy.predict(obs)[0])
    assert obs.any()
    env.close()
