"""`--res_w --res_h`: images of one agent and of several, wherever they are in the observation."""

import copy
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from gymnasium import spaces
from parts import make_config
from tiny import Tiny, TinyGame

from envs.families import make_vector_env
from envs.vector_env import VectorEnv
from runtime.utils import UserError, reference

NUMBERS = spaces.Box(-1, 1, (2,), np.float32)
SCREEN, MAP = spaces.Box(0, 255, (8, 6, 3), np.uint8), spaces.Box(0, 255, (4, 4, 1), np.uint8)
NESTED = spaces.Dict({"screen": SCREEN, "inner": spaces.Tuple((MAP, NUMBERS))})


class Painters(TinyGame):
    """The second agent sees no image."""

    def observation_space(self, agent: str) -> spaces.Space:
        return NESTED if agent == "left" else NUMBERS


def make(env: str | Callable) -> VectorEnv:
    return make_vector_env(make_config({"env": reference(env), "res_w": 5, "res_h": 3}), 2)


def resized(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, (5, 3), interpolation=cv2.INTER_AREA).reshape(3, 5, -1)


@pytest.mark.parametrize("make_env", [lambda: Tiny(observation_space=NESTED), Painters])
def test_the_images_of_every_agent_are_resized_wherever_they_are_and_nothing_else(make_env: Callable) -> None:
    env = make(make_env)
    assert {leaf: space.shape for leaf, space in env.kinds[0].obs_space.items()} == {
        "inner/0": (3, 5, 1), "inner/1": (2,), "screen": (3, 5, 3)}
    twin = copy.deepcopy(NESTED)  # draws the same
    NESTED.seed(0)
    twin.seed(0)
    step = env.reset(0)
    for _ in range(5):  # over the end of an episode
        for i in range(2):
            seen = twin.sample()
            np.testing.assert_array_equal(step.obs[0]["screen"][i], resized(seen["screen"]))
            np.testing.assert_array_equal(step.obs[0]["inner/0"][i], resized(seen["inner"][0]))
            np.testing.assert_array_equal(step.obs[0]["inner/1"][i], seen["inner"][1])
            if make_env is Painters:
                np.testing.assert_array_equal(step.obs[1]["obs"][i], twin["inner"][1].sample())
        step = env.step([np.zeros((2, 1), np.float32)] * len(env.kinds))


@pytest.mark.parametrize("env", ["tiny:Tiny", "tiny:TinyGame", "CartPole-v1"])
def test_without_images_there_is_nothing_to_resize(env: str) -> None:
    with pytest.raises(UserError, match="--res_w and --res_h need uint8 images"):
        make(env)
