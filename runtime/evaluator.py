"""Playing trained policies: for a score while they train, and for `evaluate.py`.

`Player` turns the observations of some agents into actions, `play` yields what every episode of an environment brought
its agents, and `Evaluator` is the process that scores the newest weights on environments of its own whenever the
supervisor asks, without stopping the training.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from algorithm import Algorithm
from algorithms import algorithm_class
from config import Config
from distributions import ActionDistribution, forbid
from envs.families import make_vector_env
from envs.flat_spaces import ACTION_MASK, num_action_parameters, num_columns
from envs.vector_env import Step, VectorEnv
from model import parameter_kinds
from runtime import checkpoint
from runtime.generators import fork_rng, left_alone, seed_all
from runtime.heartbeat import STEPS
from runtime.machine import body_dtype
from runtime.seeding import EVALUATION, derive_seed
from runtime.training_state import origin
from shared_buffers import SharedBuffers

MAX_ENVS = 20


class Player:
    """A policy that acts for some agents of a vector environment, all of one kind."""

    def __init__(self, algorithm: Algorithm, model: nn.Module, env: VectorEnv, agents: np.ndarray,
                 *, deterministic: bool) -> None:
        """Play agents [B] (numbers within M) with a model (after `body_to`)."""
        self.algorithm, self.model, self.deterministic, self.agents = algorithm, model, deterministic, agents
        self.kind, self.places = find_places(env, agents)
        self.device = next(model.parameters()).device
        self.rnn_states = torch.zeros(len(agents), model.state_size, device=self.device)

    @torch.inference_mode()
    def act(self, step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        """Write the actions for a step into those of the agents' kind; an episode begins where fresh [M] is true."""
        obs = {name: torch.as_tensor(value[self.places]).to(self.device)
               for name, value in step.obs[self.kind].items()}
        new = torch.as_tensor(fresh[self.agents]).to(self.device)
        columns, rnn_states = self.algorithm.act(self.model, obs, self.rnn_states, new,
                                                 deterministic=self.deterministic)
        active = torch.as_tensor(step.active[self.agents, None]).to(self.device)
        self.rnn_states = torch.where(active, rnn_states, self.rnn_states)  # the others see nothing
        actions[self.kind][self.places] = columns["actions"].cpu().numpy()


class RandomPlayer:
    """Acts at random for some agents of one kind: every allowed choice alike, numbers from a standard Gaussian."""

    def __init__(self, env: VectorEnv, agents: np.ndarray) -> None:
        self.kind, self.places = find_places(env, agents)
        self.space = env.kinds[self.kind].action_space
        self.maskable = parameter_kinds(self.space)[1].nonzero()[:, 0]

    def act(self, step: Step, fresh: np.ndarray, actions: list[np.ndarray]) -> None:
        """Write random actions into those of the agents' kind."""
        parameters = torch.zeros(len(self.places), num_action_parameters(self.space))
        if ACTION_MASK in step.obs[self.kind]:
            mask = torch.as_tensor(step.obs[self.kind][ACTION_MASK][self.places]).bool()
            parameters = forbid(parameters, mask, self.maskable)
        actions[self.kind][self.places] = ActionDistribution(self.space, parameters).sample().numpy()


def find_places(env: VectorEnv, agents: np.ndarray) -> tuple[int, np.ndarray]:
    """Tell of which kind agents are (numbers within M), and their places in it."""
    kind = env.kind_of_agent[int(agents[0]) % len(env.agents)]
    return kind, np.searchsorted(env.kinds[kind].index, agents)


def evaluation_seeds(seed: int, num_envs: int) -> list[int]:
    """Return the seeds of the environments that are played, others than those of any training."""
    return [derive_seed(seed, EVALUATION, index=i) for i in range(num_envs)]


class Episode(NamedTuple):
    """What an episode of one environment brought its agents."""

    env: int
    returns: np.ndarray  # [A] true returns
    lengths: np.ndarray  # [A] decisions
    objectives: np.ndarray  # [A] true objectives, nan where the environment tells none


def play(env: VectorEnv, players: Sequence[Player | RandomPlayer], num_episodes: int, seed: int,
         on_step: Callable[[VectorEnv], None] = lambda env: None) -> Iterator[Episode]:
    """Play episodes, as evenly spread over the environments as can be; yield each one.

    How many episodes each environment plays is fixed beforehand, so that short episodes are not counted more often than
    long ones. on_step(env) is called for the first observation and after each step.
    """
    step = env.reset(evaluation_seeds(seed, env.num_envs))
    on_step(env)
    shape = (env.num_envs, len(env.agents))
    returns = np.zeros(shape)
    lengths = np.zeros(shape, np.int64)
    alive = np.ones(shape, bool)
    objectives = np.full(shape, np.nan)
    fresh = np.ones(shape, bool)  # not acted yet in this episode
    left = num_episodes // env.num_envs + (np.arange(env.num_envs) < num_episodes % env.num_envs)
    while left.any():
        actions = [np.zeros((len(kind.index), num_columns(kind.action_space)), np.float32) for kind in env.kinds]
        for player in players:
            player.act(step, fresh.ravel(), actions)
        acted = step.active.reshape(shape)
        fresh &= ~acted
        step = env.step(actions)
        on_step(env)
        over = (step.terminated | step.truncated).reshape(shape)
        objectives = np.where(over, step.objectives.reshape(shape), objectives)
        returns += step.rewards.reshape(shape)
        lengths += acted
        running, alive = alive.any(1), alive & ~over
        # an episode ends with its last agent; one that never came does not hold it up
        for i in np.flatnonzero(running & (~alive.any(1) | step.was_reset)):
            alive[i] = False
            if left[i]:
                left[i] -= 1
                yield Episode(int(i), returns[i].copy(), lengths[i].copy(), objectives[i].copy())
        returns[step.was_reset] = 0.0
        lengths[step.was_reset] = 0
        objectives[step.was_reset] = np.nan
        alive[step.was_reset] = fresh[step.was_reset] = True


