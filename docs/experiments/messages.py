"""What does it cost to hand a trajectory over: as a pickled object in a queue, or as 8 bytes and a place in memory?

    python -m docs.experiments.messages --seconds 2

One process makes trajectories of Pong, 64 steps of 84 x 84 x 4 bytes; another one gets hold of them. Once a trajectory
travels, through a `multiprocessing.Queue`; once it lies in shared memory and only its slot's number travels, through
the `Inbox` that the system uses.
"""

import argparse
import multiprocessing
import time

import torch

from shared_buffers import SLOTS, STOP, Inbox

SHAPE, SLOTS_IN_USE = (65, 4, 84, 84), 4


def send_objects(queue, answers, seconds):
    trajectory = torch.randint(255, SHAPE, dtype=torch.uint8).numpy()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        queue.put(trajectory)
        answers.get()
    queue.put(None)


def send_places(storage, inbox, answers, seconds):
    until, slot = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        inbox.put((SLOTS, slot))  # the rows were written there one by one, while they were played
        answers.get()
        slot = (slot + 1) % SLOTS_IN_USE
    inbox.put((STOP, 0))


def report(name, count, seconds, size):
    print(f"{name:22} {1e6 * seconds / count:9,.0f} us a trajectory, {size:>9,} bytes through the kernel")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    context = multiprocessing.get_context("spawn")
    answers = Inbox(SLOTS_IN_USE)

    queue = context.Queue()
    sender = context.Process(target=send_objects, args=(queue, answers, seconds), daemon=True)
    sender.start()
    count, begin = 0, None
    while queue.get() is not None:
        begin, count = begin or time.perf_counter(), count + 1
        answers.put((SLOTS, 0))
    report("pickled, in a queue", count, time.perf_counter() - begin, torch.Size(SHAPE).numel())
    sender.join()

    storage = torch.randint(255, (SLOTS_IN_USE, *SHAPE), dtype=torch.uint8).share_memory_()
    inbox = Inbox(SLOTS_IN_USE)
    sender = context.Process(target=send_places, args=(storage, inbox, answers, seconds), daemon=True)
    sender.start()
    count, begin = 0, None
    while (messages := inbox.get())[0][0] == SLOTS:
        begin, count = begin or time.perf_counter(), count + len(messages)
        assert storage[messages[0][1]].shape == SHAPE  # here it is: nothing was copied
        answers.put((SLOTS, 0))
    report("8 bytes, in an inbox", count, time.perf_counter() - begin, Inbox.RECORD.size)
    sender.join()
