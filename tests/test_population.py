"""Populations of the public `APPO`: what is decided is done, recorded truthfully and resumed.

In `tiny_games.Payday` nothing but the reward shaping decides what is earned, so a test knows who is best. Most runs are
serial: everything happens in this process, where `watch` looks on.
"""

import copy
import json
import math
import multiprocessing
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from parts import SMALL, learners
from tiny_games import SHAPINGS, wage

import pbt
from config import tunable
from learner import Learner, training_state
from runtime.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, policy_dir
from runtime.machine import choose_device
from services.population import Population, join, objectives_of
from services.progress import PolicyProgress
from services.records import cut_lines
from shared_buffers import SharedWeights
from trainer import APPO

SERIAL: dict[str, Any] = SMALL | {
    "serial_mode": True, "lr_schedule": "constant", "learning_rate": 0.001, "train_for_env_steps": 3000,
    "stall_timeout_sec": 60.0}
PBT: dict[str, Any] = {
    "num_policies": 4, "with_pbt": True, "pbt_start_mutation": 150, "pbt_period_env_steps": 100,
    "pbt_mutation_rate": 1.0, "pbt_replace_reward_gap": 0.0, "pbt_replace_fraction": 0.25}  # one best, one worst
GIVEN = {"max_grad_norm": 3.0, "ppo_clip_value": 0.0, "gamma": 0.95}
FLAT_SHAPING = {"shaping/pay": 1.0, "shaping/bonus/at_end/0": 0.5, "shaping/bonus/at_end/1": True}
DESCRIPTION = ["policy", "policy_steps", "env_steps", "objective", "donor", "words"]  # the rest of an event are numbers


def make(train_dir: Path, env: str = "Payday", **settings: Any) -> APPO:
    return APPO(f"tiny_games:{env}", **SERIAL | {"train_dir": str(train_dir), "experiment": "run"} | settings)


def run(train_dir: Path, steps: int, env: str = "Payday", **settings: Any) -> APPO:
    with make(train_dir, env, **settings) as running:
        running.train(steps)
    return running


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def checkpoint_of(run_dir: Path, policy: int) -> dict[str, Any]:
    return load_checkpoint(find_checkpoint(run_dir, policy=policy))


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "population.jsonl")


def numbers_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the settings and the shaping that an event of population.jsonl tells."""
    return {name: value for name, value in event.items() if name not in DESCRIPTION}


def shaping_of(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return what `Payday` is to be given, from flat numbers."""
    return {"pay": numbers["shaping/pay"],
            "bonus": {"at_end": [numbers["shaping/bonus/at_end/0"], numbers["shaping/bonus/at_end/1"]]}}


