"""Exercise 2: an encoder for an observation of two parts.

As it stands it looks at the picture alone, and it knows pictures of one size only.
"""

from gymnasium import spaces
from torch import Tensor, nn

from config import Config


class PictureAndNeedle(nn.Module):
    """Convolutions for the picture; the needle is still missing."""

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Box]) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1),
                                          nn.ReLU(), nn.Flatten())
        self.joined = nn.Sequential(nn.Linear(16 * 2 * 2, 64), nn.ReLU())
        self.out_size = 64

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return self.joined(self.convolutions(obs["picture"].movedim(-1, 1)))


make = PictureAndNeedle
