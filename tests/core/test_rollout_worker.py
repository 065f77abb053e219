"""The sampler overlaps simulation with inference, and nobody holds up the others; `test_routing.py` has the rest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting_env import CountingEnv
from one_policy import CPU, drain, make_buffers, num_waiting, take_one
from parts import make_config

from model import make_model
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from shared_buffers import PAUSE, RESUME, SLOTS, SPLIT, WITH_WORKER


class Rig:
    """One rollout worker and one policy worker; the test hands on every message."""

    def __init__(self, on_step: Callable[[], None] = lambda: None, **settings: Any) -> None:
        cfg = make_config({"env": "counting", "num_workers": 1, "num_envs_per_worker": 6, "rollout": 8,
                           "batch_size": 48, "encoder_mlp_layers": (8,), "normalize_input": False}, settings)
        torch.manual_seed(0)
        model = make_model(cfg, CountingEnv.obs_space, CountingEnv.action_space)
        buffers = make_buffers(cfg, CountingEnv.obs_space, CountingEnv.action_space, model)
        self.slot_place = buffers.slot_place
        self.requests, self.answers = buffers.policies[0].requests, buffers.worker_inboxes[0]
        self.done = buffers.policies[0].trajectories_done
        self.server = PolicyWorker(cfg, buffers, 0, CPU)
        self.worker = RolloutWorker(cfg, buffers, 0, lambda report: None, lambda cfg, n: CountingEnv(n, on_step))

    def answer_one(self) -> None:
        """Let the policy worker answer the oldest request, and the rollout worker step that split."""
        self.server.serve([take_one(self.requests)])
        self.worker.handle(*take_one(self.answers))

    def give_back(self) -> list[int]:
        """Give all complete trajectories back to the rollout worker; return their slots."""
        slots = [slot for _, *slots in drain(self.done) for slot in slots]
        self.slot_place[slots] = WITH_WORKER
        self.worker.handle(SLOTS, *slots)
        return slots


@pytest.mark.parametrize(("splits", "expected"), [(1, 0), (2, 1), (3, 2)])
def test_double_buffering_steps_one_split_while_the_others_wait_for_actions(splits: int, expected: int) -> None:
    """An event tape: with two splits a request is open during every step; with one split, during none."""
    open_during_step: list[int] = []
    rig = Rig(lambda: open_during_step.append(num_waiting(rig.requests)), worker_num_splits=splits)
    rig.worker.handle(RESUME, 0)
    for _ in range(60):
        rig.answer_one()
        rig.give_back()
    assert set(open_during_step) == {expected}


@pytest.mark.parametrize("async_rl", [False, True])
def test_a_split_without_free_slots_waits_for_the_learner_and_does_not_hold_up_the_others(async_rl: bool) -> None:
    rig = Rig(async_rl=async_rl)
    rig.worker.handle(RESUME, 0)
    ahead, behind = (take_one(rig.requests) for _ in range(2))
    for message in (ahead, behind):  # one split finishes its trajectories before the other one has begun
        rig.requests.put(message)
        while not rig.requests.empty():
            rig.answer_one()
    assert sorted(rig.give_back()) == list(range(6)), "every slot is full, then all wait"
    assert num_waiting(rig.requests) == 2


def test_a_pause_holds_all_requests_back_and_loses_nothing() -> None:
    rig = Rig()
    assert rig.requests.empty(), "nothing is sampled before the first RESUME"
    rig.worker.handle(RESUME, 0)
    rig.worker.handle(PAUSE, 0)
    for _ in range(2):
        rig.answer_one()
    assert rig.requests.empty()
    rig.worker.handle(RESUME, 0)
    assert sorted(take_one(rig.requests) for _ in range(2)) == [(SPLIT, 0), (SPLIT, 1)]
