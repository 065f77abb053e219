"""Environments of a few lines, one for each kind of observation and of action, all learned in seconds.

Every observation of the reading environments shows a new target; the reward is the part of it that the action names,
divided by `STEPS`: an episode's return is the fraction that was right. `chance` is what uniformly random (allowed)
actions get. Each refuses an action that is not of its space. Use them as `--env tiny_envs:ReadsText`.
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from tiny import Tiny

STEPS = 8


class Reading(Tiny):
    """The target is one of four numbers, the observation shows it, the action names it."""

    observation_space = action_space = spaces.Discrete(4)
    chance = 1 / 4
    reward_scale = 1.0
    length = STEPS

    def reward(self, action: Any) -> float:
        return self.reward_scale * float(self.score(action)) / STEPS

    def observe(self) -> Any:
        self.target = self.draw()
        return self.show(self.target)

    def draw(self) -> Any:
        return int(self.np_random.integers(4))

    def show(self, target: Any) -> Any:
        return target

    def score(self, action: Any) -> float:
        return action == self.target


# ---- one kind of observation each ------------------------------------------------------------------------------------


class ReadsImage(Reading):
    """One quarter of a noisy picture, channels last, is bright."""

    observation_space = spaces.Box(0, 255, (6, 6, 3), np.uint8)

    def show(self, target: int) -> np.ndarray:
        image = self.np_random.integers(0, 60, (6, 6, 3))
        row, column = 3 * (target // 2), 3 * (target % 2)
        image[row : row + 3, column : column + 3] += 150
        return image.astype(np.uint8)


class ReadsGrayImage(ReadsImage):
    """Becomes one with its channel first."""

    observation_space = spaces.Box(0, 255, (6, 6), np.uint8)

    def show(self, target: int) -> np.ndarray:
        return super().show(target)[:, :, 0]


class ReadsVector(Reading):
    """A noisy direction."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)

    def show(self, target: int) -> np.ndarray:
        direction = np.array([np.cos(target * np.pi / 2), np.sin(target * np.pi / 2)])
        return (direction + self.np_random.uniform(-0.2, 0.2, 2)).astype(np.float32)


class ReadsFarAndSmall(ReadsVector):
    """One half of the direction is far from 0, the other close to it; both are needed."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def show(self, target: int) -> np.ndarray:
        return np.array([1.7e9, 0.0]) + np.array([10.0, 1e-4]) * super().show(target)


class ReadsDiscrete(Reading):
    observation_space = spaces.Discrete(4, start=3)

    def show(self, target: int) -> int:
        return target + 3


class ReadsMultiDiscrete(Reading):
    """The second of three numbers."""

    observation_space = spaces.MultiDiscrete([3, 4, 2], start=[0, -1, 5])

    def show(self, target: int) -> np.ndarray:
        return np.array([self.np_random.integers(3), target - 1, 5 + self.np_random.integers(2)])


class ReadsText(Reading):
    """A sentence with the name of a direction in it."""

    observation_space = spaces.Text(40, charset="abcdefghijklmnopqrstuvwxyz ")

    def show(self, target: int) -> str:
        name = ("north", "east", "south", "west")[target]
        return (f"go {name}", f"please turn to the {name} now", f"{name} is the goal")[self.np_random.integers(3)]


class ReadsDict(Reading):
    """One bit of the target in a vector, the other in a number; and a picture of nothing."""

    observation_space = spaces.Dict({
        "camera": spaces.Box(0, 255, (6, 6, 1), np.uint8), "pose": spaces.Box(-2, 2, (3,), np.float32),
        "gear": spaces.Discrete(2)})

    def show(self, target: int) -> dict[str, Any]:
        pose = self.np_random.uniform(-0.5, 0.5, 3)
        pose[1] += 2 * (target // 2) - 1
        return {"camera": self.np_random.integers(0, 256, (6, 6, 1)).astype(np.uint8), "pose": pose.astype(np.float32),
                "gear": target % 2}


class ReadsTuple(Reading):
    """One bit of the target in a dict in a tuple, the other in a tuple in a dict in a tuple."""

    observation_space = spaces.Tuple((
        spaces.Discrete(3),
        spaces.Dict({"left": spaces.Box(-1, 1, (1,), np.float32),
                     "right": spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(2)))})))

    def show(self, target: int) -> tuple:
        left = np.array([0.5 - (target // 2)], np.float32)
        noise = self.np_random.integers(0, 2, 3)
        bits = np.array([noise[0], target % 2], np.int8)
        return int(noise[1]), {"left": left, "right": (bits, int(noise[2]))}


# ---- one kind of action each -----------------------------------------------------------------------------------------


class ActsMultiDiscrete(Reading):
    """Three choices, in a table of one column."""

    observation_space = spaces.MultiDiscrete([2, 3, 4])
    action_space = spaces.MultiDiscrete([[2], [3], [4]], start=[[0], [1], [-3]])
    chance = (1 / 2 + 1 / 3 + 1 / 4) / 3

    def draw(self) -> np.ndarray:
        return self.np_random.integers([2, 3, 4])

    def score(self, action: np.ndarray) -> float:
        return (action[:, 0] - [0, 1, -3] == self.target).mean()


class ActsBox(Reading):
    """Two dimensions of different ranges; right is what lies within 15 % of the range around the target."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Box(np.float32([-1, 10]), np.float32([3, 30]))
    chance = 0.3

    def draw(self) -> np.ndarray:
        return self.np_random.uniform(0.15, 0.85, 2).astype(np.float32)  # in units of the range

    def score(self, action: np.ndarray) -> float:
        return (np.abs((action - [-1, 10]) / [4, 20] - self.target) < 0.15).mean()


