"""Tests of `shared_buffers.SharedWeights`: whole copies only, whoever dies at whatever moment."""

import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from shared_buffers import CURRENT, SharedWeights

CPU, FORK = torch.device("cpu"), multiprocessing.get_context("fork")
SIZE = 200_000  # large enough that a copy takes a while


def make(value: float = 0.0) -> nn.Module:
    """Return a model whose numbers are all the same: a torn copy shows."""
    model = nn.Sequential(nn.Linear(SIZE, 1), nn.BatchNorm1d(1))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def values_of(state: dict[str, Any]) -> set[float]:
    return {float(value) for tensor in state.values() for value in tensor.unique()}


def seen(weights: SharedWeights, snapshot: int = CURRENT) -> tuple[int, set[float]]:
    """Return the version and the different numbers that a reader sees."""
    model = make(-1.0)
    version = weights.refresh(model, snapshot)
    assert version == weights.version_of(snapshot)
    return version, values_of(model.state_dict())


def test_the_newest_weights_are_those_published_last() -> None:
    weights, reader = SharedWeights(make(1.0), CPU, 2), make().bfloat16()
    assert (seen(weights), weights.refresh(reader)) == ((0, {1.0}), 0)
    assert values_of(reader.state_dict()) == {1.0}
    assert reader[0].weight.dtype == torch.bfloat16, "a model of another arithmetic is refreshed too"
    for version in (7, 8, 20):
        weights.publish(make(float(version)), version)
        assert (weights.version, seen(weights)) == (version, (version, {float(version)}))
        weights.add_snapshot(make(float(version)), version)
    assert [seen(weights, snapshot) for snapshot in (0, 1)] == [(20, {20.0}), (8, {8.0})], "the oldest is replaced"
    state, version = weights.read()
    weights.publish(make(21.0), 21)
    assert (version, values_of(state)) == (20, {20.0}), "a copy of its own"


def test_each_tensor_keeps_its_numbers_to_the_last_bit() -> None:
    model = nn.BatchNorm1d(3)
    model.num_batches_tracked.fill_(2**53 + 1)
    model.register_buffer("mean", torch.tensor([1e9 + 1 / 3], dtype=torch.float64))
    state, _ = SharedWeights(model, CPU, 0).read()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@contextlib.contextmanager
