"""Every learner gets exactly the transitions of the episodes that were drawn for its policy, whoever plays them.

Real rollout and policy workers run in threads; the test plays the learners. Observations and rewards name the agent,
the episode and the step (`counting_agents.py`), so what must arrive is computed from the rules alone, and from the
draws, which are recorded where they are made.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ClassVar, NamedTuple

import counting_agents
import numpy as np
import pytest
import torch
from counting_agents import CountingAgents, Life, Name, Script
from counting_env import number_of
from parts import ONE_STEP, make_config

from algorithms import algorithm_class
from config import Config
from envs.multi_agent import ParallelVectorEnv
from envs.vector_env import EnvInfo, VectorEnv
from model import make_model
from pbt import assign_kinds
from policy_worker import PolicyWorker
from rollout_worker import NO_SLOT, RolloutWorker
from shared_buffers import CURRENT, RESUME, SLOTS, STOP, WITH_WORKER, SharedBuffers

TIMEOUT = 60  # seconds: a deadlock
GARBAGE = 77
CPU = torch.device("cpu")
NUM_SNAPSHOTS = 3


def make_cfg(**settings: Any) -> Config:
    return make_config({"env": "counting", "num_workers": 2, "num_envs_per_worker": 6, "rollout": 6, "batch_size": 96,
                        "encoder_mlp_layers": (8,), "normalize_input": False, "normalize_returns": False,
                        "obs_scale": 16.0, "rnn_size": 4} | ONE_STEP, settings)


# ---- playing them ----------------------------------------------------------------------------------------------------


class Recording(RolloutWorker):
    """Writes down each draw where it is made."""

    draws: ClassVar[dict[int, list[tuple]]]  # by environment: of each episode the policies and snapshots of its agents

    def draw(self, split: Any, env: int, own: slice) -> None:
        self.drawn_for = number_of(split.env.seeds[env])
        super().draw(split, env, own)

    def draw_players(self) -> tuple[Any, Any]:
        drawn = super().draw_players()
        self.draws.setdefault(self.drawn_for, []).append(drawn)
        return drawn


class Trajectory(NamedTuple):
    """What a learner has copied out of a slot."""

    slot: int
    tensors: dict[str, np.ndarray]
    num_rows: int  # T, or fewer for one that was under way when everything stopped
    dataset: int

    def name(self, row: int) -> Name:
        """Say whose observation a row holds."""
        env, agent, episode, t = map(int, self.tensors["obs/name"][row].tolist())
        return env, agent, episode, t


class Learner:
    """Copies what its policy gets and frees the slots: at once, or in synchronous mode when a dataset is complete."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int) -> None:
        self.buffers, self.policy = buffers, policy
        self.dataset_size = 1 if cfg.async_rl else cfg.trajectories_per_dataset
        self.shared, self.storage = buffers.policies[policy], buffers.trajectories_of(policy)
        self.trajectories: list[Trajectory] = []
        self.held: list[int] = []

    def run(self) -> None:
        while self.shared.trajectories_done.serve(self.receive):
            pass

    def receive(self, kind: int, *slots: int) -> None:
        assert kind == SLOTS
        for slot in slots:
            assert slot // self.buffers.num_slots == self.policy
            tensors = self.copy(slot)
            for tensor in self.storage.values():
                tensor[slot].fill_(GARBAGE)  # what a slot held must never be seen again
            self.held.append(slot)
            dataset = len(self.trajectories) // self.dataset_size
            self.trajectories.append(Trajectory(slot, tensors, len(tensors["rewards"]), dataset))
            if len(self.held) == self.dataset_size:
                for free in self.held:
                    self.buffers.slot_place[free] = WITH_WORKER
                    self.buffers.worker_inboxes[self.buffers.worker_of_slot(free)].put((SLOTS, free))
                self.held = []

    def copy(self, slot: int) -> dict[str, np.ndarray]:
        return {name: tensor[slot].numpy().copy() for name, tensor in self.storage.items()}


