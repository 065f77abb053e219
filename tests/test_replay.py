"""Tests of the replay: what is drawn, its n-step returns, its frames, what is forgotten."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from batches import Batch
from gymnasium import spaces
from oracles import walk
from parts import learners
from tiny import Tiny
from torch import Tensor

from algorithm import Loss
from algorithms.apex import ApeX
from algorithms.replay import Drawn, Replay, n_step
from shared_buffers import Spec
from trainer import APEX


def insert(replay: Replay, trajectory: dict[str, Tensor], priorities: Tensor) -> None:
    """Store one trajectory."""
    replay.insert({name: column[None] for name, column in trajectory.items()}, priorities[None])


# ---- draws -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_transitions_are_drawn_as_often_as_their_priorities_say(alpha: float) -> None:
    priorities = torch.tensor([0.1, 1.0, 3.0, 0.5, 2.0, 0.0001, 7.0, 1.0])
    replay = Replay({"rewards": Spec((), torch.float32)}, 8, 8, 1, alpha, 3)
    insert(replay, {"rewards": torch.arange(8.0), "valid": torch.ones(8, dtype=torch.bool)}, priorities)
    expected = (priorities**alpha / (priorities**alpha).sum()).numpy()
    counts, num_draws = np.zeros(8), 4000
    for _ in range(num_draws):
        drawn = replay.draw(1, 5, 0.4)
        counts += np.bincount(drawn.rows, minlength=8)
        weights = (8 * expected[drawn.rows]) ** -0.4
        np.testing.assert_allclose(drawn.weights.numpy(), weights / weights.max(), rtol=1e-5)
    statistic = ((counts - 5 * num_draws * expected) ** 2 / (5 * num_draws * expected)).sum()
    assert statistic < 24.3, "chi-square of 7 degrees of freedom, 0.1 % are larger"


# ---- n-step returns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 20])
def test_n_step_returns_end_with_the_episode_and_with_the_trajectory(n: int) -> None:
    rng = torch.Generator().manual_seed(n)
    for share in [0.0, 0.05, 0.3] * 40:  # of steps that terminate, and of those that truncate
        rewards, ends = torch.randn(9, generator=rng), torch.rand(2, 9, generator=rng) < share
        found = n_step(rewards, *ends, 0.9, n)
        for t in range(9):
            expected = walk(rewards[t : t + n], *ends[:, t : t + n], 0.9)
            assert [value[t].item() for value in found] == pytest.approx(expected, abs=1e-5)


# ---- what is stored ----------------------------------------------------------------------------------------------

T, DEPTH = 5, 4
SPECS = {"obs/image": Spec((3, 3, DEPTH), torch.uint8), "obs/vector": Spec((2,), torch.float32),
         "steps": Spec((), torch.int64)}


def random_trajectories(starts: list[float]) -> list[dict[str, Tensor]]:
    """Make trajectories of stacks that mostly shift by a frame, also across their borders.

    starts: of each trajectory, the probability that an episode begins in a row.
    """
    rng = torch.Generator().manual_seed(0)

    def frames(number: int) -> Tensor:
        return torch.randint(256, (3, 3, number), generator=rng, dtype=torch.uint8)

    made, stack = [], frames(DEPTH)
    for number, probability in enumerate(starts):
        images = []
        for t in range(T + 1):
            if torch.rand((), generator=rng) < probability:
                stack = frames(DEPTH)
            elif t or number % 3:
                stack = torch.cat([stack[..., 1:], frames(1)], -1)
            images.append(stack)
        steps = torch.randint(1, 3, (T,), generator=rng).clamp(max=torch.arange(T, 0, -1))
        made.append({"obs/image": torch.stack(images), "obs/vector": torch.randn(T + 1, 2, generator=rng),
                     "steps": steps, "valid": torch.rand(T, generator=rng) < 0.9})
    return made


def read(replay: Replay, specs: dict[str, Spec], rows: np.ndarray) -> dict[str, Tensor]:
    """Read transitions by their places."""
    specs = specs | {f"following_{name}": spec for name, spec in specs.items() if name.startswith("obs/")}
    out = {name: torch.empty(len(rows), *spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    replay.read(Drawn(rows, rows, torch.empty(0)), out)
    return out


def test_stacks_whose_frames_are_stored_once_come_back_bit_by_bit() -> None:
    """Beginnings of episodes, the border of a trajectory, and a time in which there are more frames than expected."""
    replay = Replay(SPECS, T, 60, DEPTH, 0.6, 0)
    made = random_trajectories([0.1] * 50 + [0.5] * 30 + [0.1] * 120)
    fewest = 12
    for trajectory in made:
        insert(replay, trajectory, torch.full((T,), torch.nan))
        there = range(replay.oldest, replay.count)
        fewest = min(fewest, len(there)) if replay.count > 12 else fewest
        rows = np.array([(number % replay.num_slots) * (T + 1) + t for number in there for t in range(T)])
        data = read(replay, SPECS, rows)
        stored = {name: torch.cat([made[number][name][:T] for number in there]) for name in made[0]}
        assert (torch.from_numpy(replay.priorities.flat[rows]) > 0).equal(stored["valid"])
        assert np.count_nonzero(replay.priorities) == stored["valid"].sum(), "and of nothing else"
        for name, column in data.items():
            if name.startswith("following_"):
                later = [made[number][name.removeprefix("following_")][torch.arange(T) + made[number]["steps"]]
                         for number in there]
                assert torch.equal(column, torch.cat(later)), name
            else:
                assert torch.equal(column, stored[name]), name
    assert 0 < fewest < 12, "with many new episodes fewer trajectories fit"
    assert replay.frames["obs/image"].ring.nbytes <= 12 * (T + 1 + 6) * 9, "not four frames of 9 for each row"


def trajectory_of(length: int) -> dict[str, Tensor]:
    return {"id": torch.arange(length), "valid": torch.ones(length, dtype=torch.bool)}


def test_priorities_of_what_was_evicted_are_never_written() -> None:
    replay = Replay({"id": Spec((), torch.int64)}, T, 3 * T, 1, 1.0, 0)
    for _ in range(3):
        insert(replay, trajectory_of(T), torch.full((T,), 2.0))
    drawn = replay.draw(2, 20, 0.4)
    insert(replay, trajectory_of(T), torch.full((T,), 5.0))
    replay.update(drawn, np.full(40, 9.0))
    np.testing.assert_array_equal(replay.priorities[0], [5.0] * T + [0.0])
    old = np.unique(drawn.rows[drawn.rows > T])
    np.testing.assert_array_equal(replay.priorities.flat[old], 9.0)
    assert replay.priorities.sum() == 5 * 5 + 9 * len(old) + 2 * (2 * T - len(old))


def test_rows_without_a_priority_begin_at_the_largest_so_far() -> None:
    replay = Replay({"id": Spec((), torch.int64)}, 2, 8, 1, 1.0, 0)
    insert(replay, trajectory_of(2), torch.tensor([torch.nan, 0.5]))
    insert(replay, trajectory_of(2), torch.tensor([3.0, torch.nan]))
    replay.update(Drawn(np.array([1]), np.array([0]), torch.ones(1)), np.array([4.0]))
    insert(replay, trajectory_of(2) | {"valid": torch.tensor([True, False])}, torch.tensor([torch.nan, 7.0]))
    np.testing.assert_array_equal(replay.priorities[:3, :2], [[1.0, 4.0], [3.0, 3.0], [4.0, 0.0]])


# ---- the feed ----------------------------------------------------------------------------------------------------


class Counting(Tiny):
    """Observation: the environment, its episode, the step; episodes of 1 to 7 steps, every third is truncated."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    episode = -1

    def begin(self) -> None:
        self.number = getattr(self, "number", int(self.np_random.integers(1 << 20)))
        self.episode += 1
        self.length = (self.number + self.episode) % 7 + 1
        self.truncates = self.episode % 3 == 2

    def observe(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.t], np.float32)

    def reward(self, action: int) -> float:
        return self.t + 1.0


