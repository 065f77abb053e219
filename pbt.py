"""The population as pure functions: who plays whom, who is replaced by whom, what a mutation changes.

The rules are Sample Factory's (arXiv 2006.11751, section 3.5), after population-based training (arXiv 1711.09846):

    when        by a policy's own steps, the decisions of all agents that play it: not before `pbt_start_mutation`,
                and `pbt_period_env_steps` after its last update (or the beginning); and only when every policy that
                it competes with, those for agents with the same spaces, has finished an episode
    rank        by objective, the mean over the last 100 episodes; ceil(fraction * N) policies are the best, as many
                the worst
    best        nothing happens to them
    middle      keep their weights; their settings are mutated
    worst       one of the best is drawn as a donor; if it is better by both gaps, its weights and optimizer are copied,
                and its settings, mutated; else they are treated like the middle
    policy 0    is never mutated: it begins with the settings of the command line and takes over those of a donor

With --lr_schedule=kl_adaptive a mutated learning rate only resets the current rate of the schedule.

Settings and reward shaping are flat dicts, {name: number}. `services/population.py` applies these rules to a run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from config import Config, Values
from envs.vector_env import EnvInfo, VectorEnv
from runtime.utils import MAPPING, UserError, derive_seed, find_function

SHAPING_LIMITS = (1e-12, 1e12)  # of the absolute value
GAMMA_FACTORS = (1.01, 1.2)  # of 1 - gamma
RETURN_TO_DEFAULT = 0.01  # the share of mutations that undo all earlier ones
EPSILON = 1e-9
NUM_PROBES = 1000  # draws of a user's mapping before the run begins
UNKNOWN = -1  # the kind of a policy that nobody has played yet

# ---- who plays ---------------------------------------------------------------------------------------------------


def assign_kinds(cfg: Config, info: EnvInfo | VectorEnv) -> list[int]:
    """Return which kind of agents each policy plays, kinds being agents with the same spaces.

    They take turns; with a mapping of the user's, many draws of it show what it does. Raises `UserError` when a kind
    has no policy, or a policy no agents.
    """
    num_kinds, num_policies = len(info.kinds), cfg.num_policies
    if not cfg.policy_mapping:
        if num_policies < num_kinds:
            raise UserError(f"the agents have {num_kinds} different pairs of observation and action space, and each "
                            f"needs a policy of its own; set --num_policies={num_kinds}, or a multiple")
        return [policy % num_kinds for policy in range(num_policies)]
    rng = np.random.default_rng(derive_seed(cfg.seed, MAPPING))
    kinds = [UNKNOWN] * num_policies
    for _ in range(NUM_PROBES):
        for policy, kind in zip(draw_mapped(cfg, info, kinds, rng), info.kind_of_agent, strict=True):
            kinds[policy] = kind
    if UNKNOWN in kinds:
        raise UserError(f"--policy_mapping never returned policy {kinds.index(UNKNOWN)} in {NUM_PROBES} draws; lower "
                        "--num_policies or map an agent to it")
    return kinds


def draw_mapped(cfg: Config, info: EnvInfo, kind_of_policy: Sequence[int], rng: Generator) -> Any:
    """Draw a policy for each agent of an environment by the user's mapping.

    Raises `UserError` when it did not return a policy that exists and fits for every agent.
    """
    known = range(len(kind_of_policy))
    policies = find_function("policy_mapping", cfg.policy_mapping)(info.agents, len(known), rng)
    if len(policies) != len(info.agents) or not set(policies) <= set(known):
        raise UserError(f"--policy_mapping returned {policies!r}; it must return for each of the agents "
                        f"{', '.join(info.agents)} one policy of {known}")
    for agent, kind, policy in zip(info.agents, info.kind_of_agent, policies, strict=True):
        if kind_of_policy[policy] not in (kind, UNKNOWN):
            raise UserError(f"--policy_mapping returned policy {policy} for agent {agent}, whose observation or action "
                            "space differs from those of other agents that play it; map it to another policy")
    return policies


def draw_policies(kind_of_agent: Sequence[int], kind_of_policy: Sequence[int], rng: Generator,
                  *, mix: bool) -> list[int]:
    """Draw a policy for each agent of an environment, uniformly from those of its kind.

    Without `mix` there is one draw for all: all agents of a kind play the same policy.
    """
    candidates = [[policy for policy, kind in enumerate(kind_of_policy) if kind == agent_kind]
                  for agent_kind in range(max(kind_of_policy) + 1)]
    draws = rng.random(len(kind_of_agent) if mix else 1)
    return [candidates[kind][int(draws[i if mix else 0] * len(candidates[kind]))]
            for i, kind in enumerate(kind_of_agent)]


def draw_snapshots(num_snapshots: Sequence[int], fraction: float, rng: Generator) -> list[int]:
    """Choose which agents of an environment are played by earlier versions of their policies.

    One agent, drawn at random, plays its current policy; each other one is an opponent and plays, with probability
    `fraction`, one of the snapshots of its policy. num_snapshots: how many there are for each agent.
    Returns the number of the snapshot for each agent, -1 for the current policy.
    """
    snapshots = [-1] * len(num_snapshots)
    if not fraction or len(num_snapshots) < 2:
        return snapshots
    learns = int(rng.integers(len(num_snapshots)))
    for agent, available in enumerate(num_snapshots):
        if agent != learns and available and rng.random() < fraction:
            snapshots[agent] = int(rng.integers(available))
    return snapshots


# ---- who is replaced ---------------------------------------------------------------------------------------------


def is_due(steps: int, last_update: int, start: int, period: int) -> bool:
    """Return whether it is a policy's turn, by its own steps now and at its last update."""
    return steps >= start and steps - last_update >= period


