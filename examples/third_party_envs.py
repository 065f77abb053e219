"""Environments of other packages that gymnasium does not know: functions of a few lines make them.

    python train.py --env examples.third_party_envs:min_atar          # pip install minatar
    python train.py --env examples.third_party_envs:crafter           # pip install crafter ruamel.yaml
    python train.py --env examples.third_party_envs:snake             # pip install jumanji
    python train.py --env examples.third_party_envs:reach             # pip install metaworld
    python train.py --env examples.third_party_envs:airstriker        # pip install stable-retro
    python train.py --env examples.third_party_envs:deep_sea          # pip install mo-gymnasium

Write your own in the same way, in a file of your own. A package is imported by the function that needs it.
"""

# ruff: noqa: PLC0415  packages that may be missing

import gymnasium as gym
import numpy as np


class OldGym(gym.Env):
    """Adapts an environment of old gym: reset() returns an observation alone, step() four values."""

    def __init__(self, make, observation_space, action_space):
        self.make, self.observation_space, self.action_space = make, observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.old = self.make(seed)
        return self.old.reset(), {}

    def step(self, action):
        obs, reward, done, info = self.old.step(action)
        is_cut_off = info.get("TimeLimit.truncated", False)
        return obs, reward, done and not is_cut_off, is_cut_off, info

    def render(self):
        return self.old.render()


def min_atar(game="Breakout"):
    import minatar.gym

    if f"MinAtar/{game}-v1" not in gym.registry:
        minatar.gym.register_envs()
    return gym.make(f"MinAtar/{game}-v1")


def crafter():
    import crafter

    return OldGym(lambda seed: crafter.Env(seed=seed), gym.spaces.Box(0, 255, (64, 64, 3), np.uint8),
                  gym.spaces.Discrete(17))


def snake():
    import jumanji
    from jumanji.wrappers import JumanjiToGymWrapper

    class Adapted(JumanjiToGymWrapper):
        unwrapped = property(lambda self: self)  # Jumanji's would be what gymnasium takes for the environment

    return Adapted(jumanji.make("Snake-v1"))


def reach():
    import metaworld  # noqa: F401  registers

    return gym.make("Meta-World/MT1", env_name="reach-v3")


def airstriker():
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")  # "human" needs a display


def deep_sea(weights=(0.9, 0.1)):
    """Of a vector of rewards one number: treasure and time."""
    import mo_gymnasium

    return mo_gymnasium.wrappers.LinearReward(mo_gymnasium.make("deep-sea-treasure-v0"), np.array(weights))
