"""The sampler overlaps simulation with inference, and nobody holds up the others; `test_routing.py` has the rest."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from one_policy import CPU, drain, make_buffers, num_waiting, take_one
from parts import make_config
from tiny import Tiny

from envs.vector_env import GymVectorEnv
from model import make_model
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker, SlotPool
from services.recovery import forget_all, forget_worker
from shared_buffers import HANDED_IN, PAUSE, RESUME, SLOTS, SPLIT, TAKEN, WITH_WORKER, Inbox


class Rig:
    """One rollout worker and one policy worker; the test hands on every message."""

    def __init__(self, **settings: Any) -> None:
        self.cfg = make_config({"env": "tiny:Tiny", "num_workers": 1, "num_envs_per_worker": 6, "rollout": 8,
                                "batch_size": 48, "encoder_mlp_layers": (8,), "normalize_input": False}, settings)
        torch.manual_seed(0)
        both = {"obs": Tiny.observation_space}, Tiny.action_space
        self.buffers = make_buffers(self.cfg, *both, make_model(self.cfg, *both))
        self.slot_place, self.rows = self.buffers.slot_place, self.buffers.storage[0]
        self.requests, self.answers = self.buffers.policies[0].requests, self.buffers.worker_inboxes[0]
        self.done = self.buffers.policies[0].trajectories_done
        self.server = PolicyWorker(self.cfg, self.buffers, 0, CPU)
        self.worker = self.begin(0)

    def begin(self, worker: int) -> RolloutWorker:
        """Make a rollout worker, which samples."""
        made = RolloutWorker(self.cfg, self.buffers, worker, lambda report: None)
        assert self.requests.empty(), "nothing is sampled before the first RESUME"
        made.handle(RESUME, 0)
        return made

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
def test_double_buffering_steps_one_split_while_the_others_wait_for_actions(
        monkeypatch: pytest.MonkeyPatch, splits: int, expected: int) -> None:
    """An event tape: with two splits a request is open during every step; with one split, during none."""
    rig, step, open_during_step = Rig(worker_num_splits=splits), GymVectorEnv.step, []
    monkeypatch.setattr(GymVectorEnv, "step", lambda env, actions: (
        open_during_step.append(num_waiting(rig.requests)), step(env, actions))[1])
    for _ in range(60):
        rig.answer_one()
        rig.give_back()
    assert set(open_during_step) == {expected}


@pytest.mark.parametrize("async_rl", [False, True])
def test_a_split_without_free_slots_waits_for_the_learner_and_does_not_hold_up_the_others(async_rl: bool) -> None:
    rig = Rig(async_rl=async_rl)
    ahead, behind = (take_one(rig.requests) for _ in range(2))
    for message in (ahead, behind):  # one split finishes its trajectories before the other one has begun
        rig.requests.put(message)
        while not rig.requests.empty():
            rig.answer_one()
    assert sorted(rig.give_back()) == list(range(6)), "every slot is full, then all wait"
    assert num_waiting(rig.requests) == 2


def test_a_pause_holds_all_requests_back_and_loses_nothing() -> None:
    rig = Rig()
    rig.worker.handle(PAUSE, 0)
    for _ in range(2):
        rig.answer_one()
    assert rig.requests.empty()
    rig.worker.handle(RESUME, 0)
    assert sorted(take_one(rig.requests) for _ in range(2)) == [(SPLIT, 0), (SPLIT, 1)]


def test_a_lost_life_ends_what_counts_and_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, two are lost with the second of three steps. The step after the last only resets."""
    monkeypatch.setattr(Tiny, "ale", property(lambda env: Mock(lives=lambda: 3 if env.t < 2 else 1)), raising=False)
    rig, reports = Rig(worker_num_splits=1), []
    rig.worker.report = reports.append
    for _ in range(8):
        rig.answer_one()
    assert rig.rows["terminated"][0].int().tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
    assert rig.rows["new_episode"][0, :8].int().tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    assert [length for _, _, length, _ in reports[0][1]] == [3] * 6


# ---- a rollout worker that takes the place of another ----------------------------------------------------------------