class Run(NamedTuple):
    """What happened: all trajectories of each policy in order, all reports, and where every environment has stopped."""

    cfg: Config
    script: Script
    buffers: SharedBuffers
    models: list[torch.nn.Module]
    trajectories: list[list[Trajectory]]
    reports: dict[str, list]  # "episodes", "matches"
    envs: dict[int, CountingAgents]  # by number
    draws: dict[int, list[tuple]]

    def draw(self, env: int, agent: int, episode: int) -> tuple[int, int]:
        """Return the policy and the snapshot of an agent."""
        policies, snapshots = self.draws[env][episode] if self.draws else ([0] * 3, [CURRENT] * 3)
        return policies[agent], snapshots[agent]


Prepare = Callable[[SharedBuffers, list[torch.nn.Module]], None]


def play(cfg: Config, rules: dict[str, Any], num_trajectories: int,
         prepare: Prepare = lambda buffers, models: None) -> Run:
    """Run all components in threads until the learners have got so many trajectories together."""
    script = Script(**rules)

    def make_env(cfg: Config, num_envs: int) -> VectorEnv:
        return ParallelVectorEnv([CountingAgents(script) for _ in range(num_envs)], "counting_agents")

    probe = make_env(cfg, 1)
    probe.reset(0)
    info = EnvInfo(probe.agents, probe.kind_of_agent, probe.kinds, probe.default_shaping)
    kind_of_policy = assign_kinds(cfg, info)
    models = []
    for policy, kind in enumerate(kind_of_policy):
        torch.manual_seed(policy)
        models.append(make_model(cfg, info.kinds[kind].obs_space, info.kinds[kind].action_space))
        torch.nn.init.normal_(models[-1].policy_head.weight)  # policies that differ
    buffers = SharedBuffers(cfg, algorithm_class(cfg.algo)(cfg), info, kind_of_policy, models, [CPU] * len(models))
    buffers.goal.fill_(10**9)
    for tensor in itertools.chain(*(tensors.values() for tensors in buffers.storage)):
        tensor.fill_(GARBAGE)
    prepare(buffers, models)
    reports: dict[str, list] = {"episodes": [], "matches": []}
    Recording.draws = {}
    workers = [Recording(cfg, buffers, worker, lambda report: reports[report[0]].extend(report[1]), make_env)
               for worker in range(cfg.num_workers)]
    learners = [Learner(cfg, buffers, policy) for policy in range(cfg.num_policies)]
    servers = [PolicyWorker(cfg, buffers, policy, CPU) for policy in range(cfg.num_policies)
               for _ in range(cfg.policy_workers_per_policy)]
    for inbox in buffers.worker_inboxes:
        inbox.put((RESUME, 0))
    inboxes = [*buffers.worker_inboxes, *(server.requests for server in servers),
               *(learner.shared.trajectories_done for learner in learners)]
    with ThreadPoolExecutor(len(inboxes)) as pool:
        running = [pool.submit(component.run) for component in (*workers, *servers, *learners)]
        deadline = time.monotonic() + TIMEOUT
        while (count := sum(len(learner.trajectories) for learner in learners)) < num_trajectories:
            if time.monotonic() > deadline or any(future.done() for future in running):
                break
            time.sleep(0.001)
        for inbox, future in zip(inboxes, running, strict=True):
            inbox.put((STOP, 0))
            wait([future], TIMEOUT)
    for future in running:
        future.result()
    assert count >= num_trajectories, "a deadlock"
    trajectories = [learner.trajectories for learner in learners]
    for policy, slot, num_rows in under_way(workers):
        trajectories[policy].append(Trajectory(slot, learners[policy].copy(slot), num_rows, -1))
    envs = {env.number: env for worker in workers for split in worker.splits for env in split.env._envs}
    return Run(cfg, script, buffers, models, trajectories, reports, envs, Recording.draws)


