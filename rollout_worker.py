"""The rollout worker: steps environments, holds no policy.

It owns `worker_num_splits` splits, each a vector environment. While policy workers compute the actions of one split
it steps another (double-buffered sampling, Sample Factory section 3.2): it sleeps only when no split is ready. All
data is written in place into the agents' trajectory slots; messages are described in `shared_buffers.py`.

Invariant: a split is in exactly one place: in a request or its answer, being stepped, or in `waiting` (for free
slots, or for the end of a pause). Read next: `policy_worker.py`.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from config import Config
from envs import make_vector_env
from flat_spaces import Observation
from shared_buffers import PAUSE, RESUME, SLOT, SPLIT, STOP, SharedBuffers


class Split:
    """One vector environment and the running episodes of its agents."""

    def __init__(self, cfg: Config, index: int, buffers: SharedBuffers, make_env: Callable) -> None:
        self.index = index
        self.env = make_env(cfg, cfg.envs_per_split)
        self.slots = buffers.agent_slot[index].numpy()  # [N], shared with the policy workers
        self.t = buffers.agent_t[index].numpy()  # [N], likewise
        self.obs: Observation = self.env.reset(cfg.seed + index * cfg.envs_per_split)
        self.needs_slots = True  # the next observation begins new trajectories
        self.last_states = np.zeros((cfg.envs_per_split, buffers.specs["rnn_states"].shape[1]), np.float32)
        self.resetting = np.zeros(cfg.envs_per_split, bool)  # the episode is over: the next step only resets
        self.new_episode = np.ones(cfg.envs_per_split, bool)  # `obs` is an episode's first
        self.episode_return = np.zeros(cfg.envs_per_split)
        self.episode_length = np.zeros(cfg.envs_per_split, np.int64)


class RolloutWorker:
    """Steps its splits whenever their actions are there. One process; shares `SharedBuffers`."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, worker: int, report: Callable[[tuple], None],
                 make_env: Callable = make_vector_env) -> None:
        """Make and reset the environments; report(("episodes", [(return, length), ...])) tells finished ones."""
        self.cfg, self.buffers, self.report = cfg, buffers, report
        self.inbox = buffers.inboxes[worker]
        self.rows = {name: tensor.numpy() for name, tensor in buffers.trajectories.items()}  # [S, T(+1), ...] views
        self.env_steps = buffers.env_steps[worker : worker + 1].numpy()
        first = worker * cfg.slots_per_worker
        self.free_slots = deque(range(first, first + cfg.slots_per_worker))
        self.paused = True
        splits = range(worker * cfg.worker_num_splits, (worker + 1) * cfg.worker_num_splits)
        self.splits = {index: Split(cfg, index, buffers, make_env) for index in splits}
        self.waiting = deque(self.splits.values())

    def run(self) -> None:
        """Serve messages until told to stop."""
        while (message := self.inbox.get())[0] != STOP:
            self.handle(*message)
        self.close()

    def handle(self, kind: int, index: int) -> None:
        """Act on one message of the inbox, then ask for all actions that can be asked for."""
        if kind == SPLIT:
            self.step(self.splits[index])
        elif kind == SLOT:
            self.free_slots.append(index)
        else:
            assert kind in (PAUSE, RESUME), kind
            self.paused = kind == PAUSE
        self.send_requests()

    def step(self, split: Split) -> None:
        """Step a split's environments with the actions in its trajectories and store what happened."""
        slots, t, rows = split.slots, split.t, self.rows
        obs, rewards, terminated, truncated = split.env.step(rows["actions"][slots, t])
        valid = ~split.resetting
        rows["rewards"][slots, t] = rewards
        rows["terminated"][slots, t] = terminated
        rows["truncated"][slots, t] = truncated
        rows["valid"][slots, t] = valid
        split.obs, split.new_episode = obs, split.resetting
        self.store_observations(split, t + 1)
        self.count_episodes(split, rewards, terminated | truncated, valid)
        split.resetting = terminated | truncated
        t += 1
        if t[0] == self.cfg.rollout:
            self.finish_trajectories(split)
        self.waiting.append(split)

    def store_observations(self, split: Split, t: np.ndarray | int) -> None:
        for name, value in split.obs.items():
            self.rows[f"obs/{name}"][split.slots, t] = value
        self.rows["new_episode"][split.slots, t] = split.new_episode

    def count_episodes(self, split: Split, rewards: np.ndarray, done: np.ndarray, valid: np.ndarray) -> None:
        """Add to the true returns and lengths (in env_steps) of the episodes; report those that ended."""
        self.env_steps += valid.sum()
        split.episode_return += rewards * valid
        split.episode_length += valid
        if done.any():
            self.report(("episodes", [(float(split.episode_return[i]), int(split.episode_length[i]))
                                      for i in np.flatnonzero(done)]))
            split.episode_return[done] = 0.0
            split.episode_length[done] = 0

    def finish_trajectories(self, split: Split) -> None:
        """Hand the split's full slots to the learner."""
        split.last_states = self.rows["rnn_states"][split.slots, -1]
        for slot in split.slots.tolist():
            self.buffers.trajectories_done.put((SLOT, slot))
        split.needs_slots = True

    def send_requests(self) -> None:
        """Ask for the actions of every waiting split that has slots, or for which there are enough free ones.

        A split without slots does not hold up the others: in synchronous mode they must finish their trajectories
        before the learner can free any slot.
        """
        if self.paused:
            return
        for _ in range(len(self.waiting)):
            split = self.waiting.popleft()
            if split.needs_slots and len(self.free_slots) < len(split.slots):
                self.waiting.append(split)
                continue
            if split.needs_slots:
                self.begin_trajectories(split)
            self.buffers.requests.put((SPLIT, split.index))

    def begin_trajectories(self, split: Split) -> None:
        """Take free slots; their first row is the last one of the trajectories before."""
        split.slots[:] = [self.free_slots.popleft() for _ in split.slots]
        split.t[:] = 0
        self.store_observations(split, 0)
        self.rows["rnn_states"][split.slots, 0] = split.last_states
        split.needs_slots = False

    def close(self) -> None:
        """Close the environments."""
        for split in self.splits.values():
            split.env.close()
