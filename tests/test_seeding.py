"""No two runs, starts, workers or environments share their random numbers; the same start draws the same again."""

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.random import mtrand
from parts import SMALL, learners, rollout_workers
from test_train import run_train

from runtime.seeding import ENVIRONMENT, EVALUATION, NETWORK, PROCESS, derive_seed
from trainer import APPO, load

TWO = SMALL | {"num_workers": 2, "worker_num_splits": 2}
LEVELS = "levels.txt"  # in the working folder


class Levels(gym.Env):
    """Every episode is a level drawn from the environment's generator; all levels that were begun are written down."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        with Path(LEVELS).open("a") as file:
            file.write(f"{int(self.np_random.integers(2**60))}\n")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, self.np_random.random() < 0.2, False, {}


class Foreign(Levels):
    """Shows what it draws from the generators that a process has only once; writes that, and one of its variables."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        drawn, info = draw(), super().reset(**kwargs)[1]
        os.environ["EPISODES"] = "some"
        with Path("drawn.txt").open("a") as file:
            file.write("".join(f"{os.environ['WHICH']} {number}\n" for number in drawn))
        return np.array([sum(drawn) % 1000 / 1000], np.float32), info


def draw() -> list[int]:
    return [int(mtrand.randint(2**60)), random.getrandbits(60), int(torch.randint(2**60, ()))]


def seed_program(seed: int) -> None:
    mtrand.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def levels_of(train_dir: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 400, **settings: Any) -> list[int]:
    """Train and return the levels that were begun, but the one that only tells the spaces."""
    monkeypatch.chdir(train_dir)
    Path(LEVELS).unlink(missing_ok=True)
    with APPO("test_seeding:Levels", train_dir=str(train_dir), experiment="run", serial_mode=True,
              **TWO | settings) as appo:
        appo.train(steps)
    return [int(line) for line in Path(LEVELS).read_text().split()][1:]


def test_seeds_of_all_generators_differ() -> None:
    keys = list(itertools.product(range(3), (ENVIRONMENT, EVALUATION, NETWORK, PROCESS), range(3), range(8), range(8)))
    seeds = [derive_seed(*key) for key in keys]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(keys)


def test_the_same_start_plays_the_same_levels_and_a_neighboring_seed_none_of_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        played.append(levels_of(tmp_path / name, monkeypatch, seed=seed))
    assert len(played[0]) > 50
    assert played[0] == played[1]
    assert not set(played[0]) & set(played[2])


def test_a_resumed_run_plays_other_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = [levels_of(tmp_path, monkeypatch) for _ in range(3)]
    assert all(len(levels) == len(set(levels)) > 50 for levels in played)
    assert not set(played[0]) & set(played[1]) | set(played[1]) & set(played[2]) | set(played[0]) & set(played[2])
    assert json.loads((tmp_path / "run" / "starts.json").read_text()) == 3


def test_a_run_that_was_killed_before_it_saved_plays_other_levels_when_it_starts_again(tmp_path: Path) -> None:
    """Neither its checkpoint nor its records exist then."""
    (tmp_path / "my_levels.py").write_text(f"import sys\nsys.path.append({os.path.dirname(__file__)!r})\n"
                                           "from test_seeding import Levels\n")
    flags = ["--env=my_levels:Levels", "--num_workers=1", "--num_envs_per_worker=4", "--rollout=16",
             "--batch_size=128", "--encoder_mlp_layers=16", "--report_interval_sec=0.2"]
    played = []
    for _ in range(2):
        records = (*tmp_path.glob("*/metrics.jsonl"), *tmp_path.glob("*/summary.json"))
        for path in (tmp_path / LEVELS, *records):
            path.unlink(missing_ok=True)
        run_train(tmp_path, *flags, disturb=lambda process: process.kill())
        played.append({int(line) for line in (tmp_path / LEVELS).read_text().split()})
    probed = played[0] & played[1]
    assert len(probed) <= 1, "only the one that tells the spaces"
    assert min(map(len, played)) > 20


def test_no_two_processes_draw_the_same_from_global_generators(tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that takes the place of another. Each system has the environment variables of its own start."""
    monkeypatch.chdir(tmp_path)
    for which, seed in (("one", 0), ("two", 1)):
        monkeypatch.setenv("WHICH", which)
        before = dict(os.environ)
        with APPO("test_seeding:Foreign", train_dir=str(tmp_path), experiment=which, seed=seed, **TWO) as appo:
            assert os.environ == before
            monkeypatch.setenv("WHICH", "later")
            appo.train(100)
            appo.crew.processes[0].kill()
            appo.train(100)
            assert appo.records.num_replaced == 1
    lines = [line.split() for line in Path("drawn.txt").read_text().splitlines()]
    assert {which for which, _ in lines} == {"one", "two"}
    assert len({number for _, number in lines}) == len(lines) > 2 * 3 * (8 + 4)


def test_serial_mode_draws_from_global_generators_by_its_seed_and_the_program_by_its_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH", "serial")
    monkeypatch.chdir(tmp_path)
    learned = []
    for number, (seed, period) in enumerate([(0, 0), (0, 100), (1, 0)]):
        seed_program(number)
        with APPO("test_seeding:Foreign", train_dir=str(tmp_path), experiment=str(number), serial_mode=True, seed=seed,
                  eval_every_env_steps=period, eval_episodes=2, **TWO) as appo:
            appo.train(200)
            drawn = [*draw(), mtrand.normal()]
            appo.train(200)
            learned.append(torch.cat([parameter.flatten() for parameter in appo.get_parameters()[0].values()]))
        load(tmp_path / str(number), env=Foreign)
        drawn += [mtrand.normal(), *draw()]
        seed_program(number)
        assert drawn == [*draw(), mtrand.normal(), mtrand.normal(), *draw()]
        assert "EPISODES" not in os.environ
    assert learned[0].equal(learned[1]), "an evaluation draws numbers of its own"
    assert not learned[0].equal(learned[2])


def test_a_new_start_shuffles_draws_and_acts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run in which nothing was learned would else repeat its minibatches, policies and actions."""
    monkeypatch.chdir(tmp_path)
    settings = TWO | {"train_dir": str(tmp_path), "experiment": "run", "serial_mode": True, "num_policies": 2}
    drawn = []
    for _ in range(2):
        with APPO("test_seeding:Levels", **settings) as appo:
            drawn.append((rollout_workers(appo)[0].rng.random(), learners(appo)[0].shuffle.initial_seed(),
                          learners(appo)[1].shuffle.initial_seed(), rollout_workers(appo)[1].rng.random()))
    assert len({number for start in drawn for number in start}) == 8
