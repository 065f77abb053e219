"""What the settings that were not given become on this machine, and why.

The profiles of `envs.py` were made for two cores. With more cores, or a GPU, `automatic` scales what depends on the
machine: workers, environments, splits, threads, trajectories and batches. Nothing is changed that was given. Only the
figures for two cores without a GPU are measured (`docs/performance.md`); the others follow from them.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from config import MAX_POLICIES, cpu_cores, max_workers

MAX_SLOTS_BY_DEFAULT = 500  # of trajectories, of one worker and one agent in each environment
ENVS_PER_CORE = 16  # of large observations: what keeps batches of inference large
MIN_ROLLOUT = 16  # of large observations: with shorter trajectories more would hang on the value of their end
CORES_PER_POLICY_WORKER = 8  # acting takes a tenth of the time of Pong on two cores
NETWORK_SETTINGS = {"encoder_conv_architecture", "encoder", "model"}  # who gives one has chosen the network
NETWORKS = {  # why an encoder was chosen
    "convnet_a3c": "the small network of A3C (without a GPU it reaches 18 on Pong in half the time; "
                   "--encoder_conv_architecture convnet_atari is the standard, and brings its own batches)",
    "convnet_atari": "the Nature CNN (the standard; a GPU has the time for it)"}


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


def automatic(machine: Machine, profile: Mapping[str, Any], given: Mapping[str, Any], *,
              large_observations: bool) -> dict[str, Any]:
    """Complete a family's profile for a machine.

    A profile's "without_gpu" replaces settings where there is none, unless a network is given: they belong to theirs.
    Its "num_envs" is the number of all environments on two cores. It decides how much experience is in flight, and so
    how old it is when it is learned from: it grows with the cores only where batches of inference would become too
    small. Then the datasets grow with it and trajectories become shorter (down to `MIN_ROLLOUT`, and not those of a
    memory), so that about one dataset is in flight.
    A population gets more environments, so that each policy's batches stay as large, but not with large observations,
    whose trajectories would fill the memory.
    """
    settings = dict(profile)
    without_gpu = settings.pop("without_gpu", {})
    if not machine.num_gpus and not NETWORK_SETTINGS & given.keys():
        settings |= without_gpu
    num_policies = min(max(1, given.get("num_policies", 1)), MAX_POLICIES)
    num_workers = max(1, given.get("num_workers", min(machine.cores, max_workers(num_policies))))
    settings["num_workers"] = num_workers
    settings["policy_workers_per_policy"] = max(1, machine.cores // (CORES_PER_POLICY_WORKER * num_policies))
    num_envs = settings.pop("num_envs")
    if large_observations:
        growth = max(1.0, ENVS_PER_CORE * machine.cores / num_envs)
        num_envs *= growth
        if growth >= 2:  # datasets grow at most twofold: larger ones learn from fewer steps
            settings["batch_size"] *= 2
        dataset = settings["batch_size"] * settings["num_batches_per_epoch"]
        has_memory = any(given.get(name) for name in ("use_rnn", "core", "model"))  # it learns within a trajectory
        while num_envs * settings["rollout"] >= 1.5 * dataset and settings["rollout"] > MIN_ROLLOUT and not has_memory:
            settings["rollout"] //= 2
        # training takes two thirds of the CPU; it has a thread for each part of a minibatch
        settings["learner_threads"] = 1 if machine.num_gpus else max(1, math.ceil(0.7 * machine.cores))
    per_worker = num_envs / num_workers
    if not large_observations:
        per_worker = max(per_worker, min(per_worker * num_policies, MAX_SLOTS_BY_DEFAULT / num_policies))
    # without a GPU, networks and environments share the cores: what a worker leaves idle, others use
    settings["worker_num_splits"] = 2 if machine.num_gpus else 1
    splits = max(1, given.get("worker_num_splits", settings["worker_num_splits"]))
    settings["num_envs_per_worker"] = splits * max(1, round(per_worker / splits))
    return settings


def explain(machine: Machine, settings: Mapping[str, Any], given: Mapping[str, Any], precision: str) -> str:
    """Say in one line which settings were chosen for the machine, and why; nothing of those that were given."""
    reasons = {
        "num_workers": "{} rollout workers (one for each core)",
        "num_envs_per_worker": "{} environments each (enough for large batches, few enough for fresh experience)",
        "worker_num_splits": "{} split(s) of them (" + (
            "one is stepped while the GPU acts for the other)" if machine.num_gpus else
            "while a worker waits for actions, other processes use its core)"),
        "policy_workers_per_policy": f"{{}} policy worker(s) (one for {CORES_PER_POLICY_WORKER} cores)",
        "learner_threads": "{} learner thread(s) " + ("(the GPU does the work)" if machine.num_gpus else
                                                      "(learning takes most of the time)"),
        "rollout": "trajectories of {} steps",
        "batch_size": "minibatches of {}",
    }
    parts = [text.format(settings[name]) for name, text in reasons.items() if name in settings and name not in given]
    network = settings.get("encoder_conv_architecture")
    if network in NETWORKS and not NETWORK_SETTINGS & given.keys():
        parts.append(NETWORKS[network])
    if "precision" not in given:
        is_reduced = precision == "bfloat16"
        why = "images, and the hardware has it" if is_reduced else "no images, or no bfloat16 in the hardware"
        parts.append(f"{precision} ({why})")
    return f"chosen for {machine}: " + ", ".join(parts)
