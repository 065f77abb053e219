"""Exercise 6: a memory of your own.

As it stands it adds up what it has seen, and forgets it only where an episode begins with the first step of a sequence.
"""

import torch
from torch import Tensor, nn

from config import Config


class Memory(nn.Module):
    """Adds up."""

    def __init__(self, cfg: Config, in_size: int) -> None:
        super().__init__()
        self.out_size = self.state_size = 32
        self.layer = nn.Linear(in_size, 32)

    def forward(self, features: Tensor, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor]:
        rnn_states = rnn_states.masked_fill(new_episode[:, :1], 0.0)
        outputs = []
        for t in range(features.shape[1]):
            rnn_states = rnn_states + self.layer(features[:, t])
            outputs.append(rnn_states)
        return torch.stack(outputs, 1), rnn_states


make = Memory
