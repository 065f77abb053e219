"""The interface of an algorithm; everything else is shared. `appo.py` is the first to read.

An algorithm is one class in one file, chosen by `--algo`. Its settings and its defaults for each family are data. Its
methods change nothing, but for `update`, and `after_sgd_step`, which may change a model's buffers:

    act          by policy workers, evaluation, tournaments and `evaluate.py`: observations -> actions, and what else a
                 trajectory keeps of them (`columns`)
    prepare      by the learner, once for each dataset, without gradient
    evaluate     by the learner, for parts of a minibatch, in several threads: what the network says, with gradient
    targets      by the learner, for a minibatch, without gradient
    loss         by the learner, for a minibatch; the optimizer follows its gradient
    update       by the learner, for a minibatch, instead of evaluate, targets and loss, where there are several losses

Every average in a loss is a `MaskedMean`: over the valid rows of a minibatch, so that masked rows change no loss and no
gradient, and of all ranks (`runtime/several.py`), so that an algorithm never sees how many there are.

The defaults here are those of an on-policy actor-critic, so that APPO, IMPALA, A3C and REINFORCE are little more than
`targets` and `loss`. The off-policy ones, Ape-X and PQL, have a feed of their own, a replay, and move target networks
in `after_sgd_step`.

Read next: `appo.py`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config, Values
from envs.flat_spaces import num_action_parameters
from feed import Data, Feed, select
from model import make_model
from runtime.several import Reducer, merge
from runtime.utils import UserError, combine
from shared_buffers import SharedBuffers, Spec

Outputs = tuple[Tensor, ...]  # what `Algorithm.evaluate` says


class MaskedMean:
    """Averages [..., T, B] tensors over the valid rows of a minibatch; 0 when there are none.

    Invalid rows may hold anything, also nan.
    """

    def __init__(self, valid: Tensor, reducer: Reducer) -> None:
        """Average over valid [T, B] bool."""
        self.invalid, self.own_count, self.reducer = ~valid, valid.sum(), reducer

    @functools.cached_property
    def count(self) -> Tensor:
        """The number of valid rows; where there are several ranks, the mean of theirs."""
        return self.reducer.gather(self.own_count)[0].sum().clamp(min=1) / self.reducer.size

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mean; of several ranks the part of this one: the mean of all parts is that of all rows.

        So a loss must be linear in it.
        """
        return self.masked(x).sum((-2, -1)) / self.count

    def masked(self, x: Tensor) -> Tensor:
        """Replace the invalid entries of x by 0."""
        return x.masked_fill(self.invalid, 0.0)

    def own_sums(self, x: Tensor) -> Tensor:
        """Return the count, the means, and the sums of squared differences from these, of x [n, T, B]: [1 + 2n]."""
        mean = self.masked(x).sum((-2, -1)) / self.own_count.clamp(min=1)
        squares = self.masked(x - mean[:, None, None]).square().sum((-2, -1))
        return torch.cat([self.own_count[None], mean, squares])

    def moments(self, x: Tensor, sums: Tensor | None = None) -> Tensor:
        """Return the means and the standard deviations of x [n, T, B], as [2, n], of all ranks.

        sums: their `own_sums`, [1 + 2n, ranks], where they are known.
        """
        sums = self.reducer.gather(self.own_sums(x))[0].T if sums is None else sums
        count, mean, squares = merge(sums[0], *sums[1:].T.chunk(2, 1))
        self.count = count.clamp(min=1) / self.reducer.size
        return torch.stack([mean, (squares / count.clamp(min=1)).sqrt()])

    def std(self, x: Tensor) -> Tensor:
        """Return the standard deviation of x."""
        return self.moments(x[None])[1, 0]


