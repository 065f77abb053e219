"""The sampler overlaps simulation with inference, and nobody holds up the others; `test_routing.py` has the rest."""

from typing import Any

import torch
from counting_env import CountingEnv, make_counting_env
from one_policy import CPU, drain, make_buffers, num_waiting, take_one

from config import Config, make_config
from model import make_model
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from shared_buffers import PAUSE, RESUME, SLOTS, SPLIT, SharedBuffers

T = 8


def make_cfg(**settings: Any) -> Config:
    return make_config({"env": "counting", "num_workers": 2, "num_envs_per_worker": 6, "rollout": T, "batch_size": 96,
                        "encoder_mlp_layers": (8,), "normalize_input": False}, settings)


def counting_buffers(cfg: Config) -> SharedBuffers:
    torch.manual_seed(0)
    model = make_model(cfg, CountingEnv.obs_space, CountingEnv.action_space)
    return make_buffers(cfg, CountingEnv.obs_space, CountingEnv.action_space, model)


def test_double_buffering_steps_one_split_while_the_other_waits_for_actions() -> None:
    """An event tape: with two splits a request is open during every step; with one split, during none."""
    for splits, expected in ((1, 0), (2, 1), (3, 2)):
        cfg = make_cfg(num_workers=1, worker_num_splits=splits, batch_size=8)
        buffers, open_during_step = counting_buffers(cfg), []
        shared = buffers.policies[0]
        server = PolicyWorker(cfg, buffers, 0, CPU)

        def make_env(cfg: Config, num_envs: int, requests: Any = shared.requests, tape: list = open_during_step) -> Any:
            return CountingEnv(num_envs, lambda: tape.append(num_waiting(requests)))

        worker = RolloutWorker(cfg, buffers, 0, lambda report: None, make_env)
        worker.handle(RESUME, 0)
        for _ in range(60):
            server.serve([take_one(shared.requests)])  # the policy worker answers one split ...
            worker.handle(*take_one(buffers.worker_inboxes[0]))  # ... which is stepped while others' requests are open
            while not shared.trajectories_done.empty():
                worker.handle(*take_one(shared.trajectories_done))
        assert set(open_during_step) == {expected}


def test_a_split_without_free_slots_does_not_hold_up_the_others() -> None:
    cfg = make_cfg(num_workers=1, async_rl=False, batch_size=48)
    buffers = counting_buffers(cfg)
    shared = buffers.policies[0]
    server = PolicyWorker(cfg, buffers, 0, CPU)
    worker = RolloutWorker(cfg, buffers, 0, lambda report: None, make_counting_env)
    worker.handle(RESUME, 0)
    ahead, behind = (take_one(shared.requests) for _ in range(2))
    shared.requests.put(ahead)  # one split finishes its trajectories before the other one has begun
    for late in ([], [behind]):
        for message in late:
            shared.requests.put(message)
        while not shared.requests.empty():
            server.serve([take_one(shared.requests)])
            worker.handle(*take_one(buffers.worker_inboxes[0]))
    done = [slot for _, *slots in drain(shared.trajectories_done) for slot in slots]
    assert sorted(done) == list(range(6)), (
        "every split finished its trajectories, then all wait for the learner")
    worker.handle(SLOTS, *done)
    assert num_waiting(shared.requests) == 2


def test_a_pause_holds_all_requests_back_and_loses_nothing() -> None:
    cfg = make_cfg(num_workers=1, batch_size=8)
    buffers = counting_buffers(cfg)
    shared = buffers.policies[0]
    server = PolicyWorker(cfg, buffers, 0, CPU)
    worker = RolloutWorker(cfg, buffers, 0, lambda report: None, make_counting_env)
    assert shared.requests.empty(), "nothing is sampled before the first RESUME"
    worker.handle(RESUME, 0)
    worker.handle(PAUSE, 0)
    while not shared.requests.empty():
        server.serve([take_one(shared.requests)])
    while not buffers.worker_inboxes[0].empty():
        worker.handle(*take_one(buffers.worker_inboxes[0]))
    assert shared.requests.empty()
    worker.handle(RESUME, 0)
    assert sorted(take_one(shared.requests) for _ in range(2)) == [(SPLIT, 0), (SPLIT, 1)]
