"""The rollout worker: steps environments, holds no policy.

It owns `worker_num_splits` splits, each a vector environment. While policy workers compute the actions of one split
it steps another, if there are several (double-buffered sampling, Sample Factory section 3.2): it sleeps only when no
split is ready. All data is written in place into the agents' trajectory slots; messages are described in
`shared_buffers.py`.

A row of a trajectory is one decision: obs[t], the action, and all that happened until the agent acts again. After an
episode's last observation one invalid row follows, to value that observation: the environment is reset, and ignores the
action.

What only several agents or policies need stands at the end of `RolloutWorker` (policies that are drawn for each agent
when an episode begins, perhaps earlier versions of them), of `Split` (trajectories that are cut), and in `SlotPool`
(trajectories that an agent leaves unfinished since it draws another policy).

Invariant: a split is in exactly one place: in requests or their answers, being stepped, or in `waiting` (for free
slots, or for the end of a pause). Read next: `policy_worker.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from config import Config
from envs.families import make_vector_env
from envs.vector_env import Step, VectorEnv
from pbt import draw_mapped, draw_policies, draw_snapshots, unflatten_shaping
from runtime.processes import STEPS, Report
from runtime.utils import ENVIRONMENT, SAMPLER, EnvironmentFailure, derive_seed
from shared_buffers import CURRENT, HANDED_IN, IDLE, PAUSE, RESUME, SLOTS, SPLIT, WITH_WORKER, Inbox, SharedBuffers

NO_SLOT = -1
NEW_SEEDS = 1 << 20  # more than a run is started: a worker that takes the place of another plays other episodes
MAX_IDLE_STEPS = 10_000  # steps in a row in which no agent of a split acts
NOT_PLAYED = {  # what a row holds that only shows the last observation of an episode, or of a trajectory that is cut
    "rewards": 0.0,
    "terminated": False,
    "truncated": False,
    "valid": False,
    "values": np.nan,  # who needs them asks when it learns
    "q_best": np.nan,
}


class RolloutWorker:
    """Steps its splits whenever their actions are there. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("inbox.get", "wait for actions"),
        ("step", lambda split: f"step, split {split.number}"),
        ("record", "store"),
        ("send_requests", "ask"),
    )

    def __init__(self, cfg: Config, buffers: SharedBuffers, worker: int, report: Report,
                 make_env: Callable[[Config, int], VectorEnv] = make_vector_env) -> None:
        """Make and reset the environments.

        report(("episodes", [(policy, return, length, true objective or nan), ...])) is called when episodes of agents
        have finished, report(("matches", [(policy, result), ...])) for those against earlier policies: 1 won, 0.5
        drawn, 0 lost; report(("paused", worker, number)) when no action is awaited after (PAUSE, number).
        """
        self.cfg = cfg
        self.buffers = buffers
        self.number = worker
        self.report = report
        self.inbox = buffers.worker_inboxes[worker]
        self.goal, self.env_steps = buffers.goal.numpy(), buffers.env_steps.numpy()
        self.policy_steps = buffers.policy_steps[worker].numpy()
        self.paused, self.pause_number = True, 0
        self.may_warn = worker == 0  # what holds for all environments, one worker says once
        self.generation = int(buffers.generation[worker])
        start = buffers.start + self.generation * NEW_SEEDS
        self.rng = np.random.default_rng(derive_seed(cfg.seed, SAMPLER, start, worker))
        own = slice(worker * buffers.slots_per_worker, (worker + 1) * buffers.slots_per_worker)
        self.pools = [SlotPool(buffers.slots_of(policy)[own], buffers.slot_place.numpy(), shared.trajectories_done)
                      for policy, shared in enumerate(buffers.policies)]
        self.splits = [Split(cfg, buffers, worker * cfg.worker_num_splits + number, start,
                             make_env(cfg, cfg.num_envs_per_worker // cfg.worker_num_splits))
                       for number in range(cfg.worker_num_splits)]
        for split in self.splits:
            self.record(split, split.latest)
        self.waiting = list(self.splits)

    def run(self) -> None:
        """Serve messages until told to stop."""
        while self.inbox.serve(self.handle):
            pass
        self.close()

    def turn(self) -> None:
        """Do all there is to do (serial mode)."""
        while not self.inbox.empty():
            self.inbox.serve(self.handle)

    def close(self) -> None:
        """Close the environments."""
        for split in self.splits:
            split.env.close()

    def handle(self, kind: int, *indices: int) -> None:
        """Act on one message of the inbox, then ask for all actions that can be asked for."""
        if kind == SPLIT:
            generation, index = divmod(indices[0], self.cfg.num_splits)
            if generation != self.generation:  # it was meant for the worker whose place this one has taken
                return
            split = self.splits[index % len(self.splits)]
            split.num_awaited -= 1
            if not split.num_awaited:
                self.step(split)
                self.waiting.append(split)
        elif kind == SLOTS:
            for slot in indices:
                self.pools[slot // self.buffers.num_slots].receive(slot)
        else:
            assert kind in (PAUSE, RESUME), kind
            self.paused, self.pause_number = kind == PAUSE, indices[0]
        self.send_requests()

    # ---- requests ------------------------------------------------------------------------------------------------

    def send_requests(self) -> None:
        """Ask for the actions of every waiting split whose agents have slots.

        A split without slots does not hold up the others: in turns they must finish their trajectories before the
        learner frees any slot.
        """
        if self.paused and self.pause_number and len(self.waiting) == len(self.splits):
            self.report(("paused", self.number, self.pause_number))
            self.pause_number = 0
        if not self.paused:
            self.waiting = [split for split in self.waiting if not self.ask(split)]

    def ask(self, split: "Split") -> bool:
        """Send the requests for a split's actions, one to each policy; False: too few slots, or no more is wanted."""
        for _ in range(MAX_IDLE_STEPS):
            has_reached_goal = np.add.reduce(self.env_steps) >= self.goal[0]  # but for what is under way
            if has_reached_goal or not self.take_slots(split):
                return False
            split.awaited_policy[:] = np.where(split.acting, split.policy, IDLE)
            policies = set(split.policy[split.acting].tolist())
            split.num_awaited = len(policies)
            request = SPLIT, split.index + self.cfg.num_splits * self.generation
            for policy in policies:
                self.buffers.policies[policy].requests.put(request)
            if policies:
                return True
            self.step(split)
        raise EnvironmentFailure(f"{self.cfg.env}: no agent has acted in {MAX_IDLE_STEPS:,} steps")

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self, split: "Split") -> None:
        """Step a split's environments with the actions in its trajectories, and store what happened."""
        self.inbox.beat(STEPS)
        step = split.env.step([rows["actions"][at] for _, rows, _, _, at in split.by_kind(split.slots != NO_SLOT)])
        self.inbox.beat()
        self.record(split, step)

    def record(self, split: "Split", step: Step) -> None:
        """Store what followed the actions in row t, and the new observations in row t + 1.

        Report the true returns and lengths of episodes that ended, but not those of earlier policies.
        """
        over = step.terminated | step.truncated
        valid = split.close_rows(step, over)
        self.env_steps[self.number] += np.count_nonzero(~step.was_reset | over[:: split.num_agents])
        self.policy_steps += np.bincount(split.policy[valid & split.learns], minlength=len(self.policy_steps))
        ended = over & split.learns & split.whole & (split.episode_length > 0)  # else the agent never acted
        split.whole |= over
        if np.count_nonzero(ended):
            columns = split.policy, split.episode_return, split.episode_length, step.objectives
            episodes = zip(*[column[ended].tolist() for column in columns], strict=True)
            self.report(("episodes", list(episodes)))
        if step.last is not None:
            split.insert_last(step, over)
            if not step.last and step.truncated.any() and self.may_warn:
                self.may_warn = False
                self.report(("log", f"{self.cfg.env} gives no final_obs: where time ends an episode, the value of the "
                             "observation before the last one stands for what would follow", True))
        if self.cfg.num_policies > 1 or self.cfg.self_play_past_fraction:
            for env in step.was_reset.nonzero()[0].tolist():
                self.draw(split, env, slice(env * split.num_agents, (env + 1) * split.num_agents))
        begins = np.repeat(step.was_reset, split.num_agents)
        split.fresh[begins] = True
        split.episode_return[begins] = split.episode_length[begins] = 0
        split.open_rows(step)
        self.finish_trajectories(split)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def take_slots(self, split: "Split") -> bool:
        """Give a slot to each agent of a split that has none, all of them or none; return whether there were enough.

        (If two splits took what there is, both would wait, where one could go on.)
        """
        needy = split.slots == NO_SLOT
        if not np.count_nonzero(needy):
            return True
        # agents in the middle of an episode, and those of frozen policies, need empty slots
        may_go_on = needy & split.fresh & split.learns
        empty = needy & ~may_go_on
        is_enough = True
        for policy, pool in enumerate(self.pools):
            num_empty, num_other = (np.count_nonzero(split.policy[agents] == policy) for agents in (empty, may_go_on))
            for slot, t in pool.take_out(num_empty):
                split.cut(slot, t)
                pool.hand_in([slot])
            is_enough &= pool.suffices(num_empty, num_other)
        if not is_enough:
            return False
        for m in (*empty.nonzero()[0], *may_go_on.nonzero()[0]):
            split.slots[m], split.t[m] = self.pools[split.policy[m]].take(may_go_on=may_go_on[m])
        for k, rows, agents, _, at in split.by_kind(needy):
            rows["rnn_states"][at] = split.last_states[k][agents]
        split.store_observations(split.acting & needy)
        return True

    def finish_trajectories(self, split: "Split") -> None:
        """Hand full slots to the learner; those of earlier policies are free again.

        In turns, where the slots of all agents come back together, a full one ends those of all agents of the split:
        some may be shorter, since agents that do not act have no rows.
        """
        full = split.t == self.cfg.rollout
        if not np.count_nonzero(full):
            return
        if not self.cfg.async_rl:
            split.cut_short(~full)
            full[:] = True
        for k, rows, agents, _, at in split.by_kind(full):
            split.last_states[k][agents] = rows["rnn_states"][at]
        split.t[full] = self.cfg.rollout
        self.release_slots(split, full)

    def release_slots(self, split: "Split", agents: np.ndarray) -> None:
        """Take the slots of some agents ([M] bool) away: full ones go to the learner, other agents go on with the rest.

        Nobody learns from what frozen policies have played: their slots are free.
        """
        full = agents & split.learns & (split.t == self.cfg.rollout)
        for policy in set(split.policy[agents].tolist()):
            own, pool = agents & (split.policy == policy), self.pools[policy]
            pool.hand_in(split.slots[own & full].tolist())
            for m in (own & ~full).nonzero()[0]:
                pool.leave(split.slots[m], split.t[m] if split.learns[m] else 0)
        split.slots[agents], split.t[agents] = NO_SLOT, 0

    # ---- policies that are drawn ---------------------------------------------------------------------------------

    def draw(self, split: "Split", env: int, own: slice) -> None:
        """Draw who plays the next episode of an environment; agents that change their policy leave their slots.

        own: the environment's agents.
        """
        self.report_match(split, own)
        policies, snapshots = self.draw_players()
        learns = np.array(snapshots) == CURRENT
        changed = np.zeros(len(split.slots), bool)
        changed[own] = (split.policy[own] != policies) | (split.learns[own] != learns)
        self.release_slots(split, changed & (split.slots != NO_SLOT))
        split.policy[own], split.snapshot[own], split.learns[own] = policies, snapshots, learns
        if self.buffers.shaping_names:
            for agent, policy in enumerate(policies):
                numbers = iter(self.buffers.shaping[policy].tolist())
                split.env.set_shaping(env, agent, unflatten_shaping(self.buffers.info.shaping, numbers))

    def report_match(self, split: "Split", own: slice) -> None:
        """Say how the current policies of an environment did against earlier ones in the episode that has ended.

        Nothing where none of either acted.
        """
        took_part, returns = split.episode_length[own] > 0, split.episode_return[own]
        current, earlier = took_part & split.learns[own], took_part & ~split.learns[own]
        if current.any() and earlier.any():
            result = 0.5 + 0.5 * float(np.sign(returns[current].mean() - returns[earlier].mean()))
            self.report(("matches", [(policy, result) for policy in split.policy[own][current].tolist()]))

    def draw_players(self) -> tuple[Sequence[int], list[int]]:
        """Return the policies of an environment's agents, and their snapshots; of an agent that learns CURRENT."""
        cfg, info, kind_of_policy = self.cfg, self.buffers.info, self.buffers.kind_of_policy
        if cfg.policy_mapping:
            policies = draw_mapped(cfg, info, kind_of_policy, self.rng)
        else:
            policies = draw_policies(info.kind_of_agent, kind_of_policy, self.rng, mix=cfg.pbt_mix_policies_in_one_env)
        available = [self.buffers.policies[policy].weights.num_snapshots for policy in policies]
        return policies, draw_snapshots(available, cfg.self_play_past_fraction, self.rng)


class Split:
    """One vector environment and its M agents: which row of which trajectory each of them fills.

    Agents need not act in every step. The life of one in one episode, and the flags that are set meanwhile:

        absent     (fresh)                    it has not acted yet; when it first acts, its row t opens
        acting     open, acting               obs[t] is stored, an action is awaited
        pending    open                       it has acted, but not again: row t stays open and gathers rewards; when
                                              it acts again, the row closes and row t + 1 opens
        final      open, acting, final        the episode is over: row t only asks for the value of the last observation
        gone                                  until the environment begins its next episode
    """

    def __init__(self, cfg: Config, buffers: SharedBuffers, index: int, start: int, env: VectorEnv) -> None:
        self.index, self.number = index, index % cfg.worker_num_splits + 1
        self.env = env
        self.num_agents = len(env.agents)  # of one environment
        # [M], shared with the policy workers, the returns with the records
        self.awaited_policy, self.snapshot, self.slots, self.t, self.episode_return = (
            table[index].numpy() for table in (buffers.awaited_policy, buffers.agent_snapshot, buffers.agent_slot,
                                               buffers.agent_t, buffers.agent_return))
        M = len(self.slots)
        self.slots[:], self.t[:], self.snapshot[:] = NO_SLOT, 0, CURRENT
        self.policy = np.zeros(M, np.int64)  # whom each agent plays in this episode
        self.learns = np.ones(M, bool)  # its newest weights, not a snapshot
        self.episode_length = np.zeros(M, np.int64)  # decisions
        self.open = np.zeros(M, bool)  # row t is under way
        self.acting = np.zeros(M, bool)  # an action is awaited for the latest observation
        self.final = np.zeros(M, bool)  # row t is the one after the episode's last observation
        self.fresh = np.ones(M, bool)  # the episode's first observation was not acted on yet
        self.rewards = np.zeros(M)  # since the last action
        self.latest = env.reset([derive_seed(cfg.seed, ENVIRONMENT, start, index, i) for i in range(env.num_envs)])
        # of each kind of agents: the trajectories, [S, T(+1), ...], and the hidden states after the last ones
        self.rows = [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in buffers.storage]
        self.last_states = [np.zeros((M, rows["rnn_states"].shape[2]), np.float32) for rows in self.rows]
        self.num_awaited = 0  # policies that have not answered yet
        self.whole = np.full(M, not env.spread_ages())  # this episode was played from its beginning

    def by_kind(self, chosen: np.ndarray) -> Iterator[tuple]:
        """For each kind with chosen agents ([M] bool): its number and trajectories, these agents, their places in it.

        And where in the trajectories their rows t lie. A slice in place of a list of all agents saves copies.
        """
        is_only = len(self.rows) == 1
        for k, (kind, rows) in enumerate(zip(self.env.kinds, self.rows, strict=True)):
            own = chosen if is_only else chosen[kind.index]
            count = np.count_nonzero(own)  # ten times cheaper than any() and all()
            if count:
                places = slice(None) if count == len(own) else own.nonzero()[0]
                agents = places if is_only else kind.index[places]
                yield k, rows, agents, places, (self.slots[agents], self.t[agents])

    def close_rows(self, step: Step, over: np.ndarray) -> np.ndarray:
        """Complete rows t with what followed the actions; return which of them are decisions, [M] bool.

        With one agent that always acts all rows are completed, and all count but those of a reset.
        over: whose episode has ended with this step, [M] bool.
        """
        self.rewards += step.rewards
        self.closing = self.open & (step.active | over | self.final)  # row t ends
        valid = self.closing & ~self.final
        self.open &= ~(self.closing & self.final)  # now they are gone
        self.final = over & self.closing & ~step.active  # not of an agent that never acted: it has no row
        self.fresh &= ~self.closing
        for _, rows, agents, _, at in self.by_kind(self.closing):
            rows["rewards"][at] = self.rewards[agents]
            rows["terminated"][at] = (step.terminated | step.life_lost)[agents]
            rows["truncated"][at] = step.truncated[agents]
            rows["valid"][at] = valid[agents]
        self.t += self.closing
        self.episode_return += step.rewards
        self.episode_length += valid
        return valid

    def open_rows(self, step: Step) -> None:
        """Begin rows t with the observations on which agents act next."""
        self.latest = step
        self.rewards[self.closing | ~self.open] = 0.0  # one before the first decision belongs to none
        self.acting = step.active | self.final
        self.open |= step.active
        chosen = self.acting & (self.slots != NO_SLOT)
        if step.last is not None:  # the next trajectory begins with what comes after the last observation of this one
            chosen &= ~(step.terminated | step.truncated) | (self.t < self.rows[0]["valid"].shape[1])
        self.store_observations(chosen)

    def store_observations(self, chosen: np.ndarray) -> None:
        """Write the latest observations of some agents ([M] bool, all with a slot) into rows t."""
        for k, rows, agents, places, at in self.by_kind(chosen):
            for name, value in self.latest.obs[k].items():
                rows[f"obs/{name}"][at] = value[places]
            rows["new_episode"][at] = self.fresh[agents]

    def insert_last(self, step: Step, over: np.ndarray) -> None:
        """Put the last observations of episodes, where they came with the first ones of the next, into rows t.

        These are no decisions, as if the environments were reset in a step of its own.
        """
        rows, slots, t = self.rows[0], self.slots[over], self.t[over]
        for name in step.obs[0]:
            column = rows[f"obs/{name}"]
            column[slots, t] = step.last[name] if step.last else column[slots, t - 1]
        rows["new_episode"][slots, t] = False
        between = over & (self.t < rows["valid"].shape[1])  # else the trajectory ends there
        at = self.slots[between], self.t[between]
        for name in rows.keys() & NOT_PLAYED.keys():
            rows[name][at] = NOT_PLAYED[name]
        self.t += between

    # ---- more than one agent -------------------------------------------------------------------------------------

    def cut(self, slot: int, t: int) -> None:
        """End a trajectory before row t: what follows is not valid, the row before bootstraps from obs[t]."""
        for rows in self.rows:  # those of the other kinds have no use for this slot
            rows["valid"][slot, t:] = False
            for name in rows.keys() & NOT_PLAYED.keys():
                rows[name][slot, t] = NOT_PLAYED[name]
            if t:
                rows["truncated"][slot, t - 1] |= ~rows["terminated"][slot, t - 1]

    def cut_short(self, short: np.ndarray) -> None:
        """End the unfinished trajectories of some agents ([M] bool) after the last row that is complete."""
        for m in short.nonzero()[0]:
            self.cut(self.slots[m], self.t[m])
        pending = short & self.open & ~self.acting
        self.t[pending] += 1  # the hidden state after the action
        self.open &= ~pending
        self.fresh &= ~pending


class SlotPool:
    """The slots of one policy in one rollout worker, and where each of them is.

    free          nobody has it
    held          an agent fills it
    unfinished    an agent that drew another policy has left it behind at row t; the next agent that draws this policy
                  goes on filling it
    away          with the learner, until that gives it back
    """

    def __init__(self, slots: Iterable[int], place: np.ndarray, done: Inbox) -> None:
        """Begin with these slots.

        Args:
            place: the shared table, which says which of them are away.
            done: the learner's inbox. A worker whose place this one has taken may have died before it wrote there.
        """
        self.place, self.done = place, done
        self.away = {slot for slot in slots if place[slot] != WITH_WORKER}
        self.free = deque(slot for slot in slots if slot not in self.away)
        self.unfinished: deque[tuple[int, int]] = deque()  # (slot, t)
        self.hand_in([slot for slot in slots if place[slot] == HANDED_IN])

    def hand_in(self, slots: Sequence[int]) -> None:
        """Give held slots to the learner."""
        self.away.update(slots)
        self.place[slots] = HANDED_IN
        self.done.put((SLOTS, *slots))

    def receive(self, slot: int) -> None:
        """Take a slot back that the learner has done with, if it was away: a message may come twice."""
        if slot in self.away and self.place[slot] == WITH_WORKER:
            self.away.remove(slot)
            self.free.append(slot)

    def leave(self, slot: int, t: int) -> None:
        """Take a held slot, in which t rows are worth going on with, away from its agent."""
        if t:
            self.unfinished.append((slot, t))
        else:
            self.free.append(slot)

    def take_out(self, num_empty: int) -> list[tuple[int, int]]:
        """Take unfinished slots out, (slot, t), which the caller must cut and hand in.

        It takes them only when too few slots are free or away for so many agents that need empty ones: none waits for
        ever.
        """
        missing = num_empty - len(self.free) - len(self.away)
        return [self.unfinished.popleft() for _ in range(min(missing, len(self.unfinished)))]

    def suffices(self, num_empty: int, num_other: int) -> bool:
        """Return whether there are so many empty slots, and so many others that may be unfinished."""
        return num_empty <= len(self.free) and num_empty + num_other <= len(self.free) + len(self.unfinished)

    def take(self, *, may_go_on: bool) -> tuple[int, int]:
        """Lend a slot and the row to begin at: an unfinished one if there is one and the agent may go on in it."""
        if may_go_on and self.unfinished:
            return self.unfinished.popleft()
        return self.free.popleft(), 0
