"""Tests of `pbt.py`: who plays whom, who is replaced by whom, what a mutation changes.

Random choices are tested with fixed seeds: shares must lie within 5 standard deviations, counts pass a chi-square test.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pbt
from appo import Settings
from config import tunable
from runtime.utils import UserError

CONFIG = Settings(env="CartPole-v1", pbt_optimize_gamma=True)
LIMITS = {field.name: field.metadata["tune"] for field in dataclasses.fields(Settings) if field.metadata["tune"]}
N = 100_000


def rules(**settings: float) -> Settings:
    return dataclasses.replace(CONFIG, **{f"pbt_{name}": value for name, value in settings.items()})


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def is_share(count: int, total: int, share: float) -> bool:
    """Return whether a count agrees with a binomial distribution."""
    return abs(count - total * share) <= 5 * math.sqrt(total * share * (1 - share))


def is_uniform(draws: Sequence[Any], values: Sequence[Any]) -> bool:
    """Return whether all draws are of these values, and equally often: chi-square of mean df and variance 2 df."""
    counts, expected, df = Counter(draws), len(draws) / len(values), len(values) - 1
    chi_square = sum((counts[value] - expected) ** 2 / expected for value in values)
    return set(counts) <= set(values) and chi_square < df + 5 * math.sqrt(2 * df)


def are_factors(ratios: Sequence[float], low: float, high: float) -> bool:
    """Return whether ratios are uniform factors of a range, half of them inverted."""
    ups, downs = [ratio for ratio in ratios if ratio > 1], [1 / ratio for ratio in ratios if ratio < 1]
    parts = [[int(10 * (factor - low) / (high - low) * (1 - 1e-9) + 1e-9) for factor in half] for half in (ups, downs)]
    return (len(ups) + len(downs) == len(ratios) and is_share(len(ups), len(ratios), 0.5)
            and all(is_uniform(part, range(10)) for part in parts))


# ---- who plays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_kinds", "num_policies", "kinds"), [
    (1, 1, [0]), (1, 3, [0, 0, 0]), (2, 5, [0, 1, 0, 1, 0]), (3, 6, [0, 1, 2, 0, 1, 2]), (2, 1, None), (4, 3, None)])
def test_every_kind_of_agents_gets_policies_in_turn_or_is_refused(
        num_kinds: int, num_policies: int, kinds: list[int] | None) -> None:
    cfg, info = Settings(env="test", num_policies=num_policies), SimpleNamespace(kinds=[None] * num_kinds)
    if kinds is not None:
        assert pbt.assign_kinds(cfg, info) == kinds
    else:
        with pytest.raises(UserError, match=rf"--num_policies={num_kinds}\b"):
            pbt.assign_kinds(cfg, info)


AGENTS, POLICIES = [0, 1, 0, 1], [0, 1, 0, 0, 1]  # the kinds of 4 agents and of 5 policies


@pytest.mark.parametrize("mix", [True, False])
def test_policies_are_drawn_uniformly_from_those_of_the_agents_kind(mix: bool) -> None:
    rng = seeded()
    draws = [pbt.draw_policies(AGENTS, POLICIES, rng, mix=mix) for _ in range(9000)]
    for agent, kind in enumerate(AGENTS):
        assert is_uniform([draw[agent] for draw in draws], [0, 2, 3] if kind == 0 else [1, 4])
    pairs = [(a, b) for a in (0, 2, 3) for b in (0, 2, 3) if mix or a == b]
    assert is_uniform([(draw[0], draw[2]) for draw in draws], pairs), "agents of a kind: independent, or the same"
    assert mix or all(draw[1] == draw[3] for draw in draws)


@pytest.mark.parametrize(("num_snapshots", "fraction"), [
    ([5, 5, 5], 0.0),  # not asked for
    ([5], 1.0),  # a single agent has no opponent
    ([0, 0, 0], 1.0),  # there are no snapshots yet
    ([], 1.0)])
def test_all_agents_play_their_current_policies(num_snapshots: list[int], fraction: float) -> None:
    rng = seeded()
    assert all(pbt.draw_snapshots(num_snapshots, fraction, rng) == [-1] * len(num_snapshots) for _ in range(200))


@pytest.mark.parametrize("fraction", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("num_agents", [2, 4])
def test_the_fraction_is_the_share_of_the_opponents_that_are_frozen(fraction: float, num_agents: int) -> None:
    rng = seeded()
    draws = [pbt.draw_snapshots([3] * num_agents, fraction, rng) for _ in range(10_000)]
    assert all(draw.count(-1) == 1 if fraction == 1 else -1 in draw for draw in draws), "someone always learns"
    frozen = [(agent, number) for draw in draws for agent, number in enumerate(draw) if number != -1]
    assert is_share(len(frozen), len(draws) * (num_agents - 1), fraction)
    assert is_uniform(frozen, [(agent, number) for agent in range(num_agents) for number in range(3)])


# ---- who is replaced ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "last_update", "start", "period", "due"), [
    (99, 0, 100, 10, False), (100, 0, 100, 10, True),  # the start
    (109, 100, 100, 10, False), (110, 100, 100, 10, True), (49, 0, 10, 50, False), (50, 0, 10, 50, True)])  # a period
def test_a_policy_is_due_from_the_start_on_once_in_each_period(
        steps: int, last_update: int, start: int, period: int, due: bool) -> None:
    assert pbt.is_due(steps, last_update, start, period) is due


@pytest.mark.parametrize("num_policies", [*range(1, 13), 20, 25, 30, 100])
def test_the_fraction_is_rounded_up_and_nobody_is_both_best_and_worst(num_policies: int) -> None:
    order = seeded().permutation(num_policies).tolist()
    objectives = {policy: -float(place) for place, policy in enumerate(order)}
    for percent in range(101):
        count = -(-percent * num_policies // 100)  # in whole numbers: .28 * 25 = 7.000000000000001
        cfg = rules(replace_fraction=percent / 100, replace_reward_gap=0.0, replace_reward_gap_absolute=0.0)
        fates = [pbt.decide(policy, objectives, seeded(), cfg) for policy in order]
        places = list(range(num_policies))
        assert [i for i in places if "unchanged" in fates[i].words] == places[:count], f"{percent} % of {num_policies}"
        assert [i for i in places if fates[i].donor is not None] == places[max(num_policies - count, count):]


@pytest.mark.parametrize(("donor", "own", "relative_gap", "absolute_gap", "better"), [
    (8.0, 6.0, 0.25, 0.0, False), (8.0, 5.999, 0.25, 0.0, True),  # the relative gap, exactly and exceeded
    (8.0, 6.0, 0.0, 2.0, False), (8.0, 5.999, 0.0, 2.0, True),  # the absolute one
    (8.0, 5.0, 0.25, 4.0, False), (8.0, 5.0, 0.5, 2.0, False), (8.0, 5.0, 0.25, 2.0, True),  # both count
    (-8.0, -10.0, 0.25, 0.0, False), (-8.0, -10.001, 0.25, 0.0, True), (-20.0, -10.0, 0.1, 1e-6, False),
    (1.0, -1.0, 1.9, 1e-6, True), (1.0, -1.0, 2.0, 1e-6, False),  # on both sides of 0
    (0.0, -1e-6, 0.1, 1e-6, False), (0.0, -2e-6, 0.1, 1e-6, True), (-5.0, -5.0, 0.0, 0.0, False),  # 0, no gap
    (0.5, -math.inf, 0.1, 1e-6, True)])  # from one that never reached an objective
def test_a_donor_must_exceed_both_gaps(
        donor: float, own: float, relative_gap: float, absolute_gap: float, better: bool) -> None:
    cfg = rules(replace_fraction=0.5, replace_reward_gap=relative_gap, replace_reward_gap_absolute=absolute_gap)
    assert (pbt.decide(1, {0: donor, 1: own}, seeded(), cfg).donor == 0) is better


ASCENDING = {policy: 10.0 * policy for policy in range(10)}  # with fraction .3: 7 8 9 are best, 0 1 2 worst
DESCENDING = {policy: -10.0 * policy for policy in range(10)}  # 0 1 2 are best, 7 8 9 worst
CLOSE = {policy: 100.0 + policy for policy in range(10)}  # nobody is 10 % better than another
EQUAL = dict.fromkeys(range(10), 1.0)  # 0 1 2 are best
MIDDLING = {0: 5.0, 1: 9.0, 2: 1.0, 3: 4.0, 4: 6.0}  # 1 4 are best, 3 2 worst
UNLIKE = {0: 100.0, 1: 10.5, 2: 10.0, 3: 9.9}  # 1 is not 10 % better than 3


@pytest.mark.parametrize(("objectives", "policy", "fraction", "donors", "mutated", "place"), [
    (ASCENDING, 9, 0.3, [None], False, "1 of 10"), (ASCENDING, 7, 0.3, [None], False, "3 of 10"),  # the best
    (ASCENDING, 6, 0.3, [None], True, "4 of 10"), (ASCENDING, 3, 0.3, [None], True, "7 of 10"),
    (ASCENDING, 2, 0.3, [7, 8, 9], True, "8 of 10"), (ASCENDING, 1, 0.4, [6, 7, 8, 9], True, "9 of 10"),
    (ASCENDING, 0, 0.3, [7, 8, 9], False, "10 of 10"),  # takes over, no mutation
    (DESCENDING, 0, 0.3, [None], False, "1 of 10"), (MIDDLING, 0, 0.3, [None], False, "3 of 5"),
    (CLOSE, 0, 0.3, [None], False, "10 of 10"), (CLOSE, 1, 0.3, [None], True, "9 of 10"),  # the best are hardly better
    (EQUAL, 2, 0.3, [None], False, "3 of 10"), (EQUAL, 9, 0.3, [None], True, "10 of 10"),
    ({4: 1.0, 6: 3.0}, 4, 0.3, [6], True, "2 of 2"), ({3: 7.0}, 3, 0.3, [None], False, "1 of 1"),  # those of one kind
    (UNLIKE, 3, 0.5, [0, None], True, "4 of 4")])  # the gap counts to the donor that was drawn
def test_decisions(objectives: dict[int, float], policy: int, fraction: float, donors: list[int | None], mutated: bool,
                   place: str) -> None:
    rng, cfg = seeded(), rules(replace_fraction=fraction)
    decisions = [pbt.decide(policy, objectives, rng, cfg) for _ in range(1000)]
    donors_drawn = [decision.donor for decision in decisions]
    assert set(donors_drawn) == set(donors)
    assert len(donors) == 1 or is_uniform(donors_drawn, donors)
    assert {(decision.policy, decision.mutate) for decision in decisions} == {(policy, mutated)}
    assert all(f"is {place}" in decision.words for decision in decisions)


# ---- what a mutation changes -------------------------------------------------------------------------------------


def numbers(value: float | bool) -> dict[str, float | bool]:
    return {str(i): value for i in range(N)}


@pytest.mark.parametrize("rate", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("value", [2.0, -3.0])
def test_numbers_are_multiplied_or_divided_by_a_factor(rate: float, value: float) -> None:
    mutated = pbt.mutate(numbers(value), numbers(value), seeded(), rules(mutation_rate=rate))
    ratios = [number / value for number in mutated.values() if number != value]
    assert len(mutated) == N
    assert is_share(len(ratios), N, rate)
    assert not rate or are_factors(ratios, 1.1, 1.5)


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("default", [False, True])
def test_booleans_flip(value: bool, default: bool) -> None:
    mutated = pbt.mutate(numbers(value), numbers(default), seeded(), CONFIG)
    assert {type(flag) for flag in mutated.values()} == {bool}
    assert is_share(list(mutated.values()).count(not value), N, 0.15)


def test_gamma_changes_by_its_distance_from_1() -> None:
    rng, gamma, cfg = seeded(), {"gamma": 0.99}, rules(mutation_rate=1.0)
    mutated = [pbt.mutate(gamma, gamma, rng, cfg, LIMITS)["gamma"] for _ in range(10_000)]
    assert are_factors([(1 - value) / (1 - 0.99) for value in mutated], 1.01, 1.2)


def mutations(defaults: dict[str, Any], count: int, factors: dict[str, float], *limits: Any) -> list[dict[str, Any]]:
    """Mutate all numbers again and again; the defaults stay what they are."""
    rng, history, before, cfg = seeded(), [defaults], dict(defaults), rules(mutation_rate=1.0, **factors)
    for _ in range(count):
        history.append(pbt.mutate(history[-1], defaults, rng, cfg, *limits))
    assert defaults == before
    return history


@pytest.mark.parametrize("settings", [
    {},
    {"gamma": 1.0, "learning_rate": 0.5, "ppo_clip_ratio": 5.0, "max_grad_norm": 1e18, "value_loss_coeff": 1e-9},
    {"gamma": 0.9999999, "learning_rate": 1e-12, "exploration_loss_coeff": 7.0, "ppo_clip_value": 1e-5},
    {"gamma": 0.1, "ppo_clip_ratio": 0.0, "max_grad_norm": 0.0, "value_loss_coeff": 0.0, "exploration_loss_coeff": 0.0},
    {"gamma": 0.0, "ppo_clip_value": 0.0}], ids=["defaults", "large", "small", "off", "myopic"])
@pytest.mark.parametrize("factors", [{}, {"perturb_min": 1e9, "perturb_max": 1e9}], ids=["usual", "huge"])
def test_no_mutation_leaves_the_legal_range(settings: dict[str, float], factors: dict[str, float]) -> None:
    defaults = tunable(dataclasses.replace(CONFIG, **settings))
    history = mutations(defaults, 2000, factors, LIMITS)
    for name, (low, high) in LIMITS.items():
        values = [values[name] for values in history]
        if defaults[name] == 0 and name != "gamma":
            assert set(values) == {0.0}, "0 means off"
        else:
            assert min(low, defaults[name]) <= min(values), name
            assert max(values) <= max(high, defaults[name]), name
            assert len(set(values)) > 1 or defaults[name] in (0.0, 1.0, 1e18), "it did change"
    for values in history[::10]:
        dataclasses.replace(CONFIG, **values)


def test_reward_shaping_keeps_its_sign_and_a_finite_size() -> None:
    defaults = {"kill": 1.0, "death": -0.5, "step": 0.0, "huge": 1e300, "tiny": -1e-300}
    low, high = pbt.SHAPING_LIMITS
    for factors in ({}, {"perturb_min": 1e20, "perturb_max": 1e20}):
        for values in mutations(defaults, 10_000, factors):
            assert values["step"] == 0
            assert low <= values["kill"] <= high
            assert low <= -values["death"] <= high
            assert low <= values["huge"] <= 1e300
            assert 1e-300 <= -values["tiny"] <= high


# ---- reward shaping ----------------------------------------------------------------------------------------------


SHAPING = {"kill": 1, "death": -0.5, "alive": True, "weapons": {"pistol": (0.1, 2), "use": False, "none": {}},
           "list": [np.float32(0.5), np.int64(-3), np.bool_(True), {"deep": [[7]]}], 3: np.uint8(4)}
FLAT = {"kill": 1.0, "death": -0.5, "alive": True, "weapons/pistol/0": 0.1, "weapons/pistol/1": 2.0,
        "weapons/use": False, "list/0": 0.5, "list/1": -3.0, "list/2": True, "list/3/deep/0/0": 7.0, "3": 4.0}


@pytest.mark.parametrize(("shaping", "flat", "mutated"), [  # mutated: all signs are turned; with numbers of Python
    (SHAPING, FLAT, {"kill": -1.0, "death": 0.5, "alive": False,
                     "weapons": {"pistol": (-0.1, -2.0), "use": True, "none": {}},
                     "list": [-0.5, 3.0, False, {"deep": [[-7.0]]}], 3: -4.0}),
    ({}, {}, {}), ([], {}, []), (2, {"": 2.0}, -2.0), (True, {"": True}, False), ((1,), {"0": 1.0}, (-1.0,))])
def test_reward_shaping_becomes_flat_numbers_and_mutated_ones_find_their_places(
        shaping: Any, flat: dict[str, Any], mutated: Any) -> None:
    before = repr(shaping)
    assert repr(pbt.flatten_shaping(shaping)) == repr(flat), "equal in values, types and order"
    turned = {path: not value if isinstance(value, bool) else -value for path, value in flat.items()}
    assert repr(pbt.unflatten_shaping(shaping, iter(turned.values()))) == repr(mutated)
    assert repr(shaping) == before
