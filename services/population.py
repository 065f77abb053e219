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
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pbt
from config import tunable
from runtime.checkpoint import add_line, finite, read_lines, save_settings, write_atomically
from runtime.processes import Service
from runtime.utils import POPULATION, UserError, derive_seed
from services.progress import RETURN_WINDOW, PolicyProgress
from services.records import Records
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
        self.default_settings = tunable(cfg)
        self.limits = {field.name: field.metadata["tune"] for field in dataclasses.fields(cfg)}
        self.default_shaping = pbt.flatten_shaping(buffers.info.shaping) if buffers.shaping.numel() else {}
        self.settings = [self.default_settings] * cfg.num_policies
        self.shaping = [self.default_shaping] * cfg.num_policies
        self.last_update: dict[int, int] = {}  # of each policy, in its own steps
        self.copying: tuple[int, int] | None = None  # a policy that waits for its donor to save itself, and the donor
        self.history = cfg.run_dir / "population.jsonl"
        self.rng = np.random.default_rng(derive_seed(cfg.seed, POPULATION, buffers.start))
        saved = [(found.state or {}).get("population", {}) for found in trainer.found]
        for policy, place in enumerate(saved):
            if place:
                self._restore(policy, place)
        self._forget_lost_events()
        for policy, place in enumerate(saved):
            if not place:
                if policy != 0:
                    self._mutate(policy, policy)
                self._record(policy, 0, None, pbt.Decision(policy, None, policy != 0, f"policy {policy} begins"))
            self._publish(policy)

    def on(self, report: tuple) -> None:
        """Let a policy copy its donor, which has saved itself; finish that before the whole run is saved."""
        match report:
            case ("saved" | "unsaved", policy, kind, *_) if kind == SAVE_PERIODIC:
                self._saved(policy)
            case ("save",):
                self.trainer.wait_until(lambda: not self.copying, lambda: "a donor did not save")
                self.trainer.wait_for_answers(LOAD, "copy")
            case ("ready_to_train",):
                self._show([])
            case ("save_published",):
                self.copying = None

    def tick(self) -> None:
        """Decide about the policies that are due."""
        if self.trainer.commands.are_told_to_sample():
            steps = self.buffers.policy_steps.sum(0).tolist()
            if decisions := self.update(objectives_of(self.records.policies, self.buffers.kind_of_policy), steps):
                self._show(decisions)

    def close(self) -> None:
        """Say how to look at it."""
        self.trainer.log(f"what became of each policy: python -m tools.plot --population {self.cfg.run_dir}")

    # ---- rules ---------------------------------------------------------------------------------------------------

    def update(self, objectives: list[float | None], steps: list[int]) -> list[pbt.Decision]:
        """Decide what happens to the policies that are due, and set it going.

        Args:
            objectives: the mean objective of each policy, None before its first episode.
            steps: the decisions of all agents of each policy so far.

        While a policy waits for its donor nothing else is decided, so that the donor's file is what was decided upon.
        """
        cfg, kinds = self.cfg, self.buffers.kind_of_policy
        decisions = []
        for policy in range(cfg.num_policies):
            rivals = {other: objectives[other] for other in range(cfg.num_policies) if kinds[other] == kinds[policy]}
            if (self.copying or None in rivals.values() or not pbt.is_due(
                    steps[policy], self.last_update[policy], cfg.pbt_start_mutation, cfg.pbt_period_env_steps)):
                continue
            decision = pbt.decide(policy, rivals, self.rng, fraction=cfg.pbt_replace_fraction,
                                  relative_gap=cfg.pbt_replace_reward_gap,
                                  absolute_gap=cfg.pbt_replace_reward_gap_absolute)
            source = policy if decision.donor is None else decision.donor
            before = self.numbers(policy)
            self.settings[policy] = self.settings[source]
            self.shaping[policy] = self.shaping[source]
            if decision.mutate:
                self._mutate(policy, source)
            changes = [f"{name} {show(before[name])} -> {show(value)}"
                       for name, value in self.numbers(policy).items() if value != before[name]]
            decision = decision._replace(words="; ".join([decision.words, *changes]))
            self._record(policy, steps[policy], objectives[policy], decision)
            if decision.donor is None:
                self._configure(policy)
            else:
                self.copying = policy, decision.donor
                self.commands.send(decision.donor, SAVE, SAVE_PERIODIC)
            decisions.append(decision)
        return decisions

    def numbers(self, policy: int) -> dict[str, Any]:
        """Return all that may be mutated of a policy, for the records."""
        return self.settings[policy] | {f"shaping/{name}": value for name, value in self.shaping[policy].items()}

    def _mutate(self, policy: int, source: int) -> None:
        how = {"rate": self.cfg.pbt_mutation_rate, "smallest": self.cfg.pbt_perturb_min,
               "largest": self.cfg.pbt_perturb_max}
        self.settings[policy] = pbt.mutate(self.settings[source], self.default_settings, self.rng, **how,
                                           limits=self.limits)
        self.shaping[policy] = pbt.mutate(self.shaping[source], self.default_shaping, self.rng, **how)

    # ---- effects -------------------------------------------------------------------------------------------------

    def _show(self, decisions: Sequence[pbt.Decision]) -> None:
        """Log decisions; put them, and the numbers and the objective of each policy, on its page."""
        env_steps = self.trainer.env_steps
        for decision in decisions:
            self.trainer.log(f"PBT: {decision.words}")
            self.records.boards[decision.policy].add_text("pbt", decision.words, env_steps)
        for policy, (records, board) in enumerate(zip(self.records.policies, self.records.boards, strict=True)):
            shown = self.numbers(policy) | ({} if records.objective is None else {"objective": records.objective})
            for name, value in shown.items():
                board.add_scalar(f"pbt/{name}", float(value), env_steps)

    def _saved(self, donor: int) -> None:
        """Let the policy that waits for this donor copy it."""
        if self.copying is not None and self.copying[1] == donor:
            policy, self.copying = self.copying[0], None
            self.commands.send(policy, LOAD, donor)
            self._configure(policy)

    def _configure(self, policy: int) -> None:
        """Give a policy its new numbers."""
        self._publish(policy)
        for commands in self.buffers.policies[policy].commands:
            commands.put((CONFIGURE, 0))

    def _publish(self, policy: int) -> None:
        """Write a policy's numbers where its learner and the rollout workers read them, and into its files."""
        for numbers, shared in ((self.settings, self.buffers.settings), (self.shaping, self.buffers.shaping)):
            shared[policy] = torch.tensor([float(value) for value in numbers[policy].values()], dtype=torch.float64)
        self.buffers.last_update[policy] = self.last_update[policy]
        with contextlib.suppress(OSError):  # they are for people; the records tell of it
            save_settings(self.cfg.run_dir / f"policy_{policy:02}_cfg.json", self.settings[policy])
            if self.default_shaping:
                save_settings(self.cfg.run_dir / f"policy_{policy:02}_reward_shaping.json",
                              pbt.unflatten_shaping(self.buffers.info.shaping, self.shaping[policy]))

    def _record(self, policy: int, steps: int, objective: float | None, decision: pbt.Decision) -> None:
        self.last_update[policy] = steps
        event = {"policy": policy, "policy_steps": steps, "env_steps": int(self.buffers.env_steps.sum()),
                 "objective": None if objective == -math.inf else objective, "donor": decision.donor,
                 "words": decision.words, **self.numbers(policy)}
        with contextlib.suppress(OSError):  # the records tell of a full disk
            add_line(self.history, json.dumps(finite(event)))

    def _restore(self, policy: int, place: dict[str, Any]) -> None:
        """Take over what a learner has saved of a policy's place in the population."""
        self.settings[policy] = {name: float(place["settings"].get(name, default))
                                 for name, default in self.default_settings.items()}
        self.shaping[policy] = {name: type(default)(place["shaping"][name])
                                for name, default in self.default_shaping.items()}
        self.last_update[policy] = place["last_update"]

    def _forget_lost_events(self) -> None:
        """Cut out of the history what came after the checkpoints that are resumed; all of it where there are none."""
        kept = [event for event in read_history(self.cfg.run_dir)
                if event["policy"] >= self.cfg.num_policies  # it is not part of this run
                or event["policy_steps"] <= self.last_update.get(event["policy"], -1)]
        try:
            write_atomically(self.history, "".join(json.dumps(event) + "\n" for event in kept))
        except OSError as error:
            raise UserError(f"{self.history} cannot be written ({error.strerror}); move it away") from error


def objectives_of(policies: Sequence[PolicyProgress], kind_of_policy: Sequence[int]) -> list[float | None]:
    """Return what population-based training ranks each policy by; None: too few episodes have finished.

    Among policies of one kind of agents, true objectives are not compared with returns: as soon as one policy has
    an objective, the others need one, and those that have none in a full window of episodes are the worst (-inf).
    """
    with_objective = {kind for kind, policy in zip(kind_of_policy, policies, strict=True)
                      if policy.has_objective}
    objectives: list[float | None] = []
    for kind, policy in zip(kind_of_policy, policies, strict=True):
        if policy.has_objective or kind not in with_objective:
            objectives.append(policy.objective if len(policy.objectives) >= policy.min_episodes else None)
        else:
            objectives.append(-math.inf if len(policy.returns) == RETURN_WINDOW else None)
    return objectives


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events of a population, but not one that a crash has cut off."""
    return read_lines(run_dir / "population.jsonl")


def show(value: float | bool) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.4g}"
