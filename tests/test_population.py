"""Populations of the public `APPO`: what is decided is done, recorded truthfully and resumed.

In `tiny_games.Payday` nothing but the reward shaping decides what is earned, so a test knows who is best. Most runs are
serial: everything happens in this process, where `watch` looks on.
"""

import copy
import itertools
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
from parts import learners
from tiny_games import TAPE, wage

import pbt
from config import tunable
from learner import Learner
from runtime.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, policy_dir
from runtime.machine import choose_device
from services.population import Population, objectives_of
from services.progress import PolicyProgress
from services.records import cut_lost_rows
from shared_buffers import SAVE_PERIODIC, SharedWeights
from trainer import APPO

SMALL: dict[str, Any] = {
    "num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 1,
    "num_epochs": 1, "encoder_mlp_layers": (8,), "device": "cpu", "serial_mode": True, "lr_schedule": "constant",
    "learning_rate": 0.001, "train_for_env_steps": 3000, "stall_timeout_sec": 60.0}
PBT: dict[str, Any] = {
    "num_policies": 4, "with_pbt": True, "pbt_start_mutation": 150, "pbt_period_env_steps": 100,
    "pbt_mutation_rate": 1.0, "pbt_replace_reward_gap": 0.0, "pbt_replace_fraction": 0.25}  # one best, one worst
ASYNC: dict[str, Any] = {"serial_mode": False, "report_interval_sec": 0.2}
DEFAULT_SHAPING = {"pay": 1.0, "bonus": {"at_end": [0.5, True]}}
FLAT_SHAPING = {"shaping/pay": 1.0, "shaping/bonus/at_end/0": 0.5, "shaping/bonus/at_end/1": True}
CLOCK = {"wall_sec", "fps"}
DESCRIPTION = {"policy", "policy_steps", "env_steps", "objective", "donor", "words"}  # the rest of an event are numbers


def make(train_dir: Path, env: str = "Payday", **settings: Any) -> APPO:
    return APPO(f"tiny_games:{env}", **SMALL | {"train_dir": str(train_dir), "experiment": "run"} | settings)


def run(train_dir: Path, steps: int, env: str = "Payday", **settings: Any) -> APPO:
    with make(train_dir, env, **settings) as running:
        running.train(steps)
    return running


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "population.jsonl")


def numbers_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the settings and the shaping that an event of population.jsonl tells."""
    return {name: value for name, value in event.items() if name not in DESCRIPTION}


def shaping_of(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return what `Payday` is to be given, from flat numbers."""
    return {"pay": numbers["shaping/pay"],
            "bonus": {"at_end": (numbers["shaping/bonus/at_end/0"], numbers["shaping/bonus/at_end/1"])}}


def is_mutation(value: Any, source: Any, default: Any) -> bool:
    """Tell whether a number may come from another one by a mutation that changes every number."""
    if isinstance(source, bool):
        return value in (not source, default)
    if source == 0:
        return value == 0  # off
    ratio = value / source
    return value == default or 1.1 - 1e-9 <= max(ratio, 1 / ratio) <= 1.5 + 1e-9


# ---- what a run of population-based training did -----------------------------------------------------------------


class Update(NamedTuple):
    """One call of `Population.update` that has decided something."""

    objectives: list[float]
    steps: list[int]
    decisions: list[pbt.Decision]
    tape_before: int  # calls of environments until then


