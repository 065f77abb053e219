"""The sampler loses, duplicates and misplaces nothing, and overlaps simulation with inference."""

import itertools
import math
import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch
from counting_env import CountingEnv, episode_length, make_counting_env, reward_code
from one_policy import CPU, make_buffers

from config import Config, make_config
from model import make_model
from policy_worker import PolicyWorker
from rollout_worker import RolloutWorker
from shared_buffers import PAUSE, RESUME, SLOTS, SPLIT, STOP, SharedBuffers

T = 8


class Threads:
    """Stands in for a multiprocessing context: the same components, run by threads with real queues and locks."""

    SimpleQueue = queue.SimpleQueue
    Lock = threading.Lock


def make_cfg(**settings: Any) -> Config:
    return make_config({"env": "counting", "num_workers": 2, "num_envs_per_worker": 6, "rollout": T, "batch_size": 96,
                        "encoder_mlp_layers": (8,), "normalize_input": False}, settings)


def counting_buffers(cfg: Config) -> SharedBuffers:
    torch.manual_seed(0)
    model = make_model(cfg, CountingEnv.obs_space, CountingEnv.action_space)
    return make_buffers(cfg, CountingEnv.obs_space, CountingEnv.action_space, model, Threads)


def collect(cfg: Config, num_trajectories: int) -> tuple[list[dict[str, np.ndarray]], list[tuple[float, int]]]:
    """Run rollout and policy workers in threads; return trajectories in order of completion, and episodes."""
    buffers, episodes = counting_buffers(cfg), []
    shared, slots = buffers.policies[0], buffers.trajectories_of(0)
    workers = [RolloutWorker(cfg, buffers, worker, lambda report: episodes.extend(report[1]), make_counting_env)
               for worker in range(cfg.num_workers)]
    servers = [PolicyWorker(cfg, buffers, 0, CPU) for _ in range(cfg.policy_workers_per_policy)]
    threads = [threading.Thread(target=component.run) for component in (*workers, *servers)]
    for thread in threads:
        thread.start()
    for inbox in buffers.inboxes:
        inbox.put((RESUME, 0))
    trajectories = []
    while len(trajectories) < num_trajectories:
        kind, *done = shared.trajectories_done.get(timeout=30)
        assert kind == SLOTS
        for slot in done:
            trajectories.append({name: tensor[slot].numpy().copy() for name, tensor in slots.items()})
            for tensor in slots.values():
                tensor[slot].fill_(77)  # what a slot held before must never be seen again
        buffers.inboxes[buffers.worker_of_slot(done[0])].put((SLOTS, *done))
    for messages, count in ((shared.requests, len(servers)), *((inbox, 1) for inbox in buffers.inboxes)):
        for _ in range(count):
            messages.put((STOP, 0))
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(policy == 0 and math.isnan(objective) for policy, _, _, objective in episodes)
    return trajectories, [(episode_return, length) for _, episode_return, length, _ in episodes]


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("policy_workers", [1, 3])
def test_no_transition_is_lost_duplicated_or_misplaced(splits: int, policy_workers: int) -> None:
    cfg = make_cfg(worker_num_splits=splits, policy_workers_per_policy=policy_workers)
    num_agents = cfg.num_workers * cfg.num_envs_per_worker
    trajectories, episodes = collect(cfg, num_trajectories=num_agents * 12)
    by_env: dict[int, list[dict[str, np.ndarray]]] = {}
    for trajectory in trajectories:
        env = trajectory["obs/obs"][:, 0]
        assert (env == env[0]).all(), "a slot holds one agent's steps only"
        by_env.setdefault(int(env[0]), []).append(trajectory)
    assert len(by_env) == num_agents
    for env, parts in by_env.items():
        check_one_environment(env, parts)
    expected = {reward_free_length(env, episode) for env in by_env for episode in range(64)}
    assert {length for _, length in episodes} <= expected


def reward_free_length(env: int, episode: int) -> int:
    return int(episode_length(np.array(env), np.array(episode)))


def check_one_environment(env: int, parts: list[dict[str, np.ndarray]]) -> None:
    """Replay the environment's rule over all its trajectories, in order, and compare every row."""
    episode, t, resetting = 0, 0, False
    for part in parts:
        for row in range(T):
            obs, next_obs = part["obs/obs"][row], part["obs/obs"][row + 1]
            assert tuple(obs) == (env, episode, t)
            assert part["new_episode"][row] == (t == 0)
            (action,) = part["actions"][row]
            assert action in range(5)
            assert part["valid"][row] == (not resetting)
            if resetting:
                assert part["rewards"][row] == 0
                episode, t, resetting = episode + 1, 0, False
                assert not part["terminated"][row]
                assert not part["truncated"][row]
            else:
                assert part["rewards"][row] == reward_code(np.array(env), np.array(episode), np.array(t), action)
                t += 1
                resetting = t == episode_length(np.array(env), np.array(episode))
                assert part["terminated"][row] == (resetting and episode % 3 != 2)
                assert part["truncated"][row] == (resetting and episode % 3 == 2)
            assert tuple(next_obs) == (env, episode, t)
            assert part["new_episode"][row + 1] == (t == 0)


