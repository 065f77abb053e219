"""What an environment has to be and to return, and the one line that says what is wrong with one that is otherwise.

What it returns is looked at where that costs nothing: when it is made, and after something has failed. Used by
`vector_env.py`, `multi_agent.py` and `families.py`.
"""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from runtime.user_error import EnvironmentFailure, UserError, nearest

TRUE_OBJECTIVE = "true_objective"  # the key of an episode's last info that population-based training ranks by

# what gymnasium's methods return
RETURNS = {"reset": "2 values: observation, info",
           "step": "5 values: observation, reward, terminated, truncated, info"}
# and those of environments of several agents
RETURNS_OF_SEVERAL = {"reset": "2 dicts by agent: observations, infos",
                      "step": "5 dicts by agent: observations, rewards, terminations, truncations, infos"}
SIGNATURES = {"reset": "reset(self, *, seed=None, options=None)", "step": "step(self, action)"}


class BrokenContract(UserError):
    """What an environment is, or has returned, is not what it must be."""


@contextlib.contextmanager
def naming_failures(name: str, seed: int | None, num_steps: int, what: str) -> Any:
    """Turn whatever an environment raises, or returns wrongly, into an `EnvironmentFailure` that says where."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BrokenContract as error:
        raise EnvironmentFailure(f"{name}, seed {seed}, step {num_steps}: {what}() returned {error}") from None
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except BaseException as error:
        raise EnvironmentFailure(f"{name}, seed {seed}, step {num_steps}: {what}() raised {type(error).__name__}: "
                                 f"{error}") from error


def brief(value: Any) -> str:
    """Show a value that may be anything in a few words."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  it is of the user's class, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


# ---- what it returns ---------------------------------------------------------------------------------------------


def plain(returned: Any) -> tuple[Any, float, bool, bool, Any]:
    """Return what step() returned, with plain numbers. Raises `BrokenContract`."""
    try:
        obs, reward, terminated, truncated, info = returned
    except (TypeError, ValueError):
        raise BrokenContract(count_values(returned, RETURNS["step"])) from None
    if not isinstance(info, Mapping):
        raise BrokenContract(count_values(returned, RETURNS["step"]))
    if not (isinstance(reward, float) and isinstance(terminated, bool) and isinstance(truncated, bool)):
        reward = float(read_number("the reward", reward, ", such as a weighted sum"))
        terminated, truncated = read_bool("terminated", terminated), read_bool("truncated", truncated)
    return obs, reward, terminated, truncated, info


def pair(returned: Any) -> tuple[Any, Any]:
    """Return what reset() returned. Raises `BrokenContract`."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise BrokenContract(count_values(returned, RETURNS["reset"]))
    return returned[0], returned[1]


def count_values(returned: Any, expected: str) -> str:
    """Say what was returned in place of several values."""
    several = isinstance(returned, (tuple, list))
    given = f"{len(returned)} values, the last of which is {brief(returned[-1])}" if several and returned else (
        brief(returned))
    return f"{given}; it must return {expected}" + (" (a dict)" if "info" in expected else "")


def read_number(name: str, value: Any, cure_of_several: str = "") -> float:
    """Return a number that may come in an array. Raises `BrokenContract`."""
    array = None
    with contextlib.suppress(Exception):  # whatever the user's class does
        array = np.asarray(value)
    if array is None or array.size != 1 or array.dtype.kind not in "fiub":
        cure = cure_of_several if array is not None and array.size > 1 else ""
        raise BrokenContract(f"{name} {brief(value)}; it must be one number{cure}")
    return array.item()


def read_bool(name: str, value: Any) -> bool:
    """Return a truth value that may come as a number or in an array. Raises `BrokenContract`."""
    number = read_number(name, value)
    if number not in (0, 1):
        raise BrokenContract(f"{name} {brief(value)}; it must be True or False")
    return bool(number)


def read_objective(info: Mapping[str, Any], key: str = TRUE_OBJECTIVE) -> float:
    """Return the true objective that an info tells; nan: none. Raises `BrokenContract` for what is no finite number."""
    value = info.get(key)
    if value is None:
        return np.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = np.asarray(value, np.float64).item()
        if not np.isinf(number):
            return number
    raise BrokenContract(f"info['{key}'] = {brief(value)}; it must be a finite number, or None")


def read_picture(value: Any) -> np.ndarray:
    """Return a picture [H, W, 3] uint8. Raises `BrokenContract`."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3:
        return value
    raise BrokenContract(f"{brief(value)}; it must return a picture, an array of height x width x 3 uint8")


