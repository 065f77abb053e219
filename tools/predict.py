"""Predict the speed: what the parts cost, what limits them, and how fast the pipeline goes with that.

    python benchmark.py predict --env PongNoFrameskip-v4                                  this machine, without a GPU
    python benchmark.py predict --env PongNoFrameskip-v4 --cores 16 --gpu H100            another one
    python benchmark.py predict --check                                                   is it true here?

What each part takes of a core is measured on this machine (`components.py`). On a GPU everything else is predicted
(`gpu_costs.py`). `schedule.py` plays the pipeline with these costs.
Used by `tools/benchmark.py`.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from config import Config, algorithm_class, make_config
from envs.families import probe, profile
from runtime.container import cpu_cores
from runtime.machine import Machine, choose_niceness, this_machine
from runtime.user_error import UserError
from tools.components import Parts, measure_parts
from tools.gpu_costs import (
    COPY_US,
    EFFICIENCY,
    GPUS,
    KERNEL_US,
    LAUNCH_US,
    WAIT_US,
    Counted,
    count_on_gpu,
    find_gpu,
    times_on_gpu,
)
from tools.schedule import Place, Played, Schedule, Times

NATURE = {"env": "PongNoFrameskip-v4", "encoder_conv_architecture": "convnet_atari", "num_epochs": 1,
          "num_batches_per_epoch": 1, "batch_size": 1024, "rollout": 32, "learner_threads": 1}
CHECKS: dict[str, dict[str, Any]] = {
    "Pong": {"env": "PongNoFrameskip-v4"},
    "Pong, Nature CNN, 1 epoch": NATURE,
    "Pong, 1 epoch": NATURE | {"encoder_conv_architecture": "convnet_a3c", "encoder_conv_mlp_layers": (256,)},
    "CartPole": {"env": "CartPole-v1"},
    "CartPole, 256 environments, 1 epoch": {
        "env": "CartPole-v1", "num_envs_per_worker": 128, "num_epochs": 1, "num_batches_per_epoch": 1,
        "batch_size": 1024, "rollout": 32},
    "CartPole, LSTM": {"env": "CartPole-v1", "use_rnn": True, "rnn_type": "lstm", "rnn_size": 64},
    "Pendulum": {"env": "Pendulum-v1"}}


class Limit(NamedTuple):
    """What one kind of component allows."""

    name: str
    env_steps_per_sec: float
    formula: str


class Prediction(NamedTuple):
    """All that is predicted for some settings."""

    cfg: Config
    parts: Parts
    times: Times
    limits: list[Limit]
    played: Played
    simulation: float  # env_steps/s of cores that do nothing else
    counted: Counted | None

    @property
    def limit(self) -> str:
        """Name what limits the speed."""
        least = min(self.limits, key=lambda limit: limit.env_steps_per_sec)
        waits = self.played.env_steps_per_sec < 0.85 * least.env_steps_per_sec
        return f"{least.name}{', and waiting for each other' if waits else ''}"


# ---- the machine -------------------------------------------------------------------------------------------------


def settings_for(given: dict[str, Any], machine: Machine) -> Config:
    """Complete the settings as a machine would."""
    cfg = make_config(profile(given.get("env", ""), given, machine), given)
    if not cfg.async_rl or len(cfg.learners) > 1 or algorithm_class(cfg.algo).roles or cfg.serial_mode:
        raise UserError("predict knows the asynchronous pipeline with one learner for each policy: "
                        "--async_rl=True, --serial_mode=False, --num_learners=1, --algo=appo, impala or a3c")
    if hasattr(cfg, "replay_ratio"):
        raise UserError(f"predict knows no replay, which --algo={cfg.algo} has; choose appo, impala or a3c")
    return cfg


# ---- costs -------------------------------------------------------------------------------------------------------


def times_on_cpu(parts: Parts) -> Times:
    us = 1e-6
    return Times(parts.step * us, parts.batch * us, parts.row * us, parts.refresh * us, parts.copy * us,
                 parts.serial * us, parts.parallel * us)


# ---- the prediction ----------------------------------------------------------------------------------------------


def list_limits(cfg: Config, num_agents: int, times: Times, place: Place, rows: float) -> list[Limit]:
    """Compute what each kind of component allows, where a batch of actions has so many rows.

    A policy worker takes what there is, however little: what it could do is computed for the largest batches, of all
    that is not being stepped.
    """
    us = 1e6
    samples = cfg.trajectories_per_dataset * cfg.rollout  # of a dataset
    sgd_steps = cfg.num_batches_per_epoch * cfg.num_epochs * num_agents / samples  # for one env_step
    refreshes = min(cfg.policy_workers_per_policy * sgd_steps, num_agents / rows)
    act = (times.act(rows) * num_agents / rows + refreshes * times.refresh) * us
    learn = sgd_steps * (times.serial + times.parallel) * us
    fastest = sgd_steps * (times.serial + times.parallel / cfg.learner_threads) * us
    step, copy = times.step * us, times.copy * us
    servers, workers, learners = cfg.policy_workers_per_policy * cfg.num_policies, cfg.num_workers, cfg.num_policies
    splits = cfg.worker_num_splits
    largest = cfg.num_workers * cfg.envs_per_split * num_agents * max(1, splits - 1) / servers
    act_at_once = times.act(largest) * num_agents / largest * us
    shared = step + act + copy + learn
    limits = [
        Limit("cores", place.cores / shared * us,
              f"{place.cores} / ({step:.1f} + {act:.1f} + {copy:.1f} + {learn:.1f}) us: step, act, copy, learn"),
        Limit("rollout workers", workers / step * us, f"{workers} / {step:.1f} us"),
        Limit("policy workers", servers / act_at_once * us,
              f"{servers} / {act_at_once:.1f} us: up to {largest:.0f} rows, in {times.act(largest) * us:,.0f} us; "
              f"on the mean {rows:.0f}"),
        Limit("learner" if learners == 1 else "learners", learners / fastest * us,
              f"{learners} / {fastest:.1f} us: an SGD step takes "
              f"{(times.serial + times.parallel / cfg.learner_threads) * us:,.0f} us")]
    if place.num_gpus:
        used = min(place.num_gpus, cfg.num_policies)
        acting = max(times.batch_gpu / rows, times.row_gpu) * num_agents * us
        learning = sgd_steps * times.step_gpu * us
        limits.append(Limit("GPU" if used == 1 else "GPUs", used / (acting + learning) * us,
                            f"{used} / ({acting:.1f} + {learning:.1f}) us: act, learn"))
    return limits


def predict(cfg: Config, machine: Machine, gpu: str, seconds: float, parts: Parts | None = None) -> Prediction:
    """Predict the speed of a configuration on a machine; gpu: its name in the table, or "": it has none."""
    parts = parts or measure_parts(cfg, seconds, learns=not gpu)
    info, counted, times = probe(cfg), None, times_on_cpu(parts)
    if gpu:
        has_images = any(len(space.shape) == 3 for space in info.kinds[0][0].values())
        in_bf16 = cfg.precision != "float32" and has_images and GPUS[gpu].bf16_tflops > 0
        counted = count_on_gpu(make_config(vars(cfg), {"precision": "bfloat16" if in_bf16 else "float32"}))
        times = times_on_gpu(parts, counted, GPUS[gpu], cfg, in_bf16=in_bf16)
    place = Place(machine.cores, machine.num_gpus, choose_niceness(cfg, torch.device("cuda" if gpu else "cpu")))
    played = Schedule(cfg, len(info.agents), times, place).play()
    limits = list_limits(cfg, len(info.agents), times, place, played.rows)
    gpu_limit = next((limit.env_steps_per_sec for limit in limits if limit.name.startswith("GPU")), float("inf"))
    played = played._replace(env_steps_per_sec=min(played.env_steps_per_sec, gpu_limit))
    return Prediction(cfg, parts, times, limits, played, machine.cores / parts.simulation * 1e6, counted)


def machine_of(cores: int, gpu: str, num_gpus: int) -> tuple[Machine, str]:
    """Return the machine that was asked for (0: what is usual) and the GPU's name in the table. Raises `UserError`."""
    if num_gpus and not gpu:
        raise UserError(f"--num_gpus={num_gpus} needs --gpu NAME; choose from {', '.join(GPUS)}")
    for name, value in (("cores", cores), ("num_gpus", num_gpus)):
        if value < 0:
            raise UserError(f"--{name}={value} must be at least 1")
    return Machine(cores or cpu_cores(), (num_gpus or 1) if gpu else 0), find_gpu(gpu) if gpu else ""


