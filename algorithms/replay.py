"""Replay: the last transitions of a policy, drawn again and again, the surprising ones more often.

A transition is a row of a trajectory: obs_t, the action, the n-step return, and the observation m <= n steps later,
from which the value of what follows is estimated:

    R_t       = r_t + gamma r_{t+1} + ... + gamma^(m-1) r_{t+m-1}
    discount  = gamma^m, or 0 where the episode was terminated

It ends early with the episode, at a time limit too, and with the trajectory. Transitions are drawn with probability
p_i^alpha / sum_k p_k^alpha, and weigh (N P(i))^-beta in the loss, divided by the largest weight of the minibatch.

Whole trajectories come and go, the oldest first. A stack of images is stored once: its frames lie in a ring, one after
another, and each row only knows where its stack ends. `layout` lists all memory that a replay takes.

Sources: arXiv 1511.05952 (prioritized replay), 1803.00933 (Ape-X). Read next: `replay_feed.py`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_buffers import Spec

Data = dict[str, Tensor]
SPARE_STARTS = 1  # there is room for so many starts of episodes in each trajectory; with more, fewer are kept
EMPTY = -1  # the number of the trajectory in a slot that is empty


def n_step(rewards: Tensor, terminated: Tensor, truncated: Tensor, gamma: float,
           n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute R [T] float32, the discounts of what follows [T] float32, and after how many steps it follows [T] int64.

    Args:
        rewards: [T] float32. terminated, truncated: [T] bool.
    """
    length = len(rewards)
    returns, discounts = torch.zeros_like(rewards), torch.ones_like(rewards)
    steps = torch.zeros_like(rewards, dtype=torch.int64)
    goes_on = torch.ones_like(terminated)
    for k in range(min(n, length)):
        rows = goes_on[: length - k]  # views: what begins so early that step t + k is in the trajectory
        returns[: length - k] += torch.where(rows, discounts[: length - k] * rewards[k:], 0.0)
        discounts[: length - k] *= torch.where(rows, gamma * ~terminated[k:], 1.0)
        steps[: length - k] += rows
        rows &= ~(terminated[k:] | truncated[k:])
    return returns, discounts, steps


