"""Exercise 7: a main policy, and others whose only task is to find what it does wrong.

As it stands policy 0 never plays itself and always has the first seat.
"""

from collections.abc import Sequence

import numpy as np


def league(agents: Sequence[str], num_policies: int, rng: np.random.Generator) -> list[int]:
    """Choose who plays a game of two: policy 0 against itself, or against one of the others, on either seat."""
    if num_policies == 1:
        return [0, 0]
    return [0, int(rng.integers(1, num_policies))]
