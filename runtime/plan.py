"""What a run is made of: all that can be found out, and refused, before anything is allocated or written.

Also how a resumed run gets back what its checkpoints hold. Used by `supervisor.py`.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from algorithm import Algorithm
from algorithms import algorithm_class
from config import Config
from envs.families import probe
from envs.vector_env import EnvInfo
from pbt import assign_kinds
from runtime import checkpoint, ranks
from runtime.children import start_server
from runtime.crew import Component, Processes
from runtime.generators import left_alone
from runtime.heartbeat import START_SEC
from runtime.machine import choose_cores, choose_device
from runtime.run_folder import ANOTHER, changes
from runtime.seeding import NETWORK, derive_seed
from runtime.training_state import check_optimizer, restore_weights
from runtime.user_error import ComponentError, UserError
from shared_buffers import SharedBuffers

DAMAGED = ".damaged"


class Plan(NamedTuple):
    """What a run is made of."""

    algorithm: Algorithm
    info: EnvInfo
    cores: list[int | None]  # to which rollout workers are bound
    # of each policy
    devices: list[torch.device]
    kinds: list[int]
    models: list[torch.nn.Module]
    paths: list[Path | None]  # the checkpoint with which a resumed run goes on
    states: list[dict[str, Any] | None]  # what that holds
    damaged: list[list[Path]]  # newer checkpoints, which cannot be read

    def describe_resume(self) -> str:
        """Tell which checkpoints are missing where a resumed run goes on with others."""
        lines = [f"{path} is damaged and is called {path.with_suffix(DAMAGED).name} now; the run goes on with "
                 f"{whole.name}" for paths, whole in zip(self.damaged, self.paths, strict=True) for path in paths]
        anew = [str(policy) for policy, state in enumerate(self.states) if state is None]
        return "\n".join([*lines, *([f"no checkpoint of policy {', '.join(anew)}: it begins anew"] if anew else [])])


@left_alone()
def make_plan(cfg: Config, run_cfg: Config) -> Plan:
    """Find out what a run is made of. Raises `UserError` for what is impossible.

    cfg: the settings of this rank. run_cfg: those of the run, in whose folder the checkpoints are.
    """
    devices = [choose_device(cfg.device, policy) for policy in range(cfg.num_policies)]
    info = probe(cfg) if cfg.serial_mode else probe_in_child(cfg)
    if cfg.self_play_past_fraction and len(info.agents) < 2:
        raise UserError(f"--self_play_past_fraction={cfg.self_play_past_fraction} needs opponents, {cfg.env} has one "
                        "agent")
    kinds = assign_kinds(cfg, info)
    models, paths, states, damaged = map(list, zip(*(load_policy(run_cfg, policy, info, kind)
                                                     for policy, kind in enumerate(kinds)), strict=True))
    return Plan(algorithm_class(cfg.algo)(cfg), info, choose_cores(cfg), devices, kinds, models, paths, states, damaged)


class Probe:
    """Makes an environment once, to learn its spaces; lives in a child process, which it may crash or freeze."""

    SPANS = ()

    def __init__(self, cfg: Config, report: Callable[[tuple], None]) -> None:
        report(("info", probe(cfg)))

    def run(self) -> None:
        """Return: all is reported."""


def probe_in_child(cfg: Config) -> EnvInfo:
    """Return what a `Probe` reports. Raises `UserError` as that does, `ComponentError` when it fails, dies or hangs."""
    reports: list[tuple] = []
    seconds = cfg.stall_timeout_sec + START_SEC
    crew = Processes(start_server())
    component = Component(f"probe of {cfg.env}", Probe, (cfg,), "probe", 0, None, torch.zeros(3, dtype=torch.int64))
    deadline = time.monotonic() + seconds
    try:
        crew.start([component], reports.append, cfg.seed, ranks.MAX_STARTS, trace=False)  # as no run starts
        while not reports and time.monotonic() < deadline:
            crew.advance(reports.append)
    finally:
        crew.kill()
    late = f"{component.name} hangs: more than {seconds:.0f} s (--stall_timeout_sec)"
    kind, *content = reports[0] if reports else ("died", 0, late, "")
    if kind == "died":
        raise ComponentError(content[2] or content[1])
    return content[0]


def load_policy(cfg: Config, policy: int, info: EnvInfo, kind: int
                ) -> tuple[torch.nn.Module, Path | None, dict[str, Any] | None, list[Path]]:
    """Make a policy's model, with the weights of its last whole checkpoint if the run is resumed and has one.

    Returns it, the checkpoint and what that holds, and newer ones that are damaged. The observations of its kind take
    the order of the checkpoint.
    """
    path, state, damaged = (checkpoint.load_newest(cfg.run_dir, policy) if cfg.restart_behavior == "resume" else
                            (None, None, []))
    if state is not None:
        info.kinds[kind] = info.as_trained(kind, state, path)
    torch.manual_seed(derive_seed(cfg.seed, NETWORK, index=policy))
    algorithm = algorithm_class(cfg.algo)(cfg)
    model = algorithm.make_model(*info.kinds[kind])
    if state is not None:
        load_weights(cfg, model, state, path)
        if "optimizer" in state:
            check_optimizer(algorithm.make_optimizer(model.parameters()), state)
    return model, path, state, damaged


def load_weights(cfg: Config, model: torch.nn.Module, state: dict[str, Any], path: Path) -> None:
    """Load the weights of a resumed run. Raises `UserError` when they do not fit, naming the settings that changed."""
    try:
        checkpoint.load_weights(model, state, path, cfg.algo)
    except UserError as error:
        groups = {field.name: field.metadata["group"] for field in dataclasses.fields(cfg)}
        changed = changes(cfg)
        shaping = [text for name, text in changed.items()
                   if groups[name] == "model" or name.startswith(("env_", "res_", "normalize_"))]
        if not changed:  # but the code has
            raise
        raise UserError(f"{cfg.run_dir} holds a run of another network: {', '.join(shaping or changed.values())}; "
                        f"{ANOTHER}") from error


def restore(cfg: Config, buffers: SharedBuffers, plan: Plan) -> None:
    """Put the counters, scores and weights of a run's checkpoints into what is shared; cfg: the settings of the run."""
    for path in (path for paths in plan.damaged for path in paths if ranks.this_rank().rank == 0):
        path.rename(path.with_suffix(DAMAGED))
    for policy, (model, state) in enumerate(zip(plan.models, plan.states, strict=True)):
        if state is not None:
            buffers.env_steps[-1] = max(int(buffers.env_steps[-1]), state["env_steps"])
            buffers.policy_steps[-1, policy] = state.get("policy_steps", state["env_steps"])
            buffers.best_score[policy], buffers.best_sort[policy] = checkpoint.best_score(cfg.run_dir, policy)
            restore_weights(cfg, policy, buffers.policies[policy].weights, model, state)
            if len(cfg.learners) > 1:
                counts = torch.tensor([state["sgd_steps"], state.get("env_steps_trained", 0), state["sgd_steps"]])
                buffers.policies[policy].shared_training.counts[:, 0] = counts
