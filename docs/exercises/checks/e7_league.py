"""Check of exercise 7: the shares of the games of every pair and seat, in many draws."""

from collections import Counter
from types import ModuleType

import numpy as np

from docs.exercises.expect import expect, part

AGENTS = ["player_0", "player_1"]
NUM_DRAWS, TOLERANCE = 4000, 0.04  # five standard deviations of a share of one half


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    league = part(student, "league")
    for num_policies in (1, 2, 3, 4):
        rngs = [np.random.default_rng(7), np.random.default_rng(7)]
        draws, again = ([league(AGENTS, num_policies, rng) for _ in range(NUM_DRAWS)] for rng in rngs)
        where = f"--num_policies={num_policies}"
        for policies in draws:
            is_legal = (isinstance(policies, list) and len(policies) == 2
                        and all(isinstance(p, int | np.integer) and 0 <= p < num_policies for p in policies))
            expect(is_legal, f"{where}: expected a list of two policies from 0 to {num_policies - 1}, got {policies!r}")
            expect(0 in policies, f"{where}: got the game {policies}; policy 0 plays in every game, exploiters never "
                   "meet")
        expect(draws == again, f"{where}: two generators with the same seed gave different games. Draw with the rng "
               "that is given: only so is a run the same twice")
        games = Counter(map(tuple, draws))
        share = games[0, 0] / NUM_DRAWS
        wanted = 1.0 if num_policies == 1 else 0.5
        expect(abs(share - wanted) <= TOLERANCE, f"{where}: expected policy 0 to play itself in {wanted:.0%} of "
               f"{NUM_DRAWS} games, got {share:.1%}")
        for exploiter in range(1, num_policies):
            seats = [games[0, exploiter] / NUM_DRAWS, games[exploiter, 0] / NUM_DRAWS]
            wanted = 0.5 / (num_policies - 1)
            expect(abs(sum(seats) - wanted) <= TOLERANCE, f"{where}: expected policy 0 to meet exploiter {exploiter} "
                   f"in {wanted:.1%} of {NUM_DRAWS} games, got {sum(seats):.1%}")
            expect(abs(seats[0] - seats[1]) <= TOLERANCE, f"{where}: exploiter {exploiter} has the second seat in "
                   f"{seats[0]:.1%} of all games and the first in {seats[1]:.1%}; expected equal shares. Who begins "
                   "often wins: draw the seat too")
    return "policy 0 plays itself in half of its games and each exploiter equally often, on either seat."
