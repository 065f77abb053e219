"""How transitions get into a replay and out of it: the feed of the off-policy algorithms.

The batcher stores each trajectory as soon as it is finished, frees its slot, and draws datasets of a few minibatches. A
ratio is held exactly, both ways: for each transition that comes in after the warm-up, `replay_ratio` transitions are
trained on. So a slow learner holds the rollout workers back, and slow ones let the learner wait. After the warm-up:

    drawn  <=  replay_ratio * (inserted - replay_warmup)  <  drawn + one dataset

Nothing is too old to be trained on. Two ages of what is trained on are reported: `policy_lag`, the SGD steps by which
its policy was behind when it came in, and `replay_age`, about how many transitions have come in since.

The learner alone has the replay. It stays when the policy takes over the weights of another one. Read next:
`q_learning.py`.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithm import Data
from algorithms.replay import Drawn, Replay, n_step
from config import Config
from feed import Feed, scale_rewards
from runtime.seeding import REPLAY, derive_seed
from runtime.user_error import UserError
from shared_buffers import SLOTS, SharedBuffers, Spec, allocate

# what is stored depends on these settings
STORED = ("replay_size", "rollout", "n_step", "gamma", "reward_scale", "reward_clip", "replay_alpha")


class Dataset:
    """Transitions as trajectories of one step, [B, 1, ...], while they are drawn and while they are trained on."""

    def __init__(self, specs: Mapping[str, Spec], size: int, *, pinned: bool) -> None:
        """Allocate it; specs: of a row of the replay."""
        following = {f"following_{name}": spec for name, spec in specs.items() if name.startswith("obs/")}
        more = {"weights": Spec((), torch.float32)} | (following if "steps" in specs else {})
        self.rows = allocate(dict(specs) | more, size, shared=False)
        ones = torch.ones(size, 1, dtype=torch.bool)
        same = {"valid": ones, "new_episode": ones, "rnn_states": torch.zeros(size, 1, 0)}  # for every dataset
        if pinned:  # in memory that a GPU can read by itself
            self.rows, same = ({name: tensor.pin_memory() for name, tensor in tensors.items()}
                               for tensors in (self.rows, same))
        self.tensors = {name: tensor[:, None] for name, tensor in self.rows.items()} | same
        self.drawn: Drawn | None = None
        self.priorities = np.full(size, np.nan)  # as of the SGD step that each transition took part in

    def set_priorities(self, rows: slice, priorities: Tensor) -> None:
        """Note the priorities [1, n] of transitions."""
        self.priorities[rows] = priorities[0].numpy()


class ReplayFeed(Feed):
    """Puts every transition into a replay, and draws as often as the ratio says."""

    def __init__(self, algorithm: Any, buffers: SharedBuffers, policy: int, learner: int,
                 deliver: Callable[[Dataset], None] | None, *, pinned: bool) -> None:
        """Allocate the replay of one learner, and two datasets; algorithm: a `q_learning.ReplayAlgorithm`."""
        cfg = algorithm.cfg
        super().__init__(cfg, buffers, policy, deliver)
        self.algorithm = algorithm
        self.weights = buffers.policies[policy].weights
        specs = self.row_specs = algorithm.row_specs(self.specs)
        self.replay = Replay(specs, cfg.rollout, cfg.replay_size, stacked_names(cfg, specs), alpha=cfg.replay_alpha,
                             seed=derive_seed(cfg.seed, REPLAY, buffers.start, policy, learner))
        self.inserted = self.drawn = 0  # transitions
        self.age = 0.0  # of the last dataset, in transitions
        # the batcher draws into one; the other is trained on, or waits in `spare` for `allow_next`
        self.drawing, self.spare = (Dataset(specs, cfg.samples_per_dataset, pinned=pinned) for _ in range(2))
        self.trained: queue.Queue[Dataset] = queue.Queue()  # from training to the batcher
        self.lock = threading.Lock()  # nothing changes while the replay is saved

    # ---- the batcher ---------------------------------------------------------------------------------------------

    def insert(self, kind: int, *slots: int) -> None:
        """Store trajectories, give their slots back, hand over what may be trained on meanwhile, and wait."""
        assert kind == SLOTS, kind
        with self.lock:
            self.copy(slots)
        self.free_slots(slots)
        self.deliver_due()

    def copy(self, slots: Sequence[int]) -> None:
        """Put trajectories into the replay."""
        for slot in slots:
            self.store({name: tensor[slot - self.first_slot] for name, tensor in self.trajectories.items()})

    def store(self, trajectory: Data) -> None:
        """Put a trajectory {name: [T(+1), ...]} into the replay."""
        cfg, valid = self.algorithm.cfg, trajectory["valid"]
        columns = n_step(scale_rewards(cfg, trajectory["rewards"]), trajectory["terminated"], trajectory["truncated"],
                         cfg.gamma, cfg.n_step)
        trajectory = trajectory | dict(zip(("rewards", "discounts", "steps"), columns, strict=True))
        trajectory["policy_lag"] = self.weights.version - trajectory["policy_version"]
        trajectory |= self.algorithm.describe(trajectory)
        self.replay.insert({name: trajectory[name] for name in self.row_specs}, trajectory["priorities"], valid)
        self.inserted += int(valid.sum())

    def deliver_due(self) -> None:
        """Draw datasets as long as one is due; each waits until training has begun the last step of the one before."""
        while self.is_due() and not self.buffers.stopping:
            with self.lock:
                self.draw()
            self.deliver(self.drawing)
            self.drawing = self.next_batch.get()  # back-pressure

    def is_due(self) -> bool:
        """Tell whether the ratio asks for another dataset."""
        cfg = self.algorithm.cfg
        allowed = cfg.replay_ratio * (self.inserted - cfg.replay_warmup)
        return self.replay.num_transitions > 0 and self.drawn + cfg.samples_per_dataset <= allowed

    def draw(self) -> None:
        """Draw the transitions of the next SGD steps; set the priorities of those that were trained on first."""
        while not self.trained.empty():
            dataset = self.trained.get()
            self.replay.update(dataset.drawn, dataset.priorities)
        cfg, dataset = self.algorithm.cfg, self.drawing
        drawn = self.replay.draw(cfg.num_batches_per_epoch, cfg.batch_size, cfg.replay_beta)
        self.drawn += len(drawn.leaves)
        self.age = float(self.replay.count - drawn.numbers.mean()) * cfg.rollout
        dataset.drawn = drawn
        dataset.priorities.fill(np.nan)
        dataset.rows["weights"].copy_(drawn.weights)
        self.replay.read(drawn, {name: tensor for name, tensor in dataset.rows.items() if name != "weights"})

    # ---- training ------------------------------------------------------------------------------------------------

    def admit(self, data: Data, sgd_steps: int) -> Tensor:
        return data["policy_lag"]

    def split(self, generator: torch.Generator) -> list[slice]:
        """Return the minibatches one after another: each was drawn by itself."""
        cfg = self.algorithm.cfg
        return [slice(begin, begin + cfg.batch_size) for begin in range(0, cfg.samples_per_dataset, cfg.batch_size)]

    def allow_next(self) -> None:
        self.next_batch.put(self.spare)

    def release(self, dataset: Dataset) -> None:
        """Take a dataset back; its priorities are set before the next but one is drawn."""
        self.trained.put(dataset)
        self.spare = dataset

    def statistics(self) -> dict[str, float]:
        new = self.inserted - self.algorithm.cfg.replay_warmup
        return {"replay_transitions": self.replay.num_transitions, "replay_ratio": self.drawn / max(1, new),
                "replay_age": self.age, "priority_max": self.replay.largest}

    @contextlib.contextmanager
    def saving(self) -> Iterator[dict[str, Any]]:
        with self.lock:
            state = self.replay.state_dict() | {"inserted": self.inserted, "drawn": self.drawn}
            state["settings"] = {name: getattr(self.algorithm.cfg, name) for name in STORED}
            yield {"replay": state} if self.algorithm.cfg.save_replay else {}

    def resume(self, state: dict[str, Any]) -> None:
        saved, cfg = state.get("replay"), self.algorithm.cfg
        if saved is None or not cfg.save_replay:
            return
        for name, value in saved["settings"].items():
            if value != getattr(cfg, name) and not (name == "gamma" and cfg.pbt_optimize_gamma):
                raise UserError(f"the replay in the checkpoint was made with --{name}={value}; resume with that, or "
                                "with --save_replay=False")
        self.replay.load_state_dict(saved)
        self.inserted, self.drawn = saved["inserted"], saved["drawn"]


def stacked_names(cfg: Config, specs: Mapping[str, Spec]) -> set[str]:
    """Name the columns that are stacks of frames."""
    depth = cfg.env_framestack
    return {name for name, spec in specs.items() if depth > 1 and len(spec.shape) == 3 and spec.shape[-1] == depth
            and spec.dtype == torch.uint8}
