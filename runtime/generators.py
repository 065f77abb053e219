"""Random generators, and what else a process has only once: who plays or trains beside others leaves it to them.

Used by `crew.py`, `evaluator.py`, `plan.py` and `policy.py`.
"""

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.random import mtrand
from torch import Tensor

from runtime.seeding import PROCESS, derive_seed

# how to read and write the global generators, the threads of PyTorch, the working folder, the environment variables
ONCE = ((lambda: mtrand.get_state(legacy=False), mtrand.set_state), (random.getstate, random.setstate),
        (torch.get_rng_state, torch.set_rng_state),
        (lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [], torch.cuda.set_rng_state_all),
        (torch.get_num_threads, torch.set_num_threads), (os.getcwd, os.chdir),
        (os.environ.copy, lambda values: (os.environ.clear(), os.environ.update(values))))


def seed_all(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python, from which environments may draw."""
    torch.manual_seed(seed)
    mtrand.seed(derive_seed(seed, PROCESS, part=1))  # with one seed PyTorch's and NumPy's would draw the same
    random.seed(derive_seed(seed, PROCESS, part=2))


@contextlib.contextmanager
def left_alone(own: list[Any] | None = None) -> Iterator[None]:
    """Set `ONCE` back afterwards. It costs 0.2 ms, with `own` twice that.

    own: the values to begin with (empty: those of now); in the end it holds those that there are then.
    """
    before = [read() for read, _ in ONCE]
    for (_, write), value in zip(ONCE, own or before, strict=True):
        write(value)
    try:
        yield
    finally:
        if own is not None:
            own[:] = [read() for read, _ in ONCE]
        for (_, write), value in zip(ONCE, before, strict=True):
            write(value)


def fork_rng(devices: Sequence[torch.device]) -> contextlib.AbstractContextManager:
    """Set the generators of the CPU and of these devices back afterwards."""
    gpus = list(dict.fromkeys(device for device in devices if device.type != "cpu"))
    return torch.random.fork_rng(gpus, device_type=gpus[0].type if gpus else "cuda")


class OwnNumbers:
    """Random numbers that begin with a seed and that nothing else draws."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        with fork_rng([device]):
            torch.default_generator.manual_seed(seed)
            if device.type != "cpu":  # `torch.manual_seed` would seed those of all GPUs, where others draw
                module = torch.get_device_module(device)
                index = module.current_device() if device.index is None else device.index
                module.default_generators[index].manual_seed(seed)
            self.states = self.read_states()

    def read_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return states

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Let whatever is drawn within be these numbers, from where they ended last."""
        with fork_rng([self.device]):
            torch.set_rng_state(self.states[0])
            for state in self.states[1:]:
                torch.get_device_module(self.device).set_rng_state(state, self.device)
            yield
            self.states = self.read_states()
