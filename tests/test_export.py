"""`python -m tools.export`: the file acts as the policy does in an evaluation, in the environment's own units."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from appo import APPO
from config import algorithm_class, make_config
from envs.families import make_vector_env
from envs.flat_spaces import unflatten_actions
from evaluate import find_policy
from runtime.checkpoint import load_checkpoint
from runtime.evaluator import Player
from runtime.files import load_saved
from runtime.user_error import UserError
from tools import export
from tools.export import Exported, to_onnx, trace

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
    return Exported(algorithm, model, kind.obs_space, kind.action_space), env


def follow(policy: Exported, env: Any, run: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> None:
    """Play with `Player`; what is exported must say the same of every step."""
    step, kind = env.reset(1), env.kinds[0]
    player = Player(policy.algorithm, policy.model, env, kind.index, deterministic=True)
    fresh, examples = np.ones(env.num_envs, bool), policy.examples()
    for _ in range(STEPS):
        inputs = {name: torch.as_tensor(value).to(examples[name].dtype).clone() for name, value in step.obs[0].items()}
        states = {"rnn_states": player.rnn_states.clone(), "new_episode": torch.as_tensor(fresh)}
        inputs |= states if policy.model.state_size else {}
        got = {name: np.asarray(value) for name, value in run(inputs).items()}
        with torch.no_grad():
            columns, next_states = policy.algorithm.act(policy.model, inputs, states["rnn_states"],
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
    ("tiny_envs:ReadsImage", IMAGE),
    ("tiny_envs:ReadsDict", IMAGE | {"use_rnn": True, "rnn_type": "gru", "rnn_size": 8, "normalize_returns": True}),
    ("tiny_envs:Recalls", {"use_rnn": True, "rnn_type": "lstm", "rnn_size": 8, "rnn_num_layers": 2}),
    ("tiny_envs:MasksInInfo", {}), ("tiny_envs:ActsTuple", {}),
    ("Pendulum-v1", {}), ("tiny_envs:ActsDict", {"adaptive_stddev": True}),
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
    names = [output.name for output in session.get_outputs()]
    follow(policy, env, lambda inputs: dict(zip(names, session.run(
        names, {name: value.numpy() for name, value in inputs.items()}), strict=True)))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with APPO("CartPole-v1", train_dir=str(tmp_path_factory.mktemp("export")), num_workers=1, num_envs_per_worker=4,
              batch_size=128, num_batches_per_epoch=1, serial_mode=True) as appo:
        appo.train(300)
        return appo.cfg.run_dir


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_the_command_writes_one_file_that_explains_itself(run_dir: Path, tmp_path: Path, suffix: str,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / f"policy.{suffix}"
    if suffix == "onnx":
        onnxruntime, _ = pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    assert export.main([str(run_dir), str(file)]) == 0
    out = capsys.readouterr().out
    assert "input obs: float32 [batch, 4], raw observation of CartPole-v1: Box(" in out
    assert "output actions: int64 [batch], most likely action, as the environment takes it: Discrete(2)" in out
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    obs = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    if suffix == "onnx":
        session = onnxruntime.InferenceSession(str(file))
        got = dict(zip([output.name for output in session.get_outputs()], session.run(None, {"obs": obs}), strict=True))
        about = session.get_modelmeta().custom_metadata_map
    else:
        extra = {"about.json": ""}
        got = torch.export.load(str(file), extra_files=extra).module()({"obs": torch.as_tensor(obs)})
        about = json.loads(extra["about.json"])
    assert str(run_dir) in about["policy"]
    assert about.keys() - {"policy"} == {"obs", *got}
    saved = load_saved(run_dir / "config.json")
    policy, env = make(saved.pop("env"), **saved)
    env.close()
    policy.model.load_state_dict(load_checkpoint(find_policy(policy.algorithm.cfg, "best", 0)[0])["model"])
    with torch.no_grad():
        wanted = policy({"obs": torch.as_tensor(obs)})
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def len_encoder(cfg: Any, obs_space: Any) -> nn.Module:
    class Counts(nn.Module):
        out_size = 4

        def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
            return obs["obs"].reshape(len(obs["obs"]), -1)

    return Counts()


def test_code_that_cannot_be_exported_is_one_line() -> None:
    policy, env = make("CartPole-v1", encoder="test_export:len_encoder")
    env.close()
    with pytest.raises(UserError, match=r"cannot be exported.*write x\.shape\[0\], not len\(x\)"):
        trace(policy)


@pytest.mark.parametrize(("run", "file", "hint"), [
    ("", "policy.pt", "must end in .onnx or .pt2"), ("", "policy.onnx", "pip install onnx=="),
    ("..", "policy.pt2", "holds no checkpoint"), ("", "a_file/policy.pt2", "choose another place")])
def test_bad_input_is_one_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, file: str,
                               hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file").touch()
    find_spec = export.importlib.util.find_spec
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnx" else find_spec(name))
    assert export.main([str(run_dir / run), str(tmp_path / file)]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


def test_an_environment_that_only_the_folder_names_is_not_imported(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "policy_00").mkdir(parents=True)
    (tmp_path / "checkpoints" / "policy_00" / "best.pt").touch()
    (tmp_path / "config.json").write_text('{"env": "evil:Env"}')
    assert export.main([str(tmp_path), str(tmp_path / "policy.pt2")]) == 2
    assert "asks to import --env=evil:Env; add --trust_run" in capsys.readouterr().err