def under_way(workers: list[RolloutWorker]) -> Iterator[tuple[int, int, int]]:
    """Yield the trajectories that are not complete, as (policy, slot, rows)."""
    for worker in workers:
        for split in worker.splits:
            for m in np.flatnonzero((split.slots != NO_SLOT) & split.learns):
                yield int(split.policy[m]), int(split.slots[m]), int(split.t[m])
        for policy, pool in enumerate(worker.pools):
            for slot, t in pool.unfinished:
                yield policy, slot, t


# ---- what must arrive ------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What the rules say about one decision, whose consequences are known."""

    policy: int
    first: bool  # of the episode
    action: int
    reward: float  # until the next decision; in between the agent does not act
    terminated: bool
    truncated: bool
    next_step: int  # the next decision, or the final observation


class Expected(NamedTuple):
    """What the rules and the draws say about a run."""

    rows: dict[Name, Row]
    finals: Counter[Name]  # final observations after which another step was taken: each has a row that is not valid
    episodes: Counter[tuple[int, float, int, float]]


def all_lives(run: Run) -> Iterator[tuple[int, int, int, Life]]:
    """Yield (environment, agent, episode, what it does there) for all episodes that have begun."""
    for number, env in run.envs.items():
        for episode in range(env.episode + 1):
            for agent, life in run.script.lives(number, episode).items():
                yield number, agent, episode, life


def expect(run: Run) -> Expected:
    """Apply the rules to all steps that the environments have taken."""
    expected = Expected({}, Counter(), Counter())
    for number, agent, episode, life in all_lives(run):
        policy, snapshot = run.draw(number, agent, episode)
        if snapshot != CURRENT:
            continue
        env = run.envs[number]
        steps = env.t if episode == env.episode else math.inf
        taken = [env.actions.get((agent, episode, t), 0) for t in range(life.end)]
        rewards = [run.script.reward(number, agent, episode, t, action) for t, action in enumerate(taken)]
        for t, following in itertools.pairwise([*life.decisions, life.end]):
            if following <= steps:
                over = following == life.end
                expected.rows[number, agent, episode, t] = Row(
                    policy, t == life.decisions[0], taken[t], sum(rewards[t:following]), over and life.terminated,
                    over and not life.terminated, following)
        if life.end <= steps and life.decisions:
            expected.finals[number, agent, episode, life.end] += steps > life.end
            total = sum(rewards[life.arrival:])
            expected.episodes[policy, total, len(life.decisions), life.objective] += 1
    return expected


def check_routing(run: Run) -> None:
    """Compare all that the learners got with what they must get: each once, and in order.

    In synchronous mode a trajectory that is ended early may lose a decision whose consequences are not known yet.
    """
    expected, asynchronous = expect(run), run.cfg.async_rl
    latest: dict[tuple[int, ...], int] = {}  # the step, by environment, agent and episode
    seen: Counter[Name] = Counter()
    finals: Counter[Name] = Counter()
    tails: list[set[Name]] = []  # what rows hold that were never sampled, or are lost
    for policy, part in ((policy, part) for policy, parts in enumerate(run.trajectories) for part in parts):
        valid, before = part.tensors["valid"][: part.num_rows], None
        for row, is_valid in enumerate(valid):
            name, over = part.name(row), before and (before.terminated or before.truncated)
            following = before and (*part.name(row - 1)[:3], before.next_step)
            assert following in (None, name)
            if is_valid:
                assert name in expected.rows, f"{name} was not played, or by a frozen policy"
                before = expected.rows[name]
                assert before.policy == policy, f"{name} belongs to another policy"
                is_cut = not asynchronous and part.dataset >= 0 and row + 1 < len(valid) and not valid[row + 1 :].any()
                check_row(run, part, row, before, is_cut=is_cut)
                assert following or row == 0 or before.first, "a trajectory changes hands at an episode's start only"
                assert latest.get(name[:3], -1) < name[3], "out of order"
                latest[name[:3]] = name[3]
                seen[name] += 1
            elif (row and not over) or not (asynchronous or valid.any()):
                assert not valid[row:].any()
                tails.append({part.name(each) for each in range(row, len(valid))})
                break
            else:
                finals[name], before = finals[name] + 1, None
                for column in ("rewards", "new_episode", "terminated"):
                    assert part.tensors[column][row] == 0
    lost = expected.rows.keys() - seen.keys()
    assert set(seen.values()) <= {1}, "nothing comes twice"
    assert int(run.buffers.env_steps.sum()) == sum(env.num_steps for env in run.envs.values())
    if asynchronous:
        assert not lost
        assert finals == expected.finals
        assert run.buffers.policy_steps.sum(0).tolist() == [
            sum(row.policy == policy for row in expected.rows.values()) for policy in range(run.cfg.num_policies)]
        assert Counter(run.reports["episodes"]) == expected.episodes
    else:
        assert lost <= set().union(*tails)
        assert all(len(tail & lost) <= 1 for tail in tails)
        assert all(expected.rows[name].next_step > name[3] + 1 for name in lost), "a pause is under way"