def any_replaced(run_dir: Path) -> bool:
    """Return whether a policy has become a copy of another."""
    return any(event["donor"] is not None for event in events_of(run_dir))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Compare weights bit by bit."""
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def is_mutation(name: str, value: Any, source: Any, default: Any) -> bool:
    """Return whether a number may come from another one by a mutation that changes every number."""
    if isinstance(source, bool):
        return value != source
    if source == 0:
        return value == 0  # off
    low, high = (1.01, 1.2) if name == "gamma" else (1.1, 1.5)
    ratio = (1 - value) / (1 - source) if name == "gamma" else value / source
    return value == default != source or low - 1e-9 <= max(ratio, 1 / ratio) <= high + 1e-9


# ---- what a run of population-based training did -----------------------------------------------------------------


class SgdStep(NamedTuple):
    """What one SGD step of a policy used."""

    policy: int
    env_steps: int
    wanted_rate: float  # the policy's setting
    rate: float  # that of the optimizer
    first_version: int
    versions: torch.Tensor
    valid: torch.Tensor


class Watch:
    """Everything that was decided and done in a serial run."""

    def __init__(self, patch: pytest.MonkeyPatch, lr_schedule: str = "constant") -> None:
        self.lr_schedule = lr_schedule
        self.updates: list[tuple] = []  # that have decided: objectives, steps, decisions, number of shapings before
        self.copies: list[tuple] = []  # policy, checkpoint of its donor, its state before and after, published weights
        self.sgd_steps: list[SgdStep] = []
        update, load, sgd_step = Population.update, Learner.load, Learner.sgd_step

        def watched_update(population: Population, objectives: list[float], steps: list[int]) -> list[pbt.Decision]:
            decisions = update(population, objectives, steps)
            if decisions:
                self.updates.append((objectives, steps, decisions, len(SHAPINGS)))
            return decisions

        def watched_load(learner: Learner, donor: int) -> None:
            saved, before = checkpoint_of(learner.cfg.run_dir, donor), copy.deepcopy(training_state(learner))
            load(learner, donor)
            after, published = copy.deepcopy(training_state(learner)), learner.weights.read()[0]
            self.copies.append((learner.policy, saved, before, after, published))

        def watched_sgd_step(learner: Learner, data: dict[str, torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
            stats = sgd_step(learner, data, **more)
            rates = {group["lr"] for group in learner.optimizer.param_groups}
            wanted = learner.buffers.settings[learner.policy, list(tunable(learner.cfg)).index("learning_rate")]
            self.sgd_steps.append(SgdStep(
                learner.policy, int(learner.buffers.env_steps.sum()), float(wanted), *rates,
                int(learner.buffers.first_version[learner.policy]),
                data["policy_version"].clone(), data["valid"].clone()))
            return stats

        patch.setattr(Population, "update", watched_update)
        patch.setattr(Learner, "load", watched_load)
        patch.setattr(Learner, "sgd_step", watched_sgd_step)


def settle(running: APPO) -> None:
    """Let a serial run carry out what was decided last."""
    for _ in range(3):
        running.save()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a finished run of population-based training, which no test changes, and all that was watched.

    Its folder is also copied as a crash would leave it: some policies have learned on since they were saved.
    """
    SHAPINGS.clear()
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        with make(folder, **PBT | GIVEN, pbt_optimize_gamma=True) as running:
            run_dir = running.cfg.run_dir
            running.train(should_stop=lambda: any_replaced(run_dir))
            settle(running)
            running.train(1500)
            shutil.copytree(run_dir, folder / "crashed")
            settle(running)
    return SimpleNamespace(run=running, dir=run_dir, crashed=folder / "crashed", watch=watch,
                           shapings=SHAPINGS.copy(), events=events_of(run_dir))


def test_files_tell_the_settings_and_the_shaping_of_every_policy(finished: SimpleNamespace) -> None:
    last = {event["policy"]: numbers_of(event) for event in finished.events}
    for policy, learner in enumerate(learners(finished.run)):
        settings = read_json(finished.dir / f"policy_{policy:02}_cfg.json")
        shaping = read_json(finished.dir / f"policy_{policy:02}_reward_shaping.json")
        assert settings == tunable(learner.cfg), "the learner's own settings"
        assert settings == {name: value for name, value in last[policy].items() if name not in FLAT_SHAPING}
        assert shaping == shaping_of(last[policy]), "in the environment's own form"
    assert len(list(finished.dir.glob("policy_*.json"))) == 2 * PBT["num_policies"]
    assert not list(finished.dir.rglob("*.tmp"))


def test_each_event_follows_from_the_one_before_and_from_its_donor(finished: SimpleNamespace) -> None:
    """Policy 0 begins with the given settings, each other with a mutation of its own."""
    defaults = tunable(finished.run.cfg) | FLAT_SHAPING
    assert defaults.items() >= GIVEN.items()
    now, kinds = [defaults] * 4, set()
    for event in finished.events:
        policy, donor, numbers = event["policy"], event["donor"], numbers_of(event)
        source = now[policy if donor is None else donor]
        is_mutated = policy != 0 and "unchanged" not in event["words"]
        assert numbers.keys() == defaults.keys()
        for name, value in numbers.items():
            assert is_mutation(name, value, source[name], defaults[name]) if is_mutated else value == source[name], name
        kinds.add((donor is not None, is_mutated))
        now[policy] = numbers
    assert kinds >= {(True, True), (False, True), (False, False)}, "replaced, mutated, and unchanged ones were seen"
    for policy, event in enumerate(finished.events[:4]):
        assert [event[name] for name in DESCRIPTION] == [policy, 0, 0, None, None, f"policy {policy} begins"]
    assert numbers_of(finished.events[1]) != numbers_of(finished.events[2])


