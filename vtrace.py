"""V-trace and GAE: value targets and advantages of a batch of trajectories, as pure functions of [T, B] tensors.

Time: obs[t] -> actions[t] -> rewards[t], terminated[t], truncated[t] -> obs[t+1]. `values` has T + 1 rows, the
last one being the value of the observation after the last action, estimated by the network like any other. (Sample
Factory derives that last value from the reward instead, which makes the last TD error vanish.)

The end of an episode comes in two kinds. After a termination nothing follows: the next value counts as 0. After a
truncation (a time limit) the episode would have gone on: the target bootstraps from the value of the true final
observation, which is obs[t+1] because environments reset one step later, and the trace is cut there.

Sources: IMPALA, arXiv 1802.01561, section 4.1; GAE, arXiv 1506.02438, equation 16. Read next: `losses.py`.
"""

import torch
from torch import Tensor


def vtrace(
    log_ratios: Tensor, rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, lambda_: float, rho_bar: float, c_bar: float,
) -> tuple[Tensor, Tensor]:
    """Compute V-trace value targets, and the advantages that belong to the clipped PPO loss.

        rho_t   = min(rho_bar, pi/mu)           c_t = lambda * min(c_bar, pi/mu)
        delta_t = rho_t * (r_t + gamma_t * V(x_{t+1}) - V(x_t))
        vs_t    = V(x_t) + delta_t + gamma_t * c_t * (vs_{t+1} - V(x_{t+1})),   backwards from vs_T = V(x_T)
        A_t     = r_t + gamma_t * vs_{t+1} - V(x_t)

    with gamma_t = 0 after a termination and vs_{t+1} replaced by V(x_{t+1}) across a truncation. With pi = mu,
    vs - V is GAE(lambda); with lambda = 1 too, vs is the n-step return. A_t carries no rho: in the PPO loss the
    ratio already is the importance weight of the policy gradient (IMPALA's own loss has rho instead of the ratio).

    Args:
        log_ratios: log pi(a_t|x_t) - log mu(a_t|x_t), [T, B] float.
        rewards: [T, B] float.
        values: V(x_0) ... V(x_T), [T+1, B] float.
        terminated, truncated: [T, B] bool.
        gamma: discount per step. lambda_, rho_bar, c_bar: lambda and the two truncations.

    Returns:
        vs [T, B] and A [T, B], float, detached.
    """
    with torch.no_grad():
        ratios = log_ratios.exp()
        discounts = gamma * (~terminated).to(values.dtype)
        rho = ratios.clamp(max=rho_bar)
        # the trace that flows from t+1 back to t; a truncation cuts it, a termination already has discount 0
        traces = discounts * lambda_ * ratios.clamp(max=c_bar) * (~truncated).to(values.dtype)
        deltas = rho * (rewards + discounts * values[1:] - values[:-1])
        corrections = backward_sum(deltas, traces)  # vs_t - V(x_t)
        vs = values[:-1] + corrections
        next_vs = torch.cat([vs[1:], values[-1:]])
        next_vs = torch.where(truncated, values[1:], next_vs)
        return vs, rewards + discounts * next_vs - values[:-1]


def gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lambda_: float,
) -> tuple[Tensor, Tensor]:
    """Compute value targets and generalized advantages: A_t = sum_k (gamma * lambda)^k * delta_{t+k}.

    Arguments and results are those of `vtrace`; the target is V(x_t) + A_t.
    """
    with torch.no_grad():
        discounts = gamma * (~terminated).to(values.dtype)
        deltas = rewards + discounts * values[1:] - values[:-1]
        advantages = backward_sum(deltas, discounts * lambda_ * (~truncated).to(values.dtype))
        return values[:-1] + advantages, advantages


def backward_sum(deltas: Tensor, traces: Tensor) -> Tensor:
    """Solve x_t = deltas_t + traces_t * x_{t+1} with x_T = 0, for [T, B] tensors."""
    total = torch.zeros_like(deltas[0])
    sums = torch.empty_like(deltas)
    for t in range(len(deltas) - 1, -1, -1):
        total = torch.addcmul(deltas[t], traces[t], total)
        sums[t] = total
    return sums