def check_row(run: Run, part: Trajectory, row: int, expected: Row, *, is_cut: bool) -> None:
    """Compare a valid row with the rules; is_cut: from what follows it the trajectory bootstraps."""
    name, tensors = part.name(row), part.tensors
    assert tensors["actions"][row].tolist() == [expected.action]
    assert tensors["rewards"][row] == expected.reward
    assert tensors["terminated"][row] == expected.terminated
    assert tensors["truncated"][row] == (expected.truncated or (is_cut and not expected.terminated))
    assert tensors["new_episode"][row] == expected.first
    assert not tensors["new_episode"][row + 1], "the hidden state of the next observation counts"
    assert tensors["policy_version"][row] == 0
    for at, step in ((row, name[3]), (row + 1, expected.next_step)):
        for leaf, value in run.script.leaves(*name[:3], step).items():
            assert tensors[f"obs/{leaf}"][at].tolist() == value.tolist()


Outputs = dict[tuple[str, int], np.ndarray]  # what a network says of a decision, by column and number of rows ahead


def check_networks(run: Run) -> None:
    """Compare values, parameters and hidden states of all rows with those of the model of their policy.

    The model sees what the agent saw when it acted, from the episode's start on.
    """
    episodes: dict[int, list[list[Name]]] = {}
    for env, agent, episode, life in all_lives(run):
        if life.decisions:
            policy, _ = run.draw(env, agent, episode)
            episodes.setdefault(policy, []).append([(env, agent, episode, t) for t in (*life.decisions, life.end)])
    outputs: dict[Name, Outputs] = {}
    for policy, of_policy in episodes.items():
        outputs |= evaluate(run.models[policy], of_policy, run.script, list(run.buffers.spaces_of(policy)[0]))
    count = 0
    for part in itertools.chain(*run.trajectories):
        valid = part.tensors["valid"][:part.num_rows]
        for row in np.flatnonzero(valid):
            count += 1
            for (column, ahead), right in outputs[part.name(row)].items():
                if (column, ahead) != ("values", 1) or row + 1 < part.num_rows:  # else it is not known yet
                    got = part.tensors[column][row + ahead]
                    if np.isnan(got).any():  # the learner asks for it
                        assert not (run.cfg.async_rl or valid[row + 1 :].any())
                        assert (column, ahead) == ("values", 1)
                        continue
                    assert (abs(got - right) <= 1e-4 + 1e-3 * abs(right)).all(), f"{column} of {part.name(row)}"
    assert count >= 100


