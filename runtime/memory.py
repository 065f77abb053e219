"""What a run takes of the machine's memory, estimated before anything is allocated. Used by `supervisor.py`."""

import contextlib
import os
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence

import psutil
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook as on_every_parameter

from config import Config, algorithm_class
from envs.flat_spaces import ACTION_MASK, num_options
from envs.vector_env import EnvInfo
from learner import CPU_BYTES_PER_PASS
from normalizers import one_hot_bytes
from runtime.container import allow_descriptors, memory_left
from runtime.ranks import from_rank_0, this_rank
from runtime.user_error import UserError
from shared_buffers import num_bytes, num_components, trajectory_specs
from weights import NEWEST_ROWS

# measured: the supervisor with its server of processes, and a component without its model and its batches
SUPERVISOR_BYTES, COMPONENT_BYTES = 340_000_000, 100_000_000
OPEN_FILES, FILES_PER_COMPONENT = 80, 12  # measured in the supervisor, which has the most: 31 + 5, of a policy 14
TABLES_BYTES = 1 << 20  # what is shared beside trajectories and weights, a page each at least
BYTES_PER_TENSOR = 1000  # of the object of each
INITIALIZING = 3  # orthogonal matrices are computed with two more of their size
ACTIVATIONS = 20  # bytes that a convolutional network keeps of each byte of a pass, of the Nature CNN in bfloat16

# how a part of the network becomes smaller, by the function that makes it
OWN = "make the layers of your own parts smaller"
CURES = {"ActorCritic.__init__": "let the environment offer fewer actions", "ActorCritic.make_body": OWN,
         "RecurrentCore.__init__": "lower --rnn_size or --rnn_num_layers",
         "VectorEncoder.__init__": "lower --encoder_mlp_layers, or let the environment show fewer numbers",
         "QNetwork.__init__": "lower --encoder_mlp_layers",
         "ImageEncoder.__init__": "lower --encoder_conv_mlp_layers, or use --encoder_conv_architecture=auto"}


def estimate_memory(cfg: Config, info: EnvInfo, kind_of_policy: list[int], models: Sequence[torch.nn.Module],
                    devices: Sequence[torch.device]) -> int:
    """Estimate the bytes of memory of all processes, without what the environments take."""
    total = SUPERVISOR_BYTES
    slots = cfg.num_workers * cfg.num_envs_per_worker * len(info.agents)
    for kind, model, device in zip(kind_of_policy, models, devices, strict=True):
        specs = trajectory_specs(cfg, *info.kinds[kind], model.state_size)
        total += num_bytes(specs, slots + 2 * len(cfg.learners) * cfg.trajectories_per_dataset)
        total += replay_bytes(cfg, info, [kind], [model])
        copies = copies_of_weights(cfg)
        if cfg.self_play_past_fraction:
            copies += cfg.self_play_snapshots * (1 + cfg.policy_workers_per_policy)
        if device.type == "cpu":
            total += copies * 4 * sum(tensor.numel() for tensor in model.state_dict().values())
            if any(len(space.shape) == 3 for space in info.kinds[kind][0].values()):
                total += ACTIVATIONS * CPU_BYTES_PER_PASS * cfg.learner_threads * len(cfg.learners)
            # one-hot vectors of a minibatch, which the learner keeps until its gradient is there, and of all agents
            rows = cfg.trajectories_per_minibatch * (cfg.rollout + 1) + slots
            total += one_hot_bytes(info.kinds[kind][0]) * rows
    if not cfg.serial_mode:
        total += num_components(cfg, len(models)) * COMPONENT_BYTES
    return total


def replay_bytes(cfg: Config, info: EnvInfo, kind_of_policy: list[int], models: Sequence[torch.nn.Module]) -> int:
    """Compute the bytes of the replays of all policies, 0 where they have none."""
    algorithm = algorithm_class(cfg.algo)(cfg)
    return sum(algorithm.bytes_of_feed(trajectory_specs(cfg, *info.kinds[kind], model.state_size))
               for kind, model in zip(kind_of_policy, models, strict=True))