def misfit(space: spaces.Space, value: Any, path: str = "") -> str | None:
    """Say why an observation cannot be stored as one of its space, None: it can; path: which part of the whole."""
    what = f"observation '{path or 'obs'}'"
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{what} is {brief(value)}; observation_space says a dict of {', '.join(map(str, space.spaces))}"
        if missing := [key for key in space.spaces if key not in value]:
            return f"{what} has no {missing[0]!r}, which observation_space says"
        parts = [(f"{path}/{key}" if path else str(key), part, value[key]) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, Sequence) or len(value) != len(space.spaces):
            return f"{what} is {brief(value)}; observation_space says a tuple of {len(space.spaces)}"
        parts = [(f"{path}/{i}" if path else str(i), part, value[i]) for i, part in enumerate(space.spaces)]
    else:
        return _misfit_of_leaf(space, value, what)
    return next((fault for path, part, inner in parts if (fault := misfit(part, inner, path))), None)


def _misfit_of_leaf(space: spaces.Space, value: Any, what: str) -> str | None:
    if space.dtype is None or space.dtype.kind == "U":
        return None if isinstance(value, str) else f"{what} is {brief(value)}; observation_space says a text"
    try:
        array = np.asarray(value)
    except Exception:  # noqa: BLE001  whatever the user's class does
        array = np.empty((), object)
    if array.dtype.kind not in "fiubc":
        return f"{what} is {brief(value)}; observation_space says numbers, {brief(space)}"
    if array.shape != space.shape:
        return f"{what} has the shape {array.shape}; observation_space says {space.shape}, {brief(space)}"
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        return f"{what} is of {array.dtype}; observation_space says {space.dtype}, {brief(space)}"
    return None


# ---- what it is --------------------------------------------------------------------------------------------------


def is_of_old_gym(thing: Any) -> bool:
    """Tell whether something comes from the package that gymnasium has replaced."""
    return any(kind.__module__.split(".")[0] == "gym" for kind in type(thing).__mro__)


def find_space(env: Any, what: str) -> spaces.Space:
    """Return a space of an environment. Raises `BrokenContract` where there is none."""
    try:
        return check_space(what, getattr(env, what))
    except AttributeError as error:
        raise BrokenContract(f"it has no {what}: {error}") from error


def check_space(what: str, space: Any) -> spaces.Space:
    """Return a space. Raises `BrokenContract` where it is none of gymnasium's."""
    if not isinstance(space, spaces.Space):
        cure = "; it is of the old gym package, import spaces from gymnasium" if is_of_old_gym(space) else ""
        raise BrokenContract(f"{what} is {brief(space)}, not a gymnasium space{cure}")
    return space


def check_env(env: Any) -> gym.Env:
    """Return what a function has made for an environment. Raises `BrokenContract` where it is none."""
    if isinstance(env, gym.Env):
        return env
    cure = "; it must return a gymnasium.Env"
    if isinstance(env, gym.vector.VectorEnv):
        cure = "; it must return one environment; --num_envs_per_worker says how many there will be"
    elif is_of_old_gym(env):
        cure = (", which is of the old gym package; make it a gymnasium.Env, or return "
                "shimmy.GymV21CompatibilityV0(env=...) of it (pip install shimmy)")
    elif hasattr(env, "step") and not isinstance(env, type):
        cure = f", which is no gymnasium.Env; write class {type(env).__name__}(gymnasium.Env)"
    raise BrokenContract(f"it makes {brief(env)}{cure}")


def refuse_signature(env: Any, what: str, error: TypeError, *args: Any, **kwargs: Any) -> None:
    """Raise `UserError` when reset() or step() of an environment, or of a wrapper of it, has other arguments."""
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    for layer in reversed(layers):
        method = getattr(layer, what)
        if f"{method.__qualname__}()" in str(error) and misses(method, *args, **kwargs):
            raise UserError(f"{error}; write it as {SIGNATURES[what]}") from error


def misses(function: Callable, *args: Any, **kwargs: Any) -> bool:
    """Tell whether a function cannot be called with these arguments."""
    with contextlib.suppress(ValueError):  # of some that are written in C
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            return True
    return False


def wrong_arguments(make: str | Callable, kwargs: Mapping[str, Any]) -> str | None:
    """Say which other arguments what makes an environment needs than these and `render_mode`; None: these will do."""
    make = load_env_creator(make) if isinstance(make, str) else make
    name_of_maker = getattr(make, "__name__", type(make).__name__)  # a partial() has none
    if not misses(make, **kwargs):
        return None
    parameters = inspect.signature(make).parameters
    named = [name for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if unknown := [name for name in kwargs if name not in named]:
        return (f"{name_of_maker}() takes no argument {unknown[0]}{nearest(unknown[0], named)}; it takes "
                + (", ".join(named) or "none"))
    missing = [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in kwargs]
    example = ", ".join(f'"{name}": ...' for name in missing)
    return f"{name_of_maker}() needs {', '.join(missing)}; give it with --env_kwargs '{{{example}}}'"


def where_and_why(error: BaseException) -> str:
    """Describe an error of a module that cannot be imported: why, and where in the user's code."""
    if isinstance(error, ImportError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_told = isinstance(error, SyntaxError) or "importlib" in place.filename
    return f"{type(error).__name__}: {error}" + ("" if is_told else f" ({place.filename}, line {place.lineno})")
