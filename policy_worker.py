"""The policy worker: computes actions for whoever asks.

It takes every request that is waiting, gathers the observations and hidden states of all agents of its policy in them
into one batch, runs one forward pass and writes actions, log-probabilities, values, next hidden states and the policy
version back in place. It keeps no state of its own besides copies of weights, so that any policy worker can serve
any step; the copy is renewed as soon as the learner has published a new version, even in the middle of a trajectory.
Agents that play an earlier version, a snapshot, are a batch of their own. On a GPU a batch goes there in one copy and
comes back in one, with one wait. Read next: `feed.py`.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from algorithms import algorithm_class
from config import Config
from normalizers import hold_units
from runtime.machine import body_dtype, prepare
from shared_buffers import CURRENT, SPLIT, STOP, Message, SharedBuffers


class PolicyWorker:
    """Serves the action requests of one policy. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("requests.get", "wait for requests"), ("weights.refresh", "copy weights"), ("gather", "gather"),
        ("compute", "forward"), ("write", "write"))

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, device: torch.device) -> None:
        self.cfg, self.buffers, self.policy, self.device = cfg, buffers, policy, device
        self.requests = buffers.policies[policy].requests
        self.weights = buffers.policies[policy].weights
        self.first_slot = buffers.policies[policy].first_slot
        self.algorithm = algorithm_class(cfg.algo)(cfg)
        self.obs_space, self.action_space = buffers.spaces_of(policy)
        self.columns = {"actions", *self.algorithm.columns(self.action_space)}
        self.dtype = body_dtype(cfg, device, self.obs_space)
        self.models: dict[int, tuple[nn.Module, int]] = {}  # the newest weights (CURRENT), snapshots; their versions
        self.fetch(CURRENT)
        self.awaited_policy, self.agent_snapshot, self.agent_slot, self.agent_t, self.agent_version = (
            tensor.numpy() for tensor in (buffers.awaited_policy, buffers.agent_snapshot, buffers.agent_slot,
                                          buffers.agent_t, buffers.agent_version))  # [splits, M]
        self.generation = buffers.generation.numpy()  # [workers]
        self.has_memory = self.models[CURRENT][0].state_size > 0
        # [S, T(+1), ...] seen as [S * T(+1), ...], so that a (slot, t) pair is one row
        self.rows = {name: tensor.flatten(0, 1) for name, tensor in buffers.trajectories_of(policy).items()}
        num_agents = buffers.agent_slot.numel()
        # what acting needs, rows of which make a batch; "rank": of each agent among all, from 0 to 1
        self.sources = {name: self.rows[name] for name in (*(f"obs/{name}" for name in self.obs_space), "rnn_states",
                                                           "new_episode")}
        self.sources["rank"] = torch.arange(num_agents) / max(1, num_agents - 1)
        self.pinned = torch.empty(0, dtype=torch.uint8)  # on the way to a GPU and back; it grows

    def run(self) -> None:
        """Serve requests until told to stop."""
        while [STOP, 0] not in (messages := self.requests.get()):
            self.serve(messages)
        self.requests.put((STOP, 0))  # this one may have taken that of another policy worker

    def turn(self) -> None:
        """Serve the requests that are there (serial mode)."""
        if not self.requests.empty():
            self.serve(self.requests.get())

    def fetch(self, snapshot: int) -> tuple[nn.Module, int]:
        """Return the newest weights (CURRENT) or a snapshot as a model, and their version."""
        model, version = self.models.get(snapshot, (None, None))
        newest = self.weights.version if snapshot == CURRENT else self.weights.snapshot_version(snapshot)
        if version == newest:
            return model, version
        if model is None:
            model = self.algorithm.make_model(self.obs_space, self.action_space)
            model = model.to(self.device).body_to(self.dtype).eval()
            prepare(self.cfg, model)
        self.models[snapshot] = model, self.weights.refresh(model, snapshot)
        hold_units(model, hold=True)
        return self.models[snapshot]

    @torch.inference_mode()
    def serve(self, messages: list[Message]) -> None:
        """Compute the actions of all agents of this policy in the requested splits, in one batch."""
        requests = np.array([index for kind, index in messages if kind == SPLIT], dtype=np.int64)
        while len(requests := requests[self.are_awaited(requests)]) and not self.act_for(requests):
            pass  # a rollout worker has died meanwhile: once more without it
        for request in requests.tolist():
            worker = self.buffers.worker_of_split(request % self.cfg.num_splits)
            self.buffers.worker_inboxes[worker].put((SPLIT, request))

    def are_awaited(self, requests: np.ndarray) -> np.ndarray:
        """Tell which requests are of a rollout worker that still lives, [B] bool."""
        generations, splits = np.divmod(requests, self.cfg.num_splits)
        return self.generation[splits // self.cfg.worker_num_splits] == generations

    def act_for(self, requests: np.ndarray) -> bool:
        """Write the actions that were asked for, unless somebody who has asked has died; tell whether."""
        splits = requests % self.cfg.num_splits
        split, agent = (self.awaited_policy[splits] == self.policy).nonzero()
        agents = splits[split], agent
        snapshots, slots, t = (table[agents] for table in (self.agent_snapshot, self.agent_slot, self.agent_t))
        if not self.are_awaited(requests).all():  # what was just read may be another one's
            return False
        played = np.unique(snapshots).tolist() if self.cfg.self_play_past_fraction else [CURRENT]
        for snapshot in played:
            chosen = snapshots == snapshot
            outputs = self.act(snapshot, tuple(index[chosen] for index in agents), slots[chosen], t[chosen])
            if not self.are_awaited(requests).all():  # its rows may be filled by another one
                return False
            for rows, output in outputs:
                self.write(rows, output)
        return True

    def act(self, snapshot: int, agents: tuple[np.ndarray, np.ndarray], slots: np.ndarray,
            t: np.ndarray) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Compute the actions of agents, given as (splits [B], their numbers in them [B]), at rows t [B] of slots [B].

        Returns what is to be written into the trajectories, and into which rows [B].
        """
        model, version = self.fetch(snapshot)
        slots = slots - self.first_slot
        with_last = torch.from_numpy(slots * (self.cfg.rollout + 1) + t)  # row in a tensor of T+1 rows a slot
        row = torch.from_numpy(slots * self.cfg.rollout + t)
        if self.has_memory and snapshot == CURRENT:
            # to weights that came from elsewhere, the hidden states of those they have replaced mean nothing
            first_version = int(self.buffers.first_version[self.policy])
            if version >= first_version:
                self.rows["new_episode"][with_last[self.agent_version[agents] < first_version]] = True
            self.agent_version[agents] = version
        agent = torch.from_numpy(agents[0] * self.agent_slot.shape[1] + agents[1])
        rows = dict.fromkeys(self.sources, with_last) | {"rank": agent}
        output = self.compute(model, self.gather(rows))
        next_states = {"rnn_states": output.pop("rnn_states")}
        return [(row, output | {"policy_version": torch.full_like(row, version)}), (with_last + 1, next_states)]

    def gather(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy rows [B] of all sources into one batch, on the device."""
        # index_select copies whole rows, 20 times faster than [row] for images
        if self.device.type == "cpu":
            return {name: tensor.index_select(0, rows[name]) for name, tensor in self.sources.items()}
        like = largest_items_first({name: tensor[: len(rows[name])] for name, tensor in self.sources.items()})
        memory = self.pinned_bytes(sum(tensor.nbytes for tensor in like.values()))
        for name, part in cut(memory, like).items():
            torch.index_select(self.sources[name], 0, rows[name], out=part)
        return cut(memory.to(self.device, non_blocking=True), like)

    def compute(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what `forward` does, on the CPU; from a GPU as views that the next batch overwrites."""
        output = self.forward(model, batch)
        if self.device.type == "cpu":
            return output
        output = largest_items_first(output)
        packed = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in output.values()])
        return cut(self.pinned_bytes(len(packed)).copy_(packed), output)  # the one wait of a batch

    def pinned_bytes(self, count: int) -> Tensor:
        """Return so many bytes of pinned memory, the same ones each time."""
        if len(self.pinned) < count:
            self.pinned = torch.empty(2 * count, dtype=torch.uint8).pin_memory()
        return self.pinned[:count]

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Choose actions; return what belongs into the trajectories, {name: [B, ...]}."""
        obs = {name: batch[f"obs/{name}"] for name in self.obs_space}
        columns, rnn_states = self.algorithm.act(model, obs, batch["rnn_states"], batch["new_episode"],
                                                 agent_rank=batch["rank"])
        if columns.keys() != self.columns:  # what is missing would be learned from as zeros
            raise ValueError(f"--algo={self.cfg.algo}: act() must return {', '.join(sorted(self.columns))}, not "
                             + ", ".join(sorted(columns)))
        return columns | {"rnn_states": rnn_states}

    def write(self, row: Tensor, output: dict[str, Tensor]) -> None:
        """Write an output into rows [B] of the trajectories."""
        for name, value in output.items():
            self.rows[name][row] = value


def largest_items_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort tensors so that each, one after another in a buffer, begins at a multiple of its item's size."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def cut(memory: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors like these that lie one after another in a buffer of bytes, as views."""
    sizes = [tensor.nbytes for tensor in like.values()]
    return {name: part.view(tensor.dtype).view(tensor.shape)
            for (name, tensor), part in zip(like.items(), memory.split(sizes), strict=True)}