class Copy(NamedTuple):
    """A policy before and after it became a copy of its donor, and what the donor had saved."""

    policy: int
    donor: int
    before: dict[str, Any]
    after: dict[str, Any]
    published: torch.Tensor
    saved: dict[str, Any]


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
        self.updates: list[Update] = []
        self.copies: list[Copy] = []
        self.sgd_steps: list[SgdStep] = []
        self.configured: list[tuple[int, int]] = []  # policy, number of SGD steps of all policies before
        saved: dict[int, dict[str, Any]] = {}
        update, save, load = Population.update, Learner.save, Learner.load
        configure, sgd_step = Learner.configure, Learner.sgd_step

        def watched_update(population: Population, objectives: list[float], steps: list[int]) -> list[pbt.Decision]:
            decisions = update(population, objectives, steps)
            if decisions:
                self.updates.append(Update(objectives, steps, decisions, len(TAPE)))
            return decisions

        def watched_save(learner: Learner, reason: int) -> None:
            if reason == SAVE_PERIODIC:
                saved[learner.policy] = copy.deepcopy(learner.state.state_dict())
            save(learner, reason)

        def watched_copy(learner: Learner, donor: int) -> None:
            state, before = learner.state, copy.deepcopy(learner.state.state_dict())
            load(learner, donor)
            self.copies.append(Copy(learner.policy, donor, before, copy.deepcopy(state.state_dict()),
                                    flat({"model": state.weights.read()[0]}), saved[donor]))

        def watched_configure(learner: Learner) -> None:
            before = learner.cfg.learning_rate
            configure(learner)
            if learner.cfg.learning_rate != before or not self.sgd_steps:
                self.configured.append((learner.policy, len(self.sgd_steps)))

        def watched_sgd_step(learner: Learner, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            stats = sgd_step(learner, data)
            rates = {group["lr"] for group in learner.state.optimizer.param_groups}
            wanted = learner.buffers.settings[learner.policy, 0]  # the learning rate is the first of them
            self.sgd_steps.append(SgdStep(
                learner.policy, int(learner.buffers.env_steps.sum()), float(wanted), *rates,
                int(learner.buffers.first_version[learner.policy]),
                data["policy_version"].clone(), data["valid"].clone()))
            return stats

        for owner, name, function in (
                (Population, "update", watched_update), (Learner, "save", watched_save),
                (Learner, "load", watched_copy), (Learner, "configure", watched_configure),
                (Learner, "sgd_step", watched_sgd_step)):
            patch.setattr(owner, name, function)

    def first_steps(self) -> list[tuple[SgdStep, int]]:
        """Return a policy's first SGD step after each change of its settings, and the env_steps before the change."""
        found = []
        for policy, number in self.configured:
            later = [step for step in self.sgd_steps[number:] if step.policy == policy]
            if number and later:
                found.append((later[0], self.sgd_steps[number - 1].env_steps))
        return found


def settle(running: APPO) -> None:
    """Let a serial run carry out what was decided last."""
    for _ in range(3):
        running.save()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a finished run of population-based training, which no test changes, and all that was watched."""
    TAPE.clear()
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        with make(tmp_path_factory.mktemp("finished"), **PBT) as running:
            running.train(1500)
            settle(running)
    return SimpleNamespace(run=running, dir=running.cfg.run_dir, watch=watch, tape=TAPE.copy(),
                           events=events_of(running.cfg.run_dir))


def test_files_tell_the_settings_and_the_shaping_of_every_policy(finished: SimpleNamespace) -> None:
    for policy, learner in enumerate(learners(finished.run)):
        settings = read_json(finished.dir / f"policy_{policy:02}_cfg.json")
        shaping = read_json(finished.dir / f"policy_{policy:02}_reward_shaping.json")
        last = [event for event in finished.events if event["policy"] == policy][-1]
        assert settings == {name: getattr(learner.cfg, name) for name in settings}, "the learner's own settings"
        assert settings.keys() == tunable(learner.cfg).keys()
        assert shaping.keys() == DEFAULT_SHAPING.keys(), "in the environment's own form"
        assert settings | {f"shaping/{name}": value for name, value in pbt.flatten_shaping(shaping).items()} == (
            numbers_of(last))
    assert len(list(finished.dir.glob("policy_*.json"))) == 2 * PBT["num_policies"]
    assert not list(finished.dir.rglob("*.tmp"))


@pytest.mark.parametrize(("rate", "optimize_gamma"), [(1.0, True), (0.0, False)])
def test_policy_0_begins_with_the_given_settings_and_each_other_with_one_mutation(
        tmp_path: Path, rate: float, *, optimize_gamma: bool) -> None:
    given = {"learning_rate": 0.0123, "max_grad_norm": 3.0, "ppo_clip_value": 0.0, "gamma": 0.95}
    running = make(tmp_path, **PBT | given | {"pbt_mutation_rate": rate, "pbt_optimize_gamma": optimize_gamma})
    running.close()
    begin = [numbers_of(event) for event in events_of(running.cfg.run_dir)]
    assert [event["policy"] for event in events_of(running.cfg.run_dir)] == [0, 1, 2, 3]
    defaults = tunable(running.cfg) | FLAT_SHAPING
    assert defaults.items() >= (given if optimize_gamma else {"learning_rate": 0.0123}).items()
    assert begin[0] == defaults
    for numbers in begin[1:]:
        assert numbers.keys() == defaults.keys()
        assert numbers["ppo_clip_value"] == 0.0, "off stays off"
        changed = {name for name, value in numbers.items() if value != defaults[name]}
        assert changed == ((defaults.keys() - {"ppo_clip_value"}) if rate else set())
        assert all(is_mutation(numbers[name], defaults[name], defaults[name]) for name in changed - {"gamma"})
        if optimize_gamma:
            ratio = (1 - numbers["gamma"]) / (1 - 0.95)
            assert 1.01 - 1e-9 <= max(ratio, 1 / ratio) <= 1.2 + 1e-9
    assert begin[1] != begin[2] or not rate, "each has a mutation of its own"
    for numbers, learner in zip(begin, learners(running), strict=True):
        assert tunable(learner.cfg).items() <= numbers.items()
        assert learner.state.learning_rate == numbers["learning_rate"]


def test_each_event_follows_from_the_one_before_and_from_its_donor(finished: SimpleNamespace) -> None:
    defaults = tunable(finished.run.cfg) | FLAT_SHAPING
    now: dict[int, dict[str, Any]] = {}
    kinds = set()
    for event in finished.events:
        policy, numbers = event["policy"], numbers_of(event)
        if policy not in now:
            assert (event["donor"], event["policy_steps"], event["objective"]) == (None, 0, None)
            assert event["words"] == f"policy {policy} begins"
            now[policy] = numbers
            continue
        source = now[policy if event["donor"] is None else event["donor"]]
        is_mutated = policy != 0 and "unchanged" not in event["words"]
        for name, value in numbers.items():
            if is_mutated:
                assert is_mutation(value, source[name], defaults[name]), name
            else:
                assert value == source[name]
        kinds.add((event["donor"] is not None, is_mutated))
        now[policy] = numbers
    assert kinds >= {(True, True), (False, True), (False, False)}, "replaced, mutated, and unchanged ones were seen"


def test_decisions_follow_the_objectives_when_a_policy_is_due(finished: SimpleNamespace) -> None:
    last, decided = [0] * 4, []
    for update in finished.watch.updates:
        assert None not in update.objectives, "every policy has finished an episode"
        order = np.argsort([-objective for objective in update.objectives], kind="stable").tolist()
        for decision in update.decisions:
            policy = decision.policy
            assert update.steps[policy] >= PBT["pbt_start_mutation"]
            assert update.steps[policy] - last[policy] >= PBT["pbt_period_env_steps"]
            last[policy] = update.steps[policy]
            assert f"is {order.index(policy) + 1} of 4" in decision.words
            is_worse = update.objectives[order[0]] - update.objectives[policy] > 1e-6
            assert decision.donor == (order[0] if policy == order[-1] and is_worse else None)
            assert decision.mutate == (policy not in (0, order[0]))
            decided.append((policy, update.steps[policy], update.objectives[policy], decision.donor, decision.words))
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
    for done in watched.copies:
        assert_equal(done.after["model"], done.saved["model"])
        assert_equal(done.after["optimizer"]["state"], done.saved["optimizer"]["state"])
        assert any(adam["exp_avg"].any() for adam in done.after["optimizer"]["state"].values())
        weights = torch.cat([tensor.reshape(-1).float() for tensor in done.after["model"].values()])
        assert torch.equal(done.published, weights), "policy workers act with them"
        assert not all(torch.equal(done.before["model"][name], tensor) for name, tensor in done.after["model"].items())
        assert done.after["sgd_steps"] == done.before["sgd_steps"] + 1, "a version of its own"
        for name in ("policy_steps", "env_steps_trained", "env_steps", "learning_rate"):
            assert done.after[name] == done.before[name], name


def assert_equal(a: Any, b: Any) -> None:
    """Compare nested states bit by bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    else:
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_mutated_learning_rate_survives_the_optimizer_of_the_donor_and_goes_on_decaying(watched: Watch) -> None:
    steps = watched.first_steps()
    assert {step.policy for step, _ in steps} & ({done.policy for done in watched.copies} - {0})
    for step, before in steps:
        share = 1 - before / SMALL["train_for_env_steps"] if watched.lr_schedule == "linear_decay" else 1
        assert share / 2 < step.rate / step.wanted_rate <= share, "the first step after new settings"


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
    begins = [(place, call.shaping) for place, call in enumerate(finished.tape) if call.what == "shaping"]
    now = {event["policy"]: shaping_of(event) for event in finished.events[:4]}
    known = [shaping_of(event) for event in finished.events]
    assert all(shaping in known for _, shaping in begins)
    assert all(call.agent == 0 for call in finished.tape)
    events = iter(finished.events[4:])
    for update in finished.watch.updates:
        for decision in update.decisions:
            event = next(events)
            outdated, now[decision.policy] = now[decision.policy], shaping_of(event)
            if decision.donor is None and outdated not in now.values():
                assert all(shaping != outdated for place, shaping in begins if place >= update.tape_before)
    assert any(shaping == now[1] for _, shaping in begins)


@pytest.mark.parametrize(("env", "sign"), [("Payday", 1), ("Misleading", -1)])
def test_the_true_objective_is_ranked_by_or_else_the_return(tmp_path: Path, env: str, sign: int) -> None:
    running = run(tmp_path, 900, env, **PBT | {"pbt_mutation_rate": 0.5})
    events = events_of(running.cfg.run_dir)
    begin = {event["policy"]: sign * wage(shaping_of(event)) for event in events[:4]}
    place = 1 + sorted(begin, key=lambda policy: (-begin[policy], policy)).index(events[4]["policy"])
    assert f"is {place} of 4" in events[4]["words"]
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
    rows = [[{name: value for name, value in row.items() if name not in CLOCK}
             for row in read_lines(folder / "metrics.jsonl")] for folder in (first, second)]
    assert rows[0] == rows[1]


# ---- resume ------------------------------------------------------------------------------------------------------


def test_a_resumed_population_goes_on_where_it_was(finished: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(finished.dir, tmp_path / "run")
    before = finished.run.find(Population)
    with APPO("tiny_games:Payday", train_dir=str(tmp_path), experiment="run", serial_mode=True) as resumed:
        after = resumed.find(Population)
        assert events_of(tmp_path / "run") == finished.events, "nobody is mutated at the beginning"
        assert after.settings == before.settings
        assert after.shaping == before.shaping
        assert after.last_update == before.last_update
        assert any(after.last_update[policy] for policy in range(4))
        assert torch.equal(resumed.buffers.settings, finished.run.buffers.settings)
        assert torch.equal(resumed.buffers.shaping, finished.run.buffers.shaping)
        for policy, learner in enumerate(learners(resumed)):
            assert after.settings[policy].items() <= vars(learner.cfg).items()
            assert learner.state.learning_rate == after.settings[policy]["learning_rate"]
            assert learner.state.sgd_steps == learners(finished.run)[policy].state.sgd_steps > 0
            assert resumed.buffers.policy_steps[:, policy].sum() == finished.run.buffers.policy_steps[:, policy].sum()
            assert_equal(learner.model.state_dict(), learners(finished.run)[policy].model.state_dict())
        num_events = len(finished.events)  # 100 episodes of each policy must finish first
        resumed.train(4000, should_stop=lambda: len(events_of(tmp_path / "run")) > num_events + 1)
    new = events_of(tmp_path / "run")[len(finished.events):]
    assert new
    for event in new:
        policy = event["policy"]
        assert event["policy_steps"] - before.last_update[policy] >= PBT["pbt_period_env_steps"]
        assert "begins" not in event["words"]


def test_a_replacement_that_was_decided_last_is_not_lost_by_a_save_and_a_resume(tmp_path: Path) -> None:
    """Stop as soon as a replacement was decided: what the files say of it must be true of the weights."""
    with make(tmp_path, **PBT) as running:
        running.train(should_stop=lambda: events_of(running.cfg.run_dir)[-1]["donor"] is not None)
    event = events_of(running.cfg.run_dir)[-1]
    state = load_checkpoint(find_checkpoint(running.cfg.run_dir, policy=event["policy"]))
    saved = map(load_checkpoint, list_checkpoints(policy_dir(running.cfg.run_dir, event["donor"])))
    assert any(torch.equal(flat(state), flat(donor)) for donor in saved)


class Crash(Exception):
    """Something that ends a run without saving."""


def test_after_a_crash_settings_are_those_that_the_weights_were_learned_with(tmp_path: Path) -> None:
    """Each policy goes on with its newest checkpoint, a donor's is newer; the files for people tell what was lost."""
    with pytest.raises(Crash), make(tmp_path, **PBT) as running:
        running.train(100)
        running.train(should_stop=lambda: events_of(running.cfg.run_dir)[-1]["donor"] is not None)
        settle(running)
        running.train(1500)
        running._kill()  # saves nothing
        raise Crash
    before = running.find(Population)
    states = [load_checkpoint(find_checkpoint(running.cfg.run_dir, policy=policy)) for policy in range(4)]
    saved = [state["population"] for state in states]
    assert [place["last_update"] for place in saved] != [before.last_update[policy] for policy in range(4)]
    events = [event for event in events_of(tmp_path / "run")
              if event["policy_steps"] <= saved[event["policy"]]["last_update"]]
    assert events != events_of(tmp_path / "run")
    steps = max(state["env_steps"] for state in states)
    assert metrics_of(tmp_path)[-1]["env_steps"] > steps
    with make(tmp_path, **PBT) as resumed:
        population = resumed.find(Population)
        for policy, learner in enumerate(learners(resumed)):
            assert population.settings[policy] == saved[policy]["settings"]
            assert population.shaping[policy] == saved[policy]["shaping"]
            assert population.last_update[policy] == saved[policy]["last_update"]
            assert saved[policy]["settings"].items() <= vars(learner.cfg).items()
            assert read_json(tmp_path / "run" / f"policy_{policy:02}_cfg.json") == saved[policy]["settings"]
        assert events_of(tmp_path / "run") == events
        assert metrics_of(tmp_path)[-1]["env_steps"] <= resumed.env_steps == steps
        resumed.train(300)
    for name in ("env_steps", "num_episodes"):
        numbers = [row[name] for row in metrics_of(tmp_path)]
        assert numbers == sorted(numbers)
        assert max(b - a for a, b in itertools.pairwise(numbers)) < 300, "nothing jumps over what was lost"


def metrics_of(train_dir: Path) -> list[dict[str, Any]]:
    return read_lines(train_dir / "run" / "metrics.jsonl")


@pytest.mark.parametrize("rest", ["", '{"env_steps": 7, "fps": 1.', "\x00\x00", '{"fps": 3}', "[]"])
def test_reports_after_the_checkpoint_and_broken_ones_are_cut_out(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"env_steps": steps, "fps": 1.5}) for steps in (10, 20, 20, 30)]
    path.write_text("\n".join([*lines, rest]) if rest else "\n".join(lines) + "\n")
    assert cut_lost_rows(path, 20) == (1 + ("fps" in rest and rest.endswith("}")), {"env_steps": 20, "fps": 1.5})
    assert path.read_text() == "\n".join(lines[:3]) + "\n"
    assert cut_lost_rows(path, 20) == (0, {"env_steps": 20, "fps": 1.5})
    assert cut_lost_rows(tmp_path / "none.jsonl", 20) == (0, {})


