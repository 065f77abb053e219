"""Recurrent policies: the learner unrolls what the policy worker computed step by step; memory stays where it belongs.

An episode's first observation may lie anywhere in a trajectory: the hidden state before it is 0, no gradient passes it.
That each agent has the hidden state of its own past, also from trajectory to trajectory, is in `test_routing.py`.
"""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from rig import Rig, clone
from torch import Tensor

T = 12
AGENTS = 6
MEMORIES: list[dict[str, Any]] = [{"rnn_type": name, "rnn_num_layers": number} for name in ("gru", "lstm")
                                  for number in (1, 2)]
RECURRENCES = [T, 4, 1]


class Recurrent(Rig):
    """A policy worker and a learner whose heads are enlarged, so that an error shows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(spaces.MultiDiscrete([3, 2]), **{
            "num_envs_per_worker": AGENTS, "worker_num_splits": 2, "rollout": T, "batch_size": AGENTS * T,
            "rnn_size": 7, "use_rnn": True, "serial_mode": False, "normalize_input": False,
            "normalize_returns": False} | settings)
        for head in (self.learner.model.policy_head, self.learner.model.value_head):
            torch.nn.init.normal_(head.weight, std=3.0)
        self.shared.weights.publish(self.learner.model, 1)
        self.learner.steps_per_pass = 20  # so that every minibatch is evaluated in several parts

    def act_randomly(self, seed: int) -> dict[str, Tensor]:
        """Act on random observations, from random states; episodes begin anywhere, also twice in a row."""
        rng, data = torch.Generator().manual_seed(seed), self.trajectories
        data["obs/obs"].copy_(torch.randn(data["obs/obs"].shape, generator=rng))
        data["new_episode"].copy_(torch.rand(AGENTS, T + 1, generator=rng) < 0.3)
        data["new_episode"][0] = False
        data["new_episode"][1] = True
        data["new_episode"][2, [0, 5, 6, T]] = True
        data["rnn_states"][:, 0] = torch.randn(AGENTS, self.learner.model.state_size, generator=rng)
        self.play()
        return clone(data)

    def step_by_step(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the learner's `unroll` does, from a loop over time, with gradients through as many steps."""
        model, outputs, length = self.learner.model, [], self.cfg.recurrence or T
        for t in range(T + 1):
            if t % length == 0 and (t < T or length < T):
                states = data["rnn_states"][:, t]
            obs = model.normalize({"obs": data["obs/obs"][:, t]})
            states = states.masked_fill(data["new_episode"][:, t, None], 0.0)
            parameters, values, states = model(obs, states, torch.zeros(AGENTS, 1, dtype=torch.bool))
            outputs.append((parameters, values))
        return tuple(torch.stack(rows) for rows in zip(*outputs, strict=True))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ---- the learner sees what the policy worker saw ---------------------------------------------------------------------


@pytest.mark.parametrize("learner_threads", [1, 2])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("memory", [*MEMORIES, {"use_rnn": False}], ids=str)
def test_unrolled_outputs_are_those_of_acting_and_their_gradients_those_of_a_loop_over_time(
        memory: dict[str, Any], recurrence: int, learner_threads: int) -> None:
    rig = Recurrent(recurrence=recurrence, learner_threads=learner_threads, **memory)
    data = rig.act_randomly(seed=2)
    rng = torch.Generator().manual_seed(3)
    weights = torch.randn(T + 1, AGENTS, 5, generator=rng), torch.randn(T + 1, AGENTS, generator=rng)
    unrolled, slow = rig.learner.unroll(data), rig.step_by_step(data)
    for name, mine, looped in zip(("action_parameters", "values"), unrolled, slow, strict=True):
        assert_close(mine[:-1].transpose(0, 1), data[name])
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


@pytest.mark.parametrize(("memory", "recurrence"), [*((memory, T) for memory in MEMORIES), (MEMORIES[0], 4),
                                                    (MEMORIES[0], 1)])
def test_no_gradient_of_the_learner_crosses_an_episode_start_or_a_segment(memory: dict[str, Any],
                                                                          recurrence: int) -> None:
    rig = Recurrent(recurrence=recurrence, **memory)
    rig.learner.steps_per_pass = 1000  # gradients of inputs do not go through parts
    data = rig.act_randomly(seed=4)
    data["obs/obs"].requires_grad_()
    data["rnn_states"].requires_grad_()
    parameters, values = rig.learner.unroll(data)
    for row in range(AGENTS):
        for t in range(T + 1):
            segment = t // recurrence * recurrence if t < T or recurrence < T else 0
            begins = data["new_episode"][row, : t + 1].nonzero().flatten().tolist()
            begin = begins[-1] if begins else -1  # -1: it also depends on the state before step 0
            expected = torch.zeros(AGENTS, T + 1, dtype=torch.bool)
            expected[row, max(begin, segment) : t + 1] = True
            states_expected = torch.zeros(AGENTS, T + 1, dtype=torch.bool)
            states_expected[row, segment] = begin < segment
            for output in (parameters[t, row].sum(), values[t, row]):
                gradient, state_gradient = torch.autograd.grad(output, (data["obs/obs"], data["rnn_states"]),
                                                               retain_graph=True)
                assert torch.equal(gradient.any(-1), expected), (row, t)
                assert torch.equal(state_gradient.any(-1), states_expected), (row, t)


# ---- whose state it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_hidden_state_is_forgotten_whatever_it_holds(recurrence: int) -> None:
    """The state before an episode's first observation may be anything, even what is not finite."""
    rig = Recurrent(rnn_type="lstm", recurrence=recurrence)
    data = rig.act_randomly(seed=6)
    forgotten = data["rnn_states"].masked_fill(data["new_episode"][..., None], torch.nan)
    outputs, others = (rig.learner.unroll(data | {"rnn_states": states}) for states in (data["rnn_states"], forgotten))
    for mine, theirs in zip(outputs, others, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()