class Decision(NamedTuple):
    """What happens to a policy: whose weights and settings it takes over, and whether these are mutated."""

    policy: int
    donor: int | None  # None: it keeps its own
    mutate: bool
    words: str


def decide(policy: int, objectives: Mapping[int, float], rng: Generator, cfg: Config) -> Decision:
    """Decide what happens to a policy that is due. objectives: {policy: mean objective} of all it competes with.

    The best comes first, and ties in the order of their numbers. A donor must exceed the policy by both gaps; the
    relative one is in units of |donor|, so -10 is better than -20 by 100 %.
    """
    order = sorted(objectives, key=lambda each: (-objectives[each], each))
    place, own = order.index(policy), objectives[policy]
    num_best = math.ceil(cfg.pbt_replace_fraction * len(order) - EPSILON)
    words = f"policy {policy} (objective {own:.4g}) is {place + 1} of {len(order)}"
    if place < num_best:
        return Decision(policy, None, False, f"{words}: unchanged")
    if place >= len(order) - num_best:
        donor = order[int(rng.integers(num_best))]
        gap = max(cfg.pbt_replace_reward_gap_absolute, cfg.pbt_replace_reward_gap * abs(objectives[donor]))
        if objectives[donor] - own > gap:
            words += f": it becomes a copy of policy {donor} (objective {objectives[donor]:.4g})"
            return Decision(policy, donor, policy != 0, words)
    return Decision(policy, None, policy != 0, f"{words}: it keeps its weights")


# ---- what a mutation changes -------------------------------------------------------------------------------------


def mutate(values: Values, defaults: Values, rng: Generator, cfg: Config, limits: Values | None = None) -> Values:
    """Mutate each number with probability `pbt_mutation_rate`.

    A number is multiplied or divided, with even odds, by a factor drawn from [`pbt_perturb_min`, `pbt_perturb_max`]; of
    gamma it is 1 - gamma, and the factor is drawn from [1.01, 1.2]; a boolean flips. One time in a hundred a number
    that has left its default returns to it. Without `limits` (for reward shaping) no name has a special meaning.
    """
    mutated = dict(values)
    for name, value in values.items():
        if rng.random() >= cfg.pbt_mutation_rate:
            continue
        if value != defaults[name] and rng.random() < RETURN_TO_DEFAULT:
            mutated[name] = defaults[name]
        elif isinstance(value, bool):
            mutated[name] = not value
        else:
            is_gamma = limits is not None and name == "gamma"
            factor = rng.uniform(*(GAMMA_FACTORS if is_gamma else (cfg.pbt_perturb_min, cfg.pbt_perturb_max)))
            factor = factor if rng.random() < 0.5 else 1 / factor
            new = max(1 - (1 - value) * factor, 0.0) if is_gamma else value * factor
            low, high = (limits or {}).get(name, SHAPING_LIMITS)
            default = abs(defaults[name]) or high  # it is always legal
            size = min(max(abs(new), min(low, default)), max(high, default))
            mutated[name] = math.copysign(size, new) if new else 0.0
    return mutated


# ---- the reward shaping that an environment offers ---------------------------------------------------------------


def flatten_shaping(shaping: Any) -> Values:
    """Turn an environment's reward shaping, a nested dict (or lists) of numbers and booleans, into {path: number}."""
    if not isinstance(shaping, Mapping | list | tuple):
        return {"": bool(shaping) if isinstance(shaping, bool | np.bool_) else float(shaping)}
    parts = shaping.items() if isinstance(shaping, Mapping) else enumerate(shaping)
    return {f"{key}/{path}".removesuffix("/"): number
            for key, part in parts for path, number in flatten_shaping(part).items()}


def unflatten_shaping(like: Any, numbers: Iterator[float | bool]) -> Any:
    """Put numbers, in the order of `flatten_shaping`, into the form of an environment's default reward shaping."""
    if isinstance(like, Mapping):
        return {key: unflatten_shaping(part, numbers) for key, part in like.items()}
    if isinstance(like, list | tuple):
        return type(like)([unflatten_shaping(part, numbers) for part in like])
    return bool(next(numbers)) if isinstance(like, bool | np.bool_) else float(next(numbers))
