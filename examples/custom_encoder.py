"""An encoder of your own: `python -m examples.custom_encoder`.

It is made from the configuration and the spaces of the normalized observations, and needs an attribute `out_size`.
From the command line: `python train.py --env CartPole-v1 --encoder examples.custom_encoder:FourierEncoder`.
"""

import math

import torch
from torch import nn

from trainer import APPO


class FourierEncoder(nn.Module):
    """Vectors as sines and cosines of random projections (arXiv 2006.10739), then one layer."""

    def __init__(self, cfg, obs_space):
        super().__init__()
        num_inputs = sum(space.shape[0] for space in obs_space.values())
        self.register_buffer("frequencies", 0.3 * torch.randn(num_inputs, 64))
        self.layer = nn.Sequential(nn.Linear(128, 64), nn.Tanh())
        self.out_size = 64

    def forward(self, obs):  # {name: [B, n]} -> [B, out_size]
        phases = 2 * math.pi * torch.cat(list(obs.values()), -1) @ self.frequencies
        return self.layer(torch.cat([phases.sin(), phases.cos()], -1))


if __name__ == "__main__":
    with APPO("CartPole-v1", experiment="custom_encoder", encoder=FourierEncoder) as appo:
        appo.train()
