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
from runtime.recovery import begin_again, forget_worker
from shared_buffers import PAUSE, RESUME, SLOTS, SPLIT, WITH_WORKER


class Rig:
    """One rollout worker and one policy worker; the test hands on every message."""

    def __init__(self, on_step: Callable[[], None] = lambda: None, **settings: Any) -> None:
        cfg = make_config({"env": "counting", "num_workers": 1, "num_envs_per_worker": 6, "rollout": 8,
                           "batch_size": 48, "encoder_mlp_layers": (8,), "normalize_input": False}, settings)
        torch.manual_seed(0)
        model = make_model(cfg, CountingEnv.obs_space, CountingEnv.action_space)
        buffers = make_buffers(cfg, CountingEnv.obs_space, CountingEnv.action_space, model)
        self.cfg, self.buffers, self.slot_place = cfg, buffers, buffers.slot_place
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


# ---- a rollout worker that takes the place of another ----------------------------------------------------------------


def test_nobody_acts_for_a_worker_that_is_gone_and_an_answer_held_back_never_reaches_its_successor() -> None:
    rig = Rig()
    rig.worker.handle(RESUME, 0)
    answered, late = (take_one(rig.requests) for _ in range(2))
    rig.server.serve([answered])
    held_back = take_one(rig.answers)
    forget_worker(rig.buffers, 0)
    successor = RolloutWorker(rig.cfg, rig.buffers, 0, lambda report: None, lambda cfg, n: CountingEnv(n, lambda: None))
    successor.handle(RESUME, 0)
    before = {name: tensor.clone() for name, tensor in rig.buffers.storage[0].items()}
    rig.server.serve([late])
    successor.handle(*held_back)
    assert rig.answers.empty()
    assert int(rig.buffers.env_steps[0]) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in rig.buffers.storage[0].items())
    rig.worker = successor
    for _ in range(2):
        rig.answer_one()
    assert int(rig.buffers.env_steps[0]) == 6, "its own answers count"


def test_a_worker_that_dies_while_its_actions_are_computed_gets_none_and_the_others_get_theirs() -> None:
    rig = Rig(num_workers=2, worker_num_splits=1)
    other = RolloutWorker(rig.cfg, rig.buffers, 1, lambda report: None, lambda cfg, n: CountingEnv(n, lambda: None))
    for worker in (rig.worker, other):
        worker.handle(RESUME, 0)
    compute = rig.server.compute
    rig.server.compute = lambda *args: (forget_worker(rig.buffers, 0), compute(*args))[1]
    versions = rig.buffers.storage[0]["policy_version"].fill_(-1)
    rig.server.serve(drain(rig.requests))
    assert rig.answers.empty()
    assert take_one(rig.buffers.worker_inboxes[1]) == (SPLIT, 1)
    assert versions[:, 0].tolist() == [-1] * 6 + [0] * 6


def test_what_all_processes_had_under_way_is_lost_and_counted() -> None:
    rig = Rig(num_workers=2)
    rig.worker.handle(RESUME, 0)
    while not (full := drain(rig.done)):
        rig.answer_one()
    rig.done.put(full[0])
    under_way = rig.cfg.rollout * sum(len(slots) for _, *slots in full) + int(rig.buffers.agent_t.sum())
    assert begin_again(rig.buffers, rig.cfg.rollout) == under_way
    assert rig.done.empty()
    assert rig.requests.empty()
    assert (rig.slot_place == WITH_WORKER).all()
    assert int(rig.buffers.restarts) == 1