def test_decisions_follow_the_objectives_when_a_policy_is_due(finished: SimpleNamespace) -> None:
    last, decided = [0] * 4, []
    for objectives, steps, decisions, _ in finished.watch.updates:
        assert None not in objectives, "every policy has finished an episode"
        order = np.argsort([-objective for objective in objectives], kind="stable").tolist()
        for decision in decisions:
            policy = decision.policy
            assert steps[policy] >= PBT["pbt_start_mutation"]
            assert steps[policy] - last[policy] >= PBT["pbt_period_env_steps"]
            last[policy] = steps[policy]
            assert f"is {order.index(policy) + 1} of 4" in decision.words
            is_worse = objectives[order[0]] - objectives[policy] > 1e-6
            assert decision.donor == (order[0] if policy == order[-1] and is_worse else None)
            assert decision.mutate == (policy not in (0, order[0]))
            decided.append((policy, steps[policy], objectives[policy], decision.donor, decision.words))
    assert decided == [(event["policy"], event["policy_steps"], event["objective"], event["donor"], event["words"])
                       for event in finished.events[4:]]
    assert {policy for policy, *_ in decided} == {0, 1, 2, 3}
    assert len(decided) >= 8


# ---- what was decided is done ------------------------------------------------------------------------------------


def test_every_sgd_step_uses_the_learning_rate_that_was_decided(finished: SimpleNamespace) -> None:
    rates: dict[int, set[float]] = {policy: set() for policy in range(4)}
    for step in finished.watch.sgd_steps:
        assert step.rate == step.wanted_rate
        rates[step.policy].add(step.rate)
    for policy, used in rates.items():
        assert used <= {event["learning_rate"] for event in finished.events if event["policy"] == policy}
    assert sum(len(used) > 1 for used in rates.values()) > 1, "they have changed in between"
    for row in read_lines(finished.dir / "metrics.jsonl"):
        for policy, part in enumerate(row["policies"]):
            assert part.get("learning_rate", 0.0) in {0.0, *rates[policy]}