def describe(found: Prediction, machine: Machine, gpu: str) -> list[str]:
    """Say what was measured and what assumed, in a few lines."""
    cfg, parts, times = found.cfg, found.parts, found.times
    what = f"{machine.cores} cores" + (f" and {machine.num_gpus} x {gpu} ({GPUS[gpu].memory_gb} GB)" if gpu else "")
    lines = [
        f"{cfg.env} on {what}; {cfg.num_workers} rollout workers x {cfg.num_envs_per_worker} environments in "
        f"{cfg.worker_num_splits} split(s), {cfg.num_policies} x {cfg.policy_workers_per_policy} policy worker(s), "
        f"rollout {cfg.rollout}, batch {cfg.batch_size} x {cfg.num_batches_per_epoch}, {cfg.num_epochs} epoch(s)",
        f"measured here, us of a core: an env_step {parts.simulation:.1f} in the simulator, {parts.step:.1f} with all "
        f"that a rollout worker does; copying it into a dataset {parts.copy:.1f}"]
    if found.counted is None:
        return [*lines, f"    a batch of actions {parts.batch:.0f}, each row of it {parts.row:.1f}, new weights "
                        f"{parts.refresh:.0f}; an SGD step {parts.serial:,.0f} in one thread and {parts.parallel:,.0f} "
                        f"shared by {cfg.learner_threads}"]
    lines.append(f"    a batch of actions without the network {parts.handing_batch:.0f}, each row of it "
                 f"{parts.handing_row:.1f}")
    for name, counts in (("a batch of actions", found.counted.batch), ("an SGD step", found.counted.sgd_step)):
        lines.append(f"counted on a pretended GPU: {name} is {counts.launches} launches, {counts.up} copies up, "
                     f"{counts.down} down, {counts.waits} waits")
    return [*lines,
            f"predicted from here on, us: a launch {LAUNCH_US:.0f}, a wait {WAIT_US:.0f}, a copy {COPY_US:.0f}; on the "
            f"GPU at least {KERNEL_US:.0f} a launch, {EFFICIENCY:.0%} of its published arithmetic "
            f"({found.counted.flops_of_row / 1e6:.2f} Mflop a row, three times that in training)",
            f"    an SGD step {times.serial * 1e6:,.0f}, of which the GPU works {times.step_gpu * 1e6:,.0f}"]


