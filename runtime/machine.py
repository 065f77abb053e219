"""What there is to compute with, and the settings that follow from it.

The profiles of families and algorithms are made for two cores. `automatic` makes settings of them for any machine: it
scales workers, environments, splits, threads, trajectories and batches. Measured are two cores without a GPU
(`docs/performance.md`) and Pong on 16 with one (`docs/gpu.md`); all others are guesses. Nothing here knows an algorithm
or an environment: functions of numbers.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from runtime.utils import UserError, Values, own_cores, this_rank

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # where a container on Linux sees its share of time, "150000 100000"
MIN_ROLLOUT = 16  # with shorter trajectories more would depend on the bootstrap value
NETWORK_SETTINGS = {"encoder_conv_architecture", "encoder", "model"}  # who gives one has chosen the network


class Machine(NamedTuple):
    """What there is to work with."""

    cores: int  # that this process may use
    num_gpus: int  # that `--device` allows
    num_ranks: int = 1  # systems that train together

    def __str__(self) -> str:
        return f"{self.cores} cores, {self.num_gpus} GPUs"


def this_machine(device: str = "auto") -> Machine:
    """Look at this machine; `device` is the setting."""
    allowed = device.startswith(("auto", "cuda"))
    num_gpus = torch.cuda.device_count() if allowed else 0
    return Machine(cpu_cores(), num_gpus, this_rank().world_size)


def cpu_cores() -> int:
    """Count the cores that this process may use: fewer than it sees where a container limits their time."""
    cores = len(own_cores())
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no control group, or "max"
        return cores


# ---- settings ----------------------------------------------------------------------------------------------------


def automatic(machine: Machine, profile: Values, given: Values, *, num_roles: int,
              large_observations: bool) -> Values:
    """Complete a profile, which is for two cores, for a machine.

    1. Without a GPU a profile's "without_gpu" counts, unless a network is given.
    2. A profile's several learners count without a GPU, where nothing forbids them.
    3. A rollout worker for each core; a policy worker for each 8 cores, with a GPU for each 32; two splits with a GPU.
    4. Images (`large_observations`): environments, batches and trajectories as `for_images` says. Without a GPU the
       learners have 0.7 threads for each core, since training takes two thirds of the CPU; in turns one for each.
       All others: in a population up to 4 times as many environments.
    5. The workers share the environments evenly.
    6. In turns a dataset is a whole number of trajectories of every environment, so that nothing is left over.

    Args:
        profile: its settings, batch_size, num_batches_per_epoch and rollout among them, and "num_envs", the number of
            all environments.
        given: what the user has set; it counts, but is not in what is returned.
        num_roles: learners of a policy that have a task of their own each; 0: all have the same.
    """
    settings, has_gpu = dict(profile), machine.num_gpus > 0
    num_policies = given.get("num_policies", 1)
    without_gpu = settings.pop("without_gpu", {})
    if not has_gpu and not NETWORK_SETTINGS & given.keys():  # 1
        settings |= without_gpu
    num_envs = settings.pop("num_envs")

    in_turns = not (settings | given).get("async_rl", True)
    if has_gpu or in_turns or machine.num_ranks > 1 or given.get("serial_mode") or given.get("with_pbt"):  # 2
        settings.pop("num_learners", None)
    num_learners = num_roles or (settings | given).get("num_learners", 1)

    settings["num_workers"] = machine.cores  # 3
    settings["policy_workers_per_policy"] = max(1, machine.cores // ((32 if has_gpu else 8) * num_policies))
    settings["worker_num_splits"] = 2 if has_gpu else 1

    if large_observations:  # 4
        has_memory = any(given.get(name) for name in ("use_rnn", "core", "model"))
        num_envs = for_images(settings, num_envs, machine, has_memory=has_memory)
        share = 1.0 if in_turns else 0.7
        settings["learner_threads"] = 1 if has_gpu else math.ceil(share * machine.cores / num_learners)
    else:
        num_envs *= min(num_policies, 4)

    workers, splits, batches, rollout = ((settings | given)[name] for name in (  # 5
        "num_workers", "worker_num_splits", "num_batches_per_epoch", "rollout"))
    unit = math.lcm(splits, batches // math.gcd(workers, batches)) if in_turns else splits
    settings["num_envs_per_worker"] = unit * max(1, round(num_envs / workers / unit))

    if in_turns:  # 6
        num_envs = workers * (settings | given)["num_envs_per_worker"]
        num_trajectories = num_envs * max(1, round(settings["batch_size"] * batches / (num_envs * rollout)))
        settings["batch_size"] = max(1, num_trajectories // batches) * rollout
    return settings


def for_images(settings: Values, num_envs: int, machine: Machine, *, has_memory: bool) -> int:
    """Return the number of environments that keeps batches of inference large; adapt trajectories and batches to it.

    At least 16 for each core, or half of the profile's. If that doubles their number, the size of minibatches doubles
    too (with a GPU: their number). Then trajectories, but not of a memory, are halved until about one dataset is in
    flight: more would age.
    """
    of_cores = machine.cores * min(16, num_envs // 2)
    if of_cores >= 2 * num_envs:
        settings["num_batches_per_epoch" if machine.num_gpus else "batch_size"] *= 2
    num_envs = max(num_envs, of_cores)
    most = 1.5 * settings["batch_size"] * settings["num_batches_per_epoch"]
    while num_envs * settings["rollout"] >= most and settings["rollout"] > MIN_ROLLOUT and not has_memory:
        settings["rollout"] //= 2
    return num_envs


# ---- devices, arithmetic, priorities -----------------------------------------------------------------------------


def choose_device(name: str, policy: int = 0) -> torch.device:
    """Resolve `--device` for a policy: auto is a GPU where there is one; on several GPUs policies take turns.

    Raises `UserError` for a device that is not there.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", (policy + this_rank().local_rank) % torch.cuda.device_count())
    try:
        device = torch.device("cpu" if name == "auto" else name)
        torch.zeros(1, device=device).item()  # "meta" is there, but holds nothing
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={name} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def body_dtype(precision: str, device: torch.device, obs_space: Values) -> torch.dtype:
    """Choose the arithmetic of the network body: bfloat16 for images where the hardware multiplies matrices in it.

    A small MLP spends more on the casts than it saves, so vectors stay in float32.
    """
    if precision != "auto":
        return getattr(torch, precision)
    if not any(len(space.shape) == 3 for space in obs_space.values()):
        return torch.float32
    has_bfloat16 = (torch.cuda.is_bf16_supported() if device.type == "cuda" else
                    torch.cpu.get_capabilities().get("avx512_bf16"))
    return torch.bfloat16 if has_bfloat16 else torch.float32


def prepare(model: nn.Module, *, tf32: bool, torch_compile: bool) -> None:
    """Set the arithmetic of float32 matrices in this process, and compile a model when it is called."""
    if tf32:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    if torch_compile:
        model.compile()


def choose_niceness(num_epochs: int, device: torch.device) -> tuple[int, int]:
    """Choose the niceness of rollout workers and policy workers: who goes first on busy cores. A learner has 0.

    Several epochs on a CPU: the learner has most of the work, and delaying the samplers lowers the lag. One epoch: the
    learner would only wait for the samplers, so rollout workers are as urgent; policy workers come last, since requests
    gather meanwhile, and larger batches are cheaper. `docs/tried.md` has the figures.
    On a GPU policy workers only hand work on, and everybody waits for that (this was not measured).
    """
    if device.type != "cpu":
        return 10, 0
    return (0, 10) if num_epochs == 1 else (10, 10)