def gather_sums(reducer: Reducer, data: Data, minibatches: Sequence[slice | Tensor]) -> list[Data]:
    """Gather, in one message, the `own_sums` of every minibatch of what `Algorithm.prepare` has "described".

    Returns {"sums": [ranks, 1 + 2n]} for each minibatch; nothing, where nothing is described.
    """
    if "described" not in data:
        return [{}] * len(minibatches)
    own = [MaskedMean(select(data["valid"], rows), reducer).own_sums(select(data["described"], rows).movedim(-1, 0))
           for rows in minibatches]
    return [{"sums": sums} for sums in reducer.gather(torch.stack(own))[0].unbind(1)]


class Loss(NamedTuple):
    """What `Algorithm.loss` returns."""

    total: Tensor  # scalar; the gradient is that of this
    statistics: Data  # {name: scalar}, for the records; "kl" is what --lr_schedule=kl_adaptive follows
    priorities: Tensor | None = None  # [T, B], of the transitions of a replay


class Algorithm:
    """One algorithm with its settings. Made by each process that acts or learns.

    Population-based training and `Trainer.change` replace `cfg` between two datasets: read it when it is used.
    """

    Settings: type[Config] = Config
    # more than 1: datasets are so much shorter; weights are published after each, not after each SGD step, and so many
    # times fewer rows of each move the observation statistics
    datasets_at_once = 1
    inputs: tuple[str, ...] = ()  # columns of rows that `evaluate` is given as further arguments, [N * L, ...]
    profiles: Mapping[str, Values] = {}  # what differs from the defaults of Settings, for each family

    def __init__(self, cfg: Config, role: str = "") -> None:
        """role: that of the learner it is made for, if it is one of `Settings.roles`."""
        self.cfg = cfg
        self.role = role if role in cfg.roles else ""
        self.env_steps = 0  # sampled so far, resumes included; the learner sets it before each dataset, 0 where it acts

    # ---- acting --------------------------------------------------------------------------------------------------

    def make_model(self, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> nn.Module:
        """Make the network: the user's own, or `ActorCritic`. Its buffers hold what acting must know beside `cfg`.

        Raises `UserError` for spaces that the algorithm cannot learn in.
        """
        return make_model(self.cfg, obs_space, action_space)

    def columns(self, action_space: spaces.Space) -> dict[str, Spec]:
        """List what `act` adds to each row of a trajectory beside the actions."""
        return {"action_parameters": Spec((num_action_parameters(action_space),), torch.float32),
                "log_probs": Spec((), torch.float32),
                "values": Spec((), torch.float32)}  # in units of the scaled rewards

    def act(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor, *,
            deterministic: bool = False, agent_rank: Tensor | None = None) -> tuple[Data, Tensor]:
        """Choose actions.

        Args:
            obs: raw observations {name: [B, ...]}. rnn_states: [B, state_size]. new_episode: [B] bool.
            deterministic: take the most likely actions; for evaluations.
            agent_rank: [B], of each agent among all that sample, from 0 to 1; None: they are evaluated instead.

        Returns:
            The actions, [B, columns] float32 as a distribution gives them, and the `columns`, {name: [B, ...]}; the
            next hidden states.
        """
        parameters, values, rnn_states = model(model.normalize(obs), rnn_states, new_episode[:, None])
        distribution = model.distribution(parameters)
        actions = distribution.mode() if deterministic else distribution.sample()
        return {"actions": actions, "action_parameters": parameters, "log_probs": distribution.log_prob(actions),
                "values": model.returns.denormalize(values)}, rnn_states

    # ---- learning ------------------------------------------------------------------------------------------------

    def make_feed(self, buffers: SharedBuffers, policy: int, learner: int) -> Feed:
        """Make what turns trajectories into datasets."""
        return Feed(self.cfg, buffers, policy)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer of these parameters; the learner sets its rate before each step.

        Its state must be tensors that are made in the first step, on the parameters' device: several learners share
        them. So on a GPU it must be fused or `capturable`.
        """
        cfg = self.cfg
        betas = cfg.adam_beta1, cfg.adam_beta2
        return torch.optim.Adam(parameters, cfg.learning_rate, betas, cfg.adam_eps, fused=True)

    # update(model, data, descend) -> {name: scalar}: a whole SGD step on a minibatch [T(+1), B, ...], of an algorithm
    # with several losses, instead of evaluate, targets and loss. descend(loss, parameters) takes a step of these
    # parameters alone.
    update: Callable[..., Data] | None = None

    def after_sgd_step(self, model: nn.Module, sgd_steps: int) -> None:
        """Do what follows each SGD step: move a target network, tell those who act of settings (population)."""

    def prepare(self, model: nn.Module, data: Data, ask: Callable[..., Outputs]) -> Data:
        """Return what a dataset [B, T(+1), ...] needs beside its columns.

        ask(rows [N, L, ...]) returns what `evaluate` says of them, [N, L, ...]; ask(rows, function) what another
        function with the same arguments does. Of numbers "described" [B, T, n] each minibatch is given the `own_sums`
        of all ranks, "sums" [1 + 2n, ranks], which takes one message a dataset.
        """
        return {}

    def evaluate(self, model: nn.Module, obs: Data, rnn_states: Tensor, new_episode: Tensor) -> Outputs:
        """Evaluate N sequences of L steps (obs: {name: [N * L, ...]}): what `targets` and `loss` need, [N * L, ...]."""
        return model(model.normalize(obs), rnn_states, new_episode)[:2]

    def targets(self, model: nn.Module, outputs: Outputs, data: Data) -> Data:
        """Compute the targets of a minibatch, without gradient.

        Args:
            outputs: those of `evaluate`, [T+1, B, ...].
            data: the columns of the trajectories and what `prepare` added, [T(+1), B, ...]. Images may be normalized
                already; `model.normalize` leaves these as they are.

        Returns:
            {"targets": [T, B], in units of the rewards, and what else the loss needs}; nothing, where that computes
            them itself.
        """
        return {}

    def loss(self, model: nn.Module, outputs: Outputs, data: Data, mean: MaskedMean) -> Loss:
        """Compute the loss of a minibatch; arguments as of `targets`, whose results are part of the data."""
        raise NotImplementedError


# ---- statistics --------------------------------------------------------------------------------------------------


@torch.no_grad()
def moments_of(mean: MaskedMean, advantages: Tensor, targets: Tensor, values: Tensor,
               sums: Tensor | None = None) -> Tensor:
    """Return the means and deviations of advantages, targets R, values V and R - V, [2, 4].

    All [T, B], in units of the rewards. sums: as of `MaskedMean.moments`.
    """
    return mean.moments(torch.stack([advantages, targets, values, targets - values]), sums)


def describe(moments: Tensor) -> Data:
    """Return the statistics that every actor-critic reports.

    The explained variance, 1 - Var(R - V) / Var(R), is 1 for perfect values, 0 for useless ones.
    """
    means, deviations = moments
    unexplained = deviations[3] / deviations[1].clamp(min=1e-12)
    return {"advantage_mean": means[0], "advantage_std": deviations[0], "value_mean": means[2],
            "explained_variance": 1 - unexplained.square()}


def summarize(stats: Sequence[Data], model: nn.Module) -> Values:
    """Combine the statistics of a dataset's SGD steps.

    On a GPU this waits for the end of all. A step whose gradient is not finite was skipped, and counts in
    `skipped_sgd_steps` alone. Raises `UserError` when all were, or when weights are not finite: it is not the data.
    """
    steps = [{name: float(value) for name, value in step.items()} for step in stats]
    taken = [step for step in steps if math.isfinite(step["grad_norm"])]
    if not (taken and nn.utils.get_total_norm(list(model.parameters())).isfinite()):
        raise UserError("learning has diverged: gradients or weights are non-finite; use a lower --learning_rate")
    return {"skipped_sgd_steps": len(steps) - len(taken)} | combine(taken)
