"""Any observation space as named arrays, any action space as one row of numbers.

Dict and Tuple observations become a flat dict of *leaves*, named by their path ("camera/left", "1/0"; a plain space is
called "obs"). A leaf is a space of one of these kinds, whatever its form in the environment:

    Box of 3 axes      an image, CxHxW or HxWxC, uint8 or float (HxW uint8 becomes 1xHxW)
    Box of 1 axis      a vector (a number and a float matrix are flattened)
    Discrete, MultiDiscrete    numbers from 0 on, which the model turns into one-hot vectors
    MultiBinary        zeros and ones; a text becomes the set of its words, each hashed into one of 64 bits

Actions are rows of float32: an index for each choice (exact up to 2^24), 0 or 1 for each bit, a number for each
continuous dimension; parts of Dict and Tuple spaces lie side by side. An *action mask* travels as the observation leaf
"action_mask", one bit for each option of all Discrete and MultiDiscrete parts in that order.

`AgentKind`, at the end, does all of this for agents with the same spaces. The model and the shared buffers take their
sizes from the same functions.
"""

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from runtime.utils import UserError, Values

ACTION_MASK = "action_mask"
TEXT_BITS = 64
# What is larger cannot be learned from: sums of squares of returns and observations would leave the range of float32.
LARGEST = 1e12

Observation = dict[str, np.ndarray]
Data = dict[str, Tensor]
Leaves = dict[str, spaces.Space]


# ---- nested spaces -----------------------------------------------------------------------------------------------


def plain_parts(space: spaces.Space) -> dict[str, spaces.Space]:
    """List the parts of a nested space that are no Dict and no Tuple, by their paths; a plain space has the path ''."""
    return {path: part for path, part, _ in _walk(space)}


def _walk(space: spaces.Space, value: Any = None, path: str = "") -> Iterator[tuple[str, spaces.Space, Any]]:
    """Yield each plain part of a space: its path, its space, and its part of a value of the space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space).items():
            yield from _walk(part, None if value is None else value[key], f"{path}/{key}" if path else str(key))
    else:
        yield path, space, value


def parts_of(space: spaces.Dict | spaces.Tuple) -> Mapping[Any, spaces.Space]:
    """Return the parts of a space of the first level, by the keys of its values."""
    return space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))


def _describe(space: spaces.Space, *, bounds: bool) -> str:
    if is_text(space):
        return "Text"
    if isinstance(space, spaces.Box):  # its own text depends on how NumPy prints
        return f"Box({f'{space.low.tolist()}, {space.high.tolist()}, ' * bounds}{space.shape}, {space.dtype})"
    return " ".join(str(space).split())


def num_options(space: spaces.Space) -> list[int]:
    """List the number of options of each choice in a Discrete or MultiDiscrete space; no choices in any other."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    return space.nvec.ravel().tolist() if isinstance(space, spaces.MultiDiscrete) else []


# ---- observations ------------------------------------------------------------------------------------------------


def obs_leaves(space: spaces.Space) -> dict[str, spaces.Space]:
    """List the leaves of an observation space. Raises `UserError` naming the part that is not supported."""
    leaves = {path or "obs": _obs_leaf(part, path or "obs") for path, part in plain_parts(space).items()}
    if not leaves.keys() - {ACTION_MASK}:
        raise UserError(f"the observation space is {space}: there is nothing to see")
    return leaves


def _obs_leaf(space: spaces.Space, name: str) -> spaces.Space:
    if is_text(space):
        return spaces.MultiBinary(TEXT_BITS)
    if options := num_options(space):
        return spaces.Discrete(*options) if isinstance(space, spaces.Discrete) else spaces.MultiDiscrete(options)
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(int(np.prod(space.shape)))
    if not isinstance(space, spaces.Box) or len(space.shape) > 3 or 0 in space.shape:
        raise UserError(f"observation '{name}' is {space}; supported are Box (numbers, vectors, images), Discrete, "
                        "MultiDiscrete, MultiBinary, Text, and Dict and Tuple of these")
    if is_image(space) and space.dtype == np.uint8:
        return spaces.Box(0, 255, (1, *space.shape)[-3:], np.uint8)
    shape = space.shape if is_image(space) else (int(np.prod(space.shape)),)
    is_rounded = len(shape) == 1 and not np.can_cast(space.dtype, np.float32)  # by float32: a clock shows 1.7e9
    return spaces.Box(-np.inf, np.inf, shape, np.float64 if is_rounded else np.float32)


