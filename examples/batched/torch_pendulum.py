"""Gymnasium's Pendulum in PyTorch, thousands at once, on any device, in any autoreset mode.

    python train.py --env examples.batched.torch_pendulum:Pendulums --num_envs_per_worker 512
"""

import math
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

DT, GRAVITY, LIMIT = 0.05, 10.0, 200


class Pendulums(gym.vector.VectorEnv):
    """Swing up, and stay there with little force. Observations [N, 3]: cosine and sine of the angle, its velocity."""

    max_episode_length = LIMIT

    def __init__(self, num_envs: int, autoreset_mode: str = "SAME_STEP", device: str = "cpu") -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode[autoreset_mode]}
        self.single_observation_space = spaces.Box(-math.inf, math.inf, (3,))
        self.single_action_space = spaces.Box(-2.0, 2.0, (1,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.random = torch.Generator(device)
        self.angle, self.velocity, self.episode_length_buf = torch.zeros(3, num_envs, device=device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict]:
        if seed is not None:
            self.random.manual_seed(seed)
        return self.begin(options["reset_mask"] if options else torch.ones_like(self.angle) > 0), {}

    def begin(self, chosen: Tensor) -> Tensor:
        angle, velocity = 2 * torch.rand(2, self.num_envs, generator=self.random, device=self.angle.device) - 1
        self.angle = torch.where(chosen, math.pi * angle, self.angle)
        self.velocity = torch.where(chosen, velocity, self.velocity)
        self.episode_length_buf = torch.where(chosen, 0, self.episode_length_buf)
        return torch.stack([self.angle.cos(), self.angle.sin(), self.velocity], 1)

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        was_over, force = self.episode_length_buf == LIMIT, actions[:, 0]  # True in NEXT_STEP mode alone
        angle = (self.angle + math.pi) % (2 * math.pi) - math.pi
        rewards = torch.where(was_over, 0, -(angle**2 + 0.1 * self.velocity**2 + 0.001 * force**2))
        self.velocity = (self.velocity + (1.5 * GRAVITY * self.angle.sin() + 3 * force) * DT).clamp(-8, 8)
        self.angle = self.angle + self.velocity * DT
        self.episode_length_buf += 1
        obs, infos = self.begin(was_over), {}
        over = self.episode_length_buf == LIMIT
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and over.any():
            obs, infos = self.begin(over), {"final_obs": obs}
        return obs, rewards, torch.zeros_like(over), over, infos
