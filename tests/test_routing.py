"""Every learner gets exactly the transitions of the episodes that were drawn for its policy, whoever plays them.

Real rollout and policy workers run in threads; the test plays the learners. Observations and rewards name the agent,
the episode and the step (`counting_agents.py`), so what must arrive is computed from the rules alone, and from the
draws, which are recorded where they are made.
"""

import contextlib
import itertools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import counting_agents
import numpy as np
import pytest
import torch
from counting_agents import CountingAgents, Name, Script
from counting_env import number_of
from parts import ONE_STEP, make_config

import pbt
import rollout_worker
from algorithms import algorithm_class
from config import Config
from envs.multi_agent import ParallelVectorEnv
from envs.vector_env import EnvInfo, VectorEnv, describe
from model import make_model
from pbt import kinds_of_policies
from policy_worker import PolicyWorker
from rollout_worker import NO_SLOT, RolloutWorker
from shared_buffers import CURRENT, RESUME, SLOTS, STOP, WITH_WORKER, SharedBuffers

TIMEOUT = 20  # seconds without a trajectory: a deadlock
GARBAGE = 77
CPU = torch.device("cpu")


def make_cfg(**settings: Any) -> Config:
    return make_config({"env": "counting", "num_workers": 2, "num_envs_per_worker": 6, "rollout": 6, "batch_size": 96,
                        "encoder_mlp_layers": (8,), "normalize_input": False, "normalize_returns": False,
                        "obs_scale": 16.0, "rnn_size": 4} | ONE_STEP, settings)


# ---- the games -------------------------------------------------------------------------------------------------------


class Game(NamedTuple):
    """A script, the vector environments that play it, and what is known of one."""

    script: Script
    make_env: Callable[[Config, int], VectorEnv]
    info: EnvInfo


def agents_game(**rules: Any) -> Game:
    script = Script(**rules)

    def make_env(cfg: Config, num_envs: int) -> VectorEnv:
        return ParallelVectorEnv([CountingAgents(script) for _ in range(num_envs)], "counting_agents")

    probe = make_env(make_cfg(), 1)
    probe.reset(0)
    return Game(script, make_env, describe(probe))


# ---- playing them ----------------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """Who plays the agents of one episode."""

    policies: list[int]
    snapshots: list[int]


