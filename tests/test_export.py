"""`python -m tools.export`: the file acts as the policy does in an evaluation, in the environment's own units."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import make_config
from torch import nn

from algorithms import algorithm_class
from envs.families import make_vector_env
from envs.flat_spaces import unflatten_actions
from runtime.evaluator import Player
from runtime.policy import load
from tools import export
from tools.export import Exported, to_onnx, trace
from trainer import APPO

STEPS = 12
IMAGE = {"encoder_conv_architecture": "convnet_small", "encoder_conv_mlp_layers": (16,)}


def make(env_id: str, rows: int = 3, **settings: Any) -> tuple[Exported, Any]:
    """Make a policy with random weights and moved statistics, and environments for it."""
    cfg = make_config({"env": env_id, "num_workers": 1, "device": "cpu", "encoder_mlp_layers": (64, 64)} | settings)
    env = make_vector_env(cfg, rows)
    step = env.reset(0)
    kind = env.kinds[0]
    algorithm = algorithm_class(cfg.algo)(cfg)
    torch.manual_seed(0)
    model = algorithm.make_model(kind.obs_space, kind.action_space).eval()
    nn.init.normal_(model.policy_head.weight)  # actions differ
    model.update_normalizers({name: torch.as_tensor(value) for name, value in step.obs[0].items()})
    return Exported(algorithm, model, kind), env


def raw_inputs(env: Any, names: Any, step: Any) -> dict[str, torch.Tensor]:
    """Return what the environments have shown last, by the paths of its parts; but masks as a player does."""
    shown = env.raw[-1] if isinstance(env.raw[-1], dict | tuple) else {"obs": env.raw[-1]}
    inputs = {}
    for name in names:
        value = shown | step.obs[0] if name == "action_mask" else shown
        for key in name.split("/"):
            value = value[int(key)] if isinstance(value, tuple) else value[key]
        inputs[name] = torch.as_tensor(value).clone()
    return inputs


def follow(policy: Exported, env: Any, run: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> None:
    """Play with `Player`; what is exported must say the same of every step."""
    kind, env.raw = env.kinds[0], []
    flatten_obs, kind.flatten = kind.flatten, lambda obs: env.raw.append(obs) or flatten_obs(obs)
    step = env.reset(1)
    player = Player(policy.algorithm, policy.model, env, kind.index, deterministic=True)
    fresh, examples = np.ones(env.num_envs, bool), policy.examples()
    for _ in range(STEPS):
        leaves = {name: torch.as_tensor(value).clone() for name, value in step.obs[0].items()}
        inputs = raw_inputs(env, kind.obs_space.keys() - policy.texts, step)
        inputs |= {name: leaves[name] for name in policy.texts}
        inputs = {name: value.to(examples[name].dtype) for name, value in inputs.items()}
        states = {"rnn_states": player.rnn_states.clone(), "new_episode": torch.as_tensor(fresh)}
        inputs |= states if policy.model.state_size else {}
        got = {name: np.asarray(value) for name, value in run(inputs).items()}
        with torch.no_grad():
            columns, next_states = policy.algorithm.act(policy.model, leaves, states["rnn_states"],
                                                        states["new_episode"], deterministic=True)
        rows = [np.zeros(columns["actions"].shape, np.float32)]
        player.act(step, fresh, rows)
        expected = {name: columns[name] for name in ("action_parameters", "values", "q_best") if name in columns}
        expected |= {"next_rnn_states": next_states} if policy.model.state_size else {}
        assert got.keys() - policy.parts.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        squash = policy.algorithm.cfg.squash_actions
        wanted = flatten(unflatten_actions(kind.action_space, rows[0], squash=squash))
        for (name, leaf), value in zip(policy.parts.items(), wanted, strict=True):
            assert (got[name].dtype, got[name].shape) == (leaf.dtype, value.shape)
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        step = env.step(rows)
        fresh = step.was_reset.copy()
    env.close()


def flatten(actions: Any) -> list[np.ndarray]:
    parts = actions.values() if isinstance(actions, dict) else actions if isinstance(actions, tuple) else None
    return [actions] if parts is None else [array for part in parts for array in flatten(part)]


@pytest.mark.parametrize(("env_id", "settings"), [
    ("tiny_envs:ReadsImage", IMAGE), ("tiny_envs:ReadsGrayImage", IMAGE), ("tiny_envs:ReadsMatrix", {}),
    ("tiny_envs:ReadsNumber", {}), ("tiny_envs:ReadsDiscrete", {}), ("tiny_envs:ReadsMultiDiscrete", {}),
    ("tiny_envs:ReadsMultiBinary", {}), ("tiny_envs:MasksInObs", {}), ("tiny_envs:ActsMultiDiscrete", {}),
    ("tiny_envs:ReadsDict", IMAGE | {"use_rnn": True, "rnn_type": "gru", "rnn_size": 8, "normalize_returns": True}),
    ("tiny_envs:Recalls", {"use_rnn": True, "rnn_type": "lstm", "rnn_size": 8, "rnn_num_layers": 2}),
    ("tiny_envs:ReadsText", {}), ("tiny_envs:ActsTuple", {}), ("tiny_envs:ActsDict", {"adaptive_stddev": True}),
    ("tiny_envs:ActsBox", {"squash_actions": True}), ("tiny_envs:MasksInInfo", {"algo": "apex"}),
    ("Pendulum-v1", {"algo": "pql"})], ids=str)
def test_a_graph_acts_as_the_policy_does(env_id: str, settings: dict[str, Any]) -> None:
    policy, env = make(env_id, **settings)
    module = trace(policy).module()
    follow(policy, env, module)
    rows = {name: torch.cat([value[:1]] * 40) for name, value in policy.examples().items()}
    assert {len(value) for value in module(rows).values()} == {40}


def test_onnx_keeps_names_and_hidden_states() -> None:
    onnxruntime, _ = pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    policy, env = make("tiny_envs:ReadsTuple", 1, use_rnn=True, rnn_type="lstm", rnn_size=8)
    program, inputs = trace(policy), policy.examples()
    data = to_onnx(program, inputs, policy(inputs), policy.meanings())
    session = onnxruntime.InferenceSession(data)
    assert {value.shape[0] for value in (*session.get_inputs(), *session.get_outputs())} == {"batch"}
    names = [output.name for output in session.get_outputs()]
    follow(policy, env, lambda inputs: dict(zip(names, session.run(
        names, {name: value.numpy() for name, value in inputs.items()}), strict=True)))


def test_the_command_writes_one_file_that_explains_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), num_workers=1, num_envs_per_worker=4, batch_size=128,
              num_batches_per_epoch=1, serial_mode=True) as appo:
        appo.train(300)
        run_dir = appo.cfg.run_dir
    file = tmp_path / "new" / "policy.pt2"
    assert export.main([str(run_dir), str(file)]) == 0
    out = capsys.readouterr().out
    assert "input obs: torch.float32 ['batch', 4], raw observation of CartPole-v1: Box(" in out
    assert "output actions: torch.int64 ['batch'], most likely action, as the environment takes it: Discrete(2)" in out
    obs, extra = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32), {"about.json": ""}
    got = torch.export.load(str(file), extra_files=extra).module()({"obs": torch.as_tensor(obs)})
    about = json.loads(extra["about.json"])
    assert str(run_dir) in about["policy"]
    assert about.keys() - {"policy"} == {"obs", *got}
    wanted, _ = load(run_dir).predict(obs, deterministic=True)
    assert got["actions"].tolist() == list(wanted)
