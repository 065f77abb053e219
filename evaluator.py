"""Playing a trained policy: for a score while it trains, and for `evaluate.py`.

`Player` turns observations into actions, `play` yields the true return and length of each episode, and `Evaluator` is
the process that scores the newest weights on environments of its own whenever the supervisor asks, without stopping the
training. Read next: `evaluate.py`.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from config import Config
from envs import VectorEnv, make_vector_env
from flat_spaces import Observation
from model import body_dtype, make_model
from shared_buffers import EVALUATE, STOP, SharedBuffers

MAX_ENVS = 20
SEED_OFFSET = 1_000_000  # evaluation plays other episodes than training


class Player:
    """A policy that turns observations of N environments into actions."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, num_envs: int, *, deterministic: bool) -> None:
        """Play with a model whose encoder has the given arithmetic (`ActorCritic.body_to`)."""
        self.model, self.dtype, self.deterministic = model, dtype, deterministic
        self.device = next(model.parameters()).device
        self.rnn_states = torch.zeros(num_envs, model.state_size, device=self.device)

    @torch.inference_mode()
    def act(self, obs: Observation, new_episode: np.ndarray) -> np.ndarray:
        """Choose actions [N, columns] for observations {name: [N, ...]}; a new episode begins without memories."""
        tensors = {name: torch.as_tensor(value, device=self.device) for name, value in obs.items()}
        new = torch.as_tensor(new_episode[:, None], device=self.device)
        parameters, _, self.rnn_states = self.model(self.model.normalize(tensors, self.dtype), self.rnn_states, new)
        distribution = self.model.distribution(parameters)
        actions = distribution.mode() if self.deterministic else distribution.sample()
        return actions.cpu().numpy()


def play(env: VectorEnv, player: Player, num_episodes: int, seed: int,
         on_step: Callable[[VectorEnv], None] = lambda env: None) -> Iterator[tuple[float, int]]:
    """Play episodes, as evenly spread over the environments as can be; yield each one's true return and length.

    How many episodes each environment plays is fixed beforehand, so that short episodes are not counted more often than
    long ones. on_step(env) is called for the first observation and after each step.
    """
    obs = env.reset(seed)
    on_step(env)
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    left = num_episodes // env.num_envs + (np.arange(env.num_envs) < num_episodes % env.num_envs)
    resetting = np.zeros(env.num_envs, bool)  # this step only resets; the observation before it was the last one
    new_episode = np.ones(env.num_envs, bool)
    while left.any():
        obs, rewards, terminated, truncated = env.step(player.act(obs, new_episode))
        on_step(env)
        new_episode = resetting
        returns += np.where(resetting, 0.0, rewards)
        lengths += ~resetting
        resetting = terminated | truncated
        for i in np.flatnonzero(resetting):
            if left[i]:
                left[i] -= 1
                yield float(returns[i]), int(lengths[i])
            returns[i], lengths[i] = 0.0, 0


class Abandoned(Exception):
    """The run is stopping; nobody waits for the rest of an evaluation."""


class Evaluator:
    """Scores the newest weights on its own environments. One process; shares `SharedBuffers`."""

    def __init__(self, cfg: Config, buffers: SharedBuffers, device: torch.device,
                 report: Callable[[tuple], None]) -> None:
        """Make the environments; report(("evaluated", {name: number})) is called after each evaluation."""
        self.cfg, self.buffers, self.report = cfg, buffers, report
        self.env = make_vector_env(cfg, min(cfg.eval_episodes, MAX_ENVS))
        self.dtype = body_dtype(cfg, device, buffers.obs_space)
        self.fork_rng = lambda: torch.random.fork_rng([device] if device.type == "cuda" else [])
        with self.fork_rng():
            model = make_model(cfg, buffers.obs_space, buffers.action_space)
        self.model = model.to(device).body_to(self.dtype).eval()

    def run(self) -> None:
        """Evaluate whenever asked, until told to stop."""
        while (message := self.buffers.evaluations.get())[0] != STOP:
            self.handle(*message)
        self.close()

    def handle(self, kind: int, index: int) -> None:
        """Score the newest policy, always on the same episodes; give up when the run is stopping."""
        assert kind == EVALUATE, kind
        env_steps = int(self.buffers.env_steps.sum())
        sgd_steps = self.buffers.weights.refresh(self.model)
        player = Player(self.model, self.dtype, self.env.num_envs, deterministic=self.cfg.eval_deterministic)
        seed = self.cfg.seed + SEED_OFFSET
        try:
            with self.fork_rng():  # in serial mode training must draw the same numbers as without
                torch.manual_seed(seed)
                episodes = list(play(self.env, player, self.cfg.eval_episodes, seed, self._go_on))
        except Abandoned:
            return
        returns, lengths = np.array(episodes, dtype=np.float64).T
        self.report(("evaluated", {
            "eval_return": float(returns.mean()), "eval_return_std": float(returns.std()),
            "eval_length": float(lengths.mean()), "eval_env_steps": env_steps, "eval_sgd_steps": sgd_steps}))

    def _go_on(self, env: VectorEnv) -> None:
        self.buffers.evaluation_steps += 1
        if self.buffers.stopping:
            raise Abandoned

    def close(self) -> None:
        """Close the environments."""
        self.env.close()
