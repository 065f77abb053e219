"""PyTorch's random generators, of the CPU and of GPUs: who only plays must leave them to those who train beside it.

Used by `evaluator.py` and `policy.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


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
