"""No two runs, starts, workers or environments share their random numbers; the same start draws the same again."""

import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from parts import SMALL
from tiny import Tiny

from runtime.utils import ENVIRONMENT, EVALUATION, NETWORK, PROCESS, derive_seed, seed_all
from services.records import Records
from trainer import APPO, load

TWO = SMALL | {"num_workers": 2, "worker_num_splits": 2}
LEVELS = "levels.txt"  # in the working folder


class Levels(Tiny):
    """Every episode is a level drawn from the environment's generator; all levels that were begun are written down."""

    def begin(self) -> None:
        self.length = int(self.np_random.integers(1, 10))
        with Path(LEVELS).open("a") as file:
            file.write(f"{int(self.np_random.integers(2**60))}\n")


class Foreign(Tiny):
    """Shows what it draws from the generators that a process has only once; writes that, and one of its variables."""

    def begin(self) -> None:
        self.drawn = draw()
        os.environ["EPISODES"] = "some"
        with Path("drawn.txt").open("a") as file:
            file.write("".join(f"{os.environ['WHICH']} {number}\n" for number in self.drawn))

    def observe(self) -> np.ndarray:
        return np.full(2, sum(self.drawn) % 1000 / 1000, np.float32)


def draw() -> list[int]:
    return [int(mtrand.randint(2**60)), random.getrandbits(60), int(torch.randint(2**60, ()))]


def levels_of(train_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train and return the levels that were begun, but the one that only tells the spaces."""
    monkeypatch.chdir(train_dir)
    Path(LEVELS).unlink(missing_ok=True)
    with APPO("test_seeding:Levels", train_dir=str(train_dir), experiment="run", serial_mode=True, **TWO) as appo:
        appo.train(400)
    return [int(line) for line in Path(LEVELS).read_text().split()][1:]


def test_seeds_of_all_generators_differ() -> None:
    keys = list(itertools.product(range(3), (ENVIRONMENT, EVALUATION, NETWORK, PROCESS), range(3), range(8), range(8)))
    seeds = [derive_seed(*key) for key in keys]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(keys)


def test_a_resumed_run_and_one_that_was_killed_before_it_saved_play_other_levels(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a checkpoint nor records exist of the last start then."""
    played = [levels_of(tmp_path, monkeypatch) for _ in range(2)]
    for path in (*tmp_path.rglob("*.pt"), *tmp_path.glob("run/metrics.jsonl"), *tmp_path.glob("run/summary.json")):
        path.unlink()
    played.append(levels_of(tmp_path, monkeypatch))
    assert all(len(levels) == len(set(levels)) > 50 for levels in played)
    assert len({level for levels in played for level in levels}) == sum(map(len, played))
    assert json.loads((tmp_path / "run" / "starts.json").read_text()) == 3


def test_no_two_processes_draw_the_same_from_global_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert appo.find(Records).num_replaced == 1
    lines = [line.split() for line in Path("drawn.txt").read_text().splitlines()]
    assert {which for which, _ in lines} == {"one", "two"}
    assert len({number for _, number in lines}) == len(lines) > 2 * 3 * (8 + 4)


def test_serial_mode_draws_from_global_generators_by_its_seed_and_the_program_by_its_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH", "serial")
    monkeypatch.chdir(tmp_path)
    learned = []
    for number, (seed, period) in enumerate([(0, 0), (0, 100), (1, 0)]):
        seed_all(100 + number)
        with APPO("test_seeding:Foreign", train_dir=str(tmp_path), experiment=str(number), serial_mode=True, seed=seed,
                  eval_every_env_steps=period, eval_episodes=2, **TWO) as appo:
            appo.train(200)
            drawn = [*draw(), mtrand.normal()]
            appo.train(200)
            learned.append(torch.cat([parameter.flatten() for parameter in appo.get_parameters()[0].values()]))
        load(tmp_path / str(number), env=Foreign)
        drawn += [mtrand.normal(), *draw()]
        seed_all(100 + number)
        assert drawn == [*draw(), mtrand.normal(), mtrand.normal(), *draw()]
    assert learned[0].equal(learned[1]), "an evaluation draws numbers of its own"
    assert not learned[0].equal(learned[2])
