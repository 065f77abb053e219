"""Recurrent policies: the learner unrolls what the policy worker computed step by step; memory stays where it belongs.

An episode's first observation may lie anywhere in a trajectory: the hidden state before it is 0, no gradient passes it.
That each agent has the hidden state of its own past, also from trajectory to trajectory, is in `test_routing.py`.
"""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from one_policy import CPU, make_buffers
from parts import make_config
from torch import Tensor

from learner import Learner
from model import make_model
from policy_worker import PolicyWorker
from shared_buffers import SPLIT

T = 12
AGENTS = 6
OBS = {"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32)}
ACTIONS = spaces.MultiDiscrete([3, 2])
KINDS = [("gru", 1), ("gru", 2), ("lstm", 1), ("lstm", 2)]
RECURRENCES = [T, 4, 1]


class Rig:
    """A policy worker and a learner with one model, whose heads are enlarged so that an error shows."""

    def __init__(self, **settings: Any) -> None:
        self.cfg = make_config({
            "env": "test", "device": "cpu", "num_workers": 1, "num_envs_per_worker": AGENTS, "worker_num_splits": 2,
            "rollout": T, "batch_size": AGENTS * T, "encoder_mlp_layers": (8,), "rnn_size": 7, "use_rnn": True,
            "normalize_input": False, "normalize_returns": False}, settings)
        torch.manual_seed(0)
        model = make_model(self.cfg, OBS, ACTIONS)
        torch.nn.init.normal_(model.policy_head.weight, std=3.0)
        torch.nn.init.normal_(model.value_head.weight, std=3.0)
        self.buffers = make_buffers(self.cfg, OBS, ACTIONS, model)
        self.shared, self.trajectories = self.buffers.policies[0], self.buffers.trajectories_of(0)
        self.policy_worker = PolicyWorker(self.cfg, self.buffers, 0, CPU)
        self.learner = Learner(self.cfg, self.buffers, 0, 0, CPU, None, lambda report: None)
        self.learner.steps_per_pass = 20  # so that every minibatch is evaluated in several parts

    def act(self, obs: Tensor, new_episode: Tensor, states: Tensor) -> dict[str, Tensor]:
        """Let the policy worker act on given observations [B, T+1, 4] and episode starts; return the trajectories."""
        data = self.trajectories
        data["obs/obs"].copy_(obs)
        data["new_episode"].copy_(new_episode)
        data["rnn_states"][:, 0] = states
        self.buffers.awaited_policy.fill_(0)
        self.buffers.agent_slot.copy_(torch.arange(AGENTS).view_as(self.buffers.agent_slot))
        for t in range(T):
            self.buffers.agent_t.fill_(t)
            self.policy_worker.serve([(SPLIT, split) for split in (0, 1)])
        return {name: tensor.clone() for name, tensor in data.items()}

    def act_randomly(self, seed: int) -> dict[str, Tensor]:
        """Act on random observations, from random states; episodes begin anywhere, also twice in a row."""
        rng = torch.Generator().manual_seed(seed)
        new_episode = torch.rand(AGENTS, T + 1, generator=rng) < 0.3
        new_episode[0] = False
        new_episode[1] = True
        new_episode[2, [0, 5, 6, T]] = True
        states = torch.randn(AGENTS, self.learner.model.state_size, generator=rng)
        return self.act(torch.randn(AGENTS, T + 1, 4, generator=rng), new_episode, states)

    def unroll(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Evaluate trajectories as the learner does: parameters [B, T+1, D], values [B, T+1]."""
        return tuple(rows.transpose(0, 1) for rows in self.learner.unroll(data))

    def step_by_step(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the same from a loop over time, with gradients through as many steps as the learner's."""
        model, outputs = self.learner.model, []
        for t in range(T + 1):
            if t % self.cfg.bptt_steps == 0 and (t < T or self.cfg.bptt_steps < T):
                states = data["rnn_states"][:, t]
            obs = model.normalize({"obs": data["obs/obs"][:, t]})
            states = states.masked_fill(data["new_episode"][:, t, None], 0.0)
            parameters, values, states = model(obs, states, torch.zeros(AGENTS, 1, dtype=torch.bool))
            outputs.append((parameters, values))
        return tuple(torch.stack(rows, 1) for rows in zip(*outputs, strict=True))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ---- the learner sees what the policy worker saw ---------------------------------------------------------------------


@pytest.mark.parametrize("learner_threads", [1, 2])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize(("rnn_type", "layers"), KINDS)
def test_unrolled_outputs_are_those_of_acting_and_their_gradients_those_of_a_loop_over_time(
        rnn_type: str, layers: int, recurrence: int, learner_threads: int) -> None:
    rig = Rig(rnn_type=rnn_type, rnn_num_layers=layers, recurrence=recurrence, learner_threads=learner_threads)
    data = rig.act_randomly(seed=2)
    rng = torch.Generator().manual_seed(3)
    weights = torch.randn(AGENTS, T + 1, 5, generator=rng), torch.randn(AGENTS, T + 1, generator=rng)
    unrolled, slow = rig.unroll(data), rig.step_by_step(data)
    for name, mine, looped in zip(("action_parameters", "values"), unrolled, slow, strict=True):
        assert_close(mine[:, :-1], data[name])
        assert_close(mine, looped)  # the bootstrap observation too
        assert mine.std() > 0.1
    names, tensors = zip(*rig.learner.model.named_parameters(), strict=True)
    loss, expected_loss = (sum((weight * x).sum() for weight, x in zip(weights, outputs, strict=True))
                           for outputs in (unrolled, slow))
    expected = torch.autograd.grad(expected_loss, tensors)
    loss.backward()
    for name, tensor, gradient in zip(names, tensors, expected, strict=True):
        assert gradient.any(), name
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-4)


# ---- where gradients go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rnn_type", "layers", "recurrence"), [*((*kind, T) for kind in KINDS), ("gru", 1, 4),
                                                                ("gru", 1, 1)])