def check_processes(cfg: Config, available: int) -> None:
    """Raise `UserError` when the processes alone are too many, before any model is made.

    There must be memory for those of one policy, and files that may be open for those of all.
    """
    needed = SUPERVISOR_BYTES + (0 if cfg.serial_mode else num_components(cfg, 1) * COMPONENT_BYTES)
    if needed > available:
        raise UserError(f"the processes alone need about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are "
                        "free (control groups count); lower --num_workers, or use --serial_mode")
    files = OPEN_FILES + num_components(cfg, cfg.num_policies) * FILES_PER_COMPONENT
    if (allowed := allow_descriptors(files)) < files:
        raise UserError(f"{files} files must be open at once, the system allows {allowed}; enter `ulimit -n {files}` "
                        "before, or lower --num_workers")


def copies_of_weights(cfg: Config) -> int:
    """Count: published twice, both moments of Adam; shared, and with gradients of each learner; of policy workers."""
    return 4 + (len(cfg.learners) > 1) + 2 * len(cfg.learners) + cfg.policy_workers_per_policy


class TooLarge(Exception):
    """More weights than the memory holds."""


def make_smaller(error: Exception) -> str:
    """Say which setting makes that part of a network smaller in which an error was raised."""
    names = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((CURES[name] for name in reversed(names) if name in CURES), OWN)


@contextlib.contextmanager
def weights_that_fit(cfg: Config, on_cpu: bool, available: int) -> Iterator[None]:
    """Raise `UserError` when the models that are made meanwhile have more weights than the memory holds.

    Each layer is counted when it is made, before anything is written to its memory, and so takes any.
    """
    copies, needed = copies_of_weights(cfg) if on_cpu else INITIALIZING, 0

    def count(module: torch.nn.Module, name: str, weights: torch.Tensor) -> None:
        nonlocal needed
        if not torch.nn.parameter.is_lazy(weights):
            needed += (weights.numel() * 4 + BYTES_PER_TENSOR) * copies
        if needed > available:
            raise TooLarge

    hook = on_every_parameter(count)
    fewer = "lower --num_policies, or " if cfg.num_policies > 1 else ""
    try:
        yield
    except TooLarge as error:
        raise UserError(f"the weights of the network and their copies need more than {needed / 1e9:,.1f} GB of memory, "
                        f"{available / 1e9:.1f} GB are free; {fewer}{make_smaller(error)}") from error
    except (RuntimeError, TypeError, MemoryError) as error:
        if not any(text in str(error).lower() for text in ("overflow", "can't allocate memory", "out of memory")):
            raise
        raise UserError(f"a layer of the network is larger than any memory; {make_smaller(error)}") from error
    finally:
        hook.remove()


def available_memory(store_prefix: str) -> int:
    """Return the bytes of memory that are left for this rank, in its container if it is in one."""
    return share_of_rank(f"{store_prefix}/memory", int(min(psutil.virtual_memory().available, memory_left())))


def available_shared_memory(store_prefix: str) -> int:
    """Return the bytes of shared memory that are left for this rank (in containers /dev/shm often has 64 MB)."""
    try:
        stat = os.statvfs("/dev/shm")  # where Linux keeps shared memory
    except OSError:
        return sys.maxsize
    return share_of_rank(f"{store_prefix}/shared_memory", stat.f_bavail * stat.f_frsize)


def check_shared_files(needed: int) -> None:
    """Raise `UserError` when files of so many bytes cannot be made in shared memory, whatever there is of it."""
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and largest < needed:
        raise UserError(f"the run needs {needed / 1e6:.1f} MB of shared memory, the system allows files of "
                        f"{largest / 1e6:.1f} MB; enter `ulimit -f unlimited` before")
    if os.path.isdir("/dev/shm") and not os.access("/dev/shm", os.W_OK):
        raise UserError("/dev/shm, where shared memory is kept, cannot be written; mount it with write access (docker "
                        "run --shm-size=2g)")


