"""What a run says of itself when it begins."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces

from config import Config
from envs.vector_env import EnvInfo
from runtime.container import cpu_cores
from runtime.machine import CORES_PER_POLICY_WORKER, NETWORK_SETTINGS, Machine, body_dtype

NETWORKS = {  # why an encoder was chosen
    "convnet_a3c": "the small network of A3C (without a GPU it reaches 18 on Pong in half the time; "
                   "--encoder_conv_architecture convnet_atari is the standard, and brings its own batches)",
    "convnet_atari": "the Nature CNN (the standard; a GPU has the time for it)"}


def describe_run(cfg: Config, info: EnvInfo, devices: Sequence[torch.device], model: torch.nn.Module,
                 trajectory_bytes: int, total_bytes: int, replay_bytes: int) -> str:
    """Describe the environment, the processes, the data and the memory of a run in a line each."""
    lines = []
    for kind, (obs_space, action_space) in enumerate(info.kinds):
        observations = ", ".join(f"{name} {describe_space(space)}" for name, space in obs_space.items())
        names = [name for name, of in zip(info.agents, info.kind_of_agent, strict=True) if of == kind]
        agents = f" ({', '.join(names)})" if len(info.agents) > 1 else ""
        lines.append(f"{cfg.env}{agents}: {observations} -> {action_space}")
    mode = "serial" if cfg.serial_mode else "asynchronous" if cfg.async_rl else "synchronous"
    policies = f"{cfg.num_policies} policies, each with " if cfg.num_policies > 1 else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines += [
        f"{mode}: {cfg.num_workers} rollout workers x {cfg.num_envs_per_worker} environments in "
        f"{cfg.worker_num_splits} split(s), {policies}{cfg.policy_workers_per_policy} policy worker(s), "
        f"{len(cfg.learners)} learner(s); "
        f"{cpu_cores()} cores, {memory:.0f} GiB, "
        f"networks on {', '.join(dict.fromkeys(map(str, devices)))} in {precision_of(cfg, info, devices)}",
        f"trajectories of {cfg.rollout} steps, datasets of {cfg.batch_size} x {cfg.num_batches_per_epoch} samples, "
        f"{cfg.num_epochs} epoch(s); {sum(p.numel() for p in model.parameters()):,} parameters; "
        f"about {total_bytes / 1e9:.1f} GB of memory, {trajectory_bytes / 1e6:.1f} MB of it "
        "trajectories in shared memory",
    ]
    if replay_bytes:
        each = " for each policy" if cfg.num_policies > 1 else ""
        lines.append(f"replay of {cfg.replay_size:,} transitions{each}, {replay_bytes:,} bytes; after the first "
                     f"{cfg.replay_warmup:,}, {cfg.replay_ratio:g} are trained on for each one sampled")
    lines.append(f"records in {cfg.run_dir}")
    return "\n".join(lines)


def precision_of(cfg: Config, info: EnvInfo, devices: Sequence[torch.device]) -> str:
    """Name the arithmetic of the network body."""
    return str(body_dtype(cfg, devices[0], info.kinds[0][0])).removeprefix("torch.")


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


def describe_space(space: Any) -> str:
    """Show a space in a few characters: a Box by its shape."""
    return "x".join(map(str, space.shape)) if isinstance(space, spaces.Box) else str(space)
