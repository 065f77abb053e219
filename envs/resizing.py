"""Image observations in another size, `--res_w` and `--res_h`: of one agent or several. Used by `families.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from envs.flat_spaces import is_channels_last
from envs.multi_agent import agent_space
from runtime.user_error import UserError

Resizer = tuple[spaces.Space, Callable[[Any], Any]]


def resizer(space: spaces.Space, width: int, height: int) -> Resizer | None:
    """Return the space with its HxWxC uint8 images resized, also those in Dicts and Tuples, and what resizes them.

    None: there are no such images.
    """
    import cv2  # noqa: PLC0415  slow to import

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        found = {key: part for key in keys if (part := resizer(space[key], width, height)) is not None}
        if not found:
            return None
        parts = {key: found[key][0] if key in found else space[key] for key in keys}

        def resize_parts(obs: Any) -> Any:
            if isinstance(space, spaces.Dict):
                return {**obs, **{key: resize(obs[key]) for key, (_, resize) in found.items()}}
            return tuple(found[key][1](value) if key in found else value for key, value in enumerate(obs))

        return (spaces.Dict(parts) if isinstance(space, spaces.Dict) else spaces.Tuple(parts.values())), resize_parts
    if not (isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
            and is_channels_last(space.shape)):
        return None

    def resize(image: np.ndarray) -> np.ndarray:
        return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, -1)

    return spaces.Box(0, 255, (height, width, space.shape[2]), np.uint8), resize


def no_images(space: Any) -> UserError:
    """Return the error of an environment without images that can be resized."""
    return UserError(f"--res_w and --res_h need uint8 images of height x width x channels, not {space} (the smallest "
                     "axis counts as channels); leave them at 0")


def resize_images(env: gym.Env, width: int, height: int) -> gym.Env:
    """Resize the images of an environment of one agent."""
    found = resizer(env.observation_space, width, height)
    if found is None:
        raise no_images(env.observation_space)
    space, resize = found
    return gym.wrappers.TransformObservation(env, resize, space)


class ResizedAgents:
    """Resizes the images of every agent of an environment (`multi_agent.py`); all else is the environment's own."""

    def __init__(self, env: Any, width: int, height: int) -> None:
        self.env = env
        spaces_of = {agent: agent_space(env, "observation_space", agent) for agent in env.possible_agents}
        self._resizers = {agent: found for agent, space in spaces_of.items()
                          if (found := resizer(space, width, height)) is not None}
        if spaces_of and not self._resizers:
            raise no_images(next(iter(spaces_of.values())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["env"], name)

    def observation_space(self, agent: Any) -> spaces.Space:
        if agent in self._resizers:
            return self._resizers[agent][0]
        return agent_space(self.env, "observation_space", agent)

    def reset(self, **kwargs: Any) -> tuple[Any, ...]:
        obs, *rest = self.env.reset(**kwargs)
        return self._resize(obs), *rest

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        obs, *rest = self.env.step(actions)
        return self._resize(obs), *rest

    def _resize(self, obs: Mapping[Any, Any]) -> dict[Any, Any]:
        return {agent: self._resizers[agent][1](value) if agent in self._resizers else value
                for agent, value in obs.items()}
