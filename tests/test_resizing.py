"""`--res_w --res_h`: images of one agent and of several, wherever they are in the observation."""

from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
from gymnasium import spaces
from parts import make_config

from envs import families
from envs.vector_env import VectorEnv
from runtime.user_error import UserError

SCREEN, MAP = spaces.Box(0, 255, (8, 6, 3), np.uint8), spaces.Box(0, 255, (4, 4, 1), np.uint8)
POSE = spaces.Box(-1, 1, (2,), np.float32)
SPACES = {
    "image": SCREEN,
    "dict": spaces.Dict({"screen": SCREEN, "inner": spaces.Dict({"map": MAP, "pose": POSE})}),
    "tuple": spaces.Tuple((POSE, SCREEN)), "vector": POSE}
SIZE = {"res_w": 5, "res_h": 3}


class Painters:
    """Two agents, of which the first sees one of `SPACES` and the second one of the others; an episode has 3 steps."""

    possible_agents: ClassVar[list[str]] = ["one", "two"]
    sees: ClassVar[dict[str, str]] = {"one": "dict", "two": "tuple"}

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACES[self.sees[agent]]

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def observe(self) -> dict[str, Any]:
        self.shown = {agent: self.observation_space(agent).sample() for agent in self.agents}
        return self.shown

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        self.agents, self.t = list(self.possible_agents), 0
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        self.t += 1
        over, agents = self.t == 3, self.agents
        results = (self.observe(), dict.fromkeys(agents, 0.0), dict.fromkeys(agents, over),
                   dict.fromkeys(agents, False), {agent: {} for agent in agents})
        self.agents = [] if over else agents
        return results


class ImageAndVector(Painters):
    sees: ClassVar[dict[str, str]] = {"one": "image", "two": "vector"}


class OnlyVectors(Painters):
    sees: ClassVar[dict[str, str]] = {"one": "vector", "two": "vector"}


def make(env: str, **settings: Any) -> VectorEnv:
    return families.make_vector_env(make_config({"env": f"test_resizing:{env}", **SIZE}, settings), 2)


def resized(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, (5, 3), interpolation=cv2.INTER_AREA).reshape(3, 5, -1)


def test_the_images_of_every_agent_are_resized_wherever_they_are_and_nothing_else() -> None:
    env = make("Painters")
    shapes = [{name: leaf.shape for name, leaf in kind.obs_space.items()} for kind in env.kinds]
    assert shapes == [{"inner/map": (3, 5, 1), "inner/pose": (2,), "screen": (3, 5, 3)}, {"0": (2,), "1": (3, 5, 3)}]
    shown = env.reset(0).obs
    for _ in range(5):  # over the end of an episode
        for i, game in enumerate(env._envs):
            one, two = game.shown["one"], game.shown["two"]
            np.testing.assert_array_equal(shown[0]["screen"][i], resized(one["screen"]))
            np.testing.assert_array_equal(shown[0]["inner/map"][i], resized(one["inner"]["map"]))
            np.testing.assert_array_equal(shown[0]["inner/pose"][i], one["inner"]["pose"])
            np.testing.assert_array_equal(shown[1]["0"][i], two[0])
            np.testing.assert_array_equal(shown[1]["1"][i], resized(two[1]))
        shown = env.step([np.zeros((2, 1), np.float32)] * 2).obs
    env.close()


def test_an_agent_without_images_may_play_beside_one_that_has_some() -> None:
    env = make("ImageAndVector")
    assert [kind.obs_space["obs"].shape for kind in env.kinds] == [(3, 5, 3), (2,)]
    assert [obs["obs"].shape for obs in env.reset(0).obs] == [(2, 3, 5, 3), (2, 2)]
    with pytest.raises(UserError, match="--res_w and --res_h need uint8 images"):
        make("OnlyVectors")