def test_nobody_acts_for_a_worker_that_is_gone_and_an_answer_held_back_never_reaches_its_successor() -> None:
    rig = Rig()
    answered, late = (take_one(rig.requests) for _ in range(2))
    rig.server.serve([answered])
    held_back = take_one(rig.answers)
    forget_worker(rig.buffers, 0)
    rig.worker = rig.begin(0)
    before = {name: tensor.clone() for name, tensor in rig.rows.items()}
    rig.server.serve([late])
    rig.worker.handle(*held_back)
    assert rig.answers.empty()
    assert int(rig.buffers.env_steps[0]) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in rig.rows.items())
    for _ in range(2):
        rig.answer_one()
    assert int(rig.buffers.env_steps[0]) == 6, "its own answers count"


def test_a_worker_that_dies_while_its_actions_are_computed_gets_none_and_the_others_get_theirs() -> None:
    rig = Rig(num_workers=2, worker_num_splits=1)
    requests = drain(rig.requests)
    rig.begin(1)
    requests += drain(rig.requests)
    compute = rig.server.compute
    rig.server.compute = lambda *args: (forget_worker(rig.buffers, 0), compute(*args))[1]
    versions = rig.rows["policy_version"].fill_(-1)
    rig.server.serve(requests)
    assert rig.answers.empty()
    assert take_one(rig.buffers.worker_inboxes[1]) == (SPLIT, 1)
    assert versions[:, 0].tolist() == [-1] * 6 + [0] * 6


def test_what_all_processes_had_under_way_is_lost_and_counted() -> None:
    rig = Rig(num_workers=2)
    while not (full := drain(rig.done)):
        rig.answer_one()
    rig.done.put(full[0])
    under_way = rig.cfg.rollout * sum(len(slots) for _, *slots in full) + int(rig.buffers.agent_t.sum())
    assert forget_all(rig.buffers, rig.cfg.rollout) == under_way
    assert rig.done.empty()
    assert rig.requests.empty()
    assert (rig.slot_place == WITH_WORKER).all()
    assert int(rig.buffers.restarts) == 1


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_takes_the_place_of_another_waits_for_what_the_learner_has_and_hands_in_again() -> None:
    place, done = np.array([WITH_WORKER, HANDED_IN, TAKEN, WITH_WORKER]), Inbox(10)
    pool = SlotPool(range(4), place, done)
    assert drain(done) == [(SLOTS, 1)]
    assert [pool.take(may_go_on=False)[0] for _ in range(2)] == [0, 3]
    assert not pool.suffices(1, 0)
    pool.receive(2)
    assert not pool.suffices(1, 0), "a message of before: the learner still has it"
    place[2] = WITH_WORKER
    pool.receive(2)
    pool.receive(2)
    assert pool.suffices(1, 0)
    assert not pool.suffices(2, 0), "a message may come twice"


@pytest.mark.parametrize("seed", range(20))
def test_every_slot_is_in_exactly_one_place(seed: int) -> None:
    """Random agents take, fill, leave and hand in; the learner gives back. The oracle: a set for each place.

    Unfinished slots are handed in only where too few are free or on their way.
    """
    rng, pool = np.random.default_rng(seed), SlotPool(range(8), np.full(8, WITH_WORKER), Inbox(1000))
    held: set[int] = set()
    away: set[int] = set()
    left: dict[int, int] = {}  # slot: row
    for _ in range(1000):
        choice, may_go_on = rng.integers(4), bool(rng.integers(2))
        free = 8 - len(held) - len(away) - len(left)
        assert pool.suffices(free, len(left))
        assert not pool.suffices(free + 1, 0)
        assert not pool.suffices(free, len(left) + 1)
        if choice == 0 and (free or (left and may_go_on)):
            slot, t = pool.take(may_go_on=may_go_on)
            assert slot not in held | away
            assert t == (left.pop(slot) if may_go_on and left else 0)
            assert slot not in left
            held.add(slot)
        elif choice == 1 and held:
            slot, t = held.pop(), int(rng.integers(3))
            pool.leave(slot, t)
            if t:
                left[slot] = t
        elif choice == 2 and held:
            pool.hand_in([slot := held.pop()])
            away.add(slot)
        elif choice == 3 and away:
            pool.place[slot := away.pop()] = WITH_WORKER
            pool.receive(slot)
        num_empty, before = int(rng.integers(1, 4)), len(left)
        taken = pool.take_out(num_empty)
        assert len(taken) == min(max(num_empty + len(held) + before - 8, 0), before)
        for slot, t in taken:
            assert left.pop(slot) == t
            pool.hand_in([slot])
            away.add(slot)
        assert set(np.flatnonzero(pool.place == HANDED_IN)) == away
