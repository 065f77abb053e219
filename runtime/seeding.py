"""Where every random number comes from: one seed for each generator, derived from --seed and what it is for.

A run may be started more than once: each start has a number (`run_folder.count_start`), so that a resumed run plays new
episodes instead of those it began with. Seeds come from NumPy's SeedSequence, which mixes all parts of a key: runs with
neighboring seeds, and processes of one run, have nothing in common. Used by everything that draws.
"""

from collections.abc import Sequence

import numpy as np

# what a generator is for
ENVIRONMENT = 0  # 1 was another generator once: the numbers of seeds stay
SAMPLER, PROCESS, NETWORK, SHUFFLE, POPULATION, MAPPING, EVALUATION, REPLAY = range(2, 10)
MAX_SEED = 2**32 - 1  # one word of a SeedSequence; more would shift the parts of a key


def derive_seed(seed: int, purpose: int, start: int = 0, index: int = 0, part: int = 0) -> int:
    """Derive a seed in [0, 2^31) for one generator.

    Args:
        seed: `Config.seed`.
        purpose: one of the constants above.
        start: the number of the start of the run; 0 for what must be the same after each.
        index, part: which of several generators, for example the worker and its environment.
    """
    return int(np.random.SeedSequence((seed, purpose, start, index, part)).generate_state(1)[0] >> 1)


def consecutive(seed: int | Sequence[int], count: int) -> list[int]:
    """Return one seed for each of `count` environments: those given, or seed, seed + 1, ..."""
    return [seed + i for i in range(count)] if isinstance(seed, int) else [int(each) for each in seed]
