"""Replay: the last transitions of a policy, drawn again and again, the surprising ones more often.

A transition is a row of a trajectory: obs_t, the action, the n-step return, and the observation m <= n steps later,
from which the value of what follows is estimated:

    R_t       = r_t + gamma r_{t+1} + ... + gamma^(m-1) r_{t+m-1}
    discount  = gamma^m, or 0 where the episode was terminated

It ends early with the episode, at a time limit too, and with the trajectory. Transitions are drawn with probability
p_i^alpha / sum_k p_k^alpha, and weigh (N P(i))^-beta in the loss, divided by the largest weight of the minibatch.

Whole trajectories come and go, the oldest first. A stack of images is stored once: its frames lie in a ring, one after
another, and each row only knows where its stack ends.

Sources: arXiv 1511.05952 (prioritized replay), 1803.00933 (Ape-X).

`ReplayFeed`, the feed of the off-policy algorithms, brings transitions into the replay and out of it.

The batcher stores each trajectory as soon as it is finished, frees its slot, and draws datasets of a few minibatches. A
ratio is held exactly, both ways: for each transition that comes in after the warm-up, `replay_ratio` transitions are
trained on. So a slow learner holds the rollout workers back, and slow ones let the learner wait. After the warm-up:

    drawn  <=  replay_ratio * (inserted - replay_warmup)  <  drawn + one dataset

Nothing is too old to be trained on. `policy_lag`, which is reported, is that of when it came in.

The learner alone has the replay. It stays when the policy takes over the weights of another one; a resumed run begins
with an empty one. Read next: `q_learning.py`.
"""

import queue
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from feed import Data, Feed, scale_rewards
from runtime.utils import REPLAY, Values, derive_seed
from shared_buffers import SharedBuffers, Spec, allocate


