"""Defaults derived from the machine, and why.

The profiles were made for two cores. With more cores, or a GPU, `automatic` scales what depends on the
machine: workers, environments, splits, threads, trajectories and batches. What was given stays as it is. Measured are
two cores without a GPU (`docs/performance.md`) and Pong on 16 with one (`docs/gpu.md`); all others are guesses.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import nn

from algorithms import algorithm_class
from config import Config, max_workers
from envs.families import FAMILIES, family
from runtime.container import cpu_cores
from runtime.ranks import this_rank
from runtime.user_error import UserError, nearest

# settings that follow from the machine, but where a profile has them
OF_MACHINE = ("num_workers", "num_envs_per_worker", "worker_num_splits", "policy_workers_per_policy", "learner_threads")
MIN_ROLLOUT = 16  # with shorter trajectories more would depend on the bootstrap value
NETWORK_SETTINGS = {"encoder_conv_architecture", "encoder", "model"}  # who gives one has chosen the network


class Machine(NamedTuple):
    """What there is to work with."""

    cores: int  # that this process may use
    num_gpus: int  # that `--device` allows

    def __str__(self) -> str:
        gpus = {0: "no GPU", 1: "a GPU"}.get(self.num_gpus, f"{self.num_gpus} GPUs")
        return f"{self.cores} core{'s' if self.cores > 1 else ''}, {gpus}"


def this_machine(device: str = "auto") -> Machine:
    """Look at this machine; `device` is that of `Config`."""
    allowed = device == "auto" or device.startswith("cuda")
    return Machine(cpu_cores(), torch.cuda.device_count() if allowed and torch.cuda.is_available() else 0)


def family_profile(kind: str, algo: str) -> dict[str, Any]:
    """Join the settings of a family and those of an algorithm for it."""
    profiles = algorithm_class(algo).profiles
    if unknown := profiles.keys() - FAMILIES.keys():
        raise UserError(f"--algo={algo}: there is no family '{min(unknown)}', which its profiles name"
                        f"{nearest(min(unknown), FAMILIES)}")
    of_env, of_algorithm = FAMILIES[kind].profile, profiles.get(kind, {})
    without_gpu = of_env.get("without_gpu", {}) | of_algorithm.get("without_gpu", {})
    return {**of_env, **of_algorithm, "without_gpu": without_gpu}


def defaults(env_id: str, given: Mapping[str, Any], machine: Machine | None = None) -> dict[str, Any]:
    """Return the settings that learn well on this environment's family and machine, beside those that are given.

    machine: None is this one.
    """
    kind = family(env_id)
    settings = family_profile(kind, given.get("algo", Config.algo))
    size = {name: value for name, value in settings.items() if name in ("res_w", "res_h")}
    if any(given.get(name, value) != value for name, value in size.items()):
        del settings["encoder_conv_architecture"]  # it belongs to that size
    return automatic(machine or this_machine(given.get("device", "auto")), settings, given,
                     large_observations=FAMILIES[kind].large_observations)


def automatic(machine: Machine, profile: Mapping[str, Any], given: Mapping[str, Any], *,
              large_observations: bool) -> dict[str, Any]:
    """Complete a family's profile, which is for two cores, for a machine.

    1. Without a GPU a profile's "without_gpu" counts, unless a network is given, and so do its several learners.
    2. A profile's "async_rl" False counts where sampling and learning share the cores; where a GPU learns, or several
       learners, policies or ranks do, they overlap.
    3. A rollout worker for each core; a policy worker for each 8 cores, with a GPU for each 32.
    4. The profile's "num_envs", shared by the workers, in two splits with a GPU; in a population up to 4 times as many.
    5. Images (`large_observations`): at least 16 environments for each core, or half of the profile's, which keeps
       batches of inference large. If that doubles their number, the size of minibatches doubles too (with a GPU: their
       number). Then trajectories, but not of a memory, are halved until about one dataset is in flight: more would age.
    6. Images: without a GPU the learners have 0.7 threads for each core, since training takes two thirds of the CPU; in
       turns one for each.
    7. In turns a dataset is a whole number of trajectories of every environment, so that nothing is left over.
    """
    of_profile = {name: profile[name] for name in OF_MACHINE if name in profile}
    own, given = algorithm_class(given.get("algo", Config.algo)).Settings, of_profile | given
    settings = {name: getattr(own, name) for name in ("batch_size", "num_batches_per_epoch", "rollout")} | profile
    without_gpu, has_gpu = settings.pop("without_gpu", {}), machine.num_gpus > 0
    several = any(given.get(name, 1) > 1 for name in ("num_policies", "num_learners")) or this_rank().world_size > 1
    settings["async_rl"] = (settings.get("async_rl", True) or has_gpu or several
                            or bool(given.get("self_play_past_fraction")))
    in_turns = not given.get("async_rl", settings["async_rl"])
    if not has_gpu and not NETWORK_SETTINGS & given.keys():
        settings |= without_gpu
    if has_gpu or in_turns or given.get("serial_mode") or given.get("with_pbt") or this_rank().world_size > 1:
        settings.pop("num_learners", None)
    num_envs, num_policies = settings.pop("num_envs"), max(1, given.get("num_policies", 1))
    num_learners = len(own.roles) or max(1, given.get("num_learners", settings.get("num_learners", 1)))
    if large_observations:
        of_cores = machine.cores * min(16, num_envs // 2)
        settings["num_batches_per_epoch" if has_gpu else "batch_size"] *= 2 if of_cores >= 2 * num_envs else 1
        num_envs = max(num_envs, of_cores)
        most = 1.5 * settings["batch_size"] * settings["num_batches_per_epoch"]
        has_memory = any(given.get(name) for name in ("use_rnn", "core", "model"))
        while num_envs * settings["rollout"] >= most and settings["rollout"] > MIN_ROLLOUT and not has_memory:
            settings["rollout"] //= 2
        share = 1.0 if in_turns else 0.7
        settings["learner_threads"] = 1 if has_gpu else math.ceil(share * machine.cores / num_learners)
    else:
        num_envs *= min(num_policies, 4)
    settings["policy_workers_per_policy"] = max(1, machine.cores // ((32 if has_gpu else 8) * num_policies))
    settings["num_workers"] = max(1, min(machine.cores, max_workers(num_policies, num_learners)))
    settings["worker_num_splits"] = 2 if has_gpu else 1
    workers, splits = (max(1, given.get(name, settings[name])) for name in ("num_workers", "worker_num_splits"))
    batches, rollout = (max(1, given.get(name, settings[name])) for name in ("num_batches_per_epoch", "rollout"))
    unit = math.lcm(splits, batches // math.gcd(workers, batches)) if in_turns else splits
    settings["num_envs_per_worker"] = unit * max(1, round(num_envs / workers / unit))
    if in_turns:
        num_envs = workers * max(1, given.get("num_envs_per_worker", settings["num_envs_per_worker"]))
        num_trajectories = num_envs * max(1, round(settings["batch_size"] * batches / (num_envs * rollout)))
        settings["batch_size"] = max(1, num_trajectories // batches) * rollout
    return settings | of_profile


def body_dtype(cfg: Config, device: torch.device, obs_space: dict[str, spaces.Space]) -> torch.dtype:
    """Choose the arithmetic of the network body: bfloat16 for images where the hardware multiplies matrices in it.

    A small MLP spends more on the casts than it saves, so vectors stay in float32.
    """
    if cfg.precision != "auto":
        return getattr(torch, cfg.precision)
    if not any(len(space.shape) == 3 for space in obs_space.values()):
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32


def prepare(cfg: Config, model: nn.Module) -> None:
    """Set the arithmetic of float32 matrices in this process, and compile a model when it is called."""
    if cfg.tf32:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    if cfg.torch_compile:
        model.compile()


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
        why = "choose auto, cpu, cuda, cuda:1, ..." if "Expected one of" in str(error) else str(error).splitlines()[0]
        raise UserError(f"--device={name} cannot be used: {why}") from error
    return device


def choose_niceness(cfg: Config, device: torch.device) -> tuple[int, int]:
    """Choose the niceness of rollout workers and policy workers: who goes first on busy cores. A learner has 0.

    Several epochs on a CPU: the learner has most of the work, and delaying the samplers lowers the lag. One epoch: the
    learner would only wait for the samplers, so rollout workers are as urgent; policy workers come last, since requests
    gather meanwhile, and larger batches are cheaper. `docs/tried.md` has the figures.
    On a GPU policy workers only hand work on, and everybody waits for that (this was not measured).
    """
    if device.type != "cpu":
        return 10, 0
    return (0, 10) if cfg.num_epochs == 1 else (10, 10)


def choose_cores(cfg: Config) -> list[int | None]:
    """Return the cores that rollout workers are bound to, one after another; None: to none.

    Sample Factory binds them by default. Here it costs 1 to 4 % while learning, and gains 3 to 5 % when only sampling.
    Raises `UserError` in serial mode.
    """
    if not cfg.set_workers_cpu_affinity:
        return [None]
    if cfg.serial_mode:
        raise UserError("--set_workers_cpu_affinity binds rollout workers to cores, but there are none with "
                        "--serial_mode; set it to False")
    return sorted(os.sched_getaffinity(0))
