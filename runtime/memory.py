"""What a run allocates, counted from the shapes, and whether the machine has it. Used by `plan.py`.

Trajectories, published weights, datasets and replays are counted. What processes, environments and activations take is
not known before.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from config import Config, algorithm_class
from envs.vector_env import EnvInfo
from runtime.container import memory_limit
from runtime.ranks import from_rank_0, this_rank
from runtime.user_error import UserError
from shared_buffers import num_bytes, trajectory_specs
from weights import NEWEST_ROWS

SHM = Path("/dev/shm")  # where Linux keeps shared memory; in containers it often has 64 MB
TABLES_BYTES = 1 << 20  # what is shared beside trajectories and weights, at most


def count_bytes(cfg: Config, info: EnvInfo, kinds: Sequence[int], models: Sequence[torch.nn.Module],
                devices: Sequence[torch.device]) -> tuple[int, int, int]:
    """Return the bytes of shared memory, of datasets and of replays; kinds, models, devices: of each policy."""
    shared, datasets, replays = TABLES_BYTES, 0, 0
    slots = cfg.num_workers * cfg.num_envs_per_worker * len(info.agents)
    copies = NEWEST_ROWS + (cfg.self_play_snapshots if cfg.self_play_past_fraction else 0)
    copies += 3 * (len(cfg.learners) > 1)  # the weights and both moments that they train together
    for kind, model, device in zip(kinds, models, devices, strict=True):
        specs = trajectory_specs(cfg, *info.kinds[kind], model.state_size)
        shared += num_bytes(specs, slots)
        if device.type == "cpu":
            shared += 4 * copies * sum(tensor.numel() for tensor in model.state_dict().values())
        datasets += num_bytes(specs, 2 * len(cfg.learners) * cfg.trajectories_per_dataset)
        replays += algorithm_class(cfg.algo)(cfg).bytes_of_feed(specs)
    return shared, datasets, replays


def check_memory(cfg: Config, shared: int, datasets: int, replays: int, store_prefix: str) -> None:
    """Raise `UserError`, saying what to lower, when a run allocates more bytes than there are for this rank."""
    others = shared + datasets
    free = share_of_rank(f"{store_prefix}/memory", int(min(psutil.virtual_memory().available, memory_limit())))
    if others + replays > free:
        cure = "lower --num_envs_per_worker, --rollout, --batch_size or --num_policies"
        if replays and others < free:
            # the sum trees, whose sizes are powers of two, take up to twice as many bytes of a smaller replay
            each = replays / cfg.replay_size + 16 * len(cfg.learners) * cfg.num_policies
            cure = f"use at most --replay_size={int((free - others) / each)}"
        raise UserError(f"the run allocates {others + replays:,} bytes of memory, {free:,} are free; {cure}")
    free = share_of_rank(f"{store_prefix}/shm", shutil.disk_usage(SHM).free) if SHM.is_dir() else shared
    if shared > free and not cfg.serial_mode:
        raise UserError(f"the run allocates {shared:,} bytes of shared memory, /dev/shm has {free:,}; enlarge it "
                        "(docker run --shm-size=2g), or lower --num_envs_per_worker, --num_workers or --rollout")


def share_of_rank(key: str, free: int) -> int:
    """Return an equal share of what rank 0 finds free, before any rank takes some."""
    return int(from_rank_0(key, free)) // this_rank().local_world_size