@torch.inference_mode()
def evaluate(model: torch.nn.Module, episodes: list[list[Name]], script: Script,
             leaves: list[str]) -> dict[Name, Outputs]:
    """Run a model through whole episodes, all at once, step by step."""
    known: dict[Name, Outputs] = {}
    states = torch.zeros(len(episodes), model.state_size)
    for k in range(max(map(len, episodes))):
        shown = [script.leaves(*episode[min(k, len(episode) - 1)]) for episode in episodes]
        obs = {leaf: torch.from_numpy(np.stack([leaves[leaf] for leaves in shown])) for leaf in leaves}
        before = states
        parameters, values, states = model(model.normalize(obs), before, torch.full((len(episodes), 1), k == 0))
        for i, episode in enumerate(episodes):
            if k < len(episode):
                known[episode[k]] = {("values", 0): values[i].numpy(), ("rnn_states", 1): states[i].numpy(),
                                     ("action_parameters", 0): parameters[i].numpy()}
            if 0 < k < len(episode):
                known[episode[k]]["rnn_states", 0] = before[i].numpy()
                known[episode[k - 1]]["values", 1] = values[i].numpy()  # a row that is truncated bootstraps from it
    return known


# ---- who plays what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policies", "policy_workers", "splits", "agents"), [
    (policies, policy_workers, (policies + policy_workers) % 3 + 1, 3 if (policies + policy_workers) % 2 else 1)
    for policies in (1, 2, 3, 4) for policy_workers in (1, 2, 3)])
def test_each_learner_gets_the_transitions_of_its_episodes(policies: int, policy_workers: int, splits: int,
                                                           agents: int) -> None:
    cfg = make_cfg(num_policies=policies, policy_workers_per_policy=policy_workers, worker_num_splits=splits)
    run = play(cfg, {"num_agents": agents}, 60)
    check_routing(run)
    assert all(run.trajectories)
    check_networks(run)


RULES = {
    "deaths": {"deaths": True},
    "absences": {"absences": True},
    "late": {"late": True},
    "inactive": {"naps": "info"},
    "forbidden everything": {"naps": "mask"},
    "forbidden everything by the info": {"naps": "mask in info"},
    "no observation": {"naps": "missing"},
    "turns": {"naps": "mask", "turns": True},
    "turns with deaths": {"naps": "info", "turns": True, "deaths": True},
    "all at once": {"naps": "missing", "deaths": True, "absences": True},
    "late and missing": {"naps": "missing", "late": True, "absences": True},
}


@pytest.mark.parametrize(("rules", "kinds", "rnn"), [
    *((rules, 2, "lstm") for rules in RULES.values()),  # the others, with all at once
    *((RULES[name], *more) for name in ("all at once", "turns with deaths") for more in ((1, "gru"), (2, "")))])
def test_agents_that_come_and_go(rules: dict[str, Any], kinds: int, rnn: str) -> None:
    """Rewards go to the last action, hidden states pass over what an agent does not do."""
    cfg = make_cfg(num_policies=4 if kinds == 2 else 3, use_rnn=bool(rnn), rnn_type=rnn or "gru",
                   rnn_num_layers=2 if rnn == "gru" else 1)
    run = play(cfg, rules | {"num_kinds": kinds}, 50)
    check_routing(run)
    check_networks(run)


def mapping_as_array(*given: Any) -> np.ndarray:
    return np.array(counting_agents.alone_or_together(*given))


MAPPED = {(0, 1, 1), (0, 2, 2)}


@pytest.mark.parametrize(("settings", "kinds", "expected"), [
    ({"num_policies": 3, "pbt_mix_policies_in_one_env": False}, 1, {(p, p, p) for p in range(3)}),
    ({"num_policies": 3, "policy_mapping": "counting_agents:alone_or_together"}, 1, MAPPED),
    ({"num_policies": 3, "policy_mapping": "test_routing:mapping_as_array"}, 1, MAPPED),
    ({"num_policies": 4}, 2, {(a, b, c) for a in (0, 2) for b in (1, 3) for c in (0, 2)}),
    ({"num_policies": 4, "pbt_mix_policies_in_one_env": False}, 2, {(0, 1, 0), (2, 3, 2)})], ids=str)
