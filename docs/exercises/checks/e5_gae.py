"""Check of exercise 5: numbers computed by hand for each kind of end, then `vtrace.py` on random inputs."""

from types import ModuleType

import torch

import vtrace
from docs.exercises.expect import expect_close, part

# T = 3, one trajectory, r = 1 1 1, V = 4 2 6 8, gamma = lambda = 0.5: the TD errors are 1 + 1 - 4, 1 + 3 - 2, 1 + 4 - 6
REWARDS, VALUES = torch.ones(3, 1), torch.tensor([[4.0], [2.0], [6.0], [8.0]])
CASES = (  # the step of the end; terminated, truncated; advantages of the steps up to the end
    ("no end", 2, False, False, (-1.5625, 1.75, -1.0), "A_t = delta_t + gamma * lambda * A_{t+1}; after the last row "
     "the value of the observation that follows, values[T], stands for the rest"),
    ("terminated at step 1", 1, True, False, (-2.25, -1.0), "Nothing follows a termination: no value, no advantage"),
    ("truncated at step 1", 1, False, True, (-1.5, 2.0), "A time limit is no end of the task: delta_t takes "
     "values[t+1], that of the final observation; only the trace is cut, since row t+1 belongs to no decision"),
    ("terminated and truncated at step 1", 1, True, True, (-2.25, -1.0), "It has terminated, time limit or not"))


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    gae = part(student, "gae")
    for name, step, is_terminated, is_truncated, known, look in CASES:
        terminated, truncated = torch.zeros(2, 3, 1, dtype=torch.bool)
        terminated[step], truncated[step] = is_terminated, is_truncated
        wanted = torch.tensor([*known, 0.0])[:3, None]
        got = gae(REWARDS.clone(), VALUES.clone(), terminated, truncated, 0.5, 0.5)
        expect_close(got, wanted, f"{name}: A", f"{look} (gae)", rows=torch.arange(3)[:, None] <= step)
    rewards, values, ends = torch.randn(12, 5), torch.randn(13, 5), torch.rand(12, 5)
    terminated, truncated = ends < 0.15, ends > 0.85
    _, wanted = vtrace.gae(rewards, values, terminated, truncated, 0.9, 0.8)
    decided = torch.cat([torch.ones(1, 5, dtype=torch.bool), ~(terminated | truncated)[:-1]])  # else a row resets
    expect_close(gae(rewards.clone(), values.clone(), terminated.clone(), truncated.clone(), 0.9, 0.8), wanted,
                 "random input, 12 steps: A", "Each column is a trajectory of its own, with its own ends (gae)",
                 rows=decided)
    return "a time limit cuts the trace and keeps the value; a termination ends both."
