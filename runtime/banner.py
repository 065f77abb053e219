"""What a run says of itself when it begins: six lines, of which four are a table of what was chosen, and why."""

import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from gymnasium import spaces
from torch import nn

from config import Config
from envs.families import family, family_profile
from envs.flat_spaces import ACTION_MASK
from runtime.machine import CORES_PER_POLICY_WORKER, NETWORK_SETTINGS, body_dtype, this_machine
from runtime.plan import Plan

WIDTH = 80


def announce(log: Callable[..., None], cfg: Config, plan: Plan, trajectory_bytes: int, given: Mapping[str, Any] | None,
             ) -> None:
    """Tell on the console and in the log what a run is made of; more of it in the log alone.

    given: the settings that were given, which need no reason; None: the run is resumed, and all were chosen before.
    """
    log("\n".join(describe_run(cfg, plan, given)))
    log("\n".join(describe_details(cfg, plan, trajectory_bytes)), to_console=False)


def describe_run(cfg: Config, plan: Plan, given: Mapping[str, Any] | None) -> list[str]:
    """Describe a run in six lines of at most `WIDTH` characters, but for the second one.

    That is longer where the name of the folder is long.
    """
    info, machine = plan.info, this_machine(cfg.device)
    agents = f", {len(info.agents)} agents" if len(info.agents) > 1 else ""
    obs_and_actions = describe_kind(plan, 0) if len(info.kinds) == 1 else f"{len(info.kinds)} kinds of agents"
    mode = ", serial" if cfg.serial_mode else "" if cfg.async_rl else ", synchronous"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [textwrap.shorten(f"{cfg.env}{agents}: {obs_and_actions}, {cfg.algo}{mode}", WIDTH, placeholder=" ..."),
             f"{machine}, about {plan.num_bytes / 2**30:.1f} of {memory / 2**30:.0f} GiB; "
             f"records in {cfg.run_dir}"]
    rows = [("sampling", describe_sampling(cfg)), ("acting", describe_acting(cfg, plan)),
            ("learning", describe_learning(cfg, plan)), ("network", describe_network(cfg, plan))]
    why = reasons(cfg, plan, given) if given is not None else {}
    width = max(len(chosen) for _, chosen in rows)
    for name, chosen in rows:
        in_columns = f"  {name:<9} {chosen:<{width}}  {why.get(name, '')}".rstrip()
        lines.append(in_columns if len(in_columns) <= WIDTH else f"  {name:<9} {chosen}"[:WIDTH])
    return lines


def describe_details(cfg: Config, plan: Plan, trajectory_bytes: int) -> list[str]:
    """Describe the spaces of all agents and what memory is for, a line each."""
    lines = []
    for kind in range(len(plan.info.kinds)):
        names = [name for name, of in zip(plan.info.agents, plan.info.kind_of_agent, strict=True) if of == kind]
        lines.append(f"{', '.join(names)}: {describe_kind(plan, kind)}")
    lines.append(f"trajectories of {cfg.rollout} steps, {trajectory_bytes / 1e6:.1f} MB of shared memory")
    if plan.replay_bytes:
        each = " for each policy" if cfg.num_policies > 1 else ""
        lines.append(f"replay of {cfg.replay_size:,} transitions{each}, {plan.replay_bytes:,} bytes; after the first "
                     f"{cfg.replay_warmup:,}, {cfg.replay_ratio:g} are trained on for each one sampled")
    return lines


def describe_sampling(cfg: Config) -> str:
    splits = f" in {cfg.worker_num_splits} splits" if cfg.worker_num_splits > 1 else ""
    return f"{count(cfg.num_workers, 'worker')} x {count(cfg.num_envs_per_worker, 'environment')}{splits}"


def describe_acting(cfg: Config, plan: Plan) -> str:
    workers = cfg.num_policies * (1 if cfg.serial_mode else cfg.policy_workers_per_policy)
    devices = ", ".join(dict.fromkeys(map(str, plan.devices)))
    return f"{count(workers, 'policy worker')}, {precision_of(cfg, plan)} on {devices}"