def is_image(space: spaces.Box) -> bool:
    """Return whether a Box is an image."""
    return len(space.shape) == 3 or (len(space.shape) == 2 and space.dtype == np.uint8)


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether an image is HxWxC: two equal axes are height and width, else the smallest are the channels."""
    if (shape[0] == shape[1]) != (shape[1] == shape[2]):
        return shape[0] == shape[1]
    return shape[2] < shape[0]


def is_text(space: spaces.Space) -> bool:
    """Return whether a space holds texts: gymnasium's `Text`, or another one of its type."""
    return getattr(getattr(space, "dtype", None), "kind", "") == "U"


def dtype_of(space: spaces.Space) -> torch.dtype:
    """Return the dtype in which values of a space that is no Dict, Tuple or Text lie in tensors."""
    return getattr(torch, space.dtype.name)


def flatten_obs(space: spaces.Space, leaves: Mapping[str, spaces.Space], obs: Any) -> Observation:
    """Turn a batch of N observations of a space into a dict of its leaves [N, ...]."""
    flat = {path or "obs": _as_numbers(part, batch) for path, part, batch in _walk(space, obs)}
    for name, value in flat.items():
        shape = leaves[name].shape
        if value.ndim != 1 + len(shape):  # an image that has them is not reinterpreted: a wrong layout must fail
            flat[name] = value.reshape(len(value), *shape)
        if flat[name].shape[1:] != shape:
            raise ValueError(f"observation '{name}' is {value.shape[1:]}, and its space {shape}")
    return flat


def _as_numbers(space: spaces.Space, batch: Any) -> np.ndarray:
    if is_text(space):
        return np.stack([hash_words(text) for text in batch])
    batch = as_array(batch)
    return np.asarray(batch, np.int64) - space.start if hasattr(space, "start") else batch


def as_array(value: Any) -> np.ndarray:
    """Return an array of NumPy, PyTorch (on any device) or JAX as one of NumPy, without a copy where it can."""
    return value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)


@functools.lru_cache(maxsize=10_000)
def hash_words(text: str) -> np.ndarray:
    """Return the set of a text's words as bits, [TEXT_BITS] int8; two words may share a bit."""
    bits = np.zeros(TEXT_BITS, np.int8)
    bits[[zlib.crc32(word.encode()) % TEXT_BITS for word in text.lower().split()]] = 1
    return bits


# ---- actions -----------------------------------------------------------------------------------------------------


def action_leaves(space: spaces.Space) -> dict[str, spaces.Space]:
    """List the plain parts of an action space. Raises `UserError` naming the part that is not supported."""
    leaves = plain_parts(space)
    for path, leaf in leaves.items() or [("", space)]:
        kinds = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box
        if not isinstance(leaf, kinds) or 0 in leaf.shape:
            part = f"part '{path}' of the action space" if path else "the action space"
            raise UserError(f"{part} is {leaf}; supported are Discrete, MultiDiscrete, MultiBinary, Box, and Dict and "
                            "Tuple of these")
    return leaves


def num_columns(space: spaces.Space) -> int:
    """Count the numbers of one action."""
    return sum(int(np.prod(part.shape)) for part in action_leaves(space).values())


def num_action_parameters(space: spaces.Space) -> int:
    """Count the numbers that describe a distribution: logits; for a Box means and log standard deviations."""
    count = 0
    for part in action_leaves(space).values():
        of_each = 2 if isinstance(part, spaces.Box) else 1
        count += sum(num_options(part)) or of_each * int(np.prod(part.shape))
    return count


