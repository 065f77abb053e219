"""What a return is, step by step: the reference for n-step returns, for those of A3C and for their statistics."""

from typing import Any


def walk(rewards: Any, terminated: Any, truncated: Any, gamma: float) -> tuple[float, float, int]:
    """Walk on to the end of the episode, or of what is given, [n] each.

    Return the sum of the discounted rewards, the discount of what follows (0 after a termination), and the steps.
    """
    total, discount, steps = 0.0, 1.0, 0
    for reward, dies, is_cut in zip(rewards, terminated, truncated, strict=True):
        total += discount * float(reward)
        discount *= 0.0 if dies else gamma
        steps += 1
        if dies or is_cut:
            break
    return total, discount, steps