# ---- what policies are ranked by ---------------------------------------------------------------------------------


def made(num_policies: int, sgd_steps: int = 0) -> list[PolicyProgress]:
    return [PolicyProgress(policy, {}, sgd_steps, None) for policy in range(num_policies)]


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
    """Return the folder of a finished asynchronous run of several policies, which no test changes."""
    with make(tmp_path_factory.mktemp("several"), "Payday", num_policies=NUM_POLICIES, **ASYNC) as running:
        running.train(1500)
        running.save()
        running.train(1500)
    assert not multiprocessing.active_children()
    return running.cfg.run_dir


def test_records_have_one_entry_for_each_policy(several: Path) -> None:
    summary, rows = read_json(several / "summary.json"), read_lines(several / "metrics.jsonl")
    assert summary["mean_return"] == [pytest.approx(4.5)] * NUM_POLICIES
    for row in rows:
        assert len(row["policies"]) == NUM_POLICIES
        assert row["sgd_steps"] == sum(part["sgd_steps"] for part in row["policies"])
    states = [load_checkpoint(find_checkpoint(several, policy=policy)) for policy in range(NUM_POLICIES)]
    assert summary["sgd_steps"] == sum(state["sgd_steps"] for state in states)
    for policy, state in enumerate(states):
        assert any("loss" in row["policies"][policy] for row in rows), "each has learned"
        assert 0 < rows[-1]["policies"][policy]["sgd_steps"] <= state["sgd_steps"], "a little was learned after it"
    assert sum(state["policy_steps"] for state in states) <= summary["env_steps"], "one agent in each environment"


