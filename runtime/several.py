"""Several learners of one policy: how they become one, and how the systems find each other that they belong to.

What stands between the gradients and the optimizer is a reducer. `Reducer` is the simplest case, one learner, and costs
nothing.

`Hogwild`: learners in processes of their own change the same weights, and the same optimizer state, without a lock;
each computes its gradients with a copy, taken before every dataset and after every step. Two steps at the same moment
may lose a part of one of them, and a checkpoint may hold a part of one: a lock would cost more (Niu et al., 2011). What
a loss averages, and the units of the returns, are of one learner alone. The first learner publishes what all have
learned, after each of its own steps. Learners with roles (`algorithms/pql.py`) use it too: each has gradients of its
own part alone, so nothing is lost.

`AllReduce`: `torchrun` starts whole systems, called *ranks*, on one host or several, each with its share of the cores
and environments of its own (`docs/several_machines.md`). Rank 0's settings and checkpoint reach the others at the
start, through torchrun's store. From then on only their learners meet: each has minibatches of its own; they average
their gradients and everything that a loss averages, and take the same steps, so that all have the same weights to the
last bit. Rank 0 keeps the run's folder, the others write little and into temporary ones. `Ranks` tells who is lost.
"""

import atexit
import contextlib
import ctypes
import functools
import io
import ipaddress
import itertools
import json
import math
import os
import signal
import socket
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from runtime.checkpoint import BEST, list_resumable, load_newest, policy_dir
from runtime.guard import remove_at_end
from runtime.processes import Service
from runtime.utils import ComponentError, UserError, this_rank

MAX_STARTS = 1_000_000
# what may differ: it follows from the cores of each rank, or is for rank 0 alone
OWN_SETTINGS = {"num_workers", "num_envs_per_worker", "worker_num_splits", "policy_workers_per_policy",
                "learner_threads", "train_dir", "eval_every_env_steps"}
CONNECT_SEC, POLL_SEC, MAX_SEC = 60, 0.1, 1e6
PIECE = 4_000_000  # bytes of a value in the store, which takes no more than 8 MiB
# A rank tells so often that it lives. It is lost after so long without; sooner when a connection has broken or the
# store is gone, but not before all can have ended in order.
BEAT_SEC, LOST_SEC, SOON_SEC = 0.5, 30.0, 2.5
PR_SET_PDEATHSIG = 1
SGD_STEPS, DECISIONS = range(2)  # what learners count: steps, decisions that were trained on
MANY_BYTES = 1_000_000  # of gradients: they are reduced, which takes twice the rounds of a gather but fewer bytes
WAITS = "wait_of_rank_"  # in the statistics of a dataset: the share of the time in which each waited for the others
systems = itertools.count(1)  # each rank has made equally many before: so they find each other

Stats = dict[str, Tensor]  # of an SGD step, scalars
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Reducer:
    """One learner: there is nobody to agree with."""

    size = 1  # ranks
    waited_sec = since = 0.0  # for other ranks, and since when

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Make the optimizer of what `step` changes."""
        return make(model.parameters())

    def take_over(self) -> None:
        """Copy into the model what learners of the same weights have learned."""

    def hand_over(self) -> None:
        """Replace the weights of all learners by those of the model."""

    def count(self, kind: int, total: int, more: int) -> int:
        """Count more of what this learner has done; return that of all learners. total: the last answer."""
        return total + more

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors without gradient of every rank, [ranks, ...] each; one message for all of them."""
        return [tensor[None] for tensor in tensors]

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, stats: Stats) -> Tensor:
        """Clip the gradients to a norm and take a step; skip it where the norm is not finite. Return the norm before.

        Gradients and stats become the means over all ranks. On a GPU this is where an SGD step waits for its gradients.
        """
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if norm.isfinite():
            torch._foreach_div_(gradients, (norm / max_norm).clamp(min=1.0))
            optimizer.step()
        return norm


ALONE = Reducer()


