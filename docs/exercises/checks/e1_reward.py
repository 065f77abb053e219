"""Check of exercise 1: circles pay nothing, and every step pays the difference of potentials (Ng et al. 1999)."""

from types import ModuleType

import gymnasium as gym

from docs.exercises.expect import expect, part
from docs.exercises.worlds import Step

UP, DOWN = 1, 0
LENGTH, GAMMA = 4, 0.5


def play(env: gym.Env, moves: list[int]) -> tuple[list, list[Step]]:
    """Play from a reset on; return the observations, one more than steps, and the steps."""
    observations, steps = [env.reset(seed=0)[0]], []
    for move in moves:
        up = env.unwrapped.upward()
        steps.append(env.step(up if move == UP else 1 - up))
        observations.append(steps[-1][0])
    return observations, steps


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    make, potential = part(student, "make"), part(student, "potential")
    _, circle = play(make(gamma=1.0, length=LENGTH), [UP, UP, DOWN, DOWN])
    paid = sum(step[1] for step in circle)
    expect(abs(paid) < 1e-6, f"walking 0 -> 1 -> 2 -> 1 -> 0 leads nowhere and must pay 0 (with gamma = 1), but pays "
           f"{paid:.4f}: who is paid for circles stays in them. Take off for a step back what a step up has paid "
           "(Shaped.step)")
    env = make(gamma=GAMMA, length=LENGTH)
    ways = {"straight up": [UP] * 4, "back and forth first": [UP, UP, DOWN, UP, UP, DOWN, UP, UP],
            "until the time is up": [UP] * 3 + [DOWN, UP] * 48 + [DOWN]}
    for way, moves in ways.items():
        observations, steps = play(env, moves)  # the same environment again: an episode must not remember another
        for t, (_, reward, terminated, truncated, _) in enumerate(steps):
            phi, next_phi = potential(observations[t]), 0.0 if terminated else potential(observations[t + 1])
            wanted = float(terminated) + GAMMA * next_phi - phi
            what = "terminated" if terminated else "truncated" if truncated else "the episode goes on"
            expect(abs(reward - wanted) < 1e-5,
                   f"{way}, step {t} ({what}), gamma = {GAMMA}: expected reward + gamma * potential(next) - "
                   f"potential(before) = {wanted:.4f}, got {reward:.4f}. The potential of what follows a termination "
                   "is 0, after a truncation it is that of the last observation; and each episode begins with its own "
                   "first observation (Shaped.reset, Shaped.step)")
        expect((terminated, truncated) == (way != "until the time is up", way == "until the time is up"),
               f"{way}: the end of the episode has changed; leave terminated and truncated as they are")
        expect("true_objective" in steps[-1][4], f"{way}: the info of the last step has lost what the "
               "environment wrote there; return it as it is (Shaped.step)")
    down, up = (play(make(length=LENGTH), [UP, UP, move])[1][-1][1] for move in (DOWN, UP))
    expect(up > down, f"at place 2 a step up pays {up:.4f} and a step down {down:.4f}: nothing shows the way. Let the "
           "potential grow along the corridor (potential)")
    return "circles pay nothing, a time limit takes nothing away, and each step up shows the way to the goal."
