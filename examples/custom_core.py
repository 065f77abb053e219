"""A core of your own, the part that remembers: `python -m examples.custom_core`.

It is made from the configuration and the size of the encoder's output, and needs `out_size` and `state_size`. From the
command line: `python train.py --env CartPole-v1 --core examples.custom_core:LeakyCore`.
"""

import torch
from torch import nn

from trainer import APPO


class LeakyCore(nn.Module):
    """Remembers moving averages of the features, each with a learned rate of forgetting."""

    def __init__(self, cfg, in_size):
        super().__init__()
        self.forget = nn.Parameter(torch.linspace(-2.0, 2.0, in_size))
        self.out_size, self.state_size = 2 * in_size, in_size

    def forward(self, features, rnn_states, new_episode):  # [B, L, in_size], [B, state_size], [B, L] bool
        keep = self.forget.sigmoid()
        averages = []
        for t in range(features.shape[1]):
            rnn_states = rnn_states.masked_fill(new_episode[:, t, None], 0.0)
            rnn_states = keep * rnn_states + (1 - keep) * features[:, t]
            averages.append(rnn_states)
        return torch.cat([features, torch.stack(averages, 1)], -1), rnn_states


if __name__ == "__main__":
    with APPO("CartPole-v1", experiment="custom_core", core=LeakyCore) as appo:
        appo.train()
