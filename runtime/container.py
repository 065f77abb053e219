"""What a container leaves of the machine: the limit of its control group, of either version, on cores.

Imports nothing slow. Used by `config.py`.
"""

import contextlib
import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # where a container sees its own


def numbers(name: str) -> list[float]:
    """Return the numbers in a file; none where it says "max", or is not there."""
    with contextlib.suppress(OSError, ValueError):
        return [float(word) for word in (CGROUP / name).read_text().split()]
    return []


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    quota = numbers("cpu.max") or numbers("cpu/cpu.cfs_quota_us") + numbers("cpu/cpu.cfs_period_us")
    limit = quota[0] / quota[1] if len(quota) == 2 and quota[0] > 0 else math.inf
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), limit)))