def test_who_plays(settings: dict[str, Any], kinds: int, expected: set[tuple[int, ...]]) -> None:
    """One draw for all agents or one for each; those with other spaces have policies of their own; or a mapping."""
    run = play(make_cfg(**settings), {"num_kinds": kinds}, 120)
    check_routing(run)
    assert {tuple(policies) for episodes in run.draws.values() for policies, _ in episodes} == expected


def test_each_agent_gets_the_reward_shaping_of_its_policy() -> None:
    def prepare(buffers: SharedBuffers, models: list[torch.nn.Module]) -> None:
        buffers.shaping[:] = torch.tensor([[10.0 + policy, 20.0 + policy] for policy in range(3)])

    run = play(make_cfg(num_policies=3, with_pbt=True), {}, 60, prepare)
    for number, env in run.envs.items():
        for episode, (policies, _) in enumerate(run.draws[number]):
            assert [env.shapings[agent, episode] for agent in range(3)] == [
                {"speed": 10.0 + policy, "care": 20.0 + policy} for policy in policies]


# ---- self-play -------------------------------------------------------------------------------------------------------


def self_play_cfg(fraction: float, **settings: Any) -> Config:
    return make_cfg(**{"num_workers": 1, "num_envs_per_worker": 2, "rollout": 4, "self_play_past_fraction": fraction,
                       "self_play_snapshots": NUM_SNAPSHOTS, **settings})


def add_snapshots(buffers: SharedBuffers, models: list[torch.nn.Module], count: int = NUM_SNAPSHOTS) -> None:
    for shared, model in zip(buffers.policies, models, strict=True):
        for version in range(count):
            shared.weights.add_snapshot(model, 50 + version)


def tell_tale_action(policy: int, snapshot: int) -> int:
    return policy * (NUM_SNAPSHOTS + 1) + snapshot + 1


def add_tell_tales(buffers: SharedBuffers, models: list[torch.nn.Module]) -> None:
    """Make every policy and every snapshot always take an action of its own."""
    for policy, (shared, model) in enumerate(zip(buffers.policies, models, strict=True)):
        torch.nn.init.zeros_(model.policy_head.weight)
        for snapshot in (*range(NUM_SNAPSHOTS), CURRENT):
            model.policy_head.bias.data.zero_()[tell_tale_action(policy, snapshot)] = 100.0
            if snapshot != CURRENT:
                shared.weights.add_snapshot(model, 50 + snapshot)
        shared.weights.publish(model, 0)


def check_matches(run: Run) -> None:
    """Compare the reported matches with those of all episodes after which another one has begun."""
    script, matches = run.script, Counter()
    for number, episode in ((number, episode) for number, env in run.envs.items() for episode in range(env.episode)):
        returns: dict[bool, list[float]] = {True: [], False: []}  # of those that learn, and of the others
        learners = []
        for agent, life in script.lives(number, episode).items():
            if life.decisions:
                policy, snapshot = run.draw(number, agent, episode)
                steps = range(life.arrival, life.end)
                returns[snapshot == CURRENT].append(sum(script.reward(number, agent, episode, t, 0) for t in steps))
                learners += [policy] * (snapshot == CURRENT)
        if returns[True] and returns[False]:
            lead = np.mean(returns[True]) - np.mean(returns[False])
            result = 1.0 if lead > 1e-9 else 0.0 if lead < -1e-9 else 0.5
            matches.update((policy, result) for policy in learners)
    assert matches
    assert Counter(run.reports["matches"]) == matches


@pytest.mark.parametrize(("policies", "fraction", "rules"), [
    (1, 1.0, {}), (3, 0.5, {}), (3, 0.5, {"deaths": True}), (1, 1.0, RULES["turns"]), (3, 0.5, RULES["turns"]),
    *((3, 0.5, rules) for rules in ({"absences": True}, {"naps": "info"}, {"late": True}))])  # some never act: no match
