"""What a GPU of the table would take, from what a pretended one counts. Used by `tools/predict.py`.

The policy worker and the learner run on a pretended GPU (`pretend_gpu.py`), which counts their launches, copies and
waits, and the memory that their operators touch. What one of these takes is a published figure or an assumption.
Nothing here was measured on a GPU.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from config import Config
from runtime.inbox import RESUME, SLOTS
from runtime.user_error import UserError, nearest
from tools.components import Parts, fill_slots, serial_system
from tools.pretend_gpu import FREE, Counts, PretendGPU
from tools.schedule import Times
from weights import CURRENT


class GPU(NamedTuple):
    """The published figures of a GPU: dense arithmetic, memory, and the bus to the CPU in one direction."""

    memory_gb: int
    memory_gb_per_sec: float
    bf16_tflops: float  # 0: it has none
    fp32_tflops: float
    bus_gb_per_sec: float


# NVIDIA's data sheets of H100 and H200 SXM5, A100 SXM4 80 GB, V100 SXM2 32 GB and T4, its whitepapers on Ada (RTX 4090)
# and GA102 (RTX 3090); recalled, not read again. PCI Express 5.0, 4.0 or 3.0 x16 for the bus.
GPUS = {
    "H100": GPU(80, 3350, 989, 67, 64), "H200": GPU(141, 4800, 989, 67, 64), "A100": GPU(80, 2039, 312, 19.5, 32),
    "V100": GPU(32, 900, 0, 15.7, 16), "RTX4090": GPU(24, 1008, 165, 82.6, 32),
    "RTX3090": GPU(24, 936, 71, 35.6, 32), "T4": GPU(16, 320, 0, 8.1, 16)}

# Assumptions. NVIDIA's "Getting Started with CUDA Graphs" has 3.8 us between two launches and 9.6 us with a wait after
# each, for C++ and a V100 (recalled); PyTorch's own work comes on top.
LAUNCH_US = 5.0  # an operator, until the CPU can go on
KERNEL_US = 2.0  # the least that the GPU takes for one
WAIT_US = 10.0  # until the CPU knows that the GPU is ready
COPY_US = 10.0  # a copy, beside its bytes
RECURRENT_US = 10.0  # one step in time of a GRU or LSTM, forward; backward takes twice as long
EFFICIENCY = 0.15  # of the published arithmetic: these networks are small
BUS_EFFICIENCY = 0.5  # of the published bus: the memory of the CPU is not pinned everywhere


class Counted(NamedTuple):
    """What the pretended GPU has counted. Bytes are those that operators read and write."""

    batch: Counts  # a batch of actions
    refresh: Counts  # new weights
    sgd_step: Counts
    dataset: Counts  # what else a dataset needs
    bytes_of_row: float  # a row of a batch of actions
    bytes_of_step: float  # an SGD step, beside its rows
    bytes_of_sample: float
    flops_of_row: float  # forward
    sent_per_row: float  # bytes from the CPU


class Traffic(PretendGPU):
    """A pretended GPU that also counts the bytes its operators read and write."""

    moved = 0

    def compute(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out = super().compute(func, args, kwargs)
        if not (func.is_view or func in FREE):
            self.moved += sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves((args, kwargs, out))
                              if isinstance(leaf, torch.Tensor))
        return out


def find_gpu(name: str) -> str:
    """Return the name of a GPU in the table. Raises `UserError`."""
    known = {key.lower(): key for key in GPUS}
    plain = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if plain not in known:
        raise UserError(f"--gpu={name} is unknown{nearest(plain.upper(), GPUS)}; choose from {', '.join(GPUS)}")
    return known[plain]


def gpu_named(device: str) -> str:
    """Return the name in the table of what the driver calls "NVIDIA H100 80GB HBM3"; "": it is not there."""
    return next((name for name in GPUS if name in device.replace(" ", "")), "")


def times_on_gpu(parts: Parts, counted: Counted, gpu: GPU, cfg: Config, *, in_bf16: bool) -> Times:
    """Return the times of a machine with a GPU, in which the CPU only hands work on."""
    us = 1e-6
    tflops = gpu.bf16_tflops if in_bf16 else gpu.fp32_tflops
    sec_per_flop, sec_per_byte = 1e-12 / (EFFICIENCY * tflops), 1e-9 / gpu.memory_gb_per_sec
    sec_per_sent = 1e-9 / (BUS_EFFICIENCY * gpu.bus_gb_per_sec)

    def rest(counts: Counts) -> float:
        return (counts.up + counts.down) * COPY_US * us + counts.waits * WAIT_US * us

    def handed(counts: Counts) -> float:
        return counts.launches * LAUNCH_US * us + rest(counts)

    samples, sgd_steps = cfg.batch_size, cfg.num_batches_per_epoch * cfg.num_epochs
    recurrent = 3 * RECURRENT_US * us * cfg.bptt_steps * cfg.rnn_num_layers if cfg.use_rnn else 0.0
    step_gpu = max(counted.sgd_step.launches * KERNEL_US * us,
                   (counted.bytes_of_step + samples * counted.bytes_of_sample) * sec_per_byte
                   + 3 * samples * counted.flops_of_row * sec_per_flop + recurrent)
    sent = cfg.num_batches_per_epoch * samples * counted.sent_per_row * sec_per_sent  # of a dataset
    return Times(
        step=parts.step * us, batch=parts.handing_batch * us + rest(counted.batch),
        row=parts.handing_row * us + counted.sent_per_row * sec_per_sent, refresh=handed(counted.refresh),
        copy=parts.copy * us, parallel=0.0,
        serial=(max(counted.sgd_step.launches * LAUNCH_US * us, step_gpu) + rest(counted.sgd_step)
                + (handed(counted.dataset) + sent) / sgd_steps),
        launching=counted.batch.launches * LAUNCH_US * us,
        row_gpu=counted.bytes_of_row * sec_per_byte + counted.flops_of_row * sec_per_flop,
        batch_gpu=counted.batch.launches * KERNEL_US * us, step_gpu=step_gpu)


def count_on_gpu(cfg: Config) -> Counted:
    """Run the policy worker and the learner on a pretended GPU: with few environments and samples, which changes bytes.

    Where the policy has a memory a minibatch has as many trajectories as configured, at most 16: episodes that begin
    cut the sequences of all.
    """
    torch.set_num_threads(1)
    few = max(1, min(cfg.trajectories_per_minibatch, 16) // 2) if cfg.use_rnn or cfg.core else 1
    with serial_system(cfg, torch.device("cpu"), **small_settings(cfg, 1, 1)) as (_, buffers, workers, server, _):
        fill_slots(buffers, workers, server)
        samples = buffers.trajectories_of(0)
        samples["valid"].fill_(True)
        names = [*(f"obs/{name}" for name in server.obs_space), "rnn_states", "new_episode"]
        obs = {name: samples[f"obs/{name}"][:, 0] for name in server.obs_space}
        with FlopCounterMode(display=False) as counter:
            server.forward(server.models[CURRENT][0], {f"obs/{name}": obs[name] for name in obs} | {
                "rnn_states": samples["rnn_states"][:, 0], "new_episode": samples["new_episode"][:, 0],
                "rank": torch.zeros(buffers.num_slots)})
        flops, sent = counter.get_total_flops() / buffers.num_slots, sum(samples[name][0, 0].nbytes for name in names)
        agents = len(buffers.info.agents)
    small, large, twice = (run_on_gpu(cfg, samples, few * size, num_epochs) for size, num_epochs in (
        (1, 1), (2, 1), (2, 2)))
    step = minus(twice["dataset"][0], large["dataset"][0])
    bytes_of_sample = (large["dataset"][1] - small["dataset"][1]) / (few * cfg.rollout)
    bytes_of_step = twice["dataset"][1] - large["dataset"][1] - 2 * few * cfg.rollout * bytes_of_sample
    return Counted(large["two"][0], large["refresh"][0], step, minus(large["dataset"][0], step),
                   (large["two"][1] - large["one"][1]) / agents, max(0.0, bytes_of_step), bytes_of_sample, flops, sent)


def small_settings(cfg: Config, trajectories: int, num_epochs: int) -> dict[str, Any]:
    """Return the settings of a system of a few environments; a dataset is a minibatch of so many trajectories."""
    return {"num_workers": max(2, 4 // cfg.worker_num_splits), "num_envs_per_worker": cfg.worker_num_splits,
            "num_epochs": num_epochs, "batch_size": trajectories * cfg.rollout, "num_batches_per_epoch": 1}


def run_on_gpu(cfg: Config, samples: dict[str, torch.Tensor], trajectories: int, num_epochs: int) -> dict[str, Any]:
    """Return the counts and bytes of a dataset of these samples, of new weights, of batches of one and two requests.

    Each is counted when it is done for the second time at least.
    """
    counted: dict[str, Any] = {}
    with Traffic() as gpu, serial_system(cfg, torch.device("pretend", 0), **small_settings(
            cfg, trajectories, num_epochs)) as (_, buffers, workers, server, (learner, *_)):

        def count(name: str, function: Any, *args: Any) -> None:
            gpu.take_counts()
            moved = gpu.moved
            function(*args)
            counted[name] = gpu.take_counts(), gpu.moved - moved

        for name, tensor in buffers.trajectories_of(0).items():
            tensor.copy_(samples[name])
        learner.feed.deliver = functools.partial(count, "dataset", learner.train)
        for _ in range(3):
            learner.feed.insert(SLOTS, *(slot % buffers.num_slots for slot in range(trajectories)))
            count("refresh", server.weights.refresh, server.fetch(CURRENT)[0])
        for worker in workers:
            worker.handle(RESUME, 0)
        requests = server.requests.get()
        for name, part in (("warm-up", requests[:1]), ("one", requests[1:2]), ("two", requests[2:4])):
            count(name, server.serve, part)
    return counted


def minus(first: Counts, second: Counts) -> Counts:
    return Counts(*(max(0, a - b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True)))
