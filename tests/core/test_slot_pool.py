"""Tests of `slot_pool.py`: no slot is lost or lent twice, and nobody waits for ever."""

import numpy as np
import pytest

from slot_pool import SlotPool


def policies(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_an_unfinished_slot_is_gone_on_with_only_by_who_may() -> None:
    pool = SlotPool([[10, 11], [20]])
    slot, t = pool.take(0, may_go_on=True)
    assert (slot, t) == (10, 0)
    pool.leave(0, 10, 5, is_worthless=False)
    assert pool.take(0, may_go_on=False) == (11, 0)
    assert not pool.suffices(policies(0), policies())
    assert pool.suffices(policies(), policies(0))
    assert pool.take(0, may_go_on=True) == (10, 5)


@pytest.mark.parametrize(("t", "is_worthless"), [(0, False), (0, True), (5, True)])
def test_what_holds_nothing_to_learn_is_free_at_once(t: int, is_worthless: bool) -> None:
    pool = SlotPool([[10]])
    pool.take(0, may_go_on=True)
    pool.leave(0, 10, t, is_worthless=is_worthless)
    assert pool.take(0, may_go_on=False) == (10, 0)


def test_a_split_gets_all_its_slots_or_none() -> None:
    pool = SlotPool([[10, 11], [20]])
    pool.take(0, may_go_on=True)
    pool.leave(0, 10, 3, is_worthless=False)  # one free, one unfinished
    for rigid, flexible, expected in [
            ((0,), (0,), True), ((0, 0), (), False), ((), (0, 0), True), ((), (0, 0, 0), False), ((1,), (1,), False),
            ((1,), (0, 0), True)]:
        assert pool.suffices(policies(*rigid), policies(*flexible)) == expected


def test_unfinished_slots_are_handed_in_only_where_too_few_are_on_their_way() -> None:
    pool = SlotPool([[10, 11, 12]])
    for slot in (10, 11, 12):
        pool.take(0, may_go_on=False)
        if slot != 12:
            pool.leave(0, slot, 4, is_worthless=False)
    assert pool.take_out(policies(0)) == [(0, 10, 4)], "none is free, none away"
    pool.send_away(0, [10])
    assert pool.take_out(policies(0)) == [], "that one will come back"
    assert pool.take_out(policies(0, 0)) == [(0, 11, 4)]
    pool.send_away(0, [11])
    pool.receive(0, 10)
    pool.receive(0, 10)
    assert pool.num_away == [1], "a message may come twice"
    assert pool.take(0, may_go_on=False) == (10, 0)
    assert not pool.free[0]


def test_a_worker_that_takes_the_place_of_another_waits_for_what_the_learner_has() -> None:
    pool = SlotPool([[10, 11], [20, 21]], away=[11, 20, 21])
    assert pool.take(0, may_go_on=False) == (10, 0)
    assert (pool.num_away, pool.suffices(policies(1), policies())) == ([1, 2], False)
    pool.receive(1, 20)
    assert (pool.num_away, pool.take(1, may_go_on=False)) == ([1, 1], (20, 0))


@pytest.mark.parametrize("seed", range(20))
def test_every_slot_is_in_exactly_one_place(seed: int) -> None:
    """Random agents take, fill, leave and hand in; the learner gives back. The oracle: a set for each place."""
    rng = np.random.default_rng(seed)
    pool = SlotPool([range(8), range(8, 16)])
    held: dict[int, int] = {}  # slot: policy
    away: dict[int, int] = {}
    for _ in range(2000):
        policy, may_go_on = int(rng.integers(2)), bool(rng.integers(2))
        needed = policies(policy)
        choice = rng.integers(4)
        if choice == 0 and pool.suffices(*((policies(), needed) if may_go_on else (needed, policies()))):
            slot, t = pool.take(policy, may_go_on=may_go_on)
            assert slot not in held
            assert slot not in away
            assert may_go_on or t == 0
            held[slot] = policy
        elif choice == 1 and held:
            slot = int(rng.choice(list(held)))
            pool.leave(held.pop(slot), slot, int(rng.integers(4)), is_worthless=bool(rng.integers(2)))
        elif choice == 2 and held:
            slot = int(rng.choice(list(held)))
            pool.send_away(held[slot], [slot])
            away[slot] = held.pop(slot)
        elif choice == 3 and away:
            slot = int(rng.choice(list(away)))
            pool.receive(away.pop(slot), slot)
        for number, slot, _ in pool.take_out(needed):
            assert not pool.free[policy], "only when none is free"
            pool.send_away(number, [slot])
            away[slot] = number
        places = [slot for free in pool.free for slot in free] + [slot for left in pool.unfinished for slot, _ in left]
        assert sorted([*places, *held, *away]) == list(range(16))
        assert pool.num_away == [sum(of == number for of in away.values()) for number in range(2)]
        number_held = sum(of == policy for of in held.values())
        assert number_held == 8 or pool.free[policy] or pool.num_away[policy] or pool.unfinished[policy]