def test_a_resumed_run_continues_every_policy_and_begins_one_anew_that_is_lost(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several, tmp_path / "run")
    shutil.rmtree(policy_dir(tmp_path / "run", NUM_POLICIES - 1))
    states = [load_checkpoint(find_checkpoint(several, policy=policy)) for policy in range(NUM_POLICIES - 1)]
    with APPO("tiny_games:Payday", train_dir=str(tmp_path), experiment="run") as resumed:
        steps = resumed.buffers.policy_steps.sum(0).tolist()
        assert resumed.versions == [*(state["sgd_steps"] for state in states), 0]
        assert steps == [*(state["policy_steps"] for state in states), 0]
        assert resumed.env_steps == max(state["env_steps"] for state in states)
        assert all(steps[:-1])
        resumed.train(1500)
        assert all(now > before for now, before in
                   zip(resumed.buffers.policy_steps.sum(0).tolist(), steps, strict=True))
    assert not multiprocessing.active_children()
    after = [load_checkpoint(find_checkpoint(tmp_path / "run", policy=policy)) for policy in range(NUM_POLICIES)]
    assert all(new["sgd_steps"] > old["sgd_steps"] for new, old in zip(after, states, strict=False))
    assert after[-1]["sgd_steps"] > 0
    assert len(read_json(tmp_path / "run" / "summary.json")["mean_return"]) == NUM_POLICIES


