"""Check of exercise 2: shapes, both parts of the observation, rows apart from each other, and a gradient everywhere."""

from types import ModuleType

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import make_config
from docs.exercises.expect import expect, expect_close, part

ROWS = 64


def hidden_layers(module: nn.Module) -> list[str]:
    """Name the attributes that keep layers where PyTorch does not look for them."""
    return [name for owner in module.modules() for name, value in vars(owner).items()
            if not name.startswith("_") and isinstance(value, list | tuple | dict)
            and any(isinstance(x, nn.Module) for x in (value.values() if isinstance(value, dict) else value))]


def check_one(student: ModuleType, needle: int, shape: tuple[int, int, int]) -> None:
    """Check the encoder for one size of both parts."""
    space = {"needle": spaces.Box(0.0, 1.0, (needle,), np.float32), "picture": spaces.Box(-1.0, 1.0, shape, np.float32)}
    encoder = part(student, "make")(make_config({"env": "none"}), space)
    size = getattr(encoder, "out_size", None)
    expect(isinstance(size, int), f"out_size: expected a whole number, got {size!r}. The core asks for it (__init__)")
    hidden = hidden_layers(encoder)
    expect(not hidden, f"{', '.join(hidden)}: layers in a plain list or dict are not trained, since parameters() does "
           "not find them. Use nn.ModuleList, nn.ModuleDict or nn.Sequential (__init__)")
    obs: dict[str, Tensor] = {"needle": torch.rand(ROWS, needle), "picture": 2 * torch.rand(ROWS, *shape) - 1}
    features = encoder(obs)
    where = f"a needle of {needle}, a picture of {shape}"
    expect(tuple(features.shape) == (ROWS, size), f"{where}: expected features of shape ({ROWS}, {size}), which is "
           f"[B, out_size], got {tuple(features.shape)} (forward)")
    for name, x in obs.items():
        moved = encoder(obs | {name: x.roll(1, 0)})
        expect(not torch.allclose(moved, features), f"{where}: another {name} gives the same features; the encoder "
               "does not use it. Join what it gets from both parts (forward)")
    expect_close(encoder({name: obs[name] for name in reversed(obs)}), features, f"{where}: the parts in another order",
                 "Take them by their names (forward)")
    expect_close(encoder({name: x[:3] for name, x in obs.items()}), features[:3],
                 f"{where}: the first 3 of {ROWS} observations alone: features",
                 "An observation's features must not depend on the others of the batch: it acts among others than it "
                 "learns among. Keep axis 0 as it is, and use no batch norm (forward)")
    features.square().sum().backward()
    still = [name for name, x in encoder.named_parameters() if x.grad is None or not x.grad.any()]
    expect(not still, f"{where}: no gradient reaches {', '.join(still)}; these never learn. Is there a detach() or "
           "no_grad() on the way, or a layer that is not used? (forward)")
    seen = {name: x.clone().requires_grad_() for name, x in obs.items()}
    encoder(seen).square().sum().backward()
    for name, x in seen.items():
        share = float((x.grad != 0).any(0).float().mean())
        expect(share > 0.9, f"{where}: only {share:.0%} of the {name}'s numbers have an influence on the features; use "
               "all of it (forward)")


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    for needle, shape in ((4, (8, 8, 1)), (6, (12, 10, 3))):
        check_one(student, needle, shape)
    return "both parts reach the features, of any size, each row by itself, and every parameter learns."