def test_earlier_versions_play_but_nobody_learns_from_them(policies: int, fraction: float,
                                                           rules: dict[str, Any]) -> None:
    cfg = self_play_cfg(fraction, num_policies=policies, policy_workers_per_policy=2)
    rules = rules | {"small_rewards": True, "most_actions": policies * (NUM_SNAPSHOTS + 1) + 1}
    tells = "mask" not in rules.get("naps", "")  # a forbidden action tells nothing
    run = play(cfg, rules, 60, add_tell_tales if tells else add_snapshots)
    for number, env in run.envs.items() if tells else ():
        for (agent, episode, _), action in env.actions.items():
            assert action == tell_tale_action(*run.draw(number, agent, episode))
    check_routing(run)
    check_matches(run)
    frozen = np.array([snapshots for episodes in run.draws.values() for _, snapshots in episodes]) != CURRENT
    assert set(frozen.sum(1).tolist()) == ({2} if fraction == 1.0 else {0, 1, 2})
    assert frozen.any(0).all()


@pytest.mark.parametrize(("policies", "rules", "fraction", "snapshots"), [
    (4, {}, 0.0, 0), (7, {}, 0.0, 0), (7, RULES["all at once"], 0.0, 0),
    *((4, RULES["all at once"], fraction, snapshots) for fraction, snapshots in ((0.5, 2), (1.0, 2), (1.0, 0)))])
def test_few_slots_are_enough_for_many_policies(policies: int, rules: dict[str, Any], fraction: float,
                                                snapshots: int) -> None:
    run = play(self_play_cfg(fraction, num_policies=policies), rules, 90,
               lambda buffers, models: add_snapshots(buffers, models, snapshots))
    check_routing(run)
    assert bool(run.reports["matches"]) == (snapshots > 0), "without snapshots all agents learn"


@pytest.mark.parametrize("rules", [rules for rules in RULES.values() if "mask" not in rules.get("naps", "")], ids=str)
def test_frozen_agents_keep_their_memory(rules: dict[str, Any]) -> None:
    """The actions of all agents count their decisions, which only a memory can do, across slots of 4 rows."""
    def count(buffers: SharedBuffers, models: list[torch.nn.Module]) -> None:
        numbers = torch.arange(12.0)
        for shared, model in zip(buffers.policies, models, strict=True):
            # the logits -100 (action - count)^2, but for what all have in common
            model.policy_head.weight.data = 200 * numbers[:, None]
            model.policy_head.bias.data = -100 * numbers**2
            shared.weights.publish(model, 0)
        add_snapshots(buffers, models)

    cfg = self_play_cfg(0.5, num_policies=2, core="counting_agents:CountingCore")
    run = play(cfg, rules | {"most_actions": 12}, 60, count)
    check_routing(run)
    for number, env in run.envs.items():
        for (agent, episode, t), action in env.actions.items():
            assert action == run.script.lives(number, episode)[agent].decisions.index(t)


# ---- synchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rules", "splits"), [(rules, 2) for rules in RULES.values()] + [({}, 1), (RULES["turns"], 1)],
                         ids=[*RULES, "", "turns, one split"])
def test_every_agent_hands_in_one_trajectory_for_each_dataset(rules: dict[str, Any], splits: int) -> None:
    cfg = make_cfg(async_rl=False, num_envs_per_worker=4, worker_num_splits=splits, batch_size=144,
                   policy_workers_per_policy=2, use_rnn=True)
    num_agents = 2 * 4 * 3
    assert cfg.trajectories_per_dataset == num_agents
    run = play(cfg, rules, 6 * num_agents)
    check_routing(run)
    check_networks(run)
    for dataset in range(6):
        parts = [part for part in run.trajectories[0] if part.dataset == dataset]
        owners = [part.name(0)[:2] for part in parts if part.name(0)[1] != GARBAGE]  # in one without rows nothing lies
        assert len({part.slot for part in parts}) == len(parts) == num_agents
        assert len(set(owners)) == len(owners)
