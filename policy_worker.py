"""The policy worker: computes actions for whoever asks.

It takes every request that is waiting, gathers the observations and hidden states of all these agents into one batch,
runs one forward pass and writes actions, log-probabilities, values, next hidden states and the policy version back in
place. It keeps no state of its own besides a copy of the weights, so that any policy worker can serve any step; the
copy is renewed as soon as the learner has published a new version, even in the middle of a trajectory.

Read next: `model.py`.
"""

import torch
from torch import Tensor

from config import Config
from model import body_dtype, make_model
from shared_buffers import SPLIT, STOP, Message, SharedBuffers, take_all


class PolicyWorker:
    """Serves the action requests of one policy. One process; shares `SharedBuffers`."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, device: torch.device) -> None:
        self.cfg, self.buffers, self.device = cfg, buffers, device
        self.dtype = body_dtype(cfg, device, buffers.obs_space)
        self.model = make_model(cfg, buffers.obs_space, buffers.action_space).to(device).body_to(self.dtype).eval()
        self.version = buffers.weights.refresh(self.model)
        # [S, T(+1), ...] seen as [S * T(+1), ...], so that a (slot, t) pair is one row
        self.rows = {name: tensor.flatten(0, 1) for name, tensor in buffers.trajectories.items()}
        self.obs_names = list(buffers.obs_space)

    def run(self) -> None:
        """Serve requests until told to stop."""
        while True:
            messages = take_all(self.buffers.requests, self.buffers.requests_lock)
            self.serve(messages)
            if messages[-1][0] == STOP:
                return

    @torch.inference_mode()
    def serve(self, messages: list[Message]) -> None:
        """Compute the actions of all requested splits in one batch."""
        splits = [index for kind, index in messages if kind == SPLIT]
        if not splits:
            return
        if int(self.buffers.weights.version) != self.version:
            self.version = self.buffers.weights.refresh(self.model)
        slots = self.buffers.agent_slot[splits].flatten()  # [B]
        t = self.buffers.agent_t[splits].flatten()
        with_last = slots * (self.cfg.rollout + 1) + t  # row in a tensor of T+1 rows a slot
        row = slots * self.cfg.rollout + t
        obs = {name: self.rows[f"obs/{name}"][with_last].to(self.device) for name in self.obs_names}
        rnn_states = self.rows["rnn_states"][with_last].to(self.device)
        new_episode = self.rows["new_episode"][with_last, None].to(self.device)

        parameters, values, rnn_states = self.model(self.model.normalize(obs, self.dtype), rnn_states, new_episode)
        distribution = self.model.distribution(parameters)
        actions = distribution.sample()
        self.write("actions", row, actions)
        self.write("action_parameters", row, parameters)
        self.write("log_probs", row, distribution.log_prob(actions))
        self.write("values", row, self.model.returns.denormalize(values))
        self.write("policy_version", row, torch.full_like(row, self.version))
        self.write("rnn_states", with_last + 1, rnn_states)
        for split in splits:
            self.buffers.inboxes[self.buffers.worker_of_split(split)].put((SPLIT, split))

    def write(self, name: str, row: Tensor, value: Tensor) -> None:
        self.rows[name][row] = value.to("cpu")
