"""The policy worker: computes actions for whoever asks.

It takes every request that is waiting, gathers the observations and hidden states of all agents of its policy in them
into one batch, runs one forward pass and writes actions, log-probabilities, values, next hidden states and the policy
version back in place. It keeps no state of its own besides copies of weights, so that any policy worker can serve
any step; the copy is renewed as soon as the learner has published a new version, even in the middle of a trajectory.
Agents that play an earlier version, a snapshot, are a batch of their own. On a GPU a batch goes there in one copy and
comes back in one, with one wait. Read next: `feed.py`.
"""

import numpy as np
import torch
from torch import Tensor, nn

from algorithms import algorithm_class
from config import Config
from envs.flat_spaces import Data
from normalizers import hold_units
from runtime.machine import body_dtype, prepare
from shared_buffers import CURRENT, SPLIT, STOP, Message, SharedBuffers, Spec, num_bytes, views


class PolicyWorker:
    """Serves the action requests of one policy. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("requests.get", "wait for requests"),
        ("weights.refresh", "copy weights"),
        ("gather", "gather"),
        ("compute", "forward"),
        ("write", "write"),
    )

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, device: torch.device) -> None:
        self.cfg = cfg
        self.policy = policy
        self.device = device
        self.inboxes = buffers.worker_inboxes
        own = buffers.policies[policy]
        self.requests, self.weights = own.requests, own.weights
        self.algorithm = algorithm_class(cfg.algo)(cfg)
        self.obs_space, self.action_space = buffers.spaces_of(policy)
        self.columns = {"actions", *self.algorithm.columns(self.action_space)}
        self.models: dict[int, tuple[nn.Module, int]] = {}  # the newest weights (CURRENT), snapshots; their versions
        self.fetch(CURRENT)
        self.generation = buffers.generation.numpy()  # [workers]
        self.awaited_policy = buffers.awaited_policy.numpy()  # [splits, M]
        self.agent_snapshot, self.agent_slot, self.agent_t = (  # [splits * M]
            table.numpy().ravel() for table in (buffers.agent_snapshot, buffers.agent_slot, buffers.agent_t))
        # [S, T(+1), ...] seen as [S * T(+1), ...], so that a (slot, t) pair is one row
        self.rows = {name: tensor.flatten(0, 1) for name, tensor in buffers.trajectories_of(policy).items()}
        # what acting needs, rows of which make a batch; "rank": of each agent among all, from 0 to 1
        names = [*(f"obs/{name}" for name in self.obs_space), "rnn_states", "new_episode"]
        ranks = torch.arange(len(self.agent_slot)) / max(1, len(self.agent_slot) - 1)
        self.sources = {name: self.rows[name] for name in names} | {"rank": ranks}
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

    @torch.inference_mode()
    def serve(self, messages: list[Message]) -> None:
        """Compute the actions of all agents of this policy in the requested splits, in one batch."""
        requests = np.array([index for kind, index in messages if kind == SPLIT], dtype=np.int64)
        while len(requests) and not self.act_for(requests):  # a rollout worker has died: once more without it
            requests = requests[self.are_awaited(requests)]
        for request in requests.tolist():
            worker = request % self.cfg.num_splits // self.cfg.worker_num_splits
            self.inboxes[worker].put((SPLIT, request))

    def are_awaited(self, requests: np.ndarray) -> np.ndarray:
        """Return which requests are of a rollout worker that still lives, [B] bool."""
        generations, splits = np.divmod(requests, self.cfg.num_splits)
        return self.generation[splits // self.cfg.worker_num_splits] == generations

    def act_for(self, requests: np.ndarray) -> bool:
        """Write the actions that were asked for; return False, and leave it, if somebody who has asked has died."""
        splits = requests % self.cfg.num_splits
        split, agent = (self.awaited_policy[splits] == self.policy).nonzero()
        agents = splits[split] * self.awaited_policy.shape[1] + agent  # their numbers among all
        snapshots, slots, t = (table[agents] for table in (self.agent_snapshot, self.agent_slot, self.agent_t))
        if not self.are_awaited(requests).all():  # what was just read may be another one's
            return False
        for snapshot in np.unique(snapshots).tolist() if self.cfg.self_play_past_fraction else [CURRENT]:
            chosen = snapshots == snapshot
            agent, slot, t_of = (torch.from_numpy(x[chosen]) for x in (agents, slots, t))
            row = slot * self.cfg.rollout + t_of
            with_last = row + slot  # the row in a tensor of T+1 rows a slot
            model, version = self.fetch(snapshot)
            output = self.compute(model, self.gather(dict.fromkeys(self.sources, with_last) | {"rank": agent}))
            if not self.are_awaited(requests).all():  # its rows may be filled by another one
                return False
            self.write(output | {"policy_version": torch.full_like(row, version)}, row, with_last + 1)
        return True

    def fetch(self, snapshot: int) -> tuple[nn.Module, int]:
        """Return the newest weights (CURRENT) or a snapshot as a model, and their version."""
        model, version = self.models.get(snapshot, (None, None))
        if version == self.weights.version_of(snapshot):
            return model, version
        if model is None:
            model = self.algorithm.make_model(self.obs_space, self.action_space).to(self.device).eval()
            model.arithmetic = body_dtype(self.cfg.precision, self.device, self.obs_space)
            model.encoder.to(model.arithmetic)  # casting its weights at every step would cost more than it saves
            prepare(model, tf32=self.cfg.tf32, torch_compile=self.cfg.torch_compile)
        self.models[snapshot] = model, self.weights.refresh(model, snapshot)
        hold_units(model, hold=True)
        return self.models[snapshot]

    def gather(self, rows: Data) -> Data:
        """Copy rows [B] of all sources into one batch, on the device."""
        # index_select copies whole rows, 20 times faster than [row] for images
        if self.device.type == "cpu":
            return {name: tensor.index_select(0, rows[name]) for name, tensor in self.sources.items()}
        specs = {name: Spec((len(rows[name]), *tensor.shape[1:]), tensor.dtype)
                 for name, tensor in self.sources.items()}
        memory = self.pinned_bytes(num_bytes(specs))
        for name, part in views(memory, specs).items():
            torch.index_select(self.sources[name], 0, rows[name], out=part)
        return views(memory.to(self.device, non_blocking=True), specs)

    def compute(self, model: nn.Module, batch: Data) -> Data:
        """Choose actions; return what belongs into the trajectories, {name: [B, ...]}, on the CPU.

        From a GPU it comes as views that the next batch overwrites.
        """
        obs = {name: batch[f"obs/{name}"] for name in self.obs_space}
        output, states = self.algorithm.act(model, obs, batch["rnn_states"], batch["new_episode"],
                                            agent_rank=batch["rank"])
        output = {name: output[name] for name in self.columns} | {"rnn_states": states}
        if self.device.type == "cpu":
            return output
        specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in output.items()}
        memory = torch.empty(num_bytes(specs), dtype=torch.uint8, device=self.device)
        for name, part in views(memory, specs).items():
            part.copy_(output[name])
        return views(self.pinned_bytes(len(memory)).copy_(memory), specs)  # the one wait of a batch

    def pinned_bytes(self, count: int) -> Tensor:
        """Return so many bytes of pinned memory, the same ones each time."""
        if len(self.pinned) < count:
            self.pinned = torch.empty(2 * count, dtype=torch.uint8).pin_memory()
        return self.pinned[:count]

    def write(self, output: Data, rows: Tensor, next_rows: Tensor) -> None:
        """Write an output into rows [B] of the trajectories, the hidden states into those that follow."""
        for name, value in output.items():
            self.rows[name][next_rows if name == "rnn_states" else rows] = value