def test_no_gradient_of_the_learner_crosses_an_episode_start_or_a_segment(rnn_type: str, layers: int,
                                                                          recurrence: int) -> None:
    rig = Rig(rnn_type=rnn_type, rnn_num_layers=layers, recurrence=recurrence)
    rig.learner.steps_per_pass = 1000  # gradients of inputs do not go through parts
    data = rig.act_randomly(seed=4)
    data["obs/obs"].requires_grad_()
    data["rnn_states"].requires_grad_()
    parameters, values = rig.unroll(data)
    for row in range(AGENTS):
        for t in range(T + 1):
            segment = t // recurrence * recurrence if t < T or recurrence < T else 0
            begins = data["new_episode"][row, : t + 1].nonzero().flatten().tolist()
            begin = begins[-1] if begins else -1  # -1: it also depends on the state before step 0
            expected = torch.zeros(AGENTS, T + 1, dtype=torch.bool)
            expected[row, max(begin, segment) : t + 1] = True
            states_expected = torch.zeros(AGENTS, T + 1, dtype=torch.bool)
            states_expected[row, segment] = begin < segment
            for output in (parameters[row, t].sum(), values[row, t]):
                gradient, state_gradient = torch.autograd.grad(output, (data["obs/obs"], data["rnn_states"]),
                                                               retain_graph=True)
                assert torch.equal(gradient.any(-1), expected), (row, t)
                assert torch.equal(state_gradient.any(-1), states_expected), (row, t)


# ---- whose state it is -----------------------------------------------------------------------------------------------


def test_a_hidden_state_is_forgotten_whatever_it_holds() -> None:
    """The state before an episode's first observation may be anything, even what is not finite."""
    rig = Rig(rnn_type="lstm")
    data = rig.act_randomly(seed=6)
    data["new_episode"][:, [0, 4, T]] = True
    data = rig.act(data["obs/obs"], data["new_episode"], data["rnn_states"][:, 0])
    forgotten = data["rnn_states"].clone()
    forgotten[data["new_episode"]] = torch.nan
    for recurrence in RECURRENCES:
        rig = Rig(rnn_type="lstm", recurrence=recurrence)
        for mine, theirs in zip(rig.unroll(data), rig.unroll(data | {"rnn_states": forgotten}), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.isfinite().all()