class SumTree:
    """Numbers in the leaves of a binary tree whose nodes hold the sums below them: draws in proportion.

    A draw takes logarithmic time. Vectorized.
    """

    def __init__(self, nodes: np.ndarray) -> None:
        """Use an array of `num_nodes`, float64; the root is 1, the children of i are 2 i and 2 i + 1."""
        self.nodes, self.first_leaf = nodes, len(nodes) // 2
        self.depth = self.first_leaf.bit_length() - 1

    @staticmethod
    def num_nodes(num_leaves: int) -> int:
        """Return how large an array so many leaves need."""
        return 2 * 2 ** math.ceil(math.log2(max(2, num_leaves)))

    @property
    def total(self) -> float:
        return float(self.nodes[1])

    def __getitem__(self, leaves: np.ndarray) -> np.ndarray:
        return self.nodes[self.first_leaf + leaves]

    def __setitem__(self, leaves: np.ndarray, values: np.ndarray | float) -> None:
        nodes = self.first_leaf + leaves
        self.nodes[nodes] = values  # of a leaf that is named twice the last one
        for _ in range(self.depth):
            nodes = np.unique(nodes // 2)
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Return the leaves in which running sums [N], within [0, total), fall; never one that holds 0."""
        nodes, sums = np.ones(len(sums), dtype=np.int64), sums.copy()
        for _ in range(self.depth):
            left = self.nodes[2 * nodes]
            goes_right = (sums >= left) & (self.nodes[2 * nodes + 1] > 0)  # a sum may be rounded beyond the last one
            sums -= left * goes_right
            nodes = 2 * nodes + goes_right
        return nodes - self.first_leaf


class Frames:
    """Stacks of C frames each, [rows, ..., C], in which a row mostly adds one frame to those of the row before."""

    def __init__(self, frames: Tensor, ends: Tensor, depth: int) -> None:
        """Use a ring of frames [F, ...]; ends [rows] int64: how many frames there had been with each stack's last."""
        self.frames, self.ends, self.depth = frames, ends, depth
        self.count = 0

    def new_frames(self, stacks: Tensor) -> Tensor:
        """Count the frames that each row of stacks [L, ..., C] adds to those of the row before."""
        shifted = (stacks[1:, ..., :-1] == stacks[:-1, ..., 1:]).flatten(1).all(1)
        return torch.cat([torch.tensor([self.depth]), torch.where(shifted, 1, self.depth)])

    def put(self, row: int, stacks: Tensor, new: Tensor) -> None:
        """Store stacks [L, ..., C] in L rows from this one on; new: the frames that each adds."""
        is_new = torch.arange(self.depth) >= self.depth - new[:, None]
        frames = stacks.movedim(-1, 1)[is_new]
        self.frames[(self.count + torch.arange(len(frames))) % len(self.frames)] = frames
        self.ends[row : row + len(stacks)] = self.count + new.cumsum(0)
        self.count += len(frames)

    def get(self, rows: Tensor, out: Tensor) -> None:
        """Write the stacks of rows [B] into a tensor [B, ..., C], a few at once, which stay in the cache."""
        positions = (self.ends[rows][:, None] - self.depth + torch.arange(self.depth)) % len(self.frames)
        for part, place in zip(out.split(64), positions.split(64), strict=True):
            stacks = self.frames.index_select(0, place.flatten()).unflatten(0, place.shape)
            part.copy_(stacks.movedim(1, -1))

    def has_room(self, row: int, num_new: int) -> bool:
        """Tell whether so many frames fit beside all from those of a row on."""
        return self.count + num_new - (int(self.ends[row]) - self.depth) <= len(self.frames)


def layout(specs: dict[str, Spec], rollout: int, size: int, stacked: set[str]) -> dict[str, Spec]:
    """List the arrays of a replay; arguments as of `Replay`."""
    num_slots = size // rollout
    arrays = {"tree": Spec((SumTree.num_nodes(num_slots * rollout),), torch.float64),
              "numbers": Spec((num_slots,), torch.int64)}
    for name, spec in specs.items():
        rows = num_slots * (rollout + name.startswith("obs/"))
        if name in stacked:
            depth = spec.shape[-1]
            num_frames = max(num_slots * (rollout + 1 + (depth - 1) * (1 + SPARE_STARTS)), (rollout + 1) * depth)
            arrays |= {name: Spec((rows,), torch.int64), f"frames/{name}": Spec((num_frames, *spec.shape[:-1]),
                                                                                spec.dtype)}
        else:
            arrays[name] = Spec((rows, *spec.shape), spec.dtype)
    return arrays


class Drawn(NamedTuple):
    """Transitions that were drawn, [B]."""

    leaves: np.ndarray
    numbers: np.ndarray  # of their trajectories: they tell whether a transition is still there
    weights: Tensor  # float32


class Replay:
    """The newest transitions of one policy, with their priorities. Private to one process."""

    def __init__(self, specs: dict[str, Spec], rollout: int, size: int, stacked: set[str], *, alpha: float,
                 seed: int) -> None:
        """Allocate.

        Args:
            specs: of the columns of one row; those that begin with obs/ have one row more in each trajectory.
            rollout: rows of a trajectory. size: rows of all of them.
            stacked: the columns that are stacks of frames, oldest first.
            alpha: the exponent of priorities; 0 draws all alike.
        """
        self.rollout = rollout
        self.alpha = alpha
        self.num_slots = size // rollout
        self.arrays = {name: torch.zeros(spec.shape, dtype=spec.dtype)
                       for name, spec in layout(specs, rollout, size, stacked).items()}
        self.tree = SumTree(self.arrays["tree"].numpy())
        self.numbers = self.arrays["numbers"].numpy()
        self.numbers.fill(EMPTY)
        self.columns = {name: self.arrays[name] for name in specs if name not in stacked}
        self.frames = {name: Frames(self.arrays[f"frames/{name}"], self.arrays[name], specs[name].shape[-1])
                       for name in sorted(stacked)}
        self.oldest = self.count = 0  # numbers of trajectories: the oldest that is there, the next that comes
        self.num_transitions = 0  # valid ones that are there
        self.largest = 1.0  # priority so far
        self.rng = np.random.default_rng(seed)

    # ---- trajectories --------------------------------------------------------------------------------------------

    def insert(self, trajectory: Data, priorities: Tensor, valid: Tensor) -> None:
        """Store one trajectory, {name: [T(+1), ...]}, in the place of the oldest ones.

        Args:
            priorities: [T] float32, above 0; nan: as large as the largest so far.
            valid: [T] bool, the rows that may be drawn.
        """
        new = {name: frames.new_frames(trajectory[name]) for name, frames in self.frames.items()}
        while not self.has_room(new):
            self.evict()
        slot = self.count % self.num_slots
        for name, column in self.columns.items():
            length = len(trajectory[name])
            column[slot * length : (slot + 1) * length] = trajectory[name]
        for name, frames in self.frames.items():
            frames.put(slot * (self.rollout + 1), trajectory[name], new[name])
        self.numbers[slot] = self.count
        self.count += 1
        known = priorities[valid & ~priorities.isnan()]
        self.largest = max(self.largest, float(known.max())) if len(known) else self.largest
        raised = priorities.nan_to_num(self.largest).double().numpy() ** self.alpha
        self.tree[slot * self.rollout + np.arange(self.rollout)] = np.where(valid.numpy(), raised, 0.0)
        self.num_transitions += int(valid.sum())

    def has_room(self, new: dict[str, Tensor]) -> bool:
        """Tell whether one more trajectory, with these new frames, fits beside those that are there."""
        row = (self.oldest % self.num_slots) * (self.rollout + 1)
        return self.count == self.oldest or (self.count - self.oldest < self.num_slots and all(
            frames.has_room(row, int(new[name].sum())) for name, frames in self.frames.items()))

    def evict(self) -> None:
        """Forget the oldest trajectory."""
        slot = self.oldest % self.num_slots
        leaves = slot * self.rollout + np.arange(self.rollout)
        self.num_transitions -= int(np.count_nonzero(self.tree[leaves]))
        self.tree[leaves] = 0.0
        self.numbers[slot] = EMPTY
        self.oldest += 1

    # ---- transitions ---------------------------------------------------------------------------------------------

    def draw(self, num_batches: int, batch_size: int, beta: float) -> Drawn:
        """Draw minibatches one after another, each one from equal parts of the sum of priorities."""
        parts = np.arange(batch_size) + self.rng.random((num_batches, batch_size))
        leaves = self.tree.find(parts.ravel() * (self.tree.total / batch_size))
        weights = self.tree[leaves].reshape(num_batches, batch_size) ** -beta  # a common factor is divided out
        weights = (weights / weights.max(1, keepdims=True)).ravel()
        return Drawn(leaves, self.numbers[leaves // self.rollout], torch.from_numpy(weights).float())

    def read(self, drawn: Drawn, out: Data) -> None:
        """Write the columns of transitions into tensors {name: [B, ...]}; `following_obs/` are those m steps later."""
        leaves = torch.from_numpy(drawn.leaves)
        first = leaves + leaves // self.rollout  # a trajectory has one observation more
        rows = {False: leaves, True: first}
        if "steps" in self.columns:
            rows["following"] = first + self.columns["steps"][leaves]
        for name, tensor in out.items():
            column = name.removeprefix("following_")
            where = rows["following" if column != name else name.startswith("obs/")]
            if column in self.frames:
                self.frames[column].get(where, tensor)
            else:
                torch.index_select(self.columns[column], 0, where, out=tensor)

    def update(self, drawn: Drawn, priorities: np.ndarray) -> None:
        """Set the priorities [B] of transitions that were drawn, where they are still there.

        One that is not finite stays as it is: its SGD step was not taken, or its loss gives none.
        """
        known = np.isfinite(priorities)
        if not self.alpha or not known.any():
            return
        there = known & (self.numbers[drawn.leaves // self.rollout] == drawn.numbers)
        self.largest = max(self.largest, float(priorities[known].max()))
        self.tree[drawn.leaves[there]] = priorities[there] ** self.alpha

    def forget_priorities(self) -> None:
        """Make all transitions alike."""
        leaves = np.arange(self.num_slots * self.rollout)
        self.tree[leaves] = self.tree[leaves] > 0
        self.largest = 1.0

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is in the replay; the arrays are the live ones."""
        counts = {name: frames.count for name, frames in self.frames.items()}
        return {"arrays": self.arrays, "frames": counts, "oldest": self.oldest, "count": self.count,
                "num_transitions": self.num_transitions, "largest": self.largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, of a replay of the same size that has these columns, or more."""
        for name, array in self.arrays.items():
            array.copy_(state["arrays"][name])
        for name, frames in self.frames.items():
            frames.count = state["frames"][name]
        for name in ("oldest", "count", "num_transitions", "largest"):
            setattr(self, name, state[name])
