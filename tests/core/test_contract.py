"""What would corrupt learning without a word, and the APIs of the old gym, end with the environment's name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from parts import make_config
from tiny import NUMBERS, Tiny

from envs.families import make_vector_env, probe
from runtime.utils import EnvironmentFailure, UserError, reference

OBS = np.zeros(2, np.float32)
IMAGE = spaces.Box(0, 255, (16, 16, 3), np.uint8)


def odd(**parts: Any) -> Callable[[], Tiny]:
    return partial(Tiny, **{"observe": lambda: OBS} | parts)


def shows(obs: Any, space: spaces.Space = NUMBERS) -> Callable[[], Tiny]:
    return odd(observe=lambda: obs, observation_space=space)


def returns(*values: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: values[0] if len(values) == 1 else values


def look(make: Callable[..., Any]) -> None:
    probe(make_config({"env": reference(make)}))


@pytest.mark.parametrize(("make", "words"), [
    (odd(step=returns(OBS, 1.0, False, {})), "step 1: step() raised ValueError: not enough values"),
    (odd(step=returns(OBS, 1.0, False, False, None)), "step 1: step() raised AttributeError"),
    (odd(reset=returns(OBS)), "step 0: reset() raised AttributeError"),
    (odd(reset=returns(OBS, None)), "step 0: reset() raised AttributeError"),
    (odd(reset=lambda: (OBS, {})), "reset() raised TypeError"),
    (odd(step=returns(OBS, [1.0, 2.0], False, False, {})), "step 1: step() raised ValueError"),
    (odd(step=returns(OBS, None, False, False, {})), "step 1: reward is not finite"),
    (odd(reset=returns(OBS, {"action_mask": [1, 0.5, 0]})), "an action mask must hold 0 and 1, not [1.  0.5 0. ]"),
    (odd(step=returns(OBS, 1.0, False, False, {"true_objective": "much"})), "step 1: step() raised ValueError"),
    (shows(np.zeros(3)), "step 0: reset() raised ValueError"), (shows(None), "reset() raised ValueError"),
    (shows(np.zeros((16, 16, 3)), IMAGE), "reset() raised TypeError: Cannot cast array data"),
    (shows(1.5, spaces.Discrete(3)), "reset() raised TypeError: Cannot cast array data"),
    (shows((0, OBS), spaces.Tuple([spaces.Discrete(2)] * 2)), "reset() raised ValueError"),
    (shows({"a": OBS}, spaces.Dict(a=NUMBERS, b=IMAGE)), "KeyError: 'b'"),
    (shows(np.full(2, np.inf, np.float16), spaces.Box(-np.inf, np.inf, (2,), np.float16)), "'obs' is not finite"),
    (odd(action_space=None), "Tiny"), (lambda: None, "lambda, its maker raised"),
])
def test_what_an_environment_must_not_be_or_return(make: Any, words: str) -> None:
    with pytest.raises((UserError, EnvironmentFailure)) as refused:
        look(make)
    assert words in str(refused.value)


@pytest.mark.parametrize("make", [
    odd(step=returns(OBS, np.array([1.0]), np.array([False]), np.bool_(0), {})),
    odd(step=lambda *args: [OBS, 1, 0, False, {}]), shows([0.0, 0.0]), shows(np.zeros(2)),
    shows(np.array(1), spaces.Discrete(3))])
def test_what_can_be_understood_is(make: Any) -> None:
    look(make)


def test_what_comes_wrong_later_names_the_environment_and_the_step() -> None:
    made: list[Tiny] = []
    env = make_vector_env(make_config({"env": reference(lambda: made.append(Tiny()) or made[-1])}), 2)
    env.reset(5)
    env.step([np.zeros((2, 1), np.float32)])
    made[-1].observe = lambda: np.zeros(3, np.float32)
    with pytest.raises(EnvironmentFailure, match=r"lambda, seed None, step 2: step\(\) raised ValueError"):
        env.step([np.zeros((2, 1), np.float32)])


def test_what_an_environment_raises_is_named_in_one_line() -> None:
    def fail(*args: Any) -> None:
        raise ValueError("it broke\nin two")

    with pytest.raises(EnvironmentFailure, match=r"step 1: step\(\) raised ValueError: it broke in two$") as failure:
        look(odd(step=fail))
    assert isinstance(failure.value.__cause__, ValueError), "Python shows its traceback"