class AllReduce(Reducer):
    """One of several learners, one in each rank, that take the same steps with the mean of their gradients.

    What is gathered is added in the order of the ranks, so that all have the same sum to the last bit.
    """

    def __init__(self, store_prefix: str, timeout_sec: float) -> None:
        """Find the learners in the other ranks; none waits longer than timeout_sec for another."""
        own, seconds = this_rank(), min(timeout_sec, MAX_SEC)
        distributed.init_process_group(
            "gloo", store=distributed.PrefixStore(store_prefix, open_store(seconds)), rank=own.rank,
            world_size=own.world_size, timeout=timedelta(seconds=seconds))
        self.size, self.since = own.world_size, time.monotonic()

    def meet(self, collective: Callable, *args: Any) -> None:
        """Call a collective, and count the time."""
        begun = time.monotonic()
        collective(*args)
        self.waited_sec += time.monotonic() - begun

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        for tensor in model.state_dict().values():  # a model of one's own may be drawn by another generator
            distributed.broadcast(tensor, 0)
        return super().make_optimizer(model, make)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        own = torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
        ranks = [torch.empty_like(own) for _ in range(self.size)]
        self.meet(distributed.all_gather, ranks, own)
        of_tensors = torch.stack(ranks).split([tensor.numel() for tensor in tensors], 1)
        return [rows.view(-1, *tensor.shape).to(tensor) for tensor, rows in zip(tensors, of_tensors, strict=True)]

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, stats: Stats) -> Tensor:
        parameters = parameters_of(optimizer)
        for parameter in parameters:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
        shared = {name: value.detach().to(parameters[0], copy=True) for name, value in stats.items()}
        parts = [*(parameter.grad for parameter in parameters), *shared.values()]
        flat = torch.cat([part.flatten() for part in parts]).cpu()
        if flat.nbytes * (self.size - 1) < MANY_BYTES:
            flat = self.gather(flat)[0].sum(0)
        else:
            self.meet(distributed.all_reduce, flat)
        means = (flat / self.size).to(parts[0]).split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [mean.view_as(part) for part, mean in zip(parts, means, strict=True)])
        stats.update(shared)
        return super().step(optimizer, max_norm, stats)


class SharedTraining:
    """What the learners of one policy change together: weights, optimizer state, counters.

    All floats lie in one tensor, since each tensor takes a file descriptor in every process; on a GPU in its memory.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, num_learners: int,
                 device: torch.device | str = "cpu") -> None:
        """Begin with the weights of a model."""
        weights = [parameter.detach().to(device) for parameter in model.parameters()]
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = make_optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # an optimizer makes its state in its first step
        states = tree_map(torch.zeros_like, [dict(optimizer.state[parameter]) for parameter in parameters])
        tensors, self.tree = tree_flatten((weights, states))
        self.shapes = [tensor.shape for tensor in tensors]
        self.flat = torch.cat([tensor.flatten() for tensor in tensors]).share_memory_()  # as it is on a GPU
        # SGD_STEPS and DECISIONS of each learner; the first one's go on with those of a checkpoint
        self.counts = torch.zeros(2, num_learners, dtype=torch.int64).share_memory_()

    def tensors(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return the weights, and what the optimizer keeps of each of them, as views."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return tree_unflatten([part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)], self.tree)


class Hogwild(Reducer):
    """One of several learners, in processes of their own, that change the same weights."""

    def __init__(self, shared: SharedTraining, learner: int) -> None:
        self.shared, self.learner = shared, learner
        weights, self.states = shared.tensors()
        self.parameters = [nn.Parameter(weight) for weight in weights]

    def make_optimizer(self, model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
        self.own = list(model.parameters())
        optimizer = make(self.parameters)
        self.bind(optimizer)
        optimizer.register_load_state_dict_post_hook(self.bind)
        return optimizer

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer change the shared state, which takes over what that has loaded."""
        for parameter, shared in zip(self.parameters, self.states, strict=True):
            for name, tensor in shared.items():
                tensor.copy_(optimizer.state[parameter].get(name, tensor))
            optimizer.state[parameter].update(shared)

    @torch.no_grad()
    def take_over(self) -> None:
        torch._foreach_copy_(self.own, self.parameters)

    @torch.no_grad()
    def hand_over(self) -> None:
        torch._foreach_copy_(self.parameters, self.own)

    def count(self, kind: int, total: int, more: int) -> int:
        counts = self.shared.counts[kind]
        counts[self.learner] += more
        return int(counts.sum())

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, stats: Stats) -> Tensor:
        for own, shared in zip(self.own, self.parameters, strict=True):
            shared.grad = own.grad
        norm = super().step(optimizer, max_norm, stats)
        self.take_over()
        return norm