@pytest.fixture(scope="module", params=["constant", "kl_adaptive", "linear_decay"])
def watched(request: pytest.FixtureRequest, finished: SimpleNamespace,
            tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Return what was done in a run with one of the learning rate schedules."""
    if request.param == "constant":
        return finished.watch
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, request.param)
        run(tmp_path_factory.mktemp(request.param), 1200,
            **PBT | {"num_policies": 3, "lr_schedule": request.param, "num_epochs": 2})
    return watch


def test_a_replaced_policy_has_the_weights_and_moments_of_its_donor_and_its_own_counters(watched: Watch) -> None:
    assert watched.copies
    for _, saved, before, after, published in watched.copies:
        assert equal(after["model"], saved["model"])
        assert equal(after["model"], published), "policy workers act with them"
        assert not equal(after["model"], before["model"])
        moments = after["optimizer"]["state"]
        torch.testing.assert_close(moments, saved["optimizer"]["state"], rtol=0, atol=0)
        assert any(adam["exp_avg"].any() for adam in moments.values())
        assert after["sgd_steps"] == before["sgd_steps"] + 1, "a version of its own"
        for name in ("policy_steps", "env_steps_trained", "env_steps", "learning_rate"):
            assert after[name] == before[name], name


def test_a_mutated_learning_rate_survives_the_optimizer_of_the_donor_and_goes_on_decaying(watched: Watch) -> None:
    last: dict[int, SgdStep] = {}
    changed = set()
    for step in watched.sgd_steps:
        before = last.get(step.policy, step)
        last[step.policy] = step
        if step.wanted_rate != before.wanted_rate:  # the first step after new settings
            changed.add(step.policy)
            left = 1 - before.env_steps / SERIAL["train_for_env_steps"]
            share = left if watched.lr_schedule == "linear_decay" else 1
            assert share / 2 < step.rate / step.wanted_rate <= share
    assert changed & {policy for policy, *_ in watched.copies if policy != 0}


def test_what_was_acted_before_a_replacement_is_not_learned_from(watched: Watch) -> None:
    old = current = 0
    for step in watched.sgd_steps:
        is_old = step.versions < step.first_version
        assert not (step.valid & is_old).any()
        old += int(is_old.sum())
        current += int((step.valid & ~is_old).sum()) if step.first_version else 0
    assert old > 0, "there was such experience"
    assert current > 0, "they learn on"


def test_an_episode_plays_the_newest_shaping_of_a_policy(finished: SimpleNamespace) -> None:
    """After a decision without a donor no episode begins with the old numbers any more."""
    known = [shaping_of(event) for event in finished.events]
    assert all(shaping in known for shaping in finished.shapings)
    now, later = known[:4], iter(known[4:])
    for _, _, decisions, num_before in finished.watch.updates:
        for decision in decisions:
            outdated, now[decision.policy] = now[decision.policy], next(later)
            if decision.donor is None and outdated not in now:
                assert outdated not in finished.shapings[num_before:]
    assert now[1] in finished.shapings


@pytest.mark.parametrize(("env", "sign"), [("Payday", 1), ("Misleading", -1)])
def test_the_true_objective_is_ranked_by_or_else_the_return(tmp_path: Path, env: str, sign: int) -> None:
    running = run(tmp_path, 900, env, **PBT | {"pbt_mutation_rate": 0.5})
    events = events_of(running.cfg.run_dir)
    begin = {event["policy"]: sign * wage(shaping_of(event)) for event in events[:4]}
    place = 1 + sorted(begin, key=lambda policy: (-begin[policy], policy)).index(events[4]["policy"])
    assert f"is {place} of 4" in events[4]["words"]
    changes = [value != events[0][name] for event in events[1:4] for name, value in numbers_of(event).items()]
    assert 0.2 < np.mean(changes) < 0.8, "about half of the numbers are mutated"
    for policy, objective in begin.items():
        first = next(event for event in events[4:] if event["policy"] == policy)
        assert first["objective"] == pytest.approx(objective), "the first decision is about the first shaping"


def test_only_policies_of_the_same_kind_of_agents_compete(tmp_path: Path) -> None:
    """Of four policies 0 and 2 are hunters, 1 and 3 prey; nobody can take over the weights of the others."""
    running = run(tmp_path, 1500, "HunterAndPrey", **PBT | {"learning_rate": 0.03, "num_epochs": 2})
    decided = events_of(running.cfg.run_dir)[4:]
    assert {event["policy"] for event in decided} == {0, 1, 2, 3}
    assert all("of 2" in event["words"] for event in decided)
    replaced = [event for event in decided if event["donor"] is not None]
    assert replaced
    assert all(abs(event["donor"] - event["policy"]) == 2 for event in replaced)


def test_one_seed_gives_one_history(tmp_path: Path) -> None:
    first, second, other = (
        run(tmp_path / name, 700, **PBT | {"num_policies": 3, "seed": seed}).cfg.run_dir
        for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    assert len(events_of(first)) > 5
    assert events_of(first) == events_of(second) != events_of(other)
    for policy in range(3):
        assert equal(checkpoint_of(first, policy)["model"], checkpoint_of(second, policy)["model"])


# ---- resume ------------------------------------------------------------------------------------------------------


def test_a_resumed_population_goes_on_where_it_was(finished: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(finished.dir, tmp_path / "run")
    before = finished.run.find(Population)
    with APPO("tiny_games:Payday", train_dir=str(tmp_path), experiment="run", serial_mode=True) as resumed:
        after = resumed.find(Population)
        assert events_of(tmp_path / "run") == finished.events, "nobody is mutated at the beginning"
        assert (after.numbers, after.last_update) == (before.numbers, before.last_update)
        assert any(after.last_update.values())
        assert torch.equal(resumed.buffers.settings, finished.run.buffers.settings)
        assert torch.equal(resumed.buffers.shaping, finished.run.buffers.shaping)
        assert torch.equal(resumed.buffers.policy_steps.sum(0), finished.run.buffers.policy_steps.sum(0))
        for policy, (learner, old) in enumerate(zip(learners(resumed), learners(finished.run), strict=True)):
            assert tunable(learner.cfg).items() <= after.numbers[policy].items()
            assert learner.learning_rate == after.numbers[policy]["learning_rate"]
            assert learner.sgd_steps == old.sgd_steps > 0
            assert equal(learner.model.state_dict(), old.model.state_dict())
        num_events = len(finished.events)  # 100 episodes of each policy must finish first
        resumed.train(4000, should_stop=lambda: len(events_of(tmp_path / "run")) > num_events + 1)
    new = events_of(tmp_path / "run")[num_events:]
    assert new
    for event in new:
        assert event["policy_steps"] - before.last_update[event["policy"]] >= PBT["pbt_period_env_steps"]
        assert "begins" not in event["words"]


def test_a_replacement_that_was_decided_last_is_not_lost_by_a_save_and_a_resume(tmp_path: Path) -> None:
    """Stop as soon as a replacement was decided: what the files say of it must be true of the weights."""
    with make(tmp_path, **PBT) as running:
        running.train(should_stop=lambda: any_replaced(running.cfg.run_dir))
    event = events_of(running.cfg.run_dir)[-1]
    state = checkpoint_of(running.cfg.run_dir, event["policy"])
    saved = map(load_checkpoint, list_checkpoints(policy_dir(running.cfg.run_dir, event["donor"])))
    assert any(equal(state["model"], donor["model"]) for donor in saved)


def test_after_a_crash_settings_are_those_that_the_weights_were_learned_with(finished: SimpleNamespace,
                                                                             tmp_path: Path) -> None:
    """Each policy goes on with its newest checkpoint, a donor's is newer; the files for people tell what was lost."""
    run_dir = Path(shutil.copytree(finished.crashed, tmp_path / "run"))
    states = [checkpoint_of(run_dir, policy) for policy in range(4)]
    saved = [state["population"] for state in states]
    events = [event for event in events_of(run_dir) if event["policy_steps"] <= saved[event["policy"]]["last_update"]]
    assert {event["policy"] for event in events} == {0, 1, 2, 3}
    assert len(events) < len(events_of(run_dir)), "some have changed since they were saved"
    steps = max(state["env_steps"] for state in states)
    assert read_lines(run_dir / "metrics.jsonl")[-1]["env_steps"] > steps
    with make(tmp_path, **PBT) as resumed:
        population = resumed.find(Population)
        for policy, (place, learner) in enumerate(zip(saved, learners(resumed), strict=True)):
            assert population.numbers[policy] == join(place["settings"], place["shaping"])
            assert population.last_update[policy] == place["last_update"]
            assert read_json(run_dir / f"policy_{policy:02}_cfg.json") == place["settings"] == tunable(learner.cfg)
        assert events_of(run_dir) == events
        assert read_lines(run_dir / "metrics.jsonl")[-1]["env_steps"] <= resumed.env_steps == steps
        resumed.train(300)
    rows = read_lines(run_dir / "metrics.jsonl")
    for name in ("env_steps", "num_episodes"):
        growth = np.diff([row[name] for row in rows])
        assert 0 <= growth.min() <= growth.max() < 300, "nothing jumps over what was lost"


@pytest.mark.parametrize("rest", ["", '{"env_steps": 7, "fps": 1.', "\x00\x00", '{"fps": 3}', "[]"])
def test_reports_after_the_checkpoint_and_broken_ones_are_cut_out(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"env_steps": steps, "fps": 1.5}) for steps in (10, 20, 20, 30)]
    path.write_text("\n".join([*lines, rest]) if rest else "\n".join(lines) + "\n")
    rows, kept = cut_lines(path, lambda row: row.get("env_steps", math.inf) <= 20)
    assert len(rows) == 4 + ("fps" in rest and rest.endswith("}"))
    assert kept == read_lines(path) == [json.loads(line) for line in lines[:3]]
    assert cut_lines(path, bool) == (kept, kept)
    assert cut_lines(tmp_path / "none.jsonl", bool) == ([], [])