def describe_learning(cfg: Config, plan: Plan) -> str:
    learners = len(cfg.learners) * cfg.num_policies
    own = f"{learners} learners: " if learners > 1 else ""
    threads = f", {cfg.learner_threads} threads" if cfg.learner_threads > 1 and not cfg.serial_mode else ""
    if plan.replay_bytes:
        return f"{own}{cfg.batch_size} of {cfg.replay_size:,} ({plan.replay_bytes / 2**30:.1f} GiB){threads}"
    epochs = count(cfg.num_epochs, "epoch")
    return f"{own}{epochs} of {cfg.num_batches_per_epoch} x {cfg.batch_size} samples{threads}"


def describe_network(cfg: Config, plan: Plan) -> str:
    """Name the parts of the first policy's network, and count its parameters."""
    model = plan.models[0]
    leaves = {name: space for name, space in plan.info.kinds[plan.kinds[0]][0].items() if name != ACTION_MASK}
    are_images = [len(space.shape or ()) == 3 for space in leaves.values()]
    layers = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    convolutions = f"{layers} convolutions" if cfg.encoder_conv_architecture == "auto" else (
        cfg.encoder_conv_architecture)
    mlp = f"mlp {'-'.join(map(str, cfg.encoder_mlp_layers))}"
    parts = [name for name in (cfg.model, cfg.encoder) if name] or [
        *([convolutions] if any(are_images) else []), *([mlp] if not all(are_images) else [])]
    parts += [cfg.core] if cfg.core else [f"{cfg.rnn_type} {cfg.rnn_size}"] if cfg.use_rnn else []
    each = f"{cfg.num_policies} of " if cfg.num_policies > 1 else ""
    return f"{each}{' + '.join(parts)}, {sum(p.numel() for p in model.parameters()):,} parameters"


def reasons(cfg: Config, plan: Plan, given: Mapping[str, Any]) -> dict[str, str]:
    """Say in a few words why each row of the table is as it is; nothing of what was given."""
    kind, why = family(cfg.env), {}
    if "num_workers" not in given and not cfg.serial_mode:
        why["sampling"] = "a worker for each core"
    if cfg.worker_num_splits > 1 and "worker_num_splits" not in given:
        why["sampling"] = "splits take turns"
    if "precision" not in given:
        has_images = any(len(space.shape or ()) == 3 for space in plan.info.kinds[0][0].values())
        why["acting"] = "bfloat16 for images" if precision_of(cfg, plan) == "bfloat16" else (
            "no bfloat16 in this hardware" if has_images else "bfloat16 is for images")
    if cfg.policy_workers_per_policy > 1 and "policy_workers_per_policy" not in given:
        why["acting"] = f"one for {CORES_PER_POLICY_WORKER} cores"
    if plan.replay_bytes:
        why["learning"] = f"{cfg.replay_ratio:g} for each sampled"
    elif not {"batch_size", "num_batches_per_epoch", "num_epochs"} <= given.keys():
        why["learning"] = f"defaults of {kind}"
    if not (NETWORK_SETTINGS | {"encoder_mlp_layers"}) & given.keys():
        is_small = "encoder_conv_architecture" in family_profile(kind, cfg.algo)["without_gpu"]
        why["network"] = "small, without a GPU" if is_small and not this_machine(cfg.device).num_gpus else (
            f"defaults of {kind}")
    return why


def precision_of(cfg: Config, plan: Plan) -> str:
    """Name the arithmetic of the network body."""
    return str(body_dtype(cfg, plan.devices[0], plan.info.kinds[0][0])).removeprefix("torch.")


def describe_kind(plan: Plan, kind: int) -> str:
    """Show the spaces of a kind of agents."""
    obs_space, action_space = plan.info.kinds[kind]
    return ", ".join(f"{name} {describe_space(space)}" for name, space in obs_space.items()) + f" -> {action_space}"


def describe_space(space: Any) -> str:
    """Show a space in a few characters: a Box by its shape."""
    return "x".join(map(str, space.shape)) if isinstance(space, spaces.Box) else str(space)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
