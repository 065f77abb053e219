"""Exercise 5: generalized advantages (Schulman et al. 2016, arXiv 1506.02438) with episodes that end.

As it stands a time limit counts as the end of the task, as in much published code.
"""

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
        goes_on = ~(terminated[t] | truncated[t])
        following = rewards[t] + gamma * goes_on * (values[t + 1] + lambda_ * following) - values[t]
        advantages[t] = following
    return advantages
