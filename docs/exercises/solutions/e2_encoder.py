"""Exercise 2, solved: an encoder for each part of the observation, and a layer that joins them."""

import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config


class PictureAndNeedle(nn.Module):
    """Convolutions for the picture, a layer for both."""

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Box]) -> None:
        super().__init__()
        height, width, channels = obs_space["picture"].shape
        self.convolutions = nn.Sequential(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1),
                                          nn.ReLU(), nn.Flatten())
        num_features = 16 * (-(-height // 4)) * (-(-width // 4)) + obs_space["needle"].shape[0]
        self.joined = nn.Sequential(nn.Linear(num_features, 64), nn.ReLU())
        self.out_size = 64

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        picture = self.convolutions(obs["picture"].movedim(-1, 1))
        return self.joined(torch.cat([picture, obs["needle"]], -1))


make = PictureAndNeedle
