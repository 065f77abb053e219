"""Recurrent policies: the learner unrolls what the policy worker computed step by step; memory stays where it belongs.

An episode's first observation may lie anywhere in a trajectory: the hidden state before it is 0, no gradient passes it.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from one_policy import CPU, drain, make_buffers, take_one
from parts import make_config
from torch import Tensor

from config import Config
from envs.flat_spaces import Observation
from envs.vector_env import AgentKind, Step, VectorEnv
from learner import Learner, join_groups
from model import make_model
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from runtime.seeding import consecutive
from shared_buffers import RESUME, SLOTS, SPLIT, WITH_WORKER

T = 12
AGENTS = 6
OBS = {"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32)}
ACTIONS = spaces.MultiDiscrete([3, 2])
KINDS = [("gru", 1), ("gru", 2), ("lstm", 1), ("lstm", 2)]
RECURRENCES = [T, 4, 1]


class ShortEpisodes(VectorEnv):
    """Observations (number / 1000, whether it is an episode's first, two random numbers); episodes of few steps."""

    obs_space: ClassVar = OBS
    action_space = ACTIONS

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.name, self.agents, self.kind_of_agent = "test", ["agent"], [0]
        self.kinds = [AgentKind("test", OBS["obs"], ACTIONS, np.arange(num_envs), squash_actions=False)]

    def reset(self, seed: int | Sequence[int]) -> Step:
        self.ids = np.array([each % 1000 for each in consecutive(seed, self.num_envs)])
        self.rng = np.random.default_rng(self.ids)
        self.done = np.zeros(self.num_envs, bool)
        return self.make_step(~self.done, np.zeros(self.num_envs), self.done)

    def observe(self, is_first: np.ndarray) -> Observation:
        noise = self.rng.normal(size=(self.num_envs, 2))
        return {"obs": np.column_stack([self.ids / 1000, is_first, noise]).astype(np.float32)}

    def make_step(self, is_first: np.ndarray, rewards: np.ndarray, truncated: np.ndarray) -> Step:
        return Step([self.observe(is_first)], rewards, self.done & ~truncated, truncated, ~self.done, is_first,
                    np.full(self.num_envs, np.nan))

    def step(self, actions: list[np.ndarray]) -> Step:
        is_first = self.done
        self.done = ~self.done & (self.rng.random(self.num_envs) < 0.4)
        truncated = self.done & (self.rng.random(self.num_envs) < 0.5)
        return self.make_step(is_first, self.rng.normal(size=self.num_envs), truncated)


def make_cfg(**settings: Any) -> Config:
    return make_config({"env": "test", "device": "cpu", "num_workers": 1, "num_envs_per_worker": AGENTS,
                        "worker_num_splits": 2, "rollout": T, "batch_size": AGENTS * T, "encoder_mlp_layers": (8,),
                        "rnn_size": 7, "use_rnn": True, "normalize_input": False, "normalize_returns": False}, settings)


class Rig:
    """A policy worker and a learner with one model, whose heads are enlarged so that an error shows."""

    def __init__(self, **settings: Any) -> None:
        self.cfg = make_cfg(**settings)
        torch.manual_seed(0)
        model = make_model(self.cfg, OBS, ACTIONS)
        torch.nn.init.normal_(model.policy_head.weight, std=3.0)
        torch.nn.init.normal_(model.value_head.weight, std=3.0)
        self.buffers = make_buffers(self.cfg, OBS, ACTIONS, model)
        self.shared, self.trajectories = self.buffers.policies[0], self.buffers.trajectories_of(0)
        self.policy_worker = PolicyWorker(self.cfg, self.buffers, 0, CPU)
        self.learner = Learner(self.cfg, self.buffers, 0, 0, CPU, None, lambda report: None)
        self.learner.steps_per_pass = 20  # so that every minibatch is evaluated in several parts

    def sample(self, num_trajectories: int) -> list[list[dict[str, Tensor]]]:
        """Run the real rollout worker; return so many consecutive trajectories [T(+1), ...] of each agent."""
        worker = RolloutWorker(self.cfg, self.buffers, 0, lambda report: None, lambda cfg, n: ShortEpisodes(n))
        worker.handle(RESUME, 0)
        torch.manual_seed(1)
        by_agent: dict[int, list[dict[str, Tensor]]] = {}
        while len(by_agent) < AGENTS or min(map(len, by_agent.values())) < num_trajectories:
            self.policy_worker.serve([take_one(self.shared.requests)])
            worker.handle(*take_one(self.buffers.worker_inboxes[0]))
            for _, *slots in drain(self.shared.trajectories_done):
                for slot in slots:
                    data = {name: tensor[slot].clone() for name, tensor in self.trajectories.items()}
                    by_agent.setdefault(round(1000 * float(data["obs/obs"][0, 0])), []).append(data)
                    for tensor in self.trajectories.values():
                        tensor[slot] = 77  # what a slot held before must never be seen again
                self.buffers.slot_place[slots] = WITH_WORKER
                worker.handle(SLOTS, *slots)
        return [by_agent[agent][:num_trajectories] for agent in sorted(by_agent)]

    def act(self, obs: Tensor, new_episode: Tensor, states: Tensor,
            served_at: Callable[[int], Sequence[int]] = lambda t: (0, 1)) -> dict[str, Tensor]:
        """Let the policy worker act on given observations [B, T+1, 4] and episode starts; return the trajectories.

        served_at(t) is called before each step and returns the splits that are served.
        """
        data = self.trajectories
        data["obs/obs"].copy_(obs)
        data["new_episode"].copy_(new_episode)
        data["rnn_states"][:, 0] = states
        self.buffers.awaited_policy.fill_(0)
        self.buffers.agent_slot.copy_(torch.arange(AGENTS).view_as(self.buffers.agent_slot))
        for t in range(T):
            self.buffers.agent_t.fill_(t)
            self.buffers.asked[:] += 1
            self.policy_worker.serve([(SPLIT, split) for split in served_at(t)])
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
        groups = self.learner.sequences(data)
        outputs = list(self.learner.map(self.learner.evaluate,
                                        [part for group in groups for part in self.learner.parts(group)]))
        assert len(outputs) > 1
        steps = [group["new_episode"].numel() for group in groups]
        return tuple(join_groups(torch.cat(rows), steps, len(data["valid"])) for rows in zip(*outputs, strict=True))

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


def stack(trajectories: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in trajectories]) for name in trajectories[0]}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ---- the learner sees what the policy worker saw ---------------------------------------------------------------------