class ActsDict(Reading):
    """A choice for the hand and a number for the wheel."""

    observation_space = spaces.Box(0, 2, (2,), np.float32)
    action_space = spaces.Dict({"wheel": spaces.Box(-4, 4, (1,), np.float32), "hand": spaces.Discrete(3)})
    chance = (0.3 + 1 / 3) / 2

    def draw(self) -> np.ndarray:
        return np.float32([self.np_random.uniform(0.15, 0.85), self.np_random.integers(3)])

    def score(self, action: dict[str, Any]) -> float:
        wheel = abs((action["wheel"][0] + 4) / 8 - self.target[0]) < 0.15
        return np.mean([wheel, action["hand"] == self.target[1]])


# ---- action masks ----------------------------------------------------------------------------------------------------


class MasksInObs(Reading):
    """Two or three of six options are allowed, changing at each step, always also the target; others are refused."""

    observation_space = spaces.Dict({"target": spaces.Discrete(6), "action_mask": spaces.MultiBinary(6)})
    action_space = spaces.Discrete(6, start=1)
    chance = (1 / 2 + 1 / 3) / 2

    def draw(self) -> int:
        target = int(self.np_random.integers(6))
        self.mask = np.zeros(6, np.int8)
        self.mask[self.np_random.permutation(np.delete(np.arange(6), target))[: self.np_random.integers(1, 3)]] = 1
        self.mask[target] = 1
        return target

    def show(self, target: int) -> Any:
        return {"target": target, "action_mask": self.mask.copy()}

    def score(self, action: int) -> float:
        assert self.mask[action - 1], f"{action} is forbidden"
        return action - 1 == self.target


class MasksInInfo(MasksInObs):
    observation_space = spaces.Discrete(6)

    def show(self, target: int) -> int:
        return target

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask.copy()}


class MasksOfParts(Reading):
    """Two choices between four options and a bit between them; the masks come as a tuple of two."""

    observation_space = spaces.MultiDiscrete([4, 2, 4])
    action_space = spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(1), spaces.Discrete(4)))
    chance = (1 / 2 + 1 / 2 + 1 / 2) / 3

    def draw(self) -> np.ndarray:
        target = self.np_random.integers([4, 2, 4])
        self.masks = tuple(np.arange(4) % 2 == target[part] % 2 for part in (0, 2))  # those of the target's parity
        return target

    def score(self, action: tuple) -> float:
        assert all(mask[choice] for mask, choice in zip(self.masks, action[::2], strict=True)), f"{action} is forbidden"
        return (np.array([action[0], *action[1], action[2]]) == self.target).mean()

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.masks}


# ---- memory, and the size of rewards ---------------------------------------------------------------------------------


class Recalls(Tiny):
    """The first observation shows a cue, the last one asks for it, those between show noise.

    Without a memory the best return is `chance`.
    """

    LENGTH = length = 6
    observation_space = spaces.Box(-1, 1, (6,), np.float32)  # the cue, noise, whether to answer
    action_space = spaces.Discrete(4)
    chance = 1 / 4

    def begin(self) -> None:
        self.cue = int(self.np_random.integers(4))

    def observe(self) -> np.ndarray:
        obs = np.zeros(6, np.float32)
        obs[4], obs[5] = self.np_random.uniform(-1, 1), self.t == self.length - 1
        if self.t == 0:
            obs[self.cue] = 1
        return obs

    def reward(self, action: int) -> float:
        return float(self.t == self.length - 1 and action == self.cue)


class HugeRewards(ReadsVector):
    reward_scale = 1e4


class TinyRewards(ReadsVector):
    reward_scale = 1e-4
