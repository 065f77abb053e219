"""Tests of `shared_buffers.Inbox`: no record is torn, and nobody who dies or freezes holds the others up."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest

from shared_buffers import PAUSE, SLOTS, SPLIT, STOP, Inbox

FORK = multiprocessing.get_context("fork")


def test_messages_come_in_order_and_slots_are_joined_until_the_one_to_stop() -> None:
    inbox, seen = Inbox(100), []
    assert inbox.empty()
    for message in ((SPLIT, 3), (SPLIT, 4), (SLOTS, 1, 2), (SLOTS, 9), (PAUSE, 0), (SLOTS, 5), (STOP, 0), (SPLIT, 4)):
        inbox.put(message)
    assert not inbox.empty()
    assert not inbox.serve(lambda *message: seen.append(message))
    assert inbox.empty()
    assert seen == [(SPLIT, 3), (SPLIT, 4), (SLOTS, 1, 2, 9), (PAUSE, 0), (SLOTS, 5)]
    inbox.put((SPLIT, 5))
    assert inbox.serve(lambda *message: seen.append(message))
    assert seen[-1] == (SPLIT, 5)


@pytest.mark.parametrize("size", [1, 37, 64, 65, 300])
@pytest.mark.parametrize("num_records", [1, 10_000, 100_000])
def test_no_writer_waits_while_there_is_no_more_than_was_said(num_records: int, size: int) -> None:
    inbox = Inbox(num_records)
    for start in range(0, num_records, size):  # a frozen reader: this would block for ever
        inbox.put((SLOTS, *range(start, min(start + size, num_records))))
    taken = []
    while not inbox.empty():
        taken += [slot for _, *slots in inbox.get() for slot in slots]
    assert taken == list(range(num_records))


def write(inbox: Inbox, writer: int) -> None:
    number = 0
    while True:
        inbox.put((writer, *range(number, number + 100)))
        number += 100


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_records_of_writers_that_are_killed_or_frozen_are_whole_and_in_order(number: int) -> None:
    """Each writer sends 0, 1, 2, ... as a kind of its own; the others go on."""
    inbox, rng = Inbox(1), random.Random(0)
    writers = [FORK.Process(target=write, args=(inbox, kind), daemon=True) for kind in range(100, 106)]
    for process in writers:
        process.start()
    seen: Counter[int] = Counter()

    def read() -> None:
        for kind, index in inbox.get():
            assert 100 <= kind < 106
            assert index == seen[kind], "none is lost, torn or twice there"
            seen[kind] += 1

    try:
        for process in writers[:-1]:
            end = time.monotonic() + rng.random() / 20
            while time.monotonic() < end:
                read()
            os.kill(process.pid, number)
        before = seen[105]
        for _ in range(200):
            read()
        assert seen[105] > before, "the last one writes on"
    finally:
        for process in writers:
            process.kill()
            process.join()
