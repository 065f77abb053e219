"""Several whole systems that train the same policy: `torchrun --standalone --nproc-per-node 2 train.py ...`.

Each process that torchrun starts is a *rank*: a whole system with its share of the cores and environments of its own.
They agree on the settings at the start, through torchrun's store. From then on only their learners meet, which add
their gradients (`reducer.AllReduce`): all have the same weights. Rank 0 keeps the run's folder, the others write little
and into temporary ones. Used wherever a rank differs from another.

PyTorch is imported only where it is used, since `children.py` needs the share of the cores before anything else.
"""

import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.guard import remove_at_end
from runtime.user_error import UserError

if TYPE_CHECKING:
    from config import Config

CORES = sorted(os.sched_getaffinity(0))  # of all ranks on this machine
MAX_STARTS = 1_000_000
# what may differ: it follows from the cores of each rank, or is for rank 0 alone
OWN_SETTINGS = {"num_workers", "num_envs_per_worker", "worker_num_splits", "policy_workers_per_policy",
                "learner_threads", "train_dir", "eval_every_env_steps"}
CONNECT_SEC, POLL_SEC, MAX_SEC = 60, 0.1, 1e6
PR_SET_PDEATHSIG = 1
systems = itertools.count(1)  # each rank has made equally many before: so they find each other


class Rank(NamedTuple):
    """Which of how many systems this is: of all, and of those on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def this_rank() -> Rank:
    """Read what torchrun says; without it this is the only one. Raises `UserError` for what torchrun does not say."""
    texts = {name: os.environ.get(name, default) for name, default in (
        ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))}
    own = Rank(*(int(text) if text.isdecimal() else -1 for text in texts.values()))
    can_meet = own.world_size == 1 or ("MASTER_ADDR" in os.environ and os.environ.get("MASTER_PORT", "").isdecimal())
    if not (0 <= own.rank < own.world_size and 0 <= own.local_rank < own.local_world_size and can_meet):
        raise UserError(f"{' '.join(f'{name}={text}' for name, text in texts.items())}: no rank of "
                        "torchrun, which sets MASTER_ADDR and MASTER_PORT too; unset these, or start with torchrun")
    return own


def take_share_of_cores() -> None:
    """Bind this process, and so its children, to this rank's share of the cores: as many as any other's."""
    own = this_rank()
    if own.world_size > 1:
        share = max(1, len(CORES) // own.local_world_size)
        os.sched_setaffinity(0, CORES[own.local_rank * share : (own.local_rank + 1) * share] or CORES)


# ---- settings ----------------------------------------------------------------------------------------------------


def check_settings(cfg: "Config", store_prefix: str) -> None:
    """Raise `UserError` for what several ranks cannot do, or when rank 0 has other settings."""
    own = this_rank()
    if own.world_size == 1:
        return
    for name, value in (("num_policies", 1), ("num_learners", 1), ("async_rl", True), ("serial_mode", False)):
        if getattr(cfg, name) != value:
            raise UserError(f"--{name}={getattr(cfg, name)} cannot be used with several ranks; set it to {value}")
    if len(cfg.learners) > 1:
        raise UserError(f"--algo={cfg.algo} has several learners of its own, and cannot be used with several ranks")
    text = json.dumps({name: value for name, value in vars(cfg).items() if name not in OWN_SETTINGS})
    of_rank_0 = json.loads(from_rank_0(f"{store_prefix}/settings", text))
    for name, value in json.loads(text).items():
        if value != of_rank_0[name]:
            raise UserError(f"rank {own.rank} has --{name}={value}, rank 0 has {of_rank_0[name]}; set it by a flag")


def own_settings(cfg: "Config") -> "Config":
    """Return the settings of this rank: all but rank 0 write little, into temporary folders, and judge nothing.

    The guard removes such a folder when this process ends, also by SIGKILL.
    """
    own = this_rank()
    if own.rank == 0:
        return cfg
    folder = tempfile.mkdtemp(prefix=f"rank_{own.rank}_of_{os.getppid()}_")
    remove_at_end(folder)
    return dataclasses.replace(cfg, train_dir=folder, eval_every_env_steps=0, stop_at_return=math.inf,
                               save_every_sec=math.inf, save_milestones_sec=math.inf, trace_sec=0.0)


# ---- meeting the others ------------------------------------------------------------------------------------------


def join_torchrun() -> str:
    """Let this process end with torchrun; return the prefix of this system's part of torchrun's store."""
    if this_rank().world_size > 1:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(systems)}"


@functools.cache
def open_store(timeout_sec: float) -> Any:
    """Connect to the store of torchrun, through which the ranks find each other."""
    from torch.distributed import TCPStore  # noqa: PLC0415

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=timeout_sec))


def from_rank_0(key: str, value: Any) -> str:
    """Return the value that rank 0 has given, as text; each key once."""
    own = this_rank()
    if own.world_size == 1:
        return str(value)
    store = open_store(CONNECT_SEC)
    if own.rank == 0:
        store.set(key, str(value))
    deadline = time.monotonic() + CONNECT_SEC
    while not store.check([key]):  # `get` would wait where no signal ends it
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not told {key} within {CONNECT_SEC} s; has it ended?")
        time.sleep(POLL_SEC)
    return store.get(key).decode()


def arrive(key: str) -> Callable[[], bool]:
    """Tell the other ranks that this one has come so far; return what tells whether all have."""
    size = this_rank().world_size
    if size == 1:
        return lambda: True
    store = open_store(CONNECT_SEC)
    store.add(key, 1)
    return lambda: store.add(key, 0) == size


def join_learners(store_prefix: str, timeout_sec: float) -> None:
    """Let the learners, one of each rank, find each other; none waits longer than timeout_sec for another."""
    from torch import distributed  # noqa: PLC0415

    own, seconds = this_rank(), min(timeout_sec, MAX_SEC)
    distributed.init_process_group(
        "gloo", store=distributed.PrefixStore(store_prefix, open_store(seconds)), rank=own.rank,
        world_size=own.world_size, timeout=timedelta(seconds=seconds))
