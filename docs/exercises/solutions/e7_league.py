"""Exercise 7, solved: a main policy, and others whose only task is to find what it does wrong."""

from collections.abc import Sequence

import numpy as np


def league(agents: Sequence[str], num_policies: int, rng: np.random.Generator) -> list[int]:
    """Choose who plays a game of two: policy 0 against itself, or against one of the others, on either seat."""
    if num_policies == 1 or rng.random() < 0.5:
        return [0, 0]
    exploiter = int(rng.integers(1, num_policies))
    return [0, exploiter] if rng.random() < 0.5 else [exploiter, 0]
