"""The population as it lives: applies the rules of `pbt.py` to the policies of a run.

It holds the settings and the reward shaping of every policy, decides when a policy is due, and tells the learners: the
donor saves itself (SAVE), then the policy that is replaced loads its newest checkpoint (LOAD) and reads its new
settings (CONFIGURE) from shared memory. Rollout workers read the shaping there whenever an episode begins. Each learner
saves what it has read with its weights: a resumed run takes both from one file, so that after a crash they belong
together.

    policy_NN_cfg.json               the settings of a policy, to be read by people
    policy_NN_reward_shaping.json    its reward shaping, if the environment offers one
    population.jsonl                 one JSON object for each policy at each of its updates
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import pbt
from config import Values, tunable
from runtime.checkpoint import add_line, finite, save_settings
from runtime.processes import Service
from runtime.utils import POPULATION, derive_seed
from services.progress import RETURN_WINDOW, PolicyProgress
from services.records import Records, cut_lines
from shared_buffers import CONFIGURE, LOAD, SAVE, SAVE_PERIODIC


class Population(Service):
    """Settings and fates of all policies. Needs `Records`, which has their objectives."""

    def start(self, trainer: Any) -> None:
        """Begin with what the checkpoints of a resumed run hold of each policy, or else with one mutation.

        The first policy is never mutated.
        """
        super().start(trainer)
        cfg, buffers = self.cfg, self.buffers = trainer.cfg, trainer.buffers
        self.commands, self.records = trainer.commands, trainer.find(Records)
        shaping = pbt.flatten_shaping(buffers.info.shaping) if buffers.shaping.numel() else {}
        self.defaults = join(tunable(cfg), shaping)
        self.limits = {field.name: field.metadata["tune"] for field in dataclasses.fields(cfg)}
        self.numbers = [self.defaults] * cfg.num_policies  # all that may be mutated of each policy
        self.last_update: dict[int, int] = {}  # of each policy, in its own steps
        self.copying: dict[int, int] = {}  # a donor that is to save itself: the policy that waits for it
        self.history = cfg.run_dir / "population.jsonl"
        self.rng = np.random.default_rng(derive_seed(cfg.seed, POPULATION, buffers.start))
        saved = [(found.state or {}).get("population", {}) for found in trainer.found]
        # the history goes on from the checkpoints; a policy that is not part of this run keeps its own
        lasts = {policy: place.get("last_update", -1) for policy, place in enumerate(saved)}
        cut_lines(self.history, lambda event: event["policy_steps"] <= lasts.get(event["policy"], math.inf))
        for policy, place in enumerate(saved):
            if place:
                numbers = join(place["settings"], place["shaping"])
                self.numbers[policy] = {name: type(default)(numbers.get(name, default))
                                        for name, default in self.defaults.items()}
                self.last_update[policy] = place["last_update"]
            else:
                if policy != 0:
                    self._mutate(policy)
                self._record(policy, 0, None, pbt.Decision(policy, None, policy != 0, f"policy {policy} begins"))
            self._publish(policy)

    def on(self, report: tuple) -> None:
        """Let a policy copy its donor, which has saved itself; finish that before the whole run is saved."""
        match report:
            case ("saved" | "unsaved", donor, kind, *_) if kind == SAVE_PERIODIC and donor in self.copying:
                policy = self.copying.pop(donor)
                self.commands.send(policy, LOAD, donor)
                self._configure(policy)
            case ("save",):
                self.trainer.wait_until(lambda: not self.copying, lambda: "a donor did not save")
                self.trainer.wait_for_answers(LOAD, "copy")
            case ("save_published",):
                self.copying.clear()

    def tick(self) -> None:
        """Decide about the policies that are due."""
        if self.trainer.commands.are_told_to_sample():
            steps = self.buffers.policy_steps.sum(0).tolist()
            for decision in self.update(objectives_of(self.records.policies, self.buffers.kind_of_policy), steps):
                self.trainer.log(f"PBT: {decision.words}")

    def close(self) -> None:
        """Say how to look at it."""
        self.trainer.log(f"what became of each policy: python -m tools.plot --population {self.cfg.run_dir}")

    # ---- rules ---------------------------------------------------------------------------------------------------

    def update(self, objectives: list[float | None], steps: list[int]) -> list[pbt.Decision]:
        """Decide what happens to the policies that are due, and set it going.

        Args:
            objectives: the mean objective of each policy, None before it has enough episodes.
            steps: the decisions of all agents of each policy so far.

        While a policy waits for its donor nothing else is decided, so that the donor's file is what was decided upon.
        """
        cfg, kinds = self.cfg, self.buffers.kind_of_policy
        decisions = []
        for policy in range(cfg.num_policies):
            rivals = {other: score for other, score in enumerate(objectives) if kinds[other] == kinds[policy]}
            if (self.copying or None in rivals.values() or not pbt.is_due(
                    steps[policy], self.last_update[policy], cfg.pbt_start_mutation, cfg.pbt_period_env_steps)):
                continue
            decision = pbt.decide(policy, rivals, self.rng, cfg)
            source = policy if decision.donor is None else decision.donor
            before, self.numbers[policy] = self.numbers[policy], self.numbers[source]
            if decision.mutate:
                self._mutate(policy)
            changes = [f"{name} {before[name]:.4g} -> {value:.4g}"
                       for name, value in self.numbers[policy].items() if value != before[name]]
            decision = decision._replace(words="; ".join([decision.words, *changes]))
            self._record(policy, steps[policy], objectives[policy], decision)
            if decision.donor is None:
                self._configure(policy)
            else:
                self.copying[decision.donor] = policy
                self.commands.send(decision.donor, SAVE, SAVE_PERIODIC)
            decisions.append(decision)
        return decisions

    def _mutate(self, policy: int) -> None:
        self.numbers[policy] = pbt.mutate(self.numbers[policy], self.defaults, self.rng, self.cfg, self.limits)

    # ---- effects -------------------------------------------------------------------------------------------------

    def _configure(self, policy: int) -> None:
        """Give a policy its new numbers."""
        self._publish(policy)
        for commands in self.buffers.policies[policy].commands:
            commands.put((CONFIGURE, 0))

    def _publish(self, policy: int) -> None:
        """Write a policy's numbers where its learner and the rollout workers read them, and into its files."""
        buffers, folder = self.buffers, self.cfg.run_dir
        numbers = torch.tensor([float(number) for number in self.numbers[policy].values()], dtype=torch.float64)
        sizes = [buffers.settings.shape[1], buffers.shaping.shape[1]]
        buffers.settings[policy], buffers.shaping[policy] = numbers.split(sizes)
        buffers.last_update[policy] = self.last_update[policy]
        place = buffers.place_in_population(self.cfg, policy)
        with contextlib.suppress(OSError):  # they are for people; the records tell of it
            save_settings(folder / f"policy_{policy:02}_cfg.json", place["settings"])
            if place["shaping"]:
                save_settings(folder / f"policy_{policy:02}_reward_shaping.json",
                              pbt.unflatten_shaping(buffers.info.shaping, iter(place["shaping"].values())))

    def _record(self, policy: int, steps: int, objective: float | None, decision: pbt.Decision) -> None:
        self.last_update[policy] = steps
        event = {"policy": policy, "policy_steps": steps, "env_steps": int(self.buffers.env_steps.sum()),
                 "objective": None if objective == -math.inf else objective, "donor": decision.donor,
                 "words": decision.words, **self.numbers[policy]}
        with contextlib.suppress(OSError):  # the records tell of a full disk
            add_line(self.history, json.dumps(finite(event)))


def objectives_of(policies: Sequence[PolicyProgress], kind_of_policy: Sequence[int]) -> list[float | None]:
    """Return what population-based training ranks each policy by; None: too few episodes have finished.

    Among policies of one kind of agents, true objectives are not compared with returns: as soon as one policy has
    an objective, the others need one, and those that have none in a full window of episodes are the worst (-inf).
    """
    with_objective = {kind for kind, policy in zip(kind_of_policy, policies, strict=True) if policy.has_objective}
    objectives: list[float | None] = []
    for kind, policy in zip(kind_of_policy, policies, strict=True):
        if policy.has_objective or kind not in with_objective:
            objectives.append(policy.objective if len(policy.objectives) >= policy.min_episodes else None)
        else:
            objectives.append(-math.inf if len(policy.returns) == RETURN_WINDOW else None)
    return objectives


def join(settings: Values, shaping: Values) -> Values:
    """Join settings and a flat reward shaping to all that may be mutated of a policy."""
    return {**settings, **{f"shaping/{name}": value for name, value in shaping.items()}}
