"""What a run takes of the memory of each GPU, computed and checked before anything is allocated there.

Weights are counted, what passes in acting and learning is rehearsed (`rehearsal.py`). What cannot be seen without a GPU
is assumed: `CONTEXT_BYTES`, `FRAGMENTATION`. The supervisor opens each GPU on which a policy lives in any case, for the
published weights, so it is the one to ask how much is free. Used by `plan.py` and `banner.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from algorithm import Algorithm
from config import Config, algorithm_class
from envs.vector_env import EnvInfo
from runtime.evaluator import MAX_ENVS
from runtime.full_memory import explaining_full_memory
from runtime.machine import body_dtype
from runtime.memory import ACTIVATIONS
from runtime.ranks import this_rank
from runtime.rehearsal import acting_bytes, learning_bytes, meta_copy
from runtime.user_error import UserError
from shared_buffers import num_bytes, trajectory_specs
from weights import NEWEST_ROWS

CONTEXT_BYTES = 500_000_000  # of CUDA in each process, with PyTorch's kernels and cuBLAS: said of an H100, not measured
# PyTorch's allocator rounds blocks up, and what it has freed does not always fit what comes next: assumed
FRAGMENTATION = 1.15
BOUND = 16  # bytes of a network that cannot be rehearsed, for each output of each layer, forward and backward


class Part(NamedTuple):
    """What one part of a run takes of a GPU."""

    what: str
    held: float  # bytes, all the time
    passing: float  # bytes, most at once of what comes and goes
    cure: str  # what makes it smaller


class DeviceMemory(NamedTuple):
    """The memory of one GPU, and what a run takes of it."""

    device: torch.device
    parts: list[Part]
    take_turns: bool  # one part has what another has given back
    contexts: int  # processes that open it, the supervisor among them
    available: int  # bytes for this rank, its supervisor's context among them
    total: int
    bound: str  # why a part is a bound

    @property
    def num_bytes(self) -> int:
        """Return what the run takes, about."""
        together = max if self.take_turns else sum
        tensors = sum(part.held for part in self.parts) + together(part.passing for part in self.parts)
        return self.contexts * CONTEXT_BYTES + int(FRAGMENTATION * tensors)

    def __str__(self) -> str:
        return f"{self.num_bytes / 2**30:.1f} of {self.total / 2**30:.0f} GiB on {self.device}"

    def describe(self) -> str:
        """Tell in one line what takes how much."""
        parts = [f"{part.what} {(part.held + part.passing) / 1e6:,.0f}" for part in self.parts]
        return (f"memory of {self.device} in MB, about: {', '.join(parts)}; {self.contexts} x "
                f"{CONTEXT_BYTES / 1e6:.0f} for processes, a margin of {FRAGMENTATION - 1:.0%} for the allocator"
                + (f"; a bound, since {self.bound}" if self.bound else ""))

    def check(self, cfg: Config) -> None:
        """Raise `UserError`, with the cure, when more is needed than is available."""
        if self.num_bytes <= self.available:
            return
        largest = max(self.parts, key=lambda part: part.held + part.passing)
        of_part = f"{largest.what} {FRAGMENTATION * (largest.held + largest.passing) / 1e9:.1f} of them"
        cure = largest.cure
        if self.contexts * CONTEXT_BYTES > FRAGMENTATION * (largest.held + largest.passing):
            of_part = f"{self.contexts} process{'es' if self.contexts > 1 else ''} alone " \
                      f"{self.contexts * CONTEXT_BYTES / 1e9:.1f} of them"
            cure = ("end what else uses it" if cfg.serial_mode else
                    "lower --policy_workers_per_policy, or use --serial_mode" if cfg.policy_workers_per_policy > 1 else
                    "lower --num_policies" if cfg.num_policies > 1 else "end what else uses it, or use --serial_mode")
        raise UserError(f"the run needs about {self.num_bytes / 1e9:.1f} GB of the memory of {self.device}, {of_part}; "
                        f"{self.available / 1e9:.1f} GB are available; {cure}, or use --device=cpu")


def plan_device_memory(cfg: Config, info: EnvInfo, kinds: Sequence[int], models: Sequence[nn.Module],
                       devices: Sequence[torch.device]) -> list[DeviceMemory]:
    """Find out what a run takes of each GPU, kinds, models and devices being those of the policies; CPUs are left out.

    Raises `UserError` when one has too little. Several ranks share what is free on a GPU; a late one sees less, when
    others have published their weights already.
    """
    # with the supervisor; each is handed the published weights of all policies, and so opens all GPUs
    processes = 1 if cfg.serial_mode else (
        1 + cfg.num_policies * (len(cfg.learners) + cfg.policy_workers_per_policy) + (cfg.eval_every_env_steps > 0))
    found, of_kinds = [], {}
    for device in dict.fromkeys(device for device in devices if device.type != "cpu"):
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            continue
        own = [policy for policy, other in enumerate(devices) if other == device]
        for policy in own:  # those of one kind are alike
            if kinds[policy] not in of_kinds:
                of_kinds[kinds[policy]] = parts_of(cfg, info, kinds[policy], models[policy], device)
        by_policy, bounds = zip(*(of_kinds[kinds[policy]] for policy in own), strict=True)
        parts = [Part(same[0].what, sum(part.held for part in same),
                      (max if cfg.serial_mode else sum)(part.passing for part in same), same[0].cure)
                 for same in zip(*by_policy, strict=True)]
        with explaining_full_memory("supervisor", "supervisor"):  # not even a context has room there
            free, total = module.mem_get_info(device)
        share = (free + CONTEXT_BYTES) // ranks_on(device, cfg.device)  # this process has its context already
        found.append(DeviceMemory(device, parts, cfg.serial_mode, processes, share, total, max(bounds)))
        found[-1].check(cfg)
    return found


def ranks_on(device: torch.device, name: str) -> int:
    """Count the ranks on this machine that share a GPU; name: --device, see `machine.choose_device`."""
    own = this_rank()
    if name not in ("auto", "cuda"):
        return own.local_world_size
    count = torch.get_device_module(device).device_count()
    return len(range(own.local_rank % count, own.local_world_size, count))


def parts_of(cfg: Config, info: EnvInfo, kind: int, model: nn.Module, device: torch.device) -> tuple[list[Part], str]:
    """Find out what one policy takes of its GPU; and why that is a bound, if it is one."""
    obs_space, _ = info.kinds[kind]
    specs = trajectory_specs(cfg, *info.kinds[kind], model.state_size)
    make = algorithm_class(cfg.algo)
    algorithm = make(cfg)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    kept = numbers_per_weight(algorithm)  # by the optimizer
    learners, several = len(cfg.learners), len(cfg.learners) > 1  # these share weights and the optimizer's state
    agents = info.kind_of_agent.count(kind)
    acting, evaluating = (envs * agents for envs in (cfg.num_workers * cfg.num_envs_per_worker,
                                                     min(cfg.eval_episodes, MAX_ENVS)))
    bound = ""
    try:
        twin = meta_copy(model, body_dtype(cfg, device, obs_space))
        copied = sum(tensor.nbytes for tensor in (*twin.parameters(), *twin.buffers()))
        in_acting, in_evaluating = (acting_bytes(algorithm, twin, obs_space, rows) for rows in (acting, evaluating))
        kept_by_graphs, in_learning = zip(*(learning_bytes(make(cfg, role), twin, specs, obs_space)
                                            for role in cfg.learners), strict=True)
    except Exception as error:  # noqa: BLE001  whatever a model of one's own does there, it may work on a GPU
        bound = f"the network does not run on the meta device ({type(error).__name__})"
        each, copied = bound_of_row(model) + ACTIVATIONS * num_bytes(specs, 1) / cfg.rollout, weights
        in_acting, in_evaluating = each * acting, each * evaluating
        dataset = num_bytes(specs, cfg.trajectories_per_dataset)
        in_learning = [each * cfg.trajectories_per_minibatch * (cfg.rollout + 1) + 2 * dataset] * len(cfg.learners)
        kept_by_graphs = [cfg.cuda_graphs * size for size in in_learning]

    snapshots = cfg.self_play_snapshots if cfg.self_play_past_fraction else 0
    workers = 1 if cfg.serial_mode else cfg.policy_workers_per_policy
    evaluator = cfg.eval_every_env_steps > 0
    smaller = "use a smaller network" + (", or lower --num_policies" if cfg.num_policies > 1 else "")
    of_workers = "lower " + ("--policy_workers_per_policy or " if workers > 1 else "") + (
        "--self_play_snapshots" if snapshots * copied > in_acting else "--num_envs_per_worker")
    return [
        Part("published weights", (NEWEST_ROWS + snapshots) * weights, 0,
             "lower --self_play_snapshots" if snapshots else smaller),
        # graphs share the memory of the largest; the first batches of a size are computed without
        Part("acting", workers * ((1 + snapshots) * copied + cfg.cuda_graphs * in_acting), workers * in_acting,
             of_workers),
        Part("weights, gradients and optimizer",
             learners * weights + (1 if algorithm.roles else learners) * gradients  # a weight is the task of one role
             + (several + kept) * gradients + cfg.half_precision_copies * learners * copied,
             # what the supervisor's allocator keeps of making that which is shared
             (several and not cfg.serial_mode) * (3 + 2 * kept) * gradients, smaller),
        Part("a dataset and a training pass", sum(kept_by_graphs), (max if cfg.serial_mode else sum)(in_learning),
             "lower --batch_size" + (" or --num_batches_per_epoch" if cfg.num_batches_per_epoch > 1 else "")),
        Part("evaluation", evaluator * copied, evaluator * in_evaluating, "lower --eval_episodes")], bound


def numbers_per_weight(algorithm: Algorithm) -> float:
    """Count the numbers that the optimizer keeps of each weight: two for Adam."""
    weight = nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.zeros_like(weight)
    optimizer = algorithm.make_optimizer([weight])
    optimizer.step()
    return sum(tensor.numel() for tensor in optimizer.state[weight].values()) // weight.numel()


def bound_of_row(model: nn.Module) -> int:
    """Bound the bytes that the layers of a network keep of one row, by the numbers that come out of each."""
    return BOUND * sum(max(parameter.shape, default=1) for parameter in model.parameters())
