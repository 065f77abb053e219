"""Exercise 4: V-trace targets, as equation 1 of IMPALA (Espeholt et al. 2018, arXiv 1802.01561) has them.

As it stands it is the n-step return, written as a sum of TD errors: right as long as pi = mu.
"""

import torch
from torch import Tensor


def v_trace(log_ratios: Tensor, rewards: Tensor, values: Tensor, discounts: Tensor, rho_bar: float,
            c_bar: float) -> Tensor:
    """Compute the targets v_s, [T, B].

    Args:
        log_ratios: log pi(a_t|x_t) - log mu(a_t|x_t), [T, B].
        rewards: [T, B]. values: V(x_0) ... V(x_T), [T+1, B].
        discounts: of the value after each step, [T, B]: gamma, or 0 after a termination.
        rho_bar, c_bar: the truncations.
    """
    targets = values[:-1].clone()
    for s in range(len(rewards)):
        weight = torch.ones_like(values[s])  # of the TD error of step t
        for t in range(s, len(rewards)):
            targets[s] += weight * (rewards[t] + discounts[t] * values[t + 1] - values[t])
            weight = weight * discounts[t]
    return targets
