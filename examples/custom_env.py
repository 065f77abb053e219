"""An environment of your own: `python -m examples.custom_env`.

Any function that returns a gymnasium environment will do. From the command line it is named by its file:
`python train.py --env examples.custom_env:make_corridor`, and the same for `evaluate.py`.
"""

import gymnasium as gym
import numpy as np

from trainer import APPO


class Corridor(gym.Env):
    """Walk to the end of a corridor, right or left as the sign at its beginning says."""

    observation_space = gym.spaces.Dict({"place": gym.spaces.Discrete(11), "sign": gym.spaces.MultiBinary(1)})
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.sign = 5, self.np_random.integers(2)
        return self.observe(), {}

    def step(self, action):
        self.place += 2 * action - 1
        at_end = self.place in (0, 10)
        return self.observe(), float(at_end and (self.place == 10) == self.sign) - 0.01, at_end, False, {}

    def observe(self):
        return {"place": self.place, "sign": np.array([self.sign], np.int8)}


def make_corridor():
    return gym.wrappers.TimeLimit(Corridor(), 100)


if __name__ == "__main__":
    with APPO(make_corridor, experiment="corridor", learning_rate=1e-3, train_for_env_steps=100_000) as appo:
        appo.train()
