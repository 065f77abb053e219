"""Exercise 5, solved: generalized advantages (Schulman et al. 2016, arXiv 1506.02438), exact at a time limit."""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lambda_: float) -> Tensor:
    """Compute the advantages A_t, [T, B].

    Args:
        rewards: [T, B]. values: V(x_0) ... V(x_T), [T+1, B].
        terminated, truncated: [T, B] bool; x_{t+1} is the final observation of an episode that ends at t.
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1].masked_fill(terminated[t], 0.0)
        trace = gamma * lambda_ * ~(terminated[t] | truncated[t])
        following = rewards[t] + gamma * next_value - values[t] + trace * following
        advantages[t] = following
    return advantages
