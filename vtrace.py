"""V-trace and GAE: value targets and advantages of a batch of trajectories, as pure functions of [T, B] tensors.

Time: obs[t] -> actions[t] -> rewards[t], terminated[t], truncated[t] -> obs[t+1]. `values` has T + 1 rows, the
last one being the value of the observation after the last action, estimated by the network like any other. (Sample
Factory derives that last value from the reward instead, which makes the last TD error vanish.)

The end of an episode comes in two kinds. After a termination nothing follows: the next value counts as 0. After a
truncation (a time limit) the episode would have gone on: the target bootstraps from the value of the true final
observation, which is obs[t+1] (a row of its own, in which nothing is decided), and the trace is cut there.

Sources: IMPALA, arXiv 1802.01561, section 4.1; GAE, arXiv 1506.02438, equation 16. Read next: `model.py`.
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
        rho = ratios.clamp(max=rho_bar)
        c = rho if c_bar == rho_bar else ratios.clamp(max=c_bar)
        discounts, uncut = discounts_of(terminated, truncated, gamma, values.dtype)
        td_errors = torch.addcmul(rewards, discounts, values[1:]) - values[:-1]
        corrections = backward_sum(rho * td_errors, uncut * c * lambda_, gamma * lambda_ * c_bar)  # vs - V, [T+1, B]
        return values[:-1] + corrections[:-1], torch.addcmul(td_errors, uncut, corrections[1:])


def gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lambda_: float,
) -> tuple[Tensor, Tensor]:
    """Compute value targets and generalized advantages: A_t = sum_k (gamma * lambda)^k * delta_{t+k}.

    Arguments and results are those of `vtrace`; the target is V(x_t) + A_t.
    """
    with torch.no_grad():
        discounts, uncut = discounts_of(terminated, truncated, gamma, values.dtype)
        td_errors = torch.addcmul(rewards, discounts, values[1:]) - values[:-1]
        advantages = backward_sum(td_errors, uncut * lambda_)[:-1]
        return values[:-1] + advantages, advantages


def discounts_of(terminated: Tensor, truncated: Tensor, gamma: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the discounts of the next values, 0 after a termination, and of traces, also 0 after a truncation."""
    discounts = torch.full_like(terminated, gamma, dtype=dtype).masked_fill_(terminated, 0.0)
    return discounts, discounts.masked_fill(truncated, 0.0)


def backward_sum(deltas: Tensor, traces: Tensor, largest_trace: float = 1.0) -> Tensor:
    """Solve x_t = deltas_t + traces_t * x_{t+1} with x_T = 0, for [T, B] tensors, without gradient; x is [T+1, B].

    largest_trace: no trace is larger. On a GPU that bound chooses the way: products of traces above 1 could overflow.
    """
    if deltas.device.type != "cpu" and largest_trace <= 1:
        return backward_scan(deltas, traces)
    sums = [deltas.new_zeros(deltas.shape[1:])]  # backwards
    for delta, trace in zip(reversed(deltas.unbind()), reversed(traces.unbind()), strict=True):
        sums.append(torch.addcmul(delta, trace, sums[-1]))
    return torch.stack(sums[::-1])


def backward_scan(deltas: Tensor, traces: Tensor) -> Tensor:
    """Solve the same in log2(T) rounds, where the loop launches T kernels (Hillis and Steele, 1986).

    After the round with step k, sums_t holds the terms of t ... t+2k-1, and products_t the product of their traces:
    sums_t + products_t * sums_{t+k} and 0 + products_t * products_{t+k}, which are one operator.
    """
    length = len(deltas)
    # what a round reads, and what it writes: sums, zeros, products; the rows from T on stay 0
    old, new = deltas.new_zeros(2, 3, 2 * length, *deltas.shape[1:])
    old[0, :length], old[2, :length] = deltas, traces
    step = 1
    while step < length:
        torch.addcmul(old[:2, :length], old[2, :length], old[::2, step : step + length], out=new[::2, :length])
        old, new = new, old
        step *= 2
    return old[0, : length + 1]
