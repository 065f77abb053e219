"""What a container leaves of the machine: the limits of control groups on cores and memory, and of descriptors.

A program that takes more memory than its control group may is killed by the kernel without a word, so the limits are
looked at before anything is made. Both versions of control groups; the tightest limit of a group and of those around it
counts. Imports nothing slow. Used by `config.py` and `memory.py`.
"""

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def groups(controller: str, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """List the folders of this process's control group and of those around it, the innermost first."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                top = root
            elif controller in controllers.split(","):
                top = root / controllers
            else:
                continue
            folder = top / path.lstrip("/")
            while folder != top:
                yield folder
                folder = folder.parent
            yield top


def read_number(path: Path) -> float:
    """Read the first number of a file; infinity where there is none: "max", -1, or no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        number = int(path.read_text().split()[0])
        return number if number >= 0 else math.inf
    return math.inf


def cpu_limit(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> float:
    """Return how many cores this process may fill; infinity: there is no limit."""
    limits = [math.inf]
    for folder in groups("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                limits.append(int(quota) / int(period))
        limits.append(read_number(folder / "cpu.cfs_quota_us") / min(read_number(folder / "cpu.cfs_period_us"), 1e9))
    return min(limits)


def memory_left(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that this process may still take; infinity: there is no limit. What the kernel only caches of
    files does not count: it gives that back.
    """
    left = [math.inf]
    for folder in groups("memory", root, own):
        for limit, used, cache in (("memory.max", "memory.current", "inactive_file "),
                                   ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")):
            most = read_number(folder / limit)
            if most < 1 << 60:  # what stands for no limit in the first version
                left.append(most - read_number(folder / used) + cached(folder / "memory.stat", cache))
    return max(0.0, min(left))


def cached(stat: Path, name: str) -> int:
    """Return the number behind a name in memory.stat."""
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_limit())))


def allow_descriptors(needed: int) -> int:
    """Allow this process, and those that it will start, as many open files as the system lets it; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else soft