def unflatten_actions(space: spaces.Space, actions: np.ndarray, *, squash: bool = False) -> Any:
    """Turn rows [N, num_columns] float32 into a batch of actions of a space.

    Choices are shifted to the space's start. A bounded continuous dimension is given in units of its range: -1 is its
    low and +1 its high; what lies beyond is clipped, or with `squash` everything is squashed into it with tanh.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = parts_of(space)
        columns = np.split(actions, np.cumsum([num_columns(part) for part in parts.values()])[:-1], 1)
        values = {key: unflatten_actions(part, own, squash=squash)
                  for (key, part), own in zip(parts.items(), columns, strict=True)}
        return values if isinstance(space, spaces.Dict) else tuple(values.values())
    actions = actions.reshape(len(actions), *space.shape)
    if not isinstance(space, spaces.Box):
        return actions.astype(space.dtype) + getattr(space, "start", 0)
    actions = np.tanh(actions) if squash else actions
    bounded = is_bounded(space)
    low = np.where(bounded, space.low, -1.0)
    high = np.where(bounded, space.high, 1.0)
    scaled = low + (np.clip(actions, -1.0, 1.0) + 1.0) * 0.5 * (high - low)
    scaled = np.clip(np.where(bounded, scaled, actions), space.low, space.high)  # also against rounding
    return (np.rint(scaled) if np.issubdtype(space.dtype, np.integer) else scaled).astype(space.dtype)


def is_bounded(space: spaces.Box) -> np.ndarray:
    """Return which dimensions of a Box have a range, [*shape] bool; those up to the ends of float32 have none."""
    with np.errstate(over="ignore"):
        return np.subtract(space.high, space.low, dtype=np.float64) <= np.finfo(np.float32).max


def flatten_mask(mask: Any) -> np.ndarray:
    """Join an action mask, an array or a (nested) tuple of arrays, into one row of bits. Raises errors for others."""
    if isinstance(mask, (tuple, list)) and any(map(np.ndim, mask)):
        return np.concatenate([flatten_mask(part) for part in mask])
    bits = np.ravel(mask)
    if not np.isin(bits, (0, 1)).all():
        raise ValueError(f"an action mask must hold 0 and 1, not {bits}")
    return bits.astype(bool)


# ---- a kind of agents --------------------------------------------------------------------------------------------


class AgentKind:
    """Agents with the same spaces: converts between an environment's forms and arrays, and checks what comes."""

    def __init__(self, space: spaces.Space, action_space: spaces.Space, index: np.ndarray, *, squash: bool) -> None:
        """Convert for the agents `index`, [M of the kind]; squash: continuous actions into their bounds."""
        self.index = index
        self.space = space
        self.action_space = action_space
        self._squash = squash
        self._num_options = [n for leaf in action_leaves(action_space).values() for n in num_options(leaf)]
        self.obs_space = obs_leaves(space)
        if self.obs_space.pop(ACTION_MASK, None) is not None:
            self.add_mask()
        self._ranges: dict[str, tuple[Any, Any]] = {}  # of leaves that may hold what cannot be learned from
        for leaf_name, leaf in self.obs_space.items():
            if options := num_options(leaf):
                self._ranges[leaf_name] = (0, np.array(options) - 1)
            elif isinstance(leaf, spaces.Box) and leaf.dtype != np.uint8:
                self._ranges[leaf_name] = (-LARGEST, LARGEST)

    def add_mask(self) -> None:
        """Take action masks into `obs_space`. They come with the observations, or else with the infos."""
        self.obs_space[ACTION_MASK] = spaces.MultiBinary(sum(self._num_options))

    def flatten(self, obs: Any, masks: Sequence[Any] = ()) -> Observation:
        """Convert a batch of observations in the form of the environment; masks: those of the infos, or None."""
        flat = flatten_obs(self.space, self.obs_space, obs)
        if ACTION_MASK in self.obs_space:
            flat[ACTION_MASK] = self.join_masks(flat.get(ACTION_MASK, masks), len(next(iter(flat.values()))))
        elif any(mask is not None for mask in masks):
            raise UserError(f"info['{ACTION_MASK}'] comes from step() but not from reset(); give it in both")
        return flat

    def actions(self, rows: np.ndarray) -> Any:
        """Convert rows of numbers into a batch of actions in the form of the environment."""
        return unflatten_actions(self.action_space, rows, squash=self._squash)

    def join_masks(self, given: Sequence[Any], count: int) -> np.ndarray:
        """Return action masks as [count, bits] bool; None allows everything, and so does one that is not given."""
        masks = np.ones((count, sum(self._num_options)), bool)
        if isinstance(given, np.ndarray) and not given.dtype.hasobject:
            masks[:] = flatten_mask(given).reshape(count, -1)
            return masks
        for i, mask in enumerate(given):
            if mask is not None:
                masks[i] = flatten_mask(mask)
        return masks

    def forbids_all(self, masks: np.ndarray) -> np.ndarray:
        """Return which of masks [n, bits] bool allow nothing for one of the choices, [n] bool."""
        of_choices = np.split(masks, np.cumsum(self._num_options)[:-1], 1)
        return np.any([~mask.any(1) for mask in of_choices], 0)

    def describe(self) -> dict[str, str]:
        """Describe what the agents see, in the order in which a model takes it, and do; for their checkpoints.

        The bounds of what it sees a policy never knew.
        """
        seen = {path or "obs": _describe(part, bounds=False) for path, part in plain_parts(self.space).items()}
        done = [f"{path} {_describe(part, bounds=True)}" for path, part in plain_parts(self.action_space).items()]
        described = {f"observation {name}": seen[name] for name in self.obs_space if name != ACTION_MASK}
        return described | {"action": ", ".join(map(str.strip, done))}

    def as_trained(self, state: Values, path: Path) -> dict[str, spaces.Space]:
        """Return the leaves of the observations in the order of a checkpoint: they are found by their names.

        Raises `UserError` when the policy was trained with other spaces, which would mean something else to it.
        """
        own = self.describe()
        saved = state.get("spaces", own)  # checkpoints of the first versions hold none
        changed = [f"{name} is {own.get(name, 'gone')} and was {saved.get(name, 'not there')}"
                   for name in saved | own if own.get(name) != saved.get(name)]
        if changed:
            raise UserError(f"checkpoint {path} was trained with other spaces: {'; '.join(changed)[:500]}; give the "
                            "environment its former ones, or use another --experiment, or --restart_behavior=restart")
        parts = (name.removeprefix("observation ") for name in saved if name != "action")
        return {part: self.obs_space[part] for part in parts} | self.obs_space

    def find_fault(self, obs: Observation) -> tuple[int, str] | None:
        """Find an agent (by its place in the kind) whose observation cannot be learned from, and say why."""
        for name, (low, high) in self._ranges.items():
            if fault := out_of_range(f"observation '{name}'", obs[name], low, high):
                return fault
        if ACTION_MASK in obs and (forbidden := self.forbids_all(obs[ACTION_MASK])).any():
            return int(forbidden.argmax()), "the action mask forbids every action"
        return None


def out_of_range(what: str, value: np.ndarray, low: Any, high: Any) -> tuple[int, str] | None:
    """Find the first entry of an array that is not within limits, and describe it."""
    if value.dtype.itemsize < 4:
        value = value.astype(np.float32)  # the limits do not fit into a float16
    good = (value >= low) & (value <= high)  # False for nan
    if good.all():
        return None
    i = int(good.reshape(len(value), -1).all(1).argmin())
    fault = "out of range" if np.isfinite(value[i]).all() else "not finite"
    return i, f"{what} is {fault}: {str(value[i])[:200]}"
