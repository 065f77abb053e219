"""`python -m tools.export`: the file acts as the policy does in an evaluation, in the environment's own units."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector.utils import batch_space
from parts import SMALL, make_config, observe
from torch import nn

from envs.families import probe
from envs.flat_spaces import ACTION_MASK, plain_parts
from evaluate import Policy, load
from tools import export
from tools.export import Exported, to_onnx, trace
from trainer import APPO

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about itself
STEPS = 12
IMAGE = {"encoder_conv_architecture": "convnet_small", "encoder_conv_mlp_layers": (16,)}
Data = dict[str, torch.Tensor]


def make(env: str, **settings: Any) -> tuple[Policy, Data]:
    """Make a policy with random weights and moved statistics; return it with random observations and action masks."""
    cfg = make_config({"env": env, "encoder_mlp_layers": (64, 64)} | settings)
    torch.manual_seed(0)
    policy = Policy(cfg, probe(cfg), 0, torch.device("cpu"))
    nn.init.normal_(policy.model.policy_head.weight)  # actions differ
    seen = batch_space(policy.kind.space, STEPS)
    seen.seed(0)
    mask = policy.kind.obs_space.get(ACTION_MASK)
    masks = () if mask is None else np.random.default_rng(0).integers(2, size=(STEPS, *mask.shape))
    flat = policy.kind.flatten(seen.sample(), masks)
    leaves = {name: torch.as_tensor(value) for name, value in flat.items()}
    observe(policy.model, leaves)
    return policy, leaves


def part_of(value: Any, path: str) -> Any:
    """Return a part of a nested observation or action."""
    for key in path.split("/") if path else ():
        value = value[int(key) if isinstance(value, tuple) else key]
    return value


def check(exported: Exported, run: Callable[[Data], dict[str, Any]], policy: Policy, leaves: Data) -> None:
    """Compare what is exported with what the policy does for all observations at once."""
    states, new_episode = torch.randn(STEPS, policy.state_size), torch.arange(STEPS) % 3 == 0
    inputs = leaves | ({"rnn_states": states, "new_episode": new_episode} if policy.state_size else {})
    examples = exported.examples()
    assert inputs.keys() == examples.keys()
    got = {name: np.asarray(value) for name, value in
           run({name: value.to(examples[name].dtype) for name, value in inputs.items()}).items()}
    with torch.no_grad():
        columns, next_states = policy.algorithm.act(policy.model, leaves, states, new_episode, deterministic=True)
    actions = policy.kind.actions(columns.pop("actions").numpy())
    expected = columns | ({"next_rnn_states": next_states} if policy.state_size else {})
    for path, part in plain_parts(policy.kind.action_space).items():
        name = f"actions/{path}" if path else "actions"
        expected[name] = part_of(actions, path)
        assert got[name].dtype == part.dtype
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("env", "settings"), [
    ("tiny_envs:ReadsImage", IMAGE), ("tiny_envs:ReadsGrayImage", IMAGE), ("tiny_envs:ReadsDiscrete", {}),
    ("tiny_envs:ReadsMultiDiscrete", {}), ("tiny_envs:MasksInObs", {}), ("tiny_envs:ActsMultiDiscrete", {}),
    ("tiny_envs:ReadsDict", IMAGE | {"use_rnn": True, "rnn_type": "gru", "rnn_size": 8, "normalize_returns": True}),
    ("tiny_envs:Recalls", {"use_rnn": True, "rnn_type": "lstm", "rnn_size": 8, "rnn_num_layers": 2}),
    ("tiny_envs:ReadsText", {}), ("tiny_envs:MasksOfParts", {}), ("tiny_envs:ActsDict", {"adaptive_stddev": True}),
    ("tiny_envs:ActsBox", {"squash_actions": True}), ("tiny_envs:MasksInInfo", {"algo": "apex"}),
    ("Pendulum-v1", {"algo": "pql"})], ids=str)
def test_a_graph_acts_as_the_policy_does(env: str, settings: dict[str, Any]) -> None:
    policy, leaves = make(env, **settings)
    exported = Exported(policy)
    check(exported, trace(exported).module(), policy, leaves)


def test_onnx_keeps_names_and_hidden_states() -> None:
    onnxruntime, _ = pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    policy, leaves = make("tiny_envs:ReadsTuple", use_rnn=True, rnn_type="lstm", rnn_size=8)
    exported = Exported(policy)
    inputs = exported.examples()
    session = onnxruntime.InferenceSession(to_onnx(trace(exported), inputs, exported(inputs)))
    names = [output.name for output in session.get_outputs()]
    check(exported, lambda inputs: dict(zip(names, session.run(
        names, {name: value.numpy() for name, value in inputs.items()}), strict=True)), policy, leaves)


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), serial_mode=True, **SMALL) as appo:
        appo.train(300)
    run_dir, file = appo.cfg.run_dir, tmp_path / "policy.pt2"
    assert export.main([str(run_dir), str(file)]) == 0
    assert "actions: torch.int64 ['batch']" in capsys.readouterr().out
    obs = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    got = torch.export.load(str(file)).module()({"obs": torch.as_tensor(obs)})
    assert got["actions"].tolist() == list(load(run_dir).predict(obs, deterministic=True)[0])
