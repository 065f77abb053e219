"""What an environment must not be and must not return: one line that says what to do, before anything is written."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from config import make_config
from envs.families import make_vector_env, probe
from runtime.user_error import EnvironmentFailure, UserError

OBS = np.zeros(2, np.float32)
IMAGE = spaces.Box(0, 255, (16, 16, 3), np.uint8)
make_odd: Callable[..., Any] = gym.Env  # what --env=test_contract:make_odd calls; each test sets it


class Fine(gym.Env):
    """Has nothing wrong; each test changes something."""

    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Discrete(3)
    shows: Any = OBS

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.shows, {}

    def step(self, action: Any) -> Any:
        return self.shows, 1.0, False, False, {}


def odd(**parts: Any) -> type:
    return type("Odd", (Fine,), parts)


def returns(*values: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: values[0] if len(values) == 1 else values


def look(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    monkeypatch.setattr("test_contract.make_odd", make)
    probe(make_config({"env": "test_contract:make_odd"}))


OLD_SPACE = type("Box", (), {"__module__": "gym.spaces", "__repr__": lambda self: "Box(2,)"})()
OLD_ENV = type("OldEnv", (), {"__module__": "gym.core", "__repr__": lambda self: "<OldEnv>"})


def needs(size: int, *, color: str, sides: int = 4) -> gym.Env:
    return Fine()


@pytest.mark.parametrize(("make", "words"), [
    # what step() returns
    (odd(step=returns(OBS, [1.0, 2.0], False, False, {})),
     "step 1: step() returned the reward [1.0, 2.0]; it must be one number, such as a weighted sum"),
    (odd(step=returns(OBS, np.array([1.0, 2.0]), False, False, {})), "returned the reward array([1., 2.]); it must be"),
    (odd(step=returns(OBS, None, False, False, {})), "returned the reward None; it must be one number"),
    (odd(step=returns(OBS, "1", False, False, {})), "returned the reward '1'; it must be one number"),
    (odd(step=returns(OBS, 1 + 2j, False, False, {})), "returned the reward (1+2j); it must be one number"),
    (odd(step=returns(OBS, 10**5000, False, False, {})), "returned the reward a int; it must be one number"),
    (odd(step=returns(OBS, 1.0, np.array([True, False]), False, {})), "terminated array([ True, False]); it must be"),
    (odd(step=returns(OBS, 1.0, False, 0.5, {})), "returned truncated 0.5; it must be True or False"),
    (odd(step=returns(OBS, 1.0, False, {})),
     "step() returned 4 values, the last of which is {}; it must return 5 values: observation, reward, terminated,"),
    (odd(step=returns(OBS, 1.0, False, False, None)), "the last of which is None; it must return 5 values"),
    (odd(step=returns(None)), "step() returned None; it must return 5 values"),
    (odd(step=lambda self: None), "takes 1 positional argument but 2 were given; write it as step(self, action)"),
    # what reset() returns
    (odd(reset=returns(OBS)), "step 0: reset() returned array([0., 0.], dtype=float32); it must return 2 values: "),
    (odd(reset=returns(OBS, None)), "reset() returned 2 values, the last of which is None; it must return 2 values"),
    (odd(reset=lambda self: (OBS, {})), "argument 'seed'; write it as reset(self, *, seed=None, options=None)"),
    (odd(reset=lambda self, seed: (OBS, {})), "argument 'options'; write it as reset(self, *, seed=None,"),
    # observations
    (odd(shows=np.zeros(3)), "observation 'obs' has the shape (3,); observation_space says (2,), Box(-1.0, 1.0, (2,)"),
    (odd(shows=None), "observation 'obs' is None; observation_space says numbers, Box("),
    (odd(shows=[[1.0], [1.0, 2.0]]), "observation 'obs' is [[1.0], [1.0, 2.0]]; observation_space says numbers"),
    (odd(shows=np.zeros((16, 16, 3)), observation_space=IMAGE), "is of float64; observation_space says uint8, Box(0"),
    (odd(shows=1.5, observation_space=spaces.Discrete(3)), "is of float64; observation_space says int64, Discrete(3)"),
    (odd(shows=7, observation_space=spaces.Text(3)), "an observation of a Text space is 7, not a text"),
    (odd(shows={"a": OBS}, observation_space=spaces.Dict(a=Fine.observation_space, b=spaces.Discrete(2))),
     "observation 'obs' has no 'b', which observation_space says"),
    (odd(shows=OBS, observation_space=spaces.Dict(a=Fine.observation_space)), "observation_space says a dict of a"),
    (odd(shows=(OBS,), observation_space=spaces.Tuple([spaces.Discrete(2)] * 2)), "space says a tuple of 2"),
    (odd(shows=(0, OBS), observation_space=spaces.Tuple([spaces.Discrete(2)] * 2)), "observation '1' has the shape"),
    # spaces
    (odd(action_space=None), "--env=test_contract:make_odd: action_space is None, not a gymnasium space"),
    (odd(observation_space=property(lambda self: self.later)), "it has no observation_space: 'Odd' object has no attr"),
    (odd(observation_space=OLD_SPACE), "it is of the old gym package, import spaces from gymnasium"),
    # what makes them
    (needs, "needs() needs size, color; give it with --env_kwargs '{\"size\": ..., \"color\": ...}'"),
    (lambda: None, "make_odd: it makes None; it must return a gymnasium.Env"),
    (lambda: Fine, "it makes <class 'test_contract.Fine'>; it must return a gymnasium.Env"),
    (lambda: (Fine(), {}), "it makes (<"),
    (lambda: gym.make_vec("CartPole-v1", 2), "it must return one environment; --num_envs_per_worker says how many"),
    (OLD_ENV, "it makes <OldEnv>, which is of the old gym package; make it a gymnasium.Env, or return shimmy.GymV21"),
    (type("Plain", (), {"step": None, "__repr__": lambda self: "<Plain>"}),
     "it makes <Plain>, which is no gymnasium.Env; write class Plain(gymnasium.Env)"),
])
def test_what_an_environment_must_not_be_or_return(monkeypatch: pytest.MonkeyPatch, make: Any, words: str) -> None:
    with pytest.raises(UserError) as refused:
        look(monkeypatch, make)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "test_contract:make_odd" in str(refused.value)


@pytest.mark.parametrize("make", [
    odd(step=returns(OBS, [1.0], np.array([False]), np.bool_(0), {})), odd(step=lambda *args: [OBS, 1, 0, False, {}]),
    odd(shows=[0.0, 0.0]), odd(shows=np.zeros(2)), odd(shows=np.array(1), observation_space=spaces.Discrete(3))])
def test_what_can_be_understood_is(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    look(monkeypatch, make)


def test_what_comes_wrong_later_names_the_environment_its_seed_and_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fine] = []
    monkeypatch.setattr("test_contract.make_odd", lambda: made.append(Fine()) or made[-1])
    env = make_vector_env(make_config({"env": "test_contract:make_odd"}), 2)
    env.reset(5)
    env.step([np.zeros((2, 1), np.float32)])
    made[-1].shows = np.zeros(3, np.float32)
    with pytest.raises(EnvironmentFailure) as failure:
        env.step([np.zeros((2, 1), np.float32)])
    assert str(failure.value).startswith("test_contract:make_odd, seed 6, step 2: observation 'obs' has the shape (3,)")
    assert failure.value.where() == "", "nothing was raised"


class Panic(BaseException):
    """What an environment written in Rust raises."""


@pytest.mark.parametrize("error", [Panic("it broke\nin two"), ValueError("it broke\nin two")])
def test_what_an_environment_raises_is_told_in_one_line_beside_its_own_frames(
        monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: Any) -> None:
        raise error

    with pytest.raises(EnvironmentFailure) as failure:
        look(monkeypatch, odd(step=fail))
    assert str(failure.value).endswith(f"step 1: step() raised {type(error).__name__}: it broke in two")
    assert failure.value.where().count("File ") == 1, "gymnasium's wrappers are not shown"
    assert 'test_contract.py", line' in failure.value.where()