def n_step(rewards: Tensor, terminated: Tensor, truncated: Tensor, gamma: float,
           n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute R and the discounts of what follows, float32, and after how many steps it follows, int64; all [..., T].

    Args:
        rewards: [..., T] float32. terminated, truncated: [..., T] bool.
    """
    length = rewards.shape[-1]
    returns, discounts = torch.zeros_like(rewards), torch.ones_like(rewards)
    steps = torch.zeros_like(rewards, dtype=torch.int64)
    goes_on = torch.ones_like(terminated)
    for k in range(min(n, length)):
        early = ..., slice(length - k)  # what begins so early that step t + k is in the trajectory
        later = ..., slice(k, None)
        rows = goes_on[early]  # a view
        returns[early] += torch.where(rows, discounts[early] * rewards[later], 0.0)
        discounts[early] *= torch.where(rows, gamma * ~terminated[later], 1.0)
        steps[early] += rows
        rows &= ~(terminated[later] | truncated[later])
    return returns, discounts, steps


class Frames:
    """Stacks of C frames, [..., C], most of which add one frame to those of the stack before: each is stored once.

    Frames lie in a ring, [F, ...]. A stack's name says how many there had been with its last one.
    """

    def __init__(self, num_frames: int, spec: Spec) -> None:
        """Allocate; spec: of a stack."""
        self.depth = spec.shape[-1]
        self.ring = torch.zeros(num_frames, *spec.shape[:-1], dtype=spec.dtype)
        self.count = 0

    def put(self, stacks: Tensor) -> Tensor:
        """Store stacks [L, ..., C] over the oldest frames; return their names, [L] int64."""
        shifted = (stacks[1:, ..., :-1] == stacks[:-1, ..., 1:]).flatten(1).all(1)
        num_new = torch.cat([torch.tensor([self.depth]), torch.where(shifted, 1, self.depth)])
        is_new = torch.arange(self.depth) >= self.depth - num_new[:, None]
        frames = stacks.movedim(-1, 1)[is_new]
        self.ring[(self.count + torch.arange(len(frames))) % len(self.ring)] = frames
        names = self.count + num_new.cumsum(0)
        self.count += len(frames)
        return names

    def get(self, names: Tensor, out: Tensor) -> None:
        """Write stacks [B] into a tensor [B, ..., C], a few at once, which stay in the cache."""
        positions = (names[:, None] - self.depth + torch.arange(self.depth)) % len(self.ring)
        for part, place in zip(out.split(64), positions.split(64), strict=True):
            stacks = self.ring.index_select(0, place.flatten()).unflatten(0, place.shape)
            part.copy_(stacks.movedim(1, -1))

    def has_lost(self, name: int) -> bool:
        """Return whether frames of a stack were stored over."""
        return self.count - (name - self.depth) > len(self.ring)


class Drawn(NamedTuple):
    """Transitions that were drawn, [B]."""

    rows: np.ndarray
    numbers: np.ndarray  # of their trajectories: they tell whether a transition is still there
    weights: Tensor  # float32


class Replay:
    """The newest transitions of one policy, with their priorities. Private to one process.

    A trajectory fills a slot of T + 1 rows; the last one holds only an observation.
    """

    def __init__(self, specs: dict[str, Spec], rollout: int, size: int, depth: int, alpha: float, seed: int) -> None:
        """Allocate.

        Args:
            specs: of the columns of one row.
            rollout: T. size: the transitions of all trajectories.
            depth: of the stacks of frames, oldest first, that images are; 1: they are no stacks.
            alpha: the exponent of priorities; 0 draws all alike.
        """
        self.length = rollout + 1
        self.num_slots = size // rollout
        self.alpha = alpha
        self.priorities = np.zeros((self.num_slots, self.length))  # p^alpha; 0: not to be drawn
        # whole stacks for the first row and one start of an episode; with more starts fewer trajectories fit
        num_frames = max(self.num_slots * (self.length + 2 * (depth - 1)), self.length * depth)
        self.frames = {name: Frames(num_frames, spec) for name, spec in specs.items()
                       if depth > 1 and len(spec.shape) == 3 and spec.shape[-1] == depth and spec.dtype == torch.uint8}
        names = {name: Spec((), torch.int64) for name in self.frames}  # of stacks
        self.columns = allocate(specs | names, self.num_slots * self.length)
        self.oldest = self.count = 0  # numbers of trajectories: the oldest that is there, the next that comes
        self.largest = 1.0  # priority so far
        self.rng = np.random.default_rng(seed)

    def insert(self, trajectories: Data, priorities: Tensor) -> None:
        """Store B trajectories, {name: [B, T(+1), ...]}, not more than fit, in the place of the oldest ones.

        priorities: [B, T] float32, above 0; nan: as large as the largest so far. Rows that are not `valid` are not
        drawn.
        """
        valid = trajectories["valid"]
        slots = np.arange(self.count, self.count + len(valid)) % self.num_slots
        self.count += len(valid)
        self.oldest = max(self.oldest, self.count - self.num_slots)
        for name, column in self.columns.items():
            values = trajectories[name]
            if name in self.frames:
                values = torch.stack([self.frames[name].put(stacks) for stacks in values])
            column.unflatten(0, (self.num_slots, self.length))[slots, : values.shape[1]] = values
        self.largest = max([self.largest, *priorities[valid & ~priorities.isnan()].tolist()])
        raised = priorities.nan_to_num(self.largest).double().numpy() ** self.alpha
        self.priorities[slots, :-1] = np.where(valid, raised, 0.0)
        while any(frames.has_lost(int(self.columns[name][self.oldest % self.num_slots * self.length]))
                  for name, frames in self.frames.items()):
            self.priorities[self.oldest % self.num_slots] = 0.0
            self.oldest += 1

    def draw(self, num_batches: int, batch_size: int, beta: float) -> Drawn:
        """Draw minibatches one after another, each one from equal parts of the sum of priorities."""
        ends = self.priorities.cumsum()  # of 200,000 rows in half the time of a tree of sums
        parts = np.arange(batch_size) + self.rng.random((num_batches, batch_size))
        sums = parts.ravel() * (ends[-1] / batch_size)
        rows = ends.searchsorted(np.minimum(sums, np.nextafter(ends[-1], 0)), "right")
        weights = self.priorities.flat[rows].reshape(num_batches, batch_size) ** -beta  # but for a common factor
        weights = (weights / weights.max(1, keepdims=True)).ravel()
        numbers = self.oldest + (rows // self.length - self.oldest) % self.num_slots
        return Drawn(rows, numbers, torch.from_numpy(weights).float())

    def read(self, drawn: Drawn, out: Data) -> None:
        """Write the columns of transitions into the tensors {name: [B, ...]} that are named after them.

        `following_obs/...` are the observations m steps later.
        """
        rows = torch.from_numpy(drawn.rows)
        for name, tensor in out.items():
            column = name.removeprefix("following_")
            places = rows if column == name else rows + self.columns["steps"][rows]
            if column in self.frames:
                self.frames[column].get(self.columns[column][places], tensor)
            elif column in self.columns:
                torch.index_select(self.columns[column], 0, places, out=tensor)

    def update(self, drawn: Drawn, priorities: np.ndarray) -> None:
        """Set the priorities [B] of transitions that were drawn, where they are still there.

        One that is not finite stays as it is: its SGD step was not taken, or its loss gives none.
        """
        known = np.isfinite(priorities)
        there = known & (drawn.numbers >= self.oldest)
        self.largest = max([self.largest, *priorities[known].tolist()])
        self.priorities.flat[drawn.rows[there]] = priorities[there] ** self.alpha


# ---- the feed ----------------------------------------------------------------------------------------------------


class Dataset:
    """Transitions as trajectories of one step, [B, 1, ...], while they are drawn and while they are trained on."""

    def __init__(self, specs: Mapping[str, Spec], size: int, *, pinned: bool) -> None:
        """Allocate it; specs: of a row of the replay; pinned: in memory that a GPU can read by itself."""
        following = {f"following_{name}": spec for name, spec in specs.items() if name.startswith("obs/")}
        more = {"weights": Spec((), torch.float32)} | (following if "steps" in specs else {})
        rows = allocate(dict(specs) | more, size)
        ones = torch.ones(size, dtype=torch.bool)
        rows |= {"valid": ones, "new_episode": ones, "rnn_states": torch.zeros(size, 0)}  # in every dataset
        self.rows = {name: tensor.pin_memory() for name, tensor in rows.items()} if pinned else rows
        self.tensors = {name: tensor[:, None] for name, tensor in self.rows.items()}
        self.drawn: Drawn | None = None
        self.priorities = np.full(size, np.nan)  # as of the SGD step that each transition took part in

    def set_priorities(self, rows: slice, priorities: Tensor) -> None:
        """Note the priorities [1, n] of transitions."""
        self.priorities[rows] = priorities[0].numpy()


class ReplayFeed(Feed):
    """Puts every transition into a replay, and draws as often as the ratio says."""

    def __init__(self, algorithm: Any, buffers: SharedBuffers, policy: int, learner: int) -> None:
        """Allocate the replay of one learner, and two datasets; algorithm: a `q_learning.ReplayAlgorithm`."""
        cfg, self.algorithm = algorithm.cfg, algorithm
        super().__init__(cfg, buffers, policy)
        self.replay = Replay(algorithm.row_specs(self.specs), cfg.rollout, cfg.replay_size, cfg.env_framestack,
                             cfg.replay_alpha, derive_seed(cfg.seed, REPLAY, buffers.start, policy, learner))
        self.inserted = self.drawn = 0  # transitions
        self.trained: queue.Queue[Dataset] = queue.Queue()  # from training to the batcher

    def make_dataset(self) -> Dataset:
        return Dataset(self.algorithm.row_specs(self.specs), self.cfg.samples_per_dataset, pinned=self.pinned)

    # ---- the batcher ---------------------------------------------------------------------------------------------

    def insert(self, slots: Sequence[int]) -> None:
        """Store trajectories, give their slots back, hand over what may be trained on meanwhile, and wait."""
        self.copy(slots)
        self.free_slots(slots)
        self.deliver_due()

    def copy(self, slots: Sequence[int]) -> None:
        """Put trajectories into the replay."""
        cfg, size = self.cfg, self.replay.num_slots
        for begin in range(0, len(slots), size):
            data = {name: tensor[list(slots[begin : begin + size])] for name, tensor in self.trajectories.items()}
            data["rewards"], data["discounts"], data["steps"] = n_step(
                scale_rewards(cfg, data["rewards"]), data["terminated"], data["truncated"], cfg.gamma, cfg.n_step)
            data["policy_lag"] = self.buffers.policies[self.policy].weights.version - data["policy_version"]
            self.replay.insert(data, self.algorithm.first_priorities(data))
            self.inserted += int(data["valid"].sum())

    def deliver_due(self) -> None:
        """Draw datasets as long as one is due; each waits until training has begun the last step of the one before."""
        while self.is_due() and not self.buffers.stopping:
            self.draw()
            self.deliver(self.filling)
            self.filling = self.returned.get()  # back-pressure

    def is_due(self) -> bool:
        """Return whether the ratio asks for another dataset."""
        cfg = self.cfg
        allowed = cfg.replay_ratio * (self.inserted - cfg.replay_warmup)
        return self.drawn + cfg.samples_per_dataset <= allowed

    def draw(self) -> None:
        """Draw the transitions of the next SGD steps; set the priorities of those that were trained on first."""
        while not self.trained.empty():
            dataset = self.trained.get()
            self.replay.update(dataset.drawn, dataset.priorities)
        cfg, dataset = self.cfg, self.filling
        drawn = self.replay.draw(cfg.num_batches_per_epoch, cfg.batch_size, cfg.replay_beta)
        self.drawn += len(drawn.rows)
        dataset.drawn = drawn
        dataset.priorities.fill(np.nan)
        dataset.rows["weights"].copy_(drawn.weights)
        self.replay.read(drawn, dataset.rows)

    # ---- training ------------------------------------------------------------------------------------------------

    def admit(self, data: Data, sgd_steps: int) -> Tensor:
        return data["policy_lag"]

    def split(self, generator: torch.Generator) -> list[slice]:
        """Return the minibatches one after another: each was drawn by itself."""
        size = self.cfg.batch_size
        return [slice(begin, begin + size) for begin in range(0, self.cfg.samples_per_dataset, size)]

    def release(self, dataset: Dataset) -> None:
        """Take a dataset back; its priorities are set before the next but one is drawn."""
        self.trained.put(dataset)
        super().release(dataset)

    def statistics(self) -> Values:
        return {"replay_transitions": np.count_nonzero(self.replay.priorities)}