def make_reducer(shared: SharedTraining | None, learner: int, store_prefix: str, timeout_sec: float) -> Reducer:
    """Choose how this learner works together with the others of its policy."""
    if shared is not None:
        return Hogwild(shared, learner)
    return AllReduce(store_prefix, timeout_sec) if this_rank().world_size > 1 else Reducer()


def agree(learner: Any, lags: Any = (), summaries: Iterable[Tensor] = ()) -> tuple[int, list[Tensor]]:
    """Exchange with the other ranks what was sampled, what a dataset holds, and whether one ends: then all do.

    Args:
        lags: how old the valid rows of this rank's dataset are, in SGD steps, [rows] tensor.
        summaries: of the dataset, for the normalizers.

    Returns the number of valid rows of all ranks (0: one ends), and the summaries of each rank, [ranks, ...].
    """
    if learner.has_ended:
        return 0, []
    buffers, reducer = learner.buffers, learner.reducer
    own, now = buffers.count_sampled(learner.policy, slice(-1)), time.monotonic()
    wait, reducer.waited_sec, reducer.since = reducer.waited_sec / (now - reducer.since), 0.0, now
    lag_mean, lag_max = (lags.double().mean(), lags.max()) if len(lags) else (0.0, 0)
    news = [buffers.training_over, learner.sgd_steps, len(lags), lag_mean, lag_max, wait, *own]
    ranks, *of_ranks = reducer.gather(torch.DoubleTensor(news), *(summaries or learner.no_summaries))
    ends, steps, rows, lag_means, lags_max, waits, *sampled = ranks.unbind(1)
    assert (steps == learner.sgd_steps).all(), f"the ranks are apart: {steps.tolist()} SGD steps"
    learner.sampled = learner.sampled_before + torch.stack(sampled).sum(1).long()
    buffers.env_steps[-1], buffers.policy_steps[-1, learner.policy] = learner.sampled - own
    learner.of_dataset = {"policy_lag_mean": float(lag_means.max()), "policy_lag_max": int(lags_max.max())}
    if reducer.size > 1:
        learner.of_dataset |= {f"{WAITS}{rank}": wait for rank, wait in enumerate(waits.tolist())}
    learner.has_ended = bool(ends.any())
    if learner.has_ended:
        buffers.training_over.fill_(True)
    return 0 if learner.has_ended else int(rows.sum()), of_ranks


def merge(counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the counts [ranks], means and sums of squared differences from these, [ranks, ...] (Chan et al., 1979)."""
    weights = counts.view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0) / counts.sum().clamp(min=1)
    return counts.sum(), mean, (squares + weights * (means - mean).square()).sum(0)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """List what an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


# ---- ranks -------------------------------------------------------------------------------------------------------


def join_ranks(given: dict) -> tuple[str, dict]:
    """Find the way to the other ranks, take over the settings of rank 0, and end when torchrun ends.

    Returns the prefix of this system's part of torchrun's store, and the settings: those that were given, or elsewhere
    than in rank 0 its own, but for what follows from a rank's machine. All but rank 0 write little, into temporary
    folders, which the guard removes when this process ends, also by SIGKILL, and judge nothing.
    """
    own, prefix = this_rank(), f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(systems)}"
    if own.world_size > 1:
        if hasattr(libc := ctypes.CDLL(None), "prctl"):  # elsewhere torchrun ends this process
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        choose_interface(f"{prefix}/address")
    if own.rank == 0:
        return prefix, given
    folder = tempfile.mkdtemp(prefix=f"rank_{own.rank}_of_{os.getppid()}_")
    remove_at_end(folder)
    settings = json.loads(from_rank_0(f"{prefix}/settings"))
    kept = {name: value for name, value in given.items() if name in OWN_SETTINGS or value == settings.get(name)}
    others = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
    return prefix, {**others, **kept, "train_dir": folder, "eval_every_env_steps": 0, "stop_at_return": math.inf,
                    "save_every_sec": math.inf, "save_milestones_sec": math.inf, "trace_sec": 0.0}