def test_population_based_training_works_in_processes(tmp_path: Path) -> None:
    with make(tmp_path, **PBT | ASYNC | {"num_policies": 2}) as running:
        running.train(100_000, should_stop=lambda: any(
            event["donor"] is not None for event in events_of(running.cfg.run_dir)))
        running.train(2000)
    assert not multiprocessing.active_children()
    events = events_of(running.cfg.run_dir)
    for policy in range(2):
        last = [event for event in events if event["policy"] == policy][-1]
        assert running.find(Population).numbers(policy) == numbers_of(last)


# ---- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_gpus", "devices"), [
    ("auto", 0, ["cpu"] * 5), ("cpu", 4, ["cpu"] * 5), ("cuda:1", 4, ["cuda:1"] * 5),
    *((name, 1, ["cuda:0"] * 5) for name in ("auto", "cuda")),
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
    taken: dict[int, torch.Tensor] = {}
    add_snapshot = SharedWeights.add_snapshot

    def add(weights: SharedWeights, model: torch.nn.Module, version: int) -> None:
        add_snapshot(weights, model, version)
        taken[version] = flat({"model": model.state_dict()})

    monkeypatch.setattr(SharedWeights, "add_snapshot", add)
    running = run(tmp_path, 1500, "HigherWins", self_play_snapshots=3, **SELF_PLAY)
    assert min(taken) == 0, "the first opponent is the beginning"
    assert len(taken) - int(running.buffers.policy_steps.sum()) // 150 in (0, 1), "one in each period"
    weights = running.buffers.policies[0].weights
    kept = {weights.version_of(number): flat({"model": weights.read(number)[0]})
            for number in range(weights.num_snapshots)}
    assert sorted(kept) == list(taken)[-3:]
    assert all(torch.equal(kept[version], taken[version]) for version in kept)
    taken.clear()
    with APPO("tiny_games:HigherWins", train_dir=str(tmp_path), experiment="run", serial_mode=True) as resumed:
        assert list(taken) == resumed.versions


def flat(state: dict[str, Any]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).float() for tensor in state["model"].values()])


@pytest.mark.parametrize(("env", "favor", "low", "high"), [
    ("HigherWins", 2, 0.85, 1.0),  # the current policy plays the highest action
    ("HigherWins", 0, 0.0, 0.15),  # the lowest
    ("AlwaysEven", 2, 0.5, 0.5), ("FirstSeatWins", 2, 0.2, 0.8)])
def test_the_share_of_games_won_against_the_past_is_reported(
        tmp_path: Path, env: str, favor: int, low: float, high: float) -> None:
    settings = SELF_PLAY | {"self_play_past_fraction": 1.0, "self_play_snapshot_every_env_steps": 1_000_000,
                            "learning_rate": 1e-12}
    with make(tmp_path, env, **settings) as running:
        learner = learners(running)[0]
        learner.model.policy_head.bias.data[favor] = 20.0
        learner.state.sgd_steps = 1
        learner.state.publish()
        running.train(800)
    assert low <= read_json(running.cfg.run_dir / "summary.json")["win_rate_vs_past"][0] <= high
