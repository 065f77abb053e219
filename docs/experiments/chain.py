"""Whose values are learned from the data of an older policy? `python -m docs.experiments.chain`

A walk of five states. The data are of a policy that goes right with probability 0.5; the policy whose values are wanted
is some versions newer, each of which adds 0.05 to the logit of "right". Its true values are known.

On 2 cores of a shared Zen 3 (AMD EPYC Milan), no GPU, seed 0, 3 s (the third decimals of three seeds differ by 6):

    versions newer     true      GAE  V-trace  V-trace, rho_bar 10
                 0    0.349    0.354    0.354    0.354
                10    0.598    0.354    0.500    0.602
                40    0.862    0.354    0.821    0.862

GAE learns the values of the policy that acted. V-trace with rho_bar 1 learns those of a policy between both, here
exactly 0.349, 0.496 and 0.821; with a rho_bar that cuts nothing, those of the new policy, at the price of variance.
"""

import math

import torch
from torch import Tensor

from docs.experiments import arguments
from vtrace import gae, vtrace

STATES, GAMMA, LAMBDA = 5, 0.95, 0.95  # it ends at either side; the right side pays 1
MU = 0.5  # the probability of a step to the right, of the policy that acted
STEP, LAGS = 0.05, (0, 10, 40)  # how far a version moves the logit; versions


def chain_values(right: float) -> Tensor:
    """Solve for the values [STATES] of a policy that goes right with some probability."""
    moves = torch.diag(torch.full((STATES - 1,), right), 1) + torch.diag(torch.full((STATES - 1,), 1 - right), -1)
    return torch.linalg.solve(torch.eye(STATES) - GAMMA * moves, right * torch.eye(STATES)[-1])


def walk() -> tuple[Tensor, Tensor]:
    """Sample walks from the middle: states [T+1, B] int64, and whether each step goes right [T, B] bool."""
    states, goes_right = torch.full((65, 1024), STATES // 2), torch.rand(64, 1024) < MU
    for t in range(64):
        after = states[t] + torch.where(goes_right[t], 1, -1)
        states[t + 1] = torch.where((after < 0) | (after == STATES), STATES // 2, after)
    return states, goes_right


def learned_values(states: Tensor, goes_right: Tensor, pi: float, rho_bar: float) -> Tensor:
    """Learn the values [STATES] of policy pi from walks of another; rho_bar 0: by GAE, which corrects nothing."""
    log_ratios = torch.where(goes_right, math.log(pi / MU), math.log((1 - pi) / (1 - MU)))
    at_right, at_left = goes_right & (states[:-1] == STATES - 1), ~goes_right & (states[:-1] == 0)
    rest = at_right | at_left, torch.zeros_like(at_right), GAMMA, LAMBDA
    rewards, values, visited = at_right.float(), torch.zeros(STATES), states[:-1].flatten()
    for _ in range(20):  # each value becomes the mean of its targets
        old = values[states]
        targets = vtrace(log_ratios, rewards, old, *rest, rho_bar, 1.0) if rho_bar else gae(rewards, old, *rest)
        values = torch.zeros(STATES).index_add(0, visited, targets[0].flatten()) / visited.bincount()
    return values


def main() -> None:
    """Print the table."""
    torch.manual_seed(arguments(__doc__).seed)
    walks = walk()
    print("value of the middle state\nversions newer     true      GAE  V-trace  V-trace, rho_bar 10")
    for lag in LAGS:
        pi = 1 / (1 + math.exp(-STEP * lag))
        numbers = [chain_values(pi), *(learned_values(*walks, pi, rho_bar) for rho_bar in (0.0, 1.0, 10.0))]
        print(f"{lag:14}" + "".join(f"{values[STATES // 2]:9.3f}" for values in numbers), flush=True)


if __name__ == "__main__":
    main()