class Abandoned(Exception):
    """The run is stopping; nobody waits for the rest of an evaluation."""


class Evaluator:
    """Scores the newest weights on its own environments. One process; shares `SharedBuffers`."""

    SPANS = (  # what `tools/timeline.py` records
        ("buffers.evaluations.get", "wait for a request"), ("evaluate", "evaluate"), ("env.step", "step"))

    def __init__(self, cfg: Config, buffers: SharedBuffers, devices: Sequence[torch.device],
                 report: Callable[[tuple], None]) -> None:
        """Make the environments.

        report(("evaluated", policy, {name: number})) is called after each evaluation, and then report(("best", policy))
        when its weights were saved as the best.
        """
        self.cfg, self.buffers, self.report = cfg, buffers, report
        self.env = make_vector_env(cfg, min(cfg.eval_episodes, MAX_ENVS))
        self.devices = devices
        self.algorithm = algorithm_class(cfg.algo)(cfg)
        self.models: list[nn.Module] = []
        with fork_rng(devices):
            for policy, device in enumerate(devices):
                obs_space, action_space = buffers.spaces_of(policy)
                model = self.algorithm.make_model(obs_space, action_space).to(device)
                self.models.append(model.body_to(body_dtype(cfg, device, obs_space)).eval())

    def run(self) -> None:
        """Evaluate whenever asked, until told to stop."""
        while self.buffers.evaluations.serve(self.handle):
            pass
        self.close()

    def turn(self) -> None:
        """Do all there is to do (serial mode)."""
        while not self.buffers.evaluations.empty():
            self.buffers.evaluations.serve(self.handle)

    def handle(self, kind: int, index: int) -> None:
        """Score the newest policies, always on the same episodes; give up when the run is stopping."""
        with contextlib.suppress(Abandoned):
            for policy in range(len(self.models)):
                self.evaluate(policy)

    def evaluate(self, policy: int) -> None:
        """Let a policy play all agents of its kind; save the best. Every other kind is played by its first policy.

        While it plays the learner goes on, so it is the evaluator that saves: the very weights that have the score.
        """
        env_steps = int(self.buffers.env_steps.sum())
        weights, version = self.buffers.policies[policy].weights.read()
        self.models[policy].load_state_dict(weights)
        kinds = self.buffers.kind_of_policy
        with left_alone(), fork_rng(self.devices):  # in serial mode training must draw the same numbers as without
            seed_all(derive_seed(self.cfg.seed, EVALUATION, part=1))
            players = []
            for number, kind in enumerate(self.env.kinds):
                plays = policy if number == kinds[policy] else kinds.index(number)
                if plays != policy:
                    self.buffers.policies[plays].weights.refresh(self.models[plays])
                players.append(Player(self.algorithm, self.models[plays], self.env, kind.index,
                                      deterministic=self.cfg.eval_deterministic))
            episodes = list(play(self.env, players, self.cfg.eval_episodes, self.cfg.seed, self._go_on))
        self.buffers.evaluations.beat()
        own = np.array(self.env.kind_of_agent) == kinds[policy]
        returns = np.array([episode.returns[own].mean() for episode in episodes])
        objectives = np.concatenate([episode.objectives[own] for episode in episodes])
        objectives = objectives[~np.isnan(objectives)]
        result = {
            "eval_return": float(returns.mean()), "eval_return_std": float(returns.std()),
            "eval_length": float(np.mean([episode.lengths[own].mean() for episode in episodes])),
            "eval_env_steps": env_steps, "eval_sgd_steps": version}
        if len(objectives):
            result["eval_true_objective"] = float(objectives.mean())
        score = result.get("eval_true_objective", result["eval_return"])
        is_best = self.save_best(policy, score, checkpoint.sort_of_score(
            is_objective=len(objectives) > 0, is_evaluation=True), weights, version, env_steps)
        self.report(("evaluated", policy, result))
        if is_best:
            self.report(("best", policy))

    def save_best(self, policy: int, score: float, sort: int, weights: dict[str, Tensor], version: int,
                  env_steps: int) -> bool:
        """Save weights as the best ones if they are; of equal ones those that have learned longer. Tell whether."""
        buffers = self.buffers
        best = float(buffers.best_score[policy])
        best_sort = int(buffers.best_sort[policy])
        if not (checkpoint.is_better(score, sort, best, best_sort) or (score, sort) == (best, best_sort)):
            return False
        state = origin(self.cfg, buffers, policy) | {"model": weights, "sgd_steps": version, "env_steps": env_steps,
                                                     "score": score, "sort_of_score": sort}
        try:
            checkpoint.save_checkpoint(state, checkpoint.policy_dir(self.cfg.run_dir, policy) / checkpoint.BEST)
        except OSError as error:
            self.report(("unsaved", policy, None, error.strerror or str(error)))
            return False
        buffers.best_score[policy], buffers.best_sort[policy] = score, sort
        return True

    def _go_on(self, env: VectorEnv) -> None:
        self.buffers.evaluations.beat(STEPS)
        if self.buffers.stopping:
            raise Abandoned

    def close(self) -> None:
        """Close the environments."""
        self.env.close()
