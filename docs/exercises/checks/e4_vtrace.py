"""Check of exercise 4: numbers computed by hand, then `vtrace.py` on random inputs."""

import math
from types import ModuleType

import torch

from docs.exercises.expect import expect_close, part
from vtrace import vtrace

GAMMA = 0.5
# T = 3, one trajectory, V = 1 2 4 8, r = 1 2 4, so the TD errors are 1 + 1 - 1, 2 + 2 - 2 and 4 + 4 - 4
REWARDS, VALUES = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [2.0], [4.0], [8.0]])
DISCOUNTS = torch.full((3, 1), GAMMA)
CASES = (
    ("pi = mu: the n-step return", (1.0, 1.0, 1.0), math.inf, math.inf, (4.0, 6.0, 8.0), "Remark 1 of the paper"),
    ("pi/mu = 1, 1, 0.5, c_bar = 0: one step each", (1.0, 1.0, 0.5), math.inf, 0.0, (2.0, 4.0, 6.0),
     "The TD error of step t is weighed by rho_t = min(rho_bar, pi/mu), the next one also by c_t = min(c_bar, pi/mu)"),
    # so v_1 is 2 + 0.5 * 2 + 0.5 * 0.5 * 4 and v_0 is 1 + 1 + 0.5 * (0.5 * 2) + 0.25 * 0.5 * 4
    ("pi/mu = 1, 0.5, 1", (1.0, 0.5, 1.0), math.inf, math.inf, (3.0, 4.0, 8.0),
     "The product of the c_i is over i = s ... t-1: it holds c_s and not c_t"),
    # v_0 is 1 + 2 * 1 + 0.5 * 2 * 2 + 0.25 * 2 * 4 without the truncations; the first 2 is rho_0, the others are c_0
    ("pi/mu = 2, 1, 1, rho_bar = 1", (2.0, 1.0, 1.0), 1.0, math.inf, (6.0, 6.0, 8.0), "rho_t = min(rho_bar, pi/mu)"),
    ("pi/mu = 2, 1, 1, c_bar = 1", (2.0, 1.0, 1.0), math.inf, 1.0, (5.0, 6.0, 8.0), "c_i = min(c_bar, pi/mu)"),
)


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    v_trace = part(student, "v_trace")
    for name, ratios, rho_bar, c_bar, targets, look in CASES:
        got = v_trace(torch.tensor(ratios)[:, None].log(), REWARDS.clone(), VALUES.clone(), DISCOUNTS.clone(), rho_bar,
                      c_bar)
        expect_close(got, torch.tensor(targets)[:, None], f"{name}: v", f"{look} (v_trace)")
    for rho_bar, c_bar in ((1.0, 1.0), (2.0, 0.5)):
        log_ratios, rewards, values = torch.randn(7, 3), torch.randn(7, 3), torch.randn(8, 3)
        terminated, never = torch.rand(7, 3) < 0.2, torch.zeros(7, 3, dtype=torch.bool)
        wanted, _ = vtrace(log_ratios, rewards, values, terminated, never, 0.9, 1.0, rho_bar, c_bar)
        got = v_trace(log_ratios, rewards, values, 0.9 * ~terminated, rho_bar, c_bar)
        expect_close(got, wanted, f"random input, 7 steps, rho_bar = {rho_bar}, c_bar = {c_bar}: v", "vtrace.py "
                     "agrees with the paper; do the discounts of all steps from s to t - 1 enter, each with its own t?")
    return "your sum and the recursion of vtrace.py are the same numbers."
