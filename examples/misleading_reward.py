"""Population-based training finds a reward that does not mislead: `python -m examples.misleading_reward`.

A courier chooses a speed for each package. Its shaped reward pays for speed and punishes breakage, but with the default
coefficients far too little: the best policy for it drives too fast and breaks most of what it carries. What counts, the
true objective, is how much arrives unbroken. The coefficients are offered to population-based training by
`get_default_reward_shaping` and `set_reward_shaping`.
"""

import gymnasium as gym
import numpy as np

from trainer import APPO

SPEEDS = 11
PACKAGES = 20


class Courier(gym.Env):
    """20 packages, one each step. At best the speed is 1 / (2 * fragility), and half of the package arrives."""

    observation_space = gym.spaces.Box(0.0, 2.0, (1,), np.float32)  # the fragility of the next package
    action_space = gym.spaces.Discrete(SPEEDS)

    def __init__(self):
        self.shaping = self.get_default_reward_shaping()

    def get_default_reward_shaping(self):
        return {"speed": 1.0, "breakage": 0.4}

    def set_reward_shaping(self, reward_shaping, agent_idx):
        self.shaping = reward_shaping

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.delivered, self.packages = 0.0, 0
        return self.observe(), {}

    def step(self, action):
        speed = action / (SPEEDS - 1)
        broken = self.fragility * speed**2
        self.delivered += max(speed - broken, 0.0)
        self.packages += 1
        info = {"true_objective": self.delivered} if self.packages == PACKAGES else {}
        reward = self.shaping["speed"] * speed - self.shaping["breakage"] * broken
        return self.observe(), reward, self.packages == PACKAGES, False, info

    def observe(self):
        self.fragility = self.np_random.uniform(0.5, 1.5)
        return np.array([self.fragility], np.float32)


if __name__ == "__main__":
    with APPO(Courier, experiment="courier", num_policies=4, with_pbt=True, train_for_env_steps=1_500_000,
              pbt_start_mutation=10_000, pbt_period_env_steps=10_000, pbt_mutation_rate=0.5,
              pbt_replace_reward_gap=0.02) as appo:
        appo.train()
