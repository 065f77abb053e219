"""Exercise 4, solved: V-trace targets, as equation 1 of IMPALA (Espeholt et al. 2018, arXiv 1802.01561) has them."""

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
    ratios = log_ratios.exp()
    rho, c = ratios.clamp(max=rho_bar), ratios.clamp(max=c_bar)
    targets = values[:-1].clone()
    for s in range(len(rewards)):
        weight = torch.ones_like(values[s])  # of the TD error of step t
        for t in range(s, len(rewards)):
            targets[s] += weight * rho[t] * (rewards[t] + discounts[t] * values[t + 1] - values[t])
            weight = weight * discounts[t] * c[t]
    return targets