SMALL: dict[str, Any] = {
    "num_workers": 2, "num_envs_per_worker": 3, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 2,
    "encoder_mlp_layers": (8,), "device": "cpu", "replay_size": 6400, "replay_warmup": 128, "replay_ratio": 3.0}


class Marked(ApeX):
    """Gives each transition a priority that tells which one it is."""

    def loss(self, model: torch.nn.Module, outputs: tuple[Tensor, ...], data: dict[str, Tensor], mean: Any) -> Loss:
        return super().loss(model, outputs, data, mean)._replace(priorities=mark(data["obs/obs"]))


def mark(obs: Tensor) -> Tensor:
    return 1 + obs[..., 2] + obs[..., 1] / 100


@pytest.mark.parametrize(("n", "env"), [
    (1, Counting), (3, Counting), *((3, functools.partial(Batch, mode=mode)) for mode in ("SAME_STEP", "DISABLED"))])
def test_every_transition_enters_the_replay_once_gets_the_priority_of_its_loss_and_the_ratio_is_exact(
        n: int, env: Any, tmp_path: Any) -> None:
    with APEX(env, algo=Marked, train_dir=str(tmp_path), serial_mode=True, n_step=n, normalize_input=False,
              **SMALL) as system:
        learner, = learners(system)
        feed, replay = learner.feed, learner.feed.replay
        update, seen = replay.update, []
        first, unknown = learner.algorithm.first_priorities, []

        def watched(drawn: Drawn, priorities: np.ndarray) -> None:
            update(drawn, priorities)
            obs = replay.columns["obs/obs"][drawn.rows]
            np.testing.assert_allclose(replay.priorities.flat[drawn.rows], mark(obs) ** 0.6, rtol=1e-5)
            seen.append(len(drawn.rows))

        replay.update = watched
        learner.algorithm.first_priorities = lambda data: unknown.append(data["q_best"][~data["valid"]]) or first(data)
        system.train(3000)
        assert sum(seen) > 5000
        assert torch.cat(unknown).isnan().all() == (env is not Counting), "where nobody has acted"
        places = np.flatnonzero(replay.priorities)
        out = read(replay, learner.algorithm.row_specs(feed.specs), places)
        rows = {tuple(row) for row in out["obs/obs"].long().tolist()}
        assert len(rows) == len(places) == feed.inserted
        assert system.env_steps - 6 * 8 <= feed.inserted <= system.env_steps, "but for what lies in slots"
        for number in {row[0] for row in rows}:
            own = [row[1:] for row in rows if row[0] == number]
            expected = [(episode, t) for episode in range(max(own)[0] + 1) for t in range((number + episode) % 7 + 1)]
            assert sorted(own) == expected[: len(own)], "all steps of all episodes, and none twice"
        for (number, episode, t), later, reward, discount, left in zip(
                out["obs/obs"].long().tolist(), out["following_obs/obs"].long().tolist(), out["rewards"].tolist(),
                out["discounts"].tolist(), 8 - places % 9, strict=True):  # left: steps to the end of the trajectory
            steps = later[2] - t
            length = (number + episode) % 7 + 1
            assert later[:2] == [number, episode]
            assert steps == min(n, length - t, left)
            assert reward == pytest.approx(sum(0.99**k * (t + 1 + k) for k in range(steps)), rel=1e-5)
            ends = t + steps == length and episode % 3 < 2
            assert discount == pytest.approx(0.0 if ends else 0.99**steps)
        trained = learner.sgd_steps * 32
        assert trained == feed.drawn == learner.decisions_trained
        assert trained <= 3.0 * (feed.inserted - 128) < trained + 64