class Recorder:
    """Writes down each draw where it is made, and the owner of each trajectory when it is handed in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draws: dict[int, list[Draw]] = {}  # by environment, one for each episode
        self.owners: dict[int, list[tuple[int, int]]] = {}  # by slot, (split, agent), one for each time
        drawing: dict[int, int] = {}  # the environment for which a worker's generator is used
        mapping, draw, hand_in = counting_agents.alone_or_together, RolloutWorker.draw, RolloutWorker.hand_in

        def add(policies: list[int], rng: np.random.Generator) -> list[int]:
            self.draws.setdefault(drawing[id(rng)], []).append(Draw(list(policies), []))
            return policies

        def draw_policies(kinds: Any, kind_of_policy: Any, rng: Any, *, mix: bool) -> list[int]:
            return add(pbt.draw_policies(kinds, kind_of_policy, rng, mix=mix), rng)

        def draw_by_mapping(agents: list[str], num_policies: int, rng: np.random.Generator) -> list[int]:
            return add(mapping(agents, num_policies, rng), rng)

        def draw_snapshots(available: Any, fraction: float, rng: Any) -> list[int]:
            drawn = pbt.draw_snapshots(available, fraction, rng)
            self.draws[drawing[id(rng)]][-1].snapshots.extend(drawn)
            return drawn

        def draw_for(worker: RolloutWorker, split: Any, env: int, own: slice) -> None:
            drawing[id(worker.rng)] = number_of(split.env.seeds[env])
            draw(worker, split, env, own)

        def hand_in_of(worker: RolloutWorker, policy: int, slots: list[int]) -> None:
            for slot in slots:
                self.owners.setdefault(slot, []).extend(
                    (split.index, int(m)) for split in worker.splits.values()
                    for m in np.flatnonzero(split.slots == slot))
            hand_in(worker, policy, slots)

        monkeypatch.setattr(rollout_worker, "draw_policies", draw_policies)
        monkeypatch.setattr(counting_agents, "alone_or_together", draw_by_mapping)
        monkeypatch.setattr(rollout_worker, "draw_snapshots", draw_snapshots)
        monkeypatch.setattr(RolloutWorker, "draw", draw_for)
        monkeypatch.setattr(RolloutWorker, "hand_in", hand_in_of)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


class Trajectory(NamedTuple):
    """What a learner has copied out of a slot."""

    slot: int
    tensors: dict[str, np.ndarray]
    num_rows: int  # T, or fewer for one that was under way when everything stopped
    dataset: int

    def name(self, row: int) -> Name:
        """Tell whose observation a row holds."""
        env, agent, episode, t = map(int, self.tensors["obs/name"][row].tolist())
        return env, agent, episode, t


class Run(NamedTuple):
    """What happened: all trajectories of each policy in order, all reports, and where every environment has stopped."""

    cfg: Config
    game: Game
    buffers: SharedBuffers
    models: list[torch.nn.Module]
    trajectories: list[list[Trajectory]]
    episodes: list[tuple[int, float, int, float]]
    matches: list[tuple[int, float]]
    envs: dict[int, Any]  # by number
    progress: dict[int, tuple[int, int]]  # of each environment: (episode, step)


Prepare = Callable[[SharedBuffers, list[torch.nn.Module]], None]


def play(cfg: Config, game: Game, num_trajectories: int, prepare: Prepare = lambda buffers, models: None) -> Run:
    """Run all components in threads until the learners have got so many trajectories together."""
    kind_of_policy = kinds_of_policies(len(game.info.kinds), cfg.num_policies)
    models = []
    for policy, kind in enumerate(kind_of_policy):
        torch.manual_seed(policy)
        models.append(make_model(cfg, *game.info.kinds[kind]))
        torch.nn.init.normal_(models[-1].policy_head.weight)  # policies that differ
    with contextlib.redirect_stdout(None):
        buffers = SharedBuffers(cfg, algorithm_class(cfg.algo)(cfg), game.info, kind_of_policy, models,
                                [CPU] * len(models), None)
    for tensor in itertools.chain(*(tensors.values() for tensors in buffers.storage)):
        tensor.fill_(GARBAGE)
    prepare(buffers, models)
    reports: dict[str, list] = {"episodes": [], "matches": []}
    workers = [RolloutWorker(cfg, buffers, worker, lambda report: reports[report[0]].extend(report[1]), game.make_env)
               for worker in range(cfg.num_workers)]
    servers = [PolicyWorker(cfg, buffers, policy, CPU) for policy in range(cfg.num_policies)
               for _ in range(cfg.policy_workers_per_policy)]
    arrivals: queue.SimpleQueue = queue.SimpleQueue()
    learners = [Learner(cfg, buffers, policy, arrivals.put) for policy in range(cfg.num_policies)]
    with running(workers, arrivals.put) as stop_workers, running(servers, arrivals.put) as stop_servers, \
            running(learners, arrivals.put) as stop_learners:
        for inbox in buffers.worker_inboxes:
            inbox.put((RESUME, 0))
        try:
            for _ in range(num_trajectories):
                if isinstance(arrival := arrivals.get(timeout=TIMEOUT), BaseException):
                    raise arrival
        except queue.Empty:
            pytest.fail("a deadlock")
        finally:
            stop_workers(buffers.worker_inboxes)
            stop_servers([shared.requests for shared in buffers.policies for _ in range(cfg.policy_workers_per_policy)])
            stop_learners([shared.trajectories_done for shared in buffers.policies])
    trajectories = [learner.trajectories for learner in learners]
    for policy, slot, num_rows in under_way(workers):
        trajectories[policy].append(Trajectory(slot, learners[policy].copy(slot), num_rows, -1))
    envs, progress = where_they_are(cfg, workers)
    return Run(cfg, game, buffers, models, trajectories, reports["episodes"], reports["matches"], envs, progress)


class Learner:
    """Copies what its policy gets and frees the slots: at once, or in synchronous mode when a dataset is complete."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, policy: int, tell: Callable[[int], None]) -> None:
        self.buffers, self.policy, self.tell = buffers, policy, tell
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
            assert self.buffers.policy_of_slot(slot) == self.policy
            tensors = self.copy(slot)
            self.trajectories.append(Trajectory(slot, tensors, len(tensors["rewards"]),
                                                len(self.trajectories) // self.dataset_size))
            for tensor in self.storage.values():
                tensor[slot - self.shared.first_slot].fill_(GARBAGE)  # what a slot held must never be seen again
            self.held.append(slot)
            if len(self.held) == self.dataset_size:
                for free in self.held:
                    self.buffers.slot_place[free] = WITH_WORKER
                    self.buffers.worker_inboxes[self.buffers.worker_of_slot(free)].put((SLOTS, free))
                self.held = []
            self.tell(slot)

    def copy(self, slot: int) -> dict[str, np.ndarray]:
        return {name: tensor[slot - self.shared.first_slot].numpy().copy() for name, tensor in self.storage.items()}


@contextlib.contextmanager
def running(components: list[Any], tell: Callable[[BaseException], None]) -> Iterator[Callable[[list[Any]], None]]:
    """Run components in threads; what one raises is told. Yields a function that stops them through their queues."""

    def run(component: Any) -> None:
        try:
            component.run()
        except BaseException as error:  # noqa: BLE001  raised again by the main thread
            tell(error)

    def stop(queues: list[Any]) -> None:
        for messages in queues:
            messages.put((STOP, 0))
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a component does not stop"

    threads = [threading.Thread(target=run, args=(component,), daemon=True) for component in components]
    for thread in threads:
        thread.start()
    yield stop


def under_way(workers: list[RolloutWorker]) -> Iterator[tuple[int, int, int]]:
    """Yield the trajectories that are not complete, as (policy, slot, rows)."""
    for worker in workers:
        for split in worker.splits.values():
            for m in np.flatnonzero((split.slots != NO_SLOT) & (split.snapshot == CURRENT)):
                yield int(split.policy[m]), int(split.slots[m]), int(split.t[m])
        for policy, left in enumerate(worker.pool.unfinished):
            for slot, t in left:
                yield policy, slot, t


def where_they_are(cfg: Config, workers: list[RolloutWorker]) -> tuple[dict[int, Any], dict[int, tuple[int, int]]]:
    envs, progress = {}, {}
    for worker in workers:
        for split in worker.splits.values():
            for i in range(cfg.envs_per_split):
                env, number = split.env._envs[i], number_of(split.env.seeds[i])
                if isinstance(env, CountingAgents):
                    envs[number], progress[number] = env, (env.episode, env.t)
    return envs, progress


# ---- what must arrive ------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What the rules say about one decision, whose consequences are known."""

    policy: int
    first: bool  # of the episode
    actions: dict[int, int]  # of the environment, by step
    terminated: bool
    truncated: bool
    next_step: int  # the next decision, or the final observation


class Expected(NamedTuple):
    """What the rules and the draws say about a run."""

    rows: dict[Name, Row]
    finals: set[Name]  # final observations after which another step was taken: each has a row that is not valid
    ended: list[Name]  # the final observations of all agents that took part


def draw_of(run: Run, recorder: Recorder, env: int, episode: int) -> Draw:
    if recorder.draws:
        return recorder.draws[env][episode]
    num_agents = run.game.script.num_agents
    return Draw([0] * num_agents, [CURRENT] * num_agents)


def all_agent_episodes(run: Run) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield (environment, agent, episode, steps taken, one more was taken) for all that has happened."""
    script = run.game.script
    for env, (last, t) in run.progress.items():
        for episode in range(last + 1):
            for agent in range(script.num_agents):
                if script.present(env, agent, episode):
                    steps = t if episode == last else script.length(env, episode)
                    yield env, agent, episode, steps, episode < last or t > script.end(env, agent, episode).step


def expect(run: Run, recorder: Recorder) -> Expected:
    """Apply the rules to all steps that the environments have taken."""
    rows, finals, ended = {}, set(), []
    for env, agent, episode, steps, went_on in all_agent_episodes(run):
        draw = draw_of(run, recorder, env, episode)
        if draw.snapshots[agent] != CURRENT:
            continue
        end = run.game.script.end(env, agent, episode)
        decisions = run.game.script.decisions(env, agent, episode)
        actions = {t: run.envs[env].actions[agent, episode, t] for t in decisions if t < steps}
        for number, (t, following) in enumerate(itertools.pairwise([*decisions, end.step])):
            if following <= steps:
                over = following == end.step
                rows[env, agent, episode, t] = Row(draw.policies[agent], number == 0, actions, over and end.terminated,
                                                   over and not end.terminated, following)
        if end.step <= steps:
            ended.append((env, agent, episode, end.step))
            if went_on and decisions:
                finals.add((env, agent, episode, end.step))
    return Expected(rows, finals, ended)


def reward_of(script: Script, name: Name, row: Row, action: int) -> float:
    """Sum the rewards from one decision to the next; in between the agent does not act."""
    env, agent, episode, t = name
    return sum(script.reward(env, agent, episode, step, action if step == t else 0) for step in range(t, row.next_step))


def check_row(run: Run, policy: int, part: Trajectory, row: int, expected: Row, *, cut: bool = False) -> None:
    """Compare a valid row with the rules. cut: it is the last one of a trajectory that was ended early."""
    name, tensors = part.name(row), part.tensors
    assert policy == expected.policy, f"{name} belongs to another policy"
    assert tensors["valid"][row]
    (action,) = tensors["actions"][row]
    assert action == expected.actions[name[3]]
    assert tensors["rewards"][row] == reward_of(run.game.script, name, expected, int(action))
    assert tensors["terminated"][row] == expected.terminated
    assert tensors["truncated"][row] == (expected.truncated or (cut and not expected.terminated))
    assert tensors["new_episode"][row] == expected.first
    assert not tensors["new_episode"][row + 1], "the hidden state of the next observation counts"
    assert tensors["policy_version"][row] == 0
    for at, step in ((row, name[3]), (row + 1, expected.next_step)):
        for leaf, value in run.game.script.leaves(*name[:3], step).items():
            assert tensors[f"obs/{leaf}"][at].tolist() == value.tolist()


def check_routing(run: Run, recorder: Recorder) -> Expected:
    """Compare all that the learners got, in asynchronous mode, with what they must get: each once, and in order."""
    expected = expect(run, recorder)
    latest: dict[tuple[int, ...], int] = {}  # the step, by environment, agent and episode
    seen: Counter[Name] = Counter()
    finals: Counter[Name] = Counter()
    for policy, parts in enumerate(run.trajectories):
        for part in parts:
            before = None  # the name and the row of the decision before
            for row in range(part.num_rows):
                name = part.name(row)
                if not part.tensors["valid"][row]:
                    over = before is not None and (before[1].terminated or before[1].truncated)
                    if row and not over:
                        assert not part.tensors["valid"][row:part.num_rows].any(), "what follows was never sampled"
                        break
                    assert before is None or name == (*before[0][:3], before[1].next_step)
                    finals[name] += 1
                    assert part.tensors["rewards"][row] == 0
                    assert not part.tensors["new_episode"][row]
                    assert not part.tensors["terminated"][row]
                    before = None
                    continue
                assert name in expected.rows, f"{name} was not played by policy {policy}, or never"
                seen[name] += 1
                decision = expected.rows[name]
                check_row(run, policy, part, row, decision)
                if before is None:
                    assert row == 0 or decision.first, "a trajectory changes hands at an episode's start only"
                else:
                    assert name == (*before[0][:3], before[1].next_step)
                assert latest.get(name[:3], -1) < name[3], "out of order"
                latest[name[:3]] = name[3]
                before = name, decision
    assert set(seen) == set(expected.rows), "nothing is lost"
    assert set(seen.values()) <= {1}, "nothing comes twice"
    return check_reports(run, recorder, expected, finals)


def check_reports(run: Run, recorder: Recorder, expected: Expected, finals: Counter[Name]) -> Expected:
    """Compare the rows that are not valid, the counters and the reported episodes with the rules."""
    assert finals == Counter(expected.finals)
    assert run.buffers.policy_steps.sum(0).tolist() == [
        sum(row.policy == policy for row in expected.rows.values()) for policy in range(run.cfg.num_policies)]
    assert int(run.buffers.env_steps.sum()) == num_steps(run)
    episodes = Counter()
    for env, agent, episode, end in expected.ended:
        if decisions := run.game.script.decisions(env, agent, episode):
            actions = run.envs[env].actions
            episodes[draw_of(run, recorder, env, episode).policies[agent],
                     sum(run.game.script.reward(env, agent, episode, t, actions.get((agent, episode, t), 0))
                         for t in range(run.game.script.arrival(env, agent, episode), end)),
                     len(decisions), run.game.script.objective(env, agent, episode)] += 1
    assert Counter(episode for episode in run.episodes if episode[2]) == episodes
    return expected


def num_steps(run: Run) -> int:
    return sum(t + sum(run.game.script.length(env, episode) for episode in range(last))
               for env, (last, t) in run.progress.items())


def check_networks(run: Run, recorder: Recorder) -> int:
    """Compare values, parameters and hidden states of all rows with those of the model of their policy.

    The model sees what the agent saw when it acted, from the episode's start on. Returns the number of rows.
    """
    script, kind_of_policy = run.game.script, run.buffers.kind_of_policy
    episodes: dict[int, list[tuple[Name, ...]]] = {}
    for env, agent, episode, _, _ in all_agent_episodes(run):
        end = script.end(env, agent, episode).step
        if decisions := script.decisions(env, agent, episode):
            policy = draw_of(run, recorder, env, episode).policies[agent]
            episodes.setdefault(policy, []).append(tuple((env, agent, episode, t) for t in (*decisions, end)))
    known: dict[Name, dict[str, np.ndarray]] = {}
    for policy, names in episodes.items():
        obs_space, _ = run.game.info.kinds[kind_of_policy[policy]]
        known |= evaluate(run.models[policy], names, script, list(obs_space))
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"values": [], "action_parameters": [], "rnn_states": []}
    for part in itertools.chain(*run.trajectories):
        for row in np.flatnonzero(part.tensors["valid"][:part.num_rows]):
            name, own = part.name(row), known[part.name(row)]
            pairs["values"].append((part.tensors["values"][row], own["values"]))
            pairs["rnn_states"].append((part.tensors["rnn_states"][row + 1], own["rnn_states"]))
            # kinds of agents differ in the number of their actions
            pairs["action_parameters"].extend(zip(part.tensors["action_parameters"][row], own["action_parameters"],
                                                  strict=True))
            if not part.tensors["new_episode"][row]:
                before = known[neighbor(script, name, -1)]
                pairs["rnn_states"].append((part.tensors["rnn_states"][row], before["rnn_states"]))
            if row + 1 < part.num_rows:  # from this one a row that is truncated bootstraps
                pairs["values"].append((part.tensors["values"][row + 1], known[neighbor(script, name, 1)]["values"]))
    for name, both in pairs.items():
        got, right = (np.array(column) for column in zip(*both, strict=True))
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4, err_msg=name)
    return sum(int(part.tensors["valid"][:part.num_rows].sum()) for part in itertools.chain(*run.trajectories))


def neighbor(script: Script, name: Name, offset: int) -> Name:
    """Name the decision before another one, or the decision or final observation after it."""
    steps = [*script.decisions(*name[:3]), script.end(*name[:3]).step]
    return (*name[:3], steps[steps.index(name[3]) + offset])


@torch.inference_mode()
def evaluate(model: torch.nn.Module, episodes: list[tuple[Name, ...]], script: Script,
             leaves: list[str]) -> dict[Name, dict[str, np.ndarray]]:
    """Run a model through whole episodes, all at once, step by step."""
    known: dict[Name, dict[str, np.ndarray]] = {}
    states = torch.zeros(len(episodes), model.state_size)
    for k in range(max(map(len, episodes))):
        names = [episode[min(k, len(episode) - 1)] for episode in episodes]
        shown = [script.leaves(*name) for name in names]
        obs = {leaf: torch.from_numpy(np.stack([leaves[leaf] for leaves in shown])) for leaf in leaves}
        parameters, values, states = model(model.normalize(obs), states,
                                           torch.full((len(episodes), 1), k == 0))
        for i, name in enumerate(names):
            known.setdefault(name, {"values": values[i].numpy(), "action_parameters": parameters[i].numpy(),
                                    "rnn_states": states[i].numpy()})
    return known


# ---- asynchronous ----------------------------------------------------------------------------------------------------


# every number of policies with every other number, and every two of the others
@pytest.mark.parametrize(("policies", "policy_workers", "splits"), [
    (policies, policy_workers, (policies + policy_workers) % 3 + 1)
    for policies in (1, 2, 3, 4) for policy_workers in (1, 2, 3)])
def test_each_learner_gets_the_transitions_of_its_episodes(recorder: Recorder, policies: int, policy_workers: int,
                                                           splits: int) -> None:
    cfg = make_cfg(num_policies=policies, policy_workers_per_policy=policy_workers, worker_num_splits=splits)
    run = play(cfg, agents_game(), 150)
    check_routing(run, recorder)
    assert all(run.trajectories)


@pytest.mark.parametrize(("policies", "policy_workers", "splits"), [(1, 3, 2), (2, 2, 3), (3, 1, 1), (4, 1, 2)])
def test_environments_of_one_agent(recorder: Recorder, policies: int, policy_workers: int, splits: int) -> None:
    cfg = make_cfg(num_policies=policies, policy_workers_per_policy=policy_workers, worker_num_splits=splits)
    run = play(cfg, agents_game(num_agents=1), 120)
    check_routing(run, recorder)
    assert check_networks(run, recorder) >= 120


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
def test_agents_that_come_and_go(recorder: Recorder, rules: dict[str, Any], kinds: int, rnn: str) -> None:
    """Rewards go to the last action, hidden states pass over what an agent does not do."""
    cfg = make_cfg(num_policies=4 if kinds == 2 else 3, use_rnn=bool(rnn), rnn_type=rnn or "gru",
                   rnn_num_layers=2 if rnn == "gru" else 1)
    run = play(cfg, agents_game(**rules, num_kinds=kinds), 80)
    check_routing(run, recorder)
    assert check_networks(run, recorder) >= 150


@pytest.mark.parametrize("rules", [{}, RULES["all at once"]])
@pytest.mark.parametrize("policies", [4, 7])
def test_few_slots_are_enough_for_many_policies(recorder: Recorder, policies: int, rules: dict[str, Any]) -> None:
    cfg = make_cfg(num_policies=policies, num_workers=1, num_envs_per_worker=2, rollout=4)
    check_routing(play(cfg, agents_game(**rules), 200), recorder)


def test_one_draw_for_all_agents_of_an_environment(recorder: Recorder) -> None:
    run = play(make_cfg(num_policies=3, pbt_mix_policies_in_one_env=False), agents_game(), 200)
    check_routing(run, recorder)
    draws = [draw.policies for draws in recorder.draws.values() for draw in draws]
    assert {tuple(policies) for policies in draws} == {(0, 0, 0), (1, 1, 1), (2, 2, 2)}


@pytest.mark.parametrize("mix", [True, False])
def test_agents_that_differ_in_spaces_have_policies_of_their_own(recorder: Recorder, mix: bool) -> None:
    run = play(make_cfg(num_policies=4, pbt_mix_policies_in_one_env=mix), agents_game(num_kinds=2), 200)
    check_routing(run, recorder)
    draws = [draw.policies for draws in recorder.draws.values() for draw in draws]
    assert {policies[0] for policies in draws} == {policies[2] for policies in draws} == {0, 2}
    assert {policies[1] for policies in draws} == {1, 3}
    assert any(policies[0] != policies[2] for policies in draws) == mix


@pytest.mark.parametrize("form", [list, np.array])
def test_a_mapping_of_your_own(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, form: Callable) -> None:
    mapping = counting_agents.alone_or_together
    monkeypatch.setattr(counting_agents, "alone_or_together", lambda *given: form(mapping(*given)))
    cfg = make_cfg(num_policies=3, policy_mapping="counting_agents:alone_or_together")
    check_routing(play(cfg, agents_game(), 200), recorder)
    draws = {tuple(draw.policies) for draws in recorder.draws.values() for draw in draws}
    assert draws == {(0, 1, 1), (0, 2, 2)}


def test_each_agent_gets_the_reward_shaping_of_its_policy(recorder: Recorder) -> None:
    def prepare(buffers: SharedBuffers, models: list[torch.nn.Module]) -> None:
        buffers.shaping[:] = torch.tensor([[10.0 + policy, 20.0 + policy] for policy in range(3)])

    cfg = make_cfg(num_policies=3, with_pbt=True)
    run = play(cfg, agents_game(), 100, prepare)
    for number, env in run.envs.items():
        for episode, draw in enumerate(recorder.draws[number]):
            for agent, policy in enumerate(draw.policies):
                assert env.shapings[agent, episode] == {"speed": 10.0 + policy, "care": 20.0 + policy}


# ---- self-play -------------------------------------------------------------------------------------------------------

NUM_SNAPSHOTS = 3


def tell_tale_action(policy: int, snapshot: int) -> int:
    return policy * (NUM_SNAPSHOTS + 1) + snapshot + 1


def add_tell_tales(buffers: SharedBuffers, models: list[torch.nn.Module]) -> None:
    """Make every policy and every snapshot always take an action of its own."""
    for policy, model in enumerate(models):
        for snapshot in (*range(NUM_SNAPSHOTS), CURRENT):
            torch.nn.init.zeros_(model.policy_head.weight)
            torch.nn.init.zeros_(model.policy_head.bias)
            with torch.no_grad():
                model.policy_head.bias[tell_tale_action(policy, snapshot)] = 100.0
            if snapshot == CURRENT:
                buffers.policies[policy].weights.publish(model, 0)
            else:
                buffers.policies[policy].weights.add_snapshot(model, 50 + snapshot)


def self_play_cfg(fraction: float, **settings: Any) -> Config:
    return make_cfg(**{"num_workers": 1, "num_envs_per_worker": 2, "rollout": 4, "self_play_past_fraction": fraction,
                       "self_play_snapshots": NUM_SNAPSHOTS, **settings})


@pytest.mark.parametrize("rules", [{}, {"deaths": True}, RULES["turns"]], ids=["", "deaths", "turns"])
@pytest.mark.parametrize(("policies", "fraction"), [(1, 1.0), (3, 0.5)])
def test_earlier_versions_play_but_nobody_learns_from_them(recorder: Recorder, policies: int, fraction: float,
                                                           rules: dict[str, Any]) -> None:
    cfg = self_play_cfg(fraction, num_policies=policies, policy_workers_per_policy=2)
    game = agents_game(**rules, small_rewards=True, most_actions=policies * (NUM_SNAPSHOTS + 1) + 1)
    if "mask" in game.script.naps:  # a forbidden action tells nothing
        run = play(cfg, game, 80, lambda buffers, models: add_snapshots(buffers, models, NUM_SNAPSHOTS))
    else:
        run = play(cfg, game, 80, add_tell_tales)
        check_tell_tales(run, recorder)
    check_routing(run, recorder)
    check_matches(run, recorder)
    frozen = [np.array(draw.snapshots) != CURRENT for draws in recorder.draws.values() for draw in draws]
    assert {int(who.sum()) for who in frozen} == ({2} if fraction == 1.0 else {0, 1, 2})
    assert all(any(who[agent] for who in frozen) for agent in range(3))


def add_snapshots(buffers: SharedBuffers, models: list[torch.nn.Module], count: int) -> None:
    for shared, model in zip(buffers.policies, models, strict=True):
        for version in range(count):
            shared.weights.add_snapshot(model, 50 + version)


def check_tell_tales(run: Run, recorder: Recorder) -> None:
    """See that every action was taken by the policy and the snapshot that were drawn."""
    for number, env in run.envs.items():
        for (agent, episode, _), action in env.actions.items():
            draw = recorder.draws[number][episode]
            assert action == tell_tale_action(draw.policies[agent], draw.snapshots[agent])


def check_matches(run: Run, recorder: Recorder) -> None:
    """Compare the reported matches with those of all episodes after which another one has begun."""
    script, matches = run.game.script, Counter()
    for env, (last, _) in run.progress.items():
        for episode in range(last):
            draw = recorder.draws[env][episode]
            taking_part = [agent for agent in range(script.num_agents) if script.present(env, agent, episode)]
            times = {agent: range(script.arrival(env, agent, episode), script.end(env, agent, episode).step)
                     for agent in taking_part}
            returns = {agent: sum(script.reward(env, agent, episode, t, 0) for t in times[agent])
                       for agent in taking_part}
            frozen = [returns[agent] for agent in taking_part if draw.snapshots[agent] != CURRENT]
            current = [agent for agent in taking_part if draw.snapshots[agent] == CURRENT]
            if frozen and current:
                lead = np.mean([returns[agent] for agent in current]) - np.mean(frozen)
                result = 1.0 if lead > 1e-9 else 0.0 if lead < -1e-9 else 0.5
                matches.update((draw.policies[agent], result) for agent in current)
    assert matches
    assert Counter(run.matches) == matches


@pytest.mark.parametrize("rules", [{"absences": True}, {"naps": "info"}, {"late": True}],
                         ids=["absences", "inactive", "late"])
def test_agents_that_take_no_part_in_an_episode_have_no_match(recorder: Recorder, rules: dict[str, Any]) -> None:
    game = agents_game(**rules, small_rewards=True)
    run = play(self_play_cfg(0.5, num_policies=2), game, 120,
               lambda buffers, models: add_snapshots(buffers, models, NUM_SNAPSHOTS))
    check_routing(run, recorder)
    check_matches(run, recorder)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_no_deadlock_with_more_policies_than_fit_evenly(recorder: Recorder, fraction: float) -> None:
    cfg = self_play_cfg(fraction, num_policies=4)
    game = agents_game(deaths=True, absences=True, naps="missing")
    run = play(cfg, game, 250, lambda buffers, models: add_snapshots(buffers, models, 2))
    check_routing(run, recorder)


def test_without_snapshots_all_agents_learn(recorder: Recorder) -> None:
    run = play(self_play_cfg(1.0, num_policies=2), agents_game(), 100)
    check_routing(run, recorder)
    assert not run.matches
    assert all(set(draw.snapshots) == {CURRENT} for draws in recorder.draws.values() for draw in draws)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_frozen_agents_keep_their_memory(recorder: Recorder, rules: dict[str, Any]) -> None:
    """The actions of all agents count their decisions, which only a memory can do, across slots of 4 rows."""
    def count(buffers: SharedBuffers, models: list[torch.nn.Module]) -> None:
        numbers = torch.arange(12.0)
        for shared, model in zip(buffers.policies, models, strict=True):
            with torch.no_grad():  # the logits -100 (action - count)^2, but for what all have in common
                model.policy_head.weight.copy_(200 * numbers[:, None])
                model.policy_head.bias.copy_(-100 * numbers**2)
            shared.weights.publish(model, 0)
        add_snapshots(buffers, models, NUM_SNAPSHOTS)

    rules = rules | ({"naps": "info"} if "mask" in rules.get("naps", "") else {})  # a mask may forbid the count
    cfg = self_play_cfg(0.5, num_policies=2, core="counting_agents:CountingCore")
    run = play(cfg, agents_game(**rules, most_actions=12), 100, count)
    check_routing(run, recorder)
    for number, env in run.envs.items():
        for (agent, episode, t), action in env.actions.items():
            assert action == run.game.script.decisions(number, agent, episode).index(t)


# ---- synchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rules", "splits"), [(rules, 2) for rules in RULES.values()] + [({}, 1), (RULES["turns"], 1)],
                         ids=[*RULES, "", "turns, one split"])
def test_every_agent_hands_in_one_trajectory_for_each_dataset(recorder: Recorder, rules: dict[str, Any],
                                                              splits: int) -> None:
    cfg = make_cfg(async_rl=False, num_envs_per_worker=4, worker_num_splits=splits, batch_size=144,
                   policy_workers_per_policy=2, use_rnn=True)
    num_agents = 2 * 4 * 3
    assert cfg.trajectories_per_dataset == num_agents
    run = play(cfg, agents_game(**rules), 6 * num_agents)
    (parts,) = run.trajectories
    owners = {slot: iter(owners) for slot, owners in recorder.owners.items()}
    by_dataset: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        if part.dataset >= 0:
            by_dataset.setdefault(part.dataset, []).append(next(owners[part.slot]))
    assert len(by_dataset) >= 6
    for dataset in range(6):
        assert len(set(by_dataset[dataset])) == num_agents
    check_cuts(run, expect(run, recorder))
    assert check_networks(run, recorder) >= 100


def check_cuts(run: Run, expected: Expected) -> None:
    """Compare all valid rows with the rules; a trajectory that was cut loses one decision at most."""
    seen: set[Name] = set()
    tails: list[set[Name]] = []  # what the rows after the last valid one hold
    for part in run.trajectories[0]:
        valid = np.flatnonzero(part.tensors["valid"][:part.num_rows])
        for row in valid:
            name = part.name(row)
            assert name not in seen
            seen.add(name)
            cut = row == valid[-1] and row + 1 < part.num_rows
            check_row(run, 0, part, row, expected.rows[name], cut=cut and part.dataset >= 0)
            following = (*name[:3], expected.rows[name].next_step)
            if row + 1 < part.num_rows:
                assert part.name(row + 1) == following
                assert part.tensors["valid"][row + 1] == (row != valid[-1] and following in expected.rows)
        if part.dataset >= 0:
            tails.append({part.name(row) for row in range(valid[-1] + 1 if len(valid) else 0, part.num_rows)})
    lost = expected.rows.keys() - seen
    assert seen <= expected.rows.keys()
    assert all(len(tail & lost) <= 1 for tail in tails)
    assert lost <= set().union(*tails)