@pytest.mark.parametrize("policy_workers", [1, 3])
def test_actions_and_values_belong_to_the_observation_of_their_row(policy_workers: int) -> None:
    # normalized values count as 0 until the learner has seen the first returns
    cfg = make_cfg(policy_workers_per_policy=policy_workers, normalize_returns=False)
    trajectories, _ = collect(cfg, num_trajectories=48)
    torch.manual_seed(0)
    model = make_model(cfg, CountingEnv.obs_space, CountingEnv.action_space)
    for part in trajectories:
        obs = {"obs": torch.from_numpy(part["obs/obs"][:-1])}
        parameters, values, _ = model(model.normalize(obs, torch.float32), torch.zeros(T, 0),
                                      torch.from_numpy(part["new_episode"][:-1, None]))
        np.testing.assert_allclose(part["values"], values.detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(part["action_parameters"], parameters.detach().numpy(), rtol=1e-4, atol=1e-5)
        log_probs = parameters.log_softmax(-1).gather(1, torch.from_numpy(part["actions"]).long()).squeeze(1)
        np.testing.assert_allclose(part["log_probs"], log_probs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_reported_episodes_have_their_true_return_and_length() -> None:
    cfg = make_cfg(num_workers=1, num_envs_per_worker=2, worker_num_splits=1, batch_size=8)
    trajectories, episodes = collect(cfg, num_trajectories=40)
    true: list[tuple[float, int]] = []
    for env in {float(part["obs/obs"][0, 0]) for part in trajectories}:
        parts = [part for part in trajectories if part["obs/obs"][0, 0] == env]
        rewards, valid = (np.concatenate([part[name] for part in parts]) for name in ("rewards", "valid"))
        done = np.concatenate([part["terminated"] | part["truncated"] for part in parts])
        starts = [0, *(np.flatnonzero(done) + 1)]
        true += [(float((rewards * valid)[a:b].sum()), int(valid[a:b].sum()))
                 for a, b in itertools.pairwise(starts)]
    assert set(true) <= set(episodes)


def test_double_buffering_steps_one_split_while_the_other_waits_for_actions() -> None:
    """An event tape: with two splits a request is open during every step; with one split, during none."""
    for splits, expected in ((1, 0), (2, 1), (3, 2)):
        cfg = make_cfg(num_workers=1, worker_num_splits=splits, batch_size=8)
        buffers, open_during_step = counting_buffers(cfg), []
        shared = buffers.policies[0]
        server = PolicyWorker(cfg, buffers, 0, CPU)

        def make_env(cfg: Config, num_envs: int, requests: Any = shared.requests, tape: list = open_during_step) -> Any:
            return CountingEnv(num_envs, lambda: tape.append(requests.qsize()))

        worker = RolloutWorker(cfg, buffers, 0, lambda report: None, make_env)
        worker.handle(RESUME, 0)
        for _ in range(60):
            server.serve([shared.requests.get_nowait()])  # the policy worker answers one split ...
            worker.handle(*buffers.inboxes[0].get_nowait())  # ... which is stepped while the others' requests are open
            while not shared.trajectories_done.empty():
                worker.handle(*shared.trajectories_done.get())
        assert set(open_during_step) == {expected}


def test_a_split_without_free_slots_does_not_hold_up_the_others() -> None:
    cfg = make_cfg(num_workers=1, async_rl=False, batch_size=48)
    buffers = counting_buffers(cfg)
    shared = buffers.policies[0]
    server = PolicyWorker(cfg, buffers, 0, CPU)
    worker = RolloutWorker(cfg, buffers, 0, lambda report: None, make_counting_env)
    worker.handle(RESUME, 0)
    ahead, behind = (shared.requests.get_nowait() for _ in range(2))
    shared.requests.put(ahead)  # one split finishes its trajectories before the other one has begun
    for late in ([], [behind]):
        for message in late:
            shared.requests.put(message)
        while not shared.requests.empty():
            server.serve([shared.requests.get_nowait()])
            worker.handle(*buffers.inboxes[0].get_nowait())
    done = [shared.trajectories_done.get_nowait()[1:] for _ in range(shared.trajectories_done.qsize())]
    assert sorted(slot for slots in done for slot in slots) == list(range(6)), (
        "every split finished its trajectories, then all wait for the learner")
    for slots in done:
        worker.handle(SLOTS, *slots)
    assert shared.requests.qsize() == 2


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
        server.serve([shared.requests.get_nowait()])
    while not buffers.inboxes[0].empty():
        worker.handle(*buffers.inboxes[0].get_nowait())
    assert shared.requests.empty()
    worker.handle(RESUME, 0)
    assert sorted(shared.requests.get_nowait() for _ in range(2)) == [(SPLIT, 0), (SPLIT, 1)]