def tell_settings(prefix: str, settings: dict) -> None:
    """Tell the other ranks the settings of rank 0. Raises `UserError` for what several ranks cannot do."""
    if this_rank().world_size == 1:
        return
    for name, value in {"num_policies": 1, "num_learners": 1, "async_rl": True, "serial_mode": False}.items():
        if settings[name] != value:
            raise UserError(f"--{name}={settings[name]} cannot be used with several ranks; set it to {value}")
    if this_rank().rank == 0:
        from_rank_0(f"{prefix}/settings", json.dumps(settings).encode())


def choose_interface(key: str) -> None:
    """Let gloo use the network interface that leads to the other hosts, whatever this host's name stands for.

    That is the one through which this rank reaches rank 0. A rank that reaches it within its own host asks the others.
    """
    own = this_rank()
    with socket.create_connection((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), CONNECT_SEC) as connection:
        address, of_rank_0 = connection.getsockname()[0], connection.getpeername()[0]
    if address != of_rank_0 and not ipaddress.ip_address(address).is_loopback:  # of another host
        open_store(CONNECT_SEC).set(key, of_rank_0)
    elif own.world_size > own.local_world_size:
        address = hear(key).decode()
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@functools.cache
def open_store(timeout_sec: float) -> Any:
    """Connect to the store of torchrun, through which the ranks find each other. It is at rank 0's host."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(address, port, timeout=timedelta(seconds=timeout_sec))


def hear(key: str) -> bytes:
    """Wait for what another rank tells in the store. Raises `ComponentError` when it tells nothing."""
    deadline = time.monotonic() + CONNECT_SEC
    try:
        store = open_store(CONNECT_SEC)
        while not store.check([key]) and time.monotonic() < deadline:
            time.sleep(POLL_SEC)  # `get` would wait where no signal ends it
        return store.get(key)
    except RuntimeError as error:
        raise ComponentError(f"rank 0 on {os.environ['MASTER_ADDR']} is lost, or has failed while it began") from error


def from_rank_0(key: str, value: bytes = b"") -> bytes:
    """Return the value that rank 0 has given; each key once."""
    if this_rank().rank == 0:
        pieces = [value[start : start + PIECE] for start in range(0, len(value), PIECE)]
        for number, piece in enumerate([str(len(pieces)).encode(), *pieces]):
            open_store(CONNECT_SEC).set(f"{key}/{number}", piece)
    return b"".join(hear(f"{key}/{number + 1}") for number in range(int(hear(f"{key}/0"))))


def copy_run(key: str, folder: Path) -> None:
    """Copy what a run goes on with from the folder of rank 0 into that of this rank."""
    file = io.BytesIO()
    newest, *_ = load_newest(folder)
    with tarfile.open(mode="w", fileobj=file) as archive:
        for path in (folder / "config.json", folder / "starts.json", policy_dir(folder) / BEST, newest):
            if path and path.is_file():
                archive.add(path, path.relative_to(folder))
    content = from_rank_0(key, file.getvalue())
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        if this_rank().rank:
            archive.extractall(folder, filter="data")


class Ranks(Service):
    """Tells the other ranks that this one lives, and ends it when one is lost.

    It does so in torchrun's store, in a thread of its own: a store that does not answer blocks nobody else. Who finds a
    rank lost ends with one line, which names its host, and passes that line on.
    """

    def __init__(self, trainer: Any, store_prefix: str) -> None:
        """Begin to tell and to hear. store_prefix: of this system's part of torchrun's store."""
        own, now = this_rank(), time.monotonic()
        self.trainer, self.prefix = trainer, f"{store_prefix}/alive"
        self.told = {"name": f"rank {own.rank} on {socket.gethostname()}", "beat": 0, "newest": "its newest checkpoint"}
        self.answered_at = now  # when the store last told of all
        # what each rank said last, and when; they may begin later than this one
        self.heard = [(self.told | {"name": f"rank {rank}"}, now + CONNECT_SEC) for rank in range(own.world_size)]
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def run(self) -> None:
        """Tell and hear, until the end or until the store is lost."""
        with contextlib.suppress(RuntimeError):  # whatever the connection dies of
            store = open_store(CONNECT_SEC)
            while not self.is_over.wait(BEAT_SEC):
                self.told["beat"] += 1
                store.set(f"{self.prefix}/{this_rank().rank}", json.dumps(self.told))
                for rank, (before, _) in enumerate(self.heard):
                    key = f"{self.prefix}/{rank}"
                    news = json.loads(store.get(key)) if store.check([key]) else before
                    if news != before:
                        self.heard[rank] = news, time.monotonic()
                self.answered_at = time.monotonic()
            store.set(f"{self.prefix}/{this_rank().rank}", json.dumps(self.told | {"has_ended": True}))

    def on(self, report: tuple) -> None:
        """Note what the others must know. Raises `ComponentError` when the connection to another rank has broken."""
        if report[0] in ("allocated", "made", "saved"):
            newest = list_resumable(policy_dir(self.trainer.cfg.run_dir))
            spaces = [kind.describe() for kind in self.trainer.buffers.info.kinds]
            # all at once: the thread may send it at any time
            self.told |= {report[0]: True, "spaces": spaces, "newest": newest[0].name if newest else "the beginning"}
        match report:
            case ("allocated" | "made" as place,):  # then rank 0 may move an older run away; all train
                self.trainer.wait_until(lambda: all(news.get(place) for news, _ in self.heard),
                                        lambda: "not all ranks have made their models and processes")
                if any(news["spaces"] != self.told["spaces"] for news, _ in self.heard):
                    raise UserError(f"the ranks have environments of other spaces, here {self.told['spaces']}")
            case ("died", _, why, _) if "/gloo/" in why:  # its errors name the line of its code
                deadline = time.monotonic() + SOON_SEC + 2 * BEAT_SEC
                while not (line := self.find_lost(SOON_SEC)) and time.monotonic() < deadline:
                    time.sleep(BEAT_SEC / 5)
                self.end(line or why)
            case ("died", _, why, _):
                self.told["failure"] = f"{self.told['name']} has failed: {why}"

    def tick(self) -> None:
        """Say who holds the others up. Raises `ComponentError` when another rank is lost."""
        if waits := [share for name, share in self.trainer.row.items() if name.startswith(WAITS)]:
            news, _ = self.heard[waits.index(min(waits))]  # it waits least: the others wait for it
            names = news["name"].split(" on ")  # rank, host
            own = this_rank()
            self.trainer.besides = f"{max(waits):.0%} wait for {names[own.local_world_size < own.world_size]}"
        has_store = self.thread.is_alive()
        line = self.find_lost(LOST_SEC if has_store else SOON_SEC)
        if line and (has_store or not self.trainer.buffers.training_over):  # then rank 0 has ended, and the store
            self.end(line)

    def find_lost(self, patience_sec: float) -> str:
        """Say in one line which rank has failed, or has given no sign of life for so long; "" when all live."""
        for news, _ in self.heard:
            if news.get("failure"):
                return news["failure"]
        silent = [(since, news) for news, since in self.heard if not news.get("has_ended")]
        since, news = min(silent, default=(self.answered_at, {}), key=lambda each: each[0])
        if self.answered_at - since <= patience_sec:  # all lived when the store last answered, which is rank 0's
            since, news = self.answered_at, self.heard[0][0]
        seconds = time.monotonic() - since
        if news.get("beat") == 0 and seconds > patience_sec:
            return f"{news['name']} has not begun"
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return f"{news['name']} is lost, no sign of life since {clock}" if seconds > patience_sec else ""

    def end(self, line: str) -> None:
        """Pass the line on, and end this rank with it."""
        self.told["failure"] = line
        raise ComponentError(f"{line}; the same command resumes from {self.heard[0][0]['newest']}")

    def close(self) -> None:
        """Let the others hear that this rank ends, and whether it has failed."""
        if not self.is_over.is_set() and (self.trainer.has_failed or not self.trainer.is_ready):
            has = "has failed" if self.trainer.has_failed else "has ended before the training began, and said why"
            self.told.setdefault("failure", f"{self.told['name']} {has}")
            time.sleep(2 * BEAT_SEC)
        self.is_over.set()
        self.thread.join(2 * BEAT_SEC)