# ---- what policies are ranked by ---------------------------------------------------------------------------------


def made(num_policies: int, sgd_steps: int = 0) -> list[PolicyProgress]:
    return [PolicyProgress(sgd_steps) for _ in range(num_policies)]


def finish(policies: Sequence[PolicyProgress], *episodes: tuple[int, float, float]) -> None:
    """Finish episodes: (policy, return, objective)."""
    for policy, episode_return, objective in episodes:
        policies[policy].add_episode(episode_return, 5, objective)


def test_returns_are_never_ranked_beside_objectives() -> None:
    policies = made(3)
    assert objectives_of(policies, [0, 0, 1]) == [None, None, None]
    finish(policies, (0, 50.0, math.nan), (1, 70.0, math.nan), (2, 90.0, math.nan))
    assert objectives_of(policies, [0, 0, 1]) == [50, 70, 90]
    finish(policies, (0, 60.0, 0.25))  # the first objective: returns of this kind of agents count no longer
    assert objectives_of(policies, [0, 0, 1]) == [0.25, None, 90]
    finish(policies, (0, 1e9, math.nan), (0, 60.0, 0.75), (1, 70.0, 0.5))  # an episode without one says nothing
    assert objectives_of(policies, [0, 0, 1]) == [0.5, 0.5, 90]
    assert policies[0].mean_return == pytest.approx((50 + 60 + 1e9 + 60) / 4)