def check(name: str, given: dict[str, Any], seconds: float, repeats: int,
          measure: Callable[[dict[str, Any], float], Any]) -> tuple[list[str], list[str]]:
    """Predict and measure in turns; return the row of a table, and what was found each time.

    What is measured is divided by the share of the cores that was left to it, as if nothing else had run.
    """
    pairs, notes = [], []
    for _ in range(repeats):
        machine = this_machine()
        found = predict(settings_for(given, machine), machine, "", seconds / 2)
        run = measure(given, seconds)
        left = min(1.0, run.idle + run.env_steps_per_sec * sum(run.cpu_us.values()) / 1e6 / machine.cores)
        predicted = {kind: cores / found.played.env_steps_per_sec * 1e6 for kind, cores in found.played.busy.items()}
        pairs.append((found.played.env_steps_per_sec, run.env_steps_per_sec / left, found.played.lag, run.lag_mean))
        notes.append(f"{name}: predicted {pairs[-1][0]:,.0f}, measured {run.env_steps_per_sec:,.0f} env_steps/s on "
                     f"{left:.0%} of the cores, {run.idle:.0%} idle; us of a sample: predicted {in_us(predicted)}; "
                     f"measured {in_us(run.cpu_us)}")
    speed, measured, lag, lag_measured = map(statistics.median, zip(*pairs, strict=True))
    return [name, f"{speed:,.0f}", f"{measured:,.0f}", f"{speed / measured:.2f}", f"{lag:.1f}", f"{lag_measured:.1f}",
            found.limit], notes


def in_us(by_kind: dict[str, float]) -> str:
    return ", ".join(f"{kind} {us:.1f}" for kind, us in by_kind.items())
