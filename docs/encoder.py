"""What the layout of images, the activation and the copying of rows cost: `python -m docs.encoder`.

The Nature CNN in bfloat16 on one core: us per image of acting (16 images) and of one training pass (264 images); and us
per image of gathering 16 rows of trajectories. Quoted in `model.py` and `envs/families.py`.
"""

from collections.abc import Callable
from functools import partial

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from config import Config, make_config
from model import NONLINEARITIES, FastELU, ImageEncoder
from runtime.crew import keep_freed_memory

SECONDS = 2.0


def time_of(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes, the median of many."""
    return Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=SECONDS).median


def make_encoder(activation: type[nn.Module], shape: tuple[int, int, int]) -> ImageEncoder:
    """Make the encoder of images of a shape with an activation function."""
    encoder = ImageEncoder(shape, make_config(Config, {"env": "none", "encoder_conv_architecture": "convnet_atari"}))
    for part in encoder.modules():
        for name, child in part.named_children():
            if isinstance(child, NONLINEARITIES["elu"]):
                setattr(part, name, activation())
    return encoder


def train(encoder: ImageEncoder, images: Tensor) -> None:
    """Run one pass forward and backward."""
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(images)
    features.float().sum().backward()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{'':28}{'acting':>8}{'training':>10}   us per image")
    for activation in (nn.ELU, FastELU, nn.ReLU):
        for shape in ((4, 84, 84), (84, 84, 4)):
            images = torch.randn(264, *shape).bfloat16()
            learning, acting = make_encoder(activation, shape), make_encoder(activation, shape).bfloat16()
            with torch.inference_mode():
                act_sec = time_of(partial(acting, images[:16])) / 16
            train_sec = time_of(partial(train, learning, images)) / len(images)
            layout = "HxWxC" if shape[-1] == 4 else "CxHxW"
            print(f"{activation.__name__ + ', ' + layout:28}{act_sec * 1e6:8.1f}{train_sec * 1e6:10.1f}")
    planes, images = np.zeros((16, 4, 84 * 84), np.uint8).swapaxes(0, 1), np.empty((16, 84 * 84, 4), np.uint8)
    print(f"{'CxHxW -> HxWxC':28}{time_of(lambda: cv2.merge(tuple(planes), images)) / 16 * 1e6:8.1f}")
    rows = torch.zeros(2000, 84, 84, 4, dtype=torch.uint8).share_memory_()
    index = torch.arange(16) * 33
    for name, gather in (("rows[index]", lambda: rows[index]), ("index_select", lambda: rows.index_select(0, index))):
        print(f"{name:28}{time_of(gather) / 16 * 1e6:8.1f}")


if __name__ == "__main__":
    main()