def test_who_never_reaches_an_objective_is_the_worst_and_holds_nobody_up() -> None:
    policies = made(3)
    finish(policies, (0, 1.0, 0.5))
    for _ in range(100):
        assert objectives_of(policies, [0, 0, 0])[1] is None, "it may still come"
        finish(policies, (1, 70.0, math.nan))
    assert objectives_of(policies, [0, 0, 0]) == [0.5, -math.inf, None]


def test_a_resumed_policy_is_ranked_after_a_hundred_episodes() -> None:
    policies = made(2, sgd_steps=9)
    for episode in range(100):
        assert objectives_of(policies, [0, 0])[0] is None
        finish(policies, (0, float(episode), math.nan))
    assert objectives_of(policies, [0, 0]) == [pytest.approx(49.5), None]


# ---- several policies at once ------------------------------------------------------------------------------------

NUM_POLICIES = 3


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished asynchronous run, which no test changes; each policy was updated once."""
    settings = {"num_policies": NUM_POLICIES, "pbt_period_env_steps": 900, "serial_mode": False,
                "report_interval_sec": 0.2}
    with make(tmp_path_factory.mktemp("several"), **PBT | settings) as running:
        run_dir = running.cfg.run_dir
        running.train(100_000, should_stop=lambda: any_replaced(run_dir))
        running.train(1950)  # 650 of each policy, 400 of which are what its mean return is of
    assert not multiprocessing.active_children()
    return run_dir


def test_a_population_lives_in_processes_and_records_have_one_entry_for_each_policy(several: Path) -> None:
    summary, rows = read_json(several / "summary.json"), read_lines(several / "metrics.jsonl")
    for row in rows:
        assert len(row["policies"]) == NUM_POLICIES
        assert row["sgd_steps"] == sum(part["sgd_steps"] for part in row["policies"])
    states = [checkpoint_of(several, policy) for policy in range(NUM_POLICIES)]
    assert summary["sgd_steps"] == sum(state["sgd_steps"] for state in states)
    last = {event["policy"]: event for event in events_of(several)}
    for policy, state in enumerate(states):
        assert any("loss" in row["policies"][policy] for row in rows), "each has learned"
        assert 0 < rows[-1]["policies"][policy]["sgd_steps"] <= state["sgd_steps"], "a little was learned after it"
        assert state["population"]["settings"].items() <= last[policy].items(), "what was decided is used"
        assert summary["mean_return"][policy] == pytest.approx(wage(shaping_of(last[policy])))
    assert sum(state["policy_steps"] for state in states) <= summary["env_steps"], "one agent in each environment"


def test_a_resumed_run_continues_every_policy_and_begins_one_anew_that_is_lost(several: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(several, tmp_path / "run"))
    shutil.rmtree(policy_dir(run_dir, NUM_POLICIES - 1))
    states = [checkpoint_of(several, policy) for policy in range(NUM_POLICIES - 1)]
    before = [*((state["sgd_steps"], state["policy_steps"]) for state in states), (0, 0)]
    with APPO("tiny_games:Payday", train_dir=str(tmp_path), experiment="run") as resumed:
        steps = resumed.buffers.policy_steps.sum(0).tolist()
        assert [*zip(resumed.versions, steps, strict=True)] == before
        assert resumed.env_steps == max(state["env_steps"] for state in states)
        resumed.train(1500)
    assert not multiprocessing.active_children()
    for policy, (sgd_steps, policy_steps) in enumerate(before):
        state = checkpoint_of(run_dir, policy)
        assert state["sgd_steps"] > sgd_steps
        assert state["policy_steps"] > policy_steps


# ---- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_gpus", "devices"), [
    ("auto", 0, ["cpu"] * 5), ("cpu", 4, ["cpu"] * 5), ("cuda:1", 4, ["cuda:1"] * 5),
    *((name, 3, ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]) for name in ("auto", "cuda"))])
def test_policies_take_turns_on_the_gpus_unless_one_device_is_chosen(
        monkeypatch: pytest.MonkeyPatch, name: str, num_gpus: int, devices: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: SimpleNamespace(item=lambda: 0.0))
    assert [str(choose_device(name, policy)) for policy in range(5)] == devices


# ---- self-play ---------------------------------------------------------------------------------------------------

SELF_PLAY: dict[str, Any] = {"self_play_past_fraction": 0.5, "self_play_snapshot_every_env_steps": 150,
                             "train_for_env_steps": 10_000}


def test_snapshots_are_taken_at_the_period_and_the_newest_are_kept(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[int, dict[str, torch.Tensor]] = {}
    add_snapshot = SharedWeights.add_snapshot

    def add(weights: SharedWeights, model: torch.nn.Module, version: int) -> None:
        add_snapshot(weights, model, version)
        taken[version] = copy.deepcopy(model.state_dict())

    monkeypatch.setattr(SharedWeights, "add_snapshot", add)
    running = run(tmp_path, 1500, "HigherWins", self_play_snapshots=3, **SELF_PLAY)
    assert min(taken) == 0, "the first opponent is the beginning"
    assert len(taken) - int(running.buffers.policy_steps.sum()) // 150 in (0, 1), "one in each period"
    weights = running.buffers.policies[0].weights
    kept = {weights.version_of(number): weights.read(number)[0] for number in range(weights.num_snapshots)}
    assert sorted(kept) == list(taken)[-3:]
    assert all(equal(kept[version], taken[version]) for version in kept)
    taken.clear()
    with APPO("tiny_games:HigherWins", train_dir=str(tmp_path), experiment="run", serial_mode=True) as resumed:
        assert list(taken) == resumed.versions


@pytest.mark.parametrize(("favor", "low", "high"), [(2, 0.85, 1.0), (0, 0.0, 0.15)])  # the highest action, the lowest
def test_the_share_of_games_won_against_the_past_is_reported(
        tmp_path: Path, favor: int, low: float, high: float) -> None:
    settings = SELF_PLAY | {"self_play_past_fraction": 1.0, "self_play_snapshot_every_env_steps": 1_000_000,
                            "learning_rate": 1e-12}
    with make(tmp_path, "HigherWins", **settings) as running:
        learner = learners(running)[0]
        learner.model.policy_head.bias.data[favor] = 20.0
        learner.sgd_steps = 1
        learner.weights.publish(learner.model, 1)
        running.train(800)
    assert low <= read_json(running.cfg.run_dir / "summary.json")["win_rate_vs_past"][0] <= high