@pytest.mark.parametrize("learner_threads", [1, 2])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize(("rnn_type", "layers"), KINDS)
def test_unrolled_outputs_are_those_of_acting(rnn_type: str, layers: int, recurrence: int,
                                              learner_threads: int) -> None:
    rig = Rig(rnn_type=rnn_type, rnn_num_layers=layers, recurrence=recurrence, learner_threads=learner_threads)
    agents = rig.sample(5)
    begins = stack([part for agent in agents for part in agent])["new_episode"]
    assert begins.any(0).all(), "episodes begin in every row"
    assert not begins.all(0).any()
    for k in range(5):
        data = stack([agent[k] for agent in agents])
        parameters, values = rig.unroll(data)
        assert_close(parameters[:, :-1], data["action_parameters"])
        assert_close(values[:, :-1], data["values"])
        if k < 4:  # the bootstrap observation is the next trajectory's first
            following = stack([agent[k + 1] for agent in agents])
            assert torch.equal(data["obs/obs"][:, -1], following["obs/obs"][:, 0])
            assert_close(parameters[:, -1], following["action_parameters"][:, 0])
            assert_close(values[:, -1], following["values"][:, 0])
    assert parameters.std() > 0.1
    assert values.std() > 0.1

    data = rig.act_randomly(seed=0)
    parameters, values = rig.unroll(data)
    assert_close(parameters[:, :-1], data["action_parameters"])
    assert_close(values[:, :-1], data["values"])


@pytest.mark.parametrize("learner_threads", [1, 2])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize(("rnn_type", "layers"), KINDS)
def test_the_loss_gets_the_outputs_of_acting_and_gives_the_gradients_of_a_loop_over_time(
        rnn_type: str, layers: int, recurrence: int, learner_threads: int) -> None:
    rig = Rig(rnn_type=rnn_type, rnn_num_layers=layers, recurrence=recurrence, learner_threads=learner_threads)
    data = rig.act_randomly(seed=2)
    rng = torch.Generator().manual_seed(3)
    weights = torch.randn(AGENTS, T + 1, 5, generator=rng), torch.randn(AGENTS, T + 1, generator=rng)

    def weighted_sum(parameters: Tensor, values: Tensor) -> Tensor:
        return (weights[0] * parameters).sum() + (weights[1] * values).sum()

    def loss(outputs: tuple[Tensor, Tensor], minibatch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        parameters, values = (output.transpose(0, 1) for output in outputs)
        assert_close(parameters[:, :-1], data["action_parameters"])
        assert_close(values[:, :-1], data["values"])
        return weighted_sum(parameters, values), {"seen": torch.tensor(True)}

    names, tensors = zip(*rig.learner.model.named_parameters(), strict=True)
    expected = torch.autograd.grad(weighted_sum(*rig.step_by_step(data)), tensors)
    rig.learner.loss = loss
    assert rig.learner.backward(data)["seen"]
    for name, tensor, gradient in zip(names, tensors, expected, strict=True):
        assert gradient.any(), name
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-4)


