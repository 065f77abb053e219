"""The reward shaping that an environment offers to population-based training, as a flat dict of numbers.

Used by `rollout_worker.py`, `runtime/population.py` and `shared_buffers.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.user_error import UserError


def flatten_shaping(shaping: Any, path: str = "") -> dict[str, float | bool]:
    """Turn an environment's reward shaping, a nested dict (or lists) of numbers, into {path: number}.

    Raises `UserError` for anything else in it.
    """
    if isinstance(shaping, (bool, np.bool_)):
        return {path: bool(shaping)}
    if isinstance(shaping, (int, float, np.integer, np.floating)) and math.isfinite(shaping):
        return {path: float(shaping)}
    if not isinstance(shaping, (Mapping, list, tuple)):
        raise UserError(f"get_default_reward_shaping(): '{path}' is {shaping!r}; supported are finite numbers, "
                        "booleans, and dicts, lists and tuples of these")
    parts = shaping.items() if isinstance(shaping, Mapping) else enumerate(shaping)
    flat: dict[str, float | bool] = {}
    for key, part in parts:
        flat |= flatten_shaping(part, f"{path}/{key}" if path else str(key))
    return flat


def unflatten_shaping(like: Any, flat: Mapping[str, float | bool], path: str = "") -> Any:
    """Put flat numbers into the form of an environment's default reward shaping."""
    if isinstance(like, Mapping):
        return {key: unflatten_shaping(part, flat, f"{path}/{key}" if path else str(key)) for key, part in like.items()}
    if isinstance(like, (list, tuple)):
        return type(like)(unflatten_shaping(part, flat, f"{path}/{i}" if path else str(i))
                          for i, part in enumerate(like))
    return bool(flat[path]) if isinstance(like, (bool, np.bool_)) else float(flat[path])


def check_shapings(expected: Mapping[str, Any], shapings: Sequence[Any], num_envs: int) -> None:
    """Raise `UserError` when some environments offer another shaping than expected, or none."""
    if len(shapings) < num_envs:
        raise UserError(f"get_default_reward_shaping(): {num_envs - len(shapings)} of {num_envs} environments lack it; "
                        "all must have it")
    for shaping in shapings:
        check_shaping_keys(expected, flatten_shaping(shaping))


def check_shaping_keys(expected: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
    """Raise `UserError` when an environment's shaping has other keys than the others'."""
    for keys, words in ((expected.keys() - flat.keys(), "is missing"), (flat.keys() - expected.keys(), "is new")):
        if keys:
            raise UserError(f"get_default_reward_shaping(): the key '{min(keys)}' {words} in another environment of "
                            "the run; all must have the same keys")
