"""The rollout worker: steps environments, holds no policy.

It owns `worker_num_splits` splits, each a vector environment. While policy workers compute the actions of one split
it steps another, if there are several (double-buffered sampling, Sample Factory section 3.2): it sleeps only when no
split is ready. All data is written in place into the agents' trajectory slots; messages are described in
`shared_buffers.py`.

When an episode begins, each agent draws the policy that it plays. A trajectory belongs to one policy: if another one is
drawn, the agent leaves its unfinished slot behind, and the next agent that draws the slot's policy goes on filling it.

A row of a trajectory is one decision: obs[t], the action, and all that happened until the agent acts again. Agents that
are dead, gone or not on turn have no rows. After an episode's last observation one invalid row follows, to value that
observation: the environment is reset, and ignores the action.

Invariant: a split is in exactly one place: in requests or their answers, being stepped, or in `waiting` (for free
slots, or for the end of a pause). Read next: `slot_pool.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from config import Config
from envs.families import make_vector_env
from envs.vector_env import Step
from pbt import check_mapping, draw_policies, draw_snapshots, flatten_shaping, unflatten_shaping
from runtime.by_name import find_function
from runtime.heartbeat import STEPS
from runtime.seeding import ENVIRONMENT, SAMPLER, derive_seed
from runtime.user_error import EnvironmentFailure
from shared_buffers import CURRENT, HANDED_IN, IDLE, PAUSE, RESUME, SLOTS, SPLIT, WITH_WORKER, SharedBuffers
from slot_pool import SlotPool

NO_SLOT = -1
NEW_SEEDS = 1 << 20  # more than a run is started: a worker that takes the place of another plays other episodes
Index = np.ndarray | slice
MAX_IDLE_STEPS = 10_000  # steps in a row in which no agent of a split acts


class Split:
    """One vector environment and its M agents: what each of them is doing.

    The life of an agent in one episode, and the flags that are set meanwhile:

        absent     (fresh)                    it has not acted yet; when it first acts, its row t opens
        acting     open, acting               obs[t] is stored, an action is awaited
        pending    open                       it has acted, but not again: row t stays open and gathers rewards; when
                                              it acts again, the row closes and row t + 1 opens
        final      open, acting, final        the episode is over: row t only asks for the value of the last observation
        gone       (has_ended)                until the environment begins its next episode
    """

    def __init__(self, cfg: Config, index: int, buffers: SharedBuffers, make_env: Callable) -> None:
        self.index, self.number = index, index % cfg.worker_num_splits + 1
        self.first_slot = buffers.first_slot_of_kind
        self.env = make_env(cfg, cfg.envs_per_split)
        self.num_agents = len(self.env.agents)  # of one environment
        # [M], shared with the policy workers, the returns with the records
        self.awaited_policy = buffers.awaited_policy[index].numpy()  # the policy that must act for an agent, or IDLE
        self.snapshot = buffers.agent_snapshot[index].numpy()
        self.slots = buffers.agent_slot[index].numpy()
        self.t = buffers.agent_t[index].numpy()
        M = len(self.slots)
        self.slots[:] = NO_SLOT
        self.t[:] = 0
        self.snapshot[:] = CURRENT
        self.policy = np.zeros(M, np.int64)  # whom each agent plays in this episode
        self.open = np.zeros(M, bool)  # row t is under way
        self.final = np.zeros(M, bool)  # row t is the one after the episode's last observation
        self.acting = np.zeros(M, bool)  # an action is awaited for the latest observation
        self.fresh = np.ones(M, bool)  # the episode's first observation was not acted on yet
        self.rewards = np.zeros(M)  # since the last action
        self.has_ended = np.zeros(M, bool)  # the agent's episode is over
        self.episode_return = buffers.agent_return[index].numpy()
        self.episode_length = np.zeros(M, np.int64)  # decisions
        self.last_states = [np.zeros((M, specs["rnn_states"].shape[1]), np.float32) for specs in buffers.specs]
        start = buffers.start + int(buffers.generation[index // cfg.worker_num_splits]) * NEW_SEEDS
        self.latest: Step = self.env.reset(
            [derive_seed(cfg.seed, ENVIRONMENT, start, index, i) for i in range(cfg.envs_per_split)])
        self.num_awaited = 0  # policies that have not answered yet

    def match_results(self, own: slice) -> list[tuple[int, float]]:
        """Say how the current policies of an environment did against earlier ones in the episode that has ended.

        Returns (policy, 1 won, 0.5 drawn or 0 lost) of each; nothing where none of either took part.
        """
        took_part = self.has_ended[own]
        current = took_part & (self.snapshot[own] == CURRENT)
        earlier = took_part & ~current
        if not current.any() or not earlier.any():
            return []
        returns = self.episode_return[own]
        result = 0.5 + 0.5 * float(np.sign(returns[current].mean() - returns[earlier].mean()))
        return [(int(policy), result) for policy in self.policy[own][current]]

    def by_kind(self, chosen: np.ndarray) -> Iterator[tuple[int, Index, Index, np.ndarray]]:
        """For each kind with chosen agents ([M] bool): its number, these agents, their places in it, their slots.

        Slots are counted from the first one of the kind. A slice in place of a list of all agents saves copies.
        """
        if len(self.env.kinds) == 1:
            count = np.count_nonzero(chosen)  # ten times cheaper than any() and all()
            if count:
                agents = slice(None) if count == len(chosen) else chosen.nonzero()[0]
                yield 0, agents, agents, self.slots[agents]
            return
        for k, kind in enumerate(self.env.kinds):
            places = chosen[kind.index].nonzero()[0]
            if len(places):
                agents = kind.index[places]
                yield k, agents, places, self.slots[agents] - self.first_slot[k]


class RolloutWorker:
    """Steps its splits whenever their actions are there. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("inbox.get", "wait for actions"), ("step", lambda split: f"step, split {split.number}"), ("absorb", "store"),
        ("send_requests", "ask"))

    def __init__(self, cfg: Config, buffers: SharedBuffers, worker: int, report: Callable[[tuple], None],
                 make_env: Callable = make_vector_env) -> None:
        """Make and reset the environments.

        report(("episodes", [(policy, return, length, true objective or nan), ...])) is called when episodes of agents
        have finished, report(("matches", [(policy, result), ...])) for those against earlier policies: 1 won, 0.5
        drawn, 0 lost; report(("paused", worker, number)) when no action is awaited after (PAUSE, number).
        """
        self.cfg, self.buffers, self.report = cfg, buffers, report
        self.inbox = buffers.worker_inboxes[worker]
        # of each kind of agents: [S, T(+1), ...] views
        self.rows = [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in buffers.storage]
        self.number = worker
        self.goal = buffers.goal.numpy()
        self.env_steps_of_all = buffers.env_steps.numpy()
        self.env_steps = self.env_steps_of_all[worker : worker + 1]
        self.policy_steps = buffers.policy_steps[worker].numpy()
        self.generation = int(buffers.generation[worker])
        start = buffers.start + self.generation * NEW_SEEDS
        self.rng = np.random.default_rng(derive_seed(cfg.seed, SAMPLER, start, worker))
        self.mapping = find_function("policy_mapping", cfg.policy_mapping) if cfg.policy_mapping else None
        self.shaping = flatten_shaping(buffers.info.shaping) if buffers.shaping.numel() else {}
        self.draws = cfg.num_policies > 1 or cfg.self_play_past_fraction > 0 or bool(self.shaping)
        self.slot_place = buffers.slot_place.numpy()
        own = buffers.slots_of_worker(worker)
        self.pool = SlotPool(own, [slot for slots in own for slot in slots if self.slot_place[slot] != WITH_WORKER])
        for policy, slots in zip(buffers.policies, own, strict=True):  # the worker before may have died saying so
            policy.trajectories_done.put((SLOTS, *(slot for slot in slots if self.slot_place[slot] == HANDED_IN)))
        self.paused, self.pause_number = True, 0
        splits = range(worker * cfg.worker_num_splits, (worker + 1) * cfg.worker_num_splits)
        self.splits = {index: Split(cfg, index, buffers, make_env) for index in splits}
        for split in self.splits.values():
            self.absorb(split, split.latest)
        self.waiting = deque(self.splits.values())

    def run(self) -> None:
        """Serve messages until told to stop."""
        while self.inbox.serve(self.handle):
            pass
        self.close()

    def turn(self) -> None:
        """Do all there is to do (serial mode)."""
        while not self.inbox.empty():
            self.inbox.serve(self.handle)

    def handle(self, kind: int, *indices: int) -> None:
        """Act on one message of the inbox, then ask for all actions that can be asked for."""
        if kind == SPLIT:
            generation, index = divmod(indices[0], self.cfg.num_splits)
            if generation != self.generation:  # it was meant for the worker whose place this one has taken
                return
            split = self.splits[index]
            split.num_awaited -= 1
            if split.num_awaited:
                return
            self.step(split)
            self.waiting.append(split)
        elif kind == SLOTS:
            for slot in indices:
                if self.slot_place[slot] == WITH_WORKER:
                    self.pool.receive(self.buffers.policy_of_slot(slot), slot)
        else:
            assert kind in (PAUSE, RESUME), kind
            self.paused, self.pause_number = kind == PAUSE, indices[0]
        self.send_requests()

    # ---- stepping ------------------------------------------------------------------------------------------------

    def step(self, split: Split) -> None:
        """Step a split's environments with the actions in its trajectories and store what happened."""
        actions = [rows["actions"][split.slots[kind.index] - first, split.t[kind.index]]
                   for kind, rows, first in zip(split.env.kinds, self.rows, split.first_slot, strict=True)]
        self.inbox.beat(STEPS)
        step = split.env.step(actions)
        self.inbox.beat()
        self.absorb(split, step)

    def absorb(self, split: Split, step: Step) -> None:
        """Take over what the environments returned: close rows, count, draw policies, open new rows."""
        split.latest = step
        over = step.terminated | step.truncated
        split.rewards += step.rewards
        split.episode_return += step.rewards
        closing = split.open & (step.active | over | split.final)
        self.close_rows(split, step, closing)
        split.open &= ~(closing & split.final)  # now they are gone
        split.final = over & closing  # not of an agent that never acted: it has no row
        if np.count_nonzero(over):
            split.has_ended |= over
            self.report_episodes(split, over, step.objectives)
        for env in step.was_reset.nonzero()[0]:
            self.begin_episode(split, int(env))
        split.rewards[~split.open] = 0.0  # a reward before the first decision belongs to none
        split.acting = step.active | split.final
        split.open |= step.active
        self.store_observations(split, split.acting & (split.slots != NO_SLOT))
        self.finish_trajectories(split)

    def close_rows(self, split: Split, step: Step, closing: np.ndarray) -> None:
        """Complete the rows of some agents ([M] bool); count the steps."""
        valid = closing & ~split.final
        for k, agents, _, slots in split.by_kind(closing):
            rows, t = self.rows[k], split.t[agents]
            rows["rewards"][slots, t] = split.rewards[agents]
            rows["terminated"][slots, t] = step.terminated[agents]
            rows["truncated"][slots, t] = step.truncated[agents]
            rows["valid"][slots, t] = valid[agents]
        split.t += closing
        split.rewards[closing] = 0.0
        split.fresh &= ~closing
        split.episode_length += valid
        self.env_steps += len(step.was_reset) - np.count_nonzero(step.was_reset)
        if self.draws:
            self.policy_steps += np.bincount(split.policy[valid & (split.snapshot == CURRENT)],
                                             minlength=len(self.policy_steps))
        else:
            self.policy_steps += np.count_nonzero(valid)

    def store_observations(self, split: Split, chosen: np.ndarray) -> None:
        """Write the latest observations of some agents ([M] bool, all with a slot) into row t."""
        for k, agents, places, slots in split.by_kind(chosen):
            rows, t = self.rows[k], split.t[agents]
            for name, value in split.latest.obs[k].items():
                rows[f"obs/{name}"][slots, t] = value[places]
            rows["new_episode"][slots, t] = split.fresh[agents]

    def report_episodes(self, split: Split, over: np.ndarray, objectives: np.ndarray) -> None:
        """Report the true returns and lengths of episodes that ended, but not those of earlier policies."""
        episodes = [(int(split.policy[m]), float(split.episode_return[m]), int(split.episode_length[m]),
                     float(objectives[m])) for m in np.flatnonzero(over & (split.snapshot == CURRENT))
                    if split.episode_length[m]]  # else it never acted
        if episodes:
            self.report(("episodes", episodes))

    # ---- episodes ------------------------------------------------------------------------------------------------

    def begin_episode(self, split: Split, env: int) -> None:
        """Reset what is counted for an environment's agents and draw the policies they play."""
        own = slice(env * split.num_agents, (env + 1) * split.num_agents)
        if self.draws:
            if results := split.match_results(own):
                self.report(("matches", results))
            self.draw(split, env, own)
        split.fresh[own], split.has_ended[own] = True, False
        split.episode_return[own] = split.episode_length[own] = 0

    def draw(self, split: Split, env: int, own: slice) -> None:
        """Draw the policies of an environment's agents, and give them their reward shaping."""
        cfg, info = self.cfg, self.buffers.info
        if self.mapping is not None:
            policies = self.mapping(info.agents, cfg.num_policies, self.rng)
            check_mapping(policies, info.agents, info.kind_of_agent, self.buffers.kind_of_policy)
        else:
            policies = draw_policies(info.kind_of_agent, self.buffers.kind_of_policy, self.rng,
                                     mix=cfg.pbt_mix_policies_in_one_env)
        available = [self.buffers.policies[policy].weights.num_snapshots for policy in policies]
        snapshots = draw_snapshots(available, cfg.self_play_past_fraction, self.rng)
        learns = np.array(snapshots) == CURRENT
        changed = (split.policy[own] != policies) | ((split.snapshot[own] == CURRENT) != learns)
        for m in np.flatnonzero(changed) + own.start:
            self.leave_slot(split, m)
        split.policy[own], split.snapshot[own] = policies, snapshots
        for agent, policy in enumerate(policies if self.shaping else ()):
            values = dict(zip(self.shaping, self.buffers.shaping[policy].tolist(), strict=True))
            split.env.set_shaping(env, agent, unflatten_shaping(info.shaping, values))

    # ---- slots ---------------------------------------------------------------------------------------------------

    def leave_slot(self, split: Split, m: int) -> None:
        """Take an agent's slot away at the beginning of an episode, so that another agent can go on filling it."""
        slot = int(split.slots[m])
        t = int(split.t[m])
        policy = split.policy[m]
        split.slots[m], split.t[m] = NO_SLOT, 0
        if slot == NO_SLOT:
            return
        learns = split.snapshot[m] == CURRENT
        if learns and t == self.cfg.rollout:
            self.hand_in(policy, [slot])
        else:
            self.pool.leave(policy, slot, t, is_worthless=not learns)

    def finish_trajectories(self, split: Split) -> None:
        """Hand full slots to the learner.

        In turns, where the slots of all agents come back together, a full one ends those of all agents of the split:
        some may be shorter, since agents that do not act have no rows.
        """
        full = split.t == self.cfg.rollout
        if not np.count_nonzero(full):
            return
        if not self.cfg.async_rl:
            self.cut_short_ones(split, ~full)
            full[:] = True
        for k, agents, _, slots in split.by_kind(full):
            states, rows = split.last_states[k], self.rows[k]["rnn_states"]
            states[agents] = rows[slots, split.t[agents]]
            frozen = split.snapshot[agents] != CURRENT
            rows[slots[frozen], 0] = states[agents][frozen]  # nobody learns from these: they begin anew
        split.t[full] = 0
        learns = full & (split.snapshot == CURRENT)
        for policy in set(split.policy[learns].tolist()):
            self.hand_in(policy, split.slots[learns & (split.policy == policy)].tolist())
        split.slots[learns] = NO_SLOT
        self.store_observations(split, split.acting & full & (split.slots != NO_SLOT))

    def cut_short_ones(self, split: Split, short: np.ndarray) -> None:
        """End the unfinished trajectories of some agents ([M] bool) after the last row whose value is known.

        The row of obs[t] is dropped: its value when acting, which GAE needs, is not known yet.
        """
        pending = short & split.open & ~split.acting
        split.t[pending] += 1  # the hidden state after the action
        for m in np.flatnonzero(short):
            self.cut(int(split.slots[m]), max(int(split.t[m]) - 1, 0))
        split.open &= ~pending
        split.fresh &= ~pending

    def hand_in(self, policy: int, slots: list[int]) -> None:
        """Give slots of a policy to its learner."""
        self.pool.send_away(policy, slots)
        self.slot_place[slots] = HANDED_IN
        self.buffers.policies[policy].trajectories_done.put((SLOTS, *slots))

    def cut(self, slot: int, t: int) -> None:
        """End a trajectory before row t: what follows is not valid, the row before bootstraps from obs[t]."""
        k = max(k for k, first in enumerate(self.buffers.first_slot_of_kind) if slot >= first)
        rows, slot = self.rows[k], slot - self.buffers.first_slot_of_kind[k]
        rows["valid"][slot, t:] = False
        if t:
            rows["truncated"][slot, t - 1] |= ~rows["terminated"][slot, t - 1]

    def take_slots(self, split: Split) -> bool:
        """Give a slot to each agent of a split that has none, all of them or none; tell whether there were enough.

        (If two splits took what there is, both would wait, where one could go on.)
        """
        needy = split.slots == NO_SLOT
        if not np.count_nonzero(needy):
            return True
        # agents in the middle of an episode, and those of frozen policies, need empty slots
        flexible = needy & split.fresh & (split.snapshot == CURRENT)
        rigid = needy & ~flexible
        for policy, slot, t in self.pool.take_out(split.policy[rigid]):
            self.cut(slot, t)
            self.hand_in(policy, [slot])
        if not self.pool.suffices(split.policy[rigid], split.policy[flexible]):
            return False
        for m in (*np.flatnonzero(rigid), *np.flatnonzero(flexible)):
            split.slots[m], split.t[m] = self.pool.take(split.policy[m], may_go_on=bool(flexible[m]))
        for k, agents, _, slots in split.by_kind(needy):
            self.rows[k]["rnn_states"][slots, split.t[agents]] = split.last_states[k][agents]
        self.store_observations(split, split.acting & needy)
        return True

    # ---- requests ------------------------------------------------------------------------------------------------

    def send_requests(self) -> None:
        """Ask for the actions of every waiting split whose agents have slots.

        A split without slots does not hold up the others: in turns they must finish their trajectories before the
        learner frees any slot.
        """
        if self.paused and self.pause_number and len(self.waiting) == len(self.splits):
            self.report(("paused", self.number, self.pause_number))
            self.pause_number = 0
        if self.paused or self.has_reached_goal():
            return
        for _ in range(len(self.waiting)):
            split = self.waiting.popleft()
            if not self.ask(split):
                self.waiting.append(split)

    def has_reached_goal(self) -> bool:
        """Tell whether enough was sampled; what is under way adds at most one step of each environment."""
        return np.add.reduce(self.env_steps_of_all) >= self.goal[0]

    def ask(self, split: Split) -> bool:
        """Send the requests for a split's actions, one to each policy; False: too few slots, or no more is wanted."""
        idle_steps = 0
        while not self.has_reached_goal() and self.take_slots(split):
            split.awaited_policy[:] = np.where(split.acting, split.policy, IDLE)
            policies = set(split.policy[split.acting].tolist())
            split.num_awaited = len(policies)
            for policy in policies:
                self.buffers.policies[policy].requests.put(
                    (SPLIT, split.index + self.cfg.num_splits * self.generation))
            if policies:
                return True
            idle_steps += 1
            if idle_steps > MAX_IDLE_STEPS:
                raise EnvironmentFailure(f"{self.cfg.env}: no agent has acted in {MAX_IDLE_STEPS:,} steps")
            self.step(split)
        return False

    def close(self) -> None:
        """Close the environments."""
        for split in self.splits.values():
            split.env.close()