# ---- where gradients go ----------------------------------------------------------------------------------------------


def first_step_seen(new_episode: Tensor, t: int) -> int:
    """Return the step from which on an output at step t depends on its inputs; -1: also on the state before step 0."""
    begins = new_episode[: t + 1].nonzero().flatten().tolist()
    return begins[-1] if begins else -1


@pytest.mark.parametrize(("rnn_type", "layers", "recurrence"), [*((*kind, T) for kind in KINDS), ("gru", 1, 4),
                                                                ("gru", 1, 1)])
def test_no_gradient_of_the_learner_crosses_an_episode_start_or_a_segment(rnn_type: str, layers: int,
                                                                          recurrence: int) -> None:
    rig = Rig(rnn_type=rnn_type, rnn_num_layers=layers, recurrence=recurrence)
    data = rig.act_randomly(seed=4)
    data["obs/obs"].requires_grad_()
    data["rnn_states"].requires_grad_()
    parameters, values = rig.unroll(data)
    for row in range(AGENTS):
        for t in range(T + 1):
            segment = t // recurrence * recurrence if t < T or recurrence < T else 0
            begin = first_step_seen(data["new_episode"][row], t)
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


@pytest.mark.parametrize(("rnn_type", "layers"), KINDS)
def test_each_agent_has_the_hidden_state_of_its_own_past(rnn_type: str, layers: int) -> None:
    """Follow every agent alone, over several trajectories, from its first observation on."""
    rig = Rig(rnn_type=rnn_type, rnn_num_layers=layers)
    agents = rig.sample(4)
    for parts in agents:
        state = torch.zeros(1, rig.learner.model.state_size)
        for k, part in enumerate(parts):
            if k:
                assert torch.equal(part["rnn_states"][0], parts[k - 1]["rnn_states"][-1])
            is_first = part["obs/obs"][:, 1] == 1
            assert torch.equal(part["new_episode"], is_first)
            for t in range(T):
                assert_close(part["rnn_states"][t], state[0])
                state = torch.zeros_like(state) if is_first[t] else state
                with torch.no_grad():
                    parameters, values, state = rig.learner.model(
                        {"obs": part["obs/obs"][t, None]}, state, torch.zeros(1, 1, dtype=torch.bool))
                assert_close(part["action_parameters"][t], parameters[0])
                assert_close(part["values"][t], values[0])
    states = stack([parts[0] for parts in agents])["rnn_states"]
    assert torch.cdist(states[:, -1], states[:, -1]).fill_diagonal_(1).min() > 0.01, "the agents' states differ"


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


# ---- a policy that became a copy of another --------------------------------------------------------------------------


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
def test_agents_forget_the_hidden_states_of_weights_that_were_replaced(rnn_type: str) -> None:
    """From the first row that the copied weights act, and in no other row, the memory is empty; the learner sees it."""
    rig, rng = Rig(rnn_type=rnn_type), torch.Generator().manual_seed(1)
    obs, states = torch.randn(AGENTS, T + 1, 4, generator=rng), torch.randn(AGENTS, rig.learner.model.state_size)
    versions = {3: 1, 7: 2, 9: 3}  # at step 3 and 9 after an ordinary SGD step

    def served_at(t: int) -> list[int]:
        if t == 5:
            rig.buffers.first_version[0] = 2  # announced before the weights are there
        if t in versions:
            rig.shared.weights.publish(rig.learner.model, versions[t])
        return [0] if t == 7 else [0, 1]  # the second split misses a row, and forgets when its turn comes

    data = rig.act(obs, torch.zeros(AGENTS, T + 1, dtype=torch.bool), states, served_at)
    in_first = torch.arange(AGENTS) < rig.cfg.envs_per_split
    assert data["new_episode"][in_first].nonzero()[:, 1].tolist() == [7] * rig.cfg.envs_per_split
    assert data["new_episode"][~in_first].nonzero()[:, 1].tolist() == [8] * rig.cfg.envs_per_split
    parameters, values = rig.unroll({name: tensor[in_first] for name, tensor in data.items()})
    torch.testing.assert_close(values[:, :T], data["values"][in_first], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parameters[:, :T], data["action_parameters"][in_first], rtol=1e-4, atol=1e-4)
    fresh, _, _ = rig.learner.model({"obs": obs[in_first, 7]}, torch.zeros(int(in_first.sum()), states.shape[1]),
                                    torch.zeros(int(in_first.sum()), 1, dtype=torch.bool))
    torch.testing.assert_close(data["action_parameters"][in_first, 7], fresh, rtol=1e-4, atol=1e-4)