def halfway(look: Callable[[], None]) -> Iterator[None]:
    """Let a function be called in the middle of every copy out of or into a model, when half of it is done."""

    def copy_in_two(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        for number, (part, values) in enumerate(zip(to, source, strict=True)):
            if number == len(to) // 2:
                look()
            part.copy_(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", copy_in_two)
        yield


def test_a_writer_that_dies_leaves_the_newest_weights_whole_and_another_goes_on() -> None:
    weights = SharedWeights(make(1.0), CPU, 1)
    weights.publish(make(2.0), 2)
    weights.add_snapshot(make(2.0), 2)
    for write in (weights.publish, weights.publish, weights.add_snapshot):
        with pytest.raises(ZeroDivisionError), halfway(lambda: 1 / 0):
            write(make(3.0), 3)
        assert seen(weights) == (2, {2.0})
    state, version = weights.read(0)
    assert (version, values_of(state)) == (2, {2.0}), "the newest in the place of the snapshot that was being replaced"
    weights.publish(make(3.0), 3)
    assert seen(weights) == (3, {3.0})


def write_for_ever(weights: SharedWeights) -> None:
    for version in itertools.count(1):
        model = make(version % 100)
        weights.publish(model, version)
        weights.add_snapshot(model, version)


def test_readers_see_whole_weights_while_a_writer_is_frozen_and_killed_again_and_again() -> None:
    weights, versions = SharedWeights(make(), CPU, 1), set()

    def see_whole_copies() -> int:
        for snapshot in (0, CURRENT):
            state, version = weights.read(snapshot)
            assert values_of(state) == {version % 100}
        return version

    for _ in range(4):
        writer = FORK.Process(target=write_for_ever, args=(weights,), daemon=True)
        writer.start()
        while weights.version < len(versions):  # it has begun
            pass
        versions |= {see_whole_copies() for _ in range(10)}
        os.kill(writer.pid, signal.SIGSTOP)
        see_whole_copies()  # a frozen writer holds nobody up
        writer.kill()
        writer.join()
    assert len(versions) > 4


def read_for_ever(weights: SharedWeights, begun: Any) -> None:
    with halfway(lambda: (begun.set(), time.sleep(1000))):
        weights.refresh(make())


def test_a_learner_waits_for_a_reader_of_the_older_weights_until_that_dies() -> None:
    weights, begun = SharedWeights(make(1.0), CPU, 0), FORK.Event()
    reader = FORK.Process(target=read_for_ever, args=(weights, begun), daemon=True)
    reader.start()
    begun.wait()
    weights.publish(make(2.0), 2)  # into the other row
    writer = threading.Thread(target=weights.publish, args=(make(3.0), 3))
    writer.start()
    writer.join(0.3)
    assert (writer.is_alive(), weights.version) == (True, 2)
    reader.kill()
    writer.join(10)
    assert seen(weights) == (3, {3.0})


def freeze_while_writing(weights: SharedWeights) -> None:
    with halfway(lambda: os.kill(os.getpid(), signal.SIGSTOP)):
        weights.add_snapshot(make(3.0), 3)


def test_no_reader_waits_for_a_writer() -> None:
    weights, reader = SharedWeights(make(1.0), CPU, 1), make()
    weights.add_snapshot(make(2.0), 2)
    writer = FORK.Process(target=freeze_while_writing, args=(weights,), daemon=True)
    writer.start()
    while psutil.Process(writer.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    for end in (lambda: None, writer.kill):
        end()
        assert (weights.refresh(reader, 0), values_of(reader.state_dict())) == (0, {1.0})
    writer.join()


# ---- on a GPU, where a copy takes effect later ----------------------------------------------------------------------


class SlowWeights(SharedWeights):
    """The writer's end of weights on a GPU that copies, and passes events, one after another when `work` is called.

    A copy is done in two halves. Readers have another view of the weights.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.waits = 0
        super().__init__(make(0.0), CPU, 1)

    def work(self) -> None:
        self.queue.pop(0)()

    def _write(self, row: int, model: nn.Module, version: int) -> None:
        def copy_later(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
            self.queue += [functools.partial(part.copy_, value) for part, value in zip(to, source, strict=True)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", copy_later)
            super()._write(row, model, version)

    def _mark(self) -> SimpleNamespace:
        event = SimpleNamespace(passed=False, synchronize=lambda: self.wait_for(event))
        self.queue.append(lambda: setattr(event, "passed", True))
        return event

    def wait_for(self, event: SimpleNamespace) -> None:
        self.waits += 1
        while not event.passed:
            self.work()

    def reader(self) -> SharedWeights:
        other = copy.copy(self)
        other.__class__ = SharedWeights
        return other


def test_weights_count_when_a_gpu_has_copied_them_and_a_reader_never_sees_half_of_them() -> None:
    """The next publication waits for one that is not finished; the last one, and a snapshot, is waited for."""
    weights = SlowWeights()
    reader = weights.reader()
    assert (seen(reader), weights.waits) == ((0, {0.0}), 1)
    for version in range(1, 5):
        weights.publish(make(version), version, wait=False)
        assert weights.waits == version, "for the one before"
        for _ in range(2):  # half of it is copied, then all
            assert seen(reader) == (version - 1, {version - 1.0})
            weights.work()
    weights.finish_publishing()
    assert (seen(reader), weights.waits) == ((4, {4.0}), 5)
    weights.publish(make(5.0), 5)
    assert (seen(reader), weights.waits) == ((5, {5.0}), 6)
    weights.add_snapshot(make(6.0), 6)
    assert (seen(reader, 0), weights.waits) == ((6, {6.0}), 7)