def share_of_rank(key: str, free: int) -> int:
    """Return an equal share of what rank 0 finds free, before any rank takes some."""
    return int(from_rank_0(key, free)) // this_rank().local_world_size


def check_memory(cfg: Config, needed_by: list[int], available: int, replays: int = 0) -> None:
    """Raise `UserError` when a run needs more bytes than are available.

    needed_by: with the first policy, two, ...; replays: of the last of these, the bytes of all replays.
    """
    needed = needed_by[-1]
    left = available - needed + replays  # for replays
    if needed > available and replays and left > 0:
        # the sum trees, whose sizes are powers of two, take up to twice as many bytes of a smaller replay: 16 a number
        each = replays / cfg.replay_size + 16 * len(cfg.learners) * len(needed_by)
        raise UserError(f"--replay_size={cfg.replay_size} takes {replays:,} bytes of memory, everything else "
                        f"{needed - replays:,}, and {available:,} are free; use at most --replay_size="
                        f"{int(left / each)}")
    if needed > available:
        fewer = [count for count, by in enumerate(needed_by, 1) if by <= available]
        cure = f"use --num_policies={fewer[-1]}, or lower" if fewer else "lower"
        what = f"--num_policies={cfg.num_policies}" if cfg.num_policies > 1 else "the run"
        raise UserError(f"{what} needs about {needed / 1e9:.1f} GB of memory ({needed:,} "
                        f"bytes), {available / 1e9:.1f} GB are free; {cure} --num_envs_per_worker, --rollout or "
                        "--batch_size")


def check_shared_memory(cfg: Config, info: EnvInfo, kind_of_policy: list[int], models: Sequence[torch.nn.Module],
                        devices: Sequence[torch.device], available: int) -> None:
    """Raise `UserError` when trajectories, weights on the CPU and tables need more shared memory than is available."""
    slots = cfg.num_workers * cfg.num_envs_per_worker * len(info.agents)
    needed = TABLES_BYTES + sum(num_bytes(trajectory_specs(cfg, *info.kinds[kind], model.state_size), slots)
                                for kind, model in zip(kind_of_policy, models, strict=True))
    copies = NEWEST_ROWS + (cfg.self_play_snapshots if cfg.self_play_past_fraction else 0)
    copies += 3 * (len(cfg.learners) > 1)  # the weights and both moments that they train together
    needed += sum(4 * copies * sum(tensor.numel() for tensor in model.state_dict().values())
                  for model, device in zip(models, devices, strict=True) if device.type == "cpu")
    check_shared_files(needed)
    if needed > available and not cfg.serial_mode:
        raise UserError(
            f"the run needs {needed / 1e6:.1f} MB of shared memory, /dev/shm has {available / 1e6:.1f} MB free; "
            "enlarge it (docker run --shm-size=2g), or lower --num_envs_per_worker, --num_workers or --rollout")


def check_one_hot(cfg: Config, info: EnvInfo, available: int) -> None:
    """Raise `UserError` when the first layer of the network for a large Discrete observation alone is too large."""
    for obs_space, _ in info.kinds:
        for name, space in obs_space.items():
            first = cfg.encoder_mlp_layers[0] if cfg.encoder_mlp_layers else 1
            needed = 4 * sum(num_options(space)) * first * copies_of_weights(cfg)
            if name != ACTION_MASK and needed > available and sum(num_options(space)) > first:
                raise UserError(f"observation '{name}' has {sum(num_options(space)):,} options; as one-hot vectors "
                                f"they need a network of {needed / 1e9:,.0f} GB, {available / 1e9:.0f} GB are free; "
                                "let the environment give numbers or bits instead")
