"""Vector environments of gymnasium in every autoreset mode: the same transitions, ends and last observations."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from batches import Batch, length_of
from gymnasium import spaces
from parts import ONE_STEP, make_config
from torch import Tensor

import appo
from algorithm import Algorithm
from algorithms.impala import VTraceGradient
from appo import AsyncPPO
from envs.families import make_vector_env
from envs.flat_spaces import AgentKind
from evaluate import evaluation_seeds, play
from runtime.utils import EnvironmentFailure, UserError, reference
from trainer import APPO
from vtrace import gae

SMALL = {"num_workers": 2, "num_envs_per_worker": 6, "worker_num_splits": 2, "rollout": 8, "batch_size": 96,
         "encoder_mlp_layers": (8,), "rnn_size": 4, "device": "cpu", "normalize_input": False, "serial_mode": True,
         "normalize_returns": False, "obs_scale": 8.0, **ONE_STEP}
MODES = [{"mode": "NEXT_STEP"}, {"mode": "SAME_STEP"}, {"mode": "SAME_STEP", "last": "final_observation"},
         {"mode": "SAME_STEP", "one_by_one": True}, {"mode": "DISABLED"}, {"mode": "SAME_STEP", "as_tensors": True},
         {"mode": "DISABLED", "as_tensors": True}, {"mode": "SAME_STEP", "last": "forgotten"}]


class Witness(AsyncPPO):
    """Keeps every dataset that it learns from."""

    seen: ClassVar[list[dict[str, Tensor]]]

    def prepare(self, model: torch.nn.Module, data: dict[str, Tensor], ask: Any) -> dict[str, Tensor]:
        self.seen.append({name: column.clone() for name, column in data.items()})
        return super().prepare(model, data, ask)


@pytest.mark.parametrize(("arguments", "num_policies", "async_rl"), [
    *((each, 1, True) for each in MODES), *((each, 1, False) for each in MODES),
    *((MODES[i], 2, True) for i in (0, 1, 4))])
def test_transitions_ends_and_last_observations_are_those_of_the_episodes(
        arguments: dict[str, Any], num_policies: int, async_rl: bool, tmp_path: Path) -> None:
    Witness.seen = []
    make = functools.partial(Batch, pay=0.125, **arguments)
    with APPO(make, algo=Witness, train_dir=str(tmp_path), async_rl=async_rl, num_policies=num_policies,
              **SMALL) as system:
        system.train(3000)
        decisions = system.env_steps
    rows: dict[int, list[tuple[int, int]]] = {}
    truncated = 0
    for data in Witness.seen:
        for b, t in data["valid"].nonzero().tolist():
            at = {name: column[b] for name, column in data.items()}
            number, episode, step = at["obs/obs"][t].int().tolist()
            is_last = step + 1 == length_of(number, episode)
            assert at["new_episode"][t] == (step == 0)
            assert at["rewards"][t] == step + 1 + at["actions"][t, 0] / 8
            assert at["terminated"][t] == (is_last and episode % 3 < 2)
            if arguments.get("last") == "forgotten" and is_last:
                assert at["obs/obs"][t + 1].int().tolist() == [number, episode, step]
            else:
                assert at["obs/obs"][t + 1].int().tolist() == [number, episode, step + 1]
            if is_last and episode % 3 == 2:
                assert at["truncated"][t]
                truncated += 1
            elif at["truncated"][t]:
                assert num_policies > 1 or not async_rl, "cut: in turns the longest of a split ends all"
            rows.setdefault(number, []).append((episode, step))
    assert truncated > 20
    for number, own in rows.items():
        episodes = range(max(own)[0] + 1)
        expected = [(episode, step) for episode in episodes for step in range(length_of(number, episode))]
        if num_policies == 1:
            assert own == expected[: len(own)], "no row is lost, and none comes twice"
        else:
            assert len(set(own)) == len(own)
            assert {*own} <= {*expected}
    assert sum(map(len, rows.values())) > 0.7 * decisions


def check_values(model: torch.nn.Module, values: Tensor, data: dict[str, Tensor]) -> None:
    """Compare values [T+1, B] with those of a walk through each trajectory, one observation at a time."""
    states, rows = data["rnn_states"][0], []
    for obs, new_episode in zip(data["obs/obs"], data["new_episode"], strict=True):
        _, value, states = model(model.normalize({"obs": obs}), states, new_episode[:, None])
        rows.append(value)
    counts = torch.cat([data["valid"], torch.ones_like(data["valid"][:1])])
    counts[1:] |= data["truncated"] & data["valid"]  # from these is bootstrapped
    torch.testing.assert_close(values[counts], torch.stack(rows)[counts])


@pytest.mark.parametrize("use_rnn", [False, True])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize(("algo", "settings"), [
    (AsyncPPO, {"with_vtrace": False, "ppo_clip_value": 0.2}), (AsyncPPO, {}), (VTraceGradient, {})])
def test_values_are_those_of_the_true_last_observations(algo: type[Algorithm], settings: dict[str, Any], mode: str,
                                                        use_rnn: bool, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[Tensor] = []
    monkeypatch.setattr(appo, "gae", lambda *args: predicted.append(args[1]) or gae(*args))

    class Checked(algo):
        def prepare(self, model: torch.nn.Module, data: dict[str, Tensor], ask: Any) -> dict[str, Tensor]:
            found = super().prepare(model, data, ask)
            if predicted:
                check_values(model, predicted.pop(), {name: column.transpose(0, 1) for name, column in data.items()})
            return found

        def targets(self, model: torch.nn.Module, outputs: Any, data: dict[str, Tensor]) -> dict[str, Tensor]:
            check_values(model, outputs[1], data)
            checked.append(1)
            return super().targets(model, outputs, data)

    checked: list[int] = []
    with APPO(functools.partial(Batch, mode=mode), algo=Checked, train_dir=str(tmp_path), async_rl=False,
              use_rnn=use_rnn, **SMALL | settings) as system:
        system.train(1000)
        assert all(parameter.isfinite().all() for parameter in system.get_parameters()[0].values())
    assert len(checked) > 5


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_an_evaluation_counts_whole_episodes(mode: str) -> None:
    env = make_vector_env(make_config({"env": reference(functools.partial(Batch, mode=mode))}), 3)
    numbers = env.reset(evaluation_seeds(5, 3)).obs[0]["obs"][:, 0]
    idle = SimpleNamespace(act=lambda step, fresh, actions: None)
    found = sorted((each.env, *each.returns, *each.lengths) for ended in play(env, [idle], 12, 5) for each in ended)
    lengths = [(i, length_of(int(number), episode)) for i, number in enumerate(numbers) for episode in range(4)]
    assert found == sorted((i, n * (n + 1) / 2, n) for i, n in lengths)


@pytest.mark.parametrize("masked", [True, False])
def test_masks_of_a_batch_and_of_one_after_the_other_are_the_same(masked: bool) -> None:
    masks = np.array([[1, 0, 1], [0, 1, 1]], np.int8)
    kind = AgentKind(spaces.Box(0, 1, (2,)), spaces.Discrete(3), np.arange(2), squash=False)
    expected = masks.astype(bool) if masked else np.ones((2, 3), bool)
    np.testing.assert_array_equal(kind.join_masks(masks if masked else [None, None], 2), expected)
    np.testing.assert_array_equal(kind.join_masks([*masks] if masked else [], 2), expected)


def test_a_run_says_once_that_last_observations_are_missing(tmp_path: Path) -> None:
    make = functools.partial(Batch, mode="SAME_STEP", last="forgotten")
    with APPO(make, train_dir=str(tmp_path), experiment="run", **SMALL) as system:
        system.train(1000)
    assert (tmp_path / "run" / "log.txt").read_text().count("gives no final_obs") == 1


@pytest.mark.parametrize(("changed", "what"), [
    ({"metadata": {}}, "autoreset_mode"),
    ({"rewards": np.zeros((2, 1), np.float32)}, "shape"),
    ({"obs": np.zeros((2, 4), np.float32)}, "observation 'obs'"),
])
def test_what_a_batch_cannot_return_is_one_line(changed: dict[str, Any], what: str) -> None:
    def make(num_envs: int) -> Batch:
        batch = Batch(num_envs)
        vars(batch).update(changed)
        return batch

    with pytest.raises((UserError, EnvironmentFailure), match=what):
        env = make_vector_env(make_config({"env": reference(make)}), 2)
        env.reset(0)
        env.step(env.no_actions())
