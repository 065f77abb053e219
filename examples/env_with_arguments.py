"""An environment class of your own, with arguments: `python -m examples.env_with_arguments`.

From the command line: `python train.py --env examples.env_with_arguments:Lights --env_kwargs '{"size": 9}'`.
"""

import gymnasium as gym
import numpy as np

from trainer import APPO


class Lights(gym.Env):
    """A row of lamps, of which some are on; the action names the first one that is."""

    def __init__(self, size=5):
        self.observation_space = gym.spaces.MultiBinary(size)
        self.action_space = gym.spaces.Discrete(size)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.switch(), {}

    def step(self, action):
        reward, self.steps = float(action == self.lamps.argmax()), self.steps + 1
        return self.switch(), reward, False, self.steps == 10, {}

    def switch(self):
        self.lamps = self.np_random.integers(0, 2, self.action_space.n, np.int8)
        self.lamps[self.np_random.integers(len(self.lamps))] = 1
        return self.lamps


if __name__ == "__main__":
    with APPO(Lights, env_kwargs={"size": 7}, experiment="lights") as appo:
        appo.train(30_000)
        print("the first lamp that is on:", appo.predict([0, 0, 1, 0, 1, 0, 0], deterministic=True)[0])
