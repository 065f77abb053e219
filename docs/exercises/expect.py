"""How a check says that an exercise is not solved yet: what was expected, what came, where to look."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class NotYet(AssertionError):
    """An exercise is not solved yet; the message is for the student."""


def expect(condition: Any, message: str) -> None:
    """Raise `NotYet` with a message unless the condition holds."""
    if not condition:
        raise NotYet(message)


def part(student: ModuleType, name: str) -> Any:
    """Return a function or class of the student's file."""
    expect(hasattr(student, name), f"{student.__file__} has no {name}; the check needs it under this name")
    return getattr(student, name)


def expect_close(got: Any, wanted: Tensor, what: str, look: str, rows: Tensor | bool = True) -> None:
    """Raise `NotYet`, naming the first entry that differs, unless a tensor has the wanted shape and entries.

    rows: True where the entries count; all by default.
    """
    expect(isinstance(got, Tensor), f"{what}: expected a tensor of shape {list(wanted.shape)}, got {got!r}. {look}")
    expect(got.shape == wanted.shape,
           f"{what}: expected the shape {list(wanted.shape)}, got {list(got.shape)}. {look}")
    differs = rows & ~torch.isclose(got.double(), wanted.double(), rtol=1e-4, atol=1e-4)  # also where got is nan
    if differs.any():
        place = tuple(differs.nonzero()[0].tolist())
        index = "".join(f"[{i}]" for i in place)
        raise NotYet(f"{what}{index}: expected {wanted[place]:.4f}, got {got[place]:.4f}. {look}")
