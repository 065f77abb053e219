"""The policy network: normalizers, encoders, core, and the actor-critic that joins them.

    observations -> normalizers -> encoder (one per leaf, concatenated) -> core -> policy head, value head

Policy workers hold a copy for acting, the learner the original; both come from `Algorithm.make_model`. The running
statistics of observations and returns are buffers of the model, so they are published and saved with the weights, and
the policy that acted and the policy that learns see observations through the same numbers.

The encoder may run in bfloat16. The core (whose state would gather rounding errors), the heads and everything after
them are float32. Encoder, core or the whole model can be your own: see `examples/`. Read next: `encoders.py`.
"""

import itertools
import math
import numbers

import torch
from gymnasium import spaces
from torch import Tensor, nn

from config import Config
from distributions import ActionDistribution, check_action_space, forbid
from encoders import LeafEncoders, in_float32, initialize
from envs.flat_spaces import ACTION_MASK, action_leaves, num_action_parameters, num_options
from normalizers import (
    FixedNormalizer,
    ReturnNormalizer,
    RunningNormalizer,
    expand,
    expanded_space,
    normalized_names,
)
from reducer import ALONE, Reducer
from runtime.by_name import find_function
from runtime.user_error import UserError

# ---- cores -------------------------------------------------------------------------------------------------------


class FeedForwardCore(nn.Module):
    """The core of a feed-forward policy: features pass through, the hidden state has size 0."""

    def __init__(self, cfg: Config, in_size: int) -> None:
        super().__init__()
        self.out_size, self.state_size = in_size, 0

    def forward(self, features: Tensor, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor]:
        return features, rnn_states


class RecurrentCore(nn.Module):
    """A GRU or LSTM whose state is 0 at the beginning of every episode, wherever in a sequence that is.

    A sequence is cut wherever an episode of any of its rows begins, and each piece is one call of the fused kernel.
    Forward and backward of 32 rows x 33 steps, 512 units, 1 % of the steps beginning an episode, on one core of an
    EPYC (Zen 5): 100 ms; a loop over time takes 125, packed sequences 134. With small networks and episodes of 10 steps
    (8 rows x 65 steps, 64 units) packed sequences win, 3.4 ms against 9 and 7: they are no longer than the longest
    episode.
    """

    def __init__(self, cfg: Config, in_size: int) -> None:
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[cfg.rnn_type]
        self.rnn = kind(in_size, cfg.rnn_size, cfg.rnn_num_layers, batch_first=True)
        self.is_lstm = cfg.rnn_type == "lstm"
        self.num_layers = cfg.rnn_num_layers
        self.out_size = cfg.rnn_size
        self.state_size = cfg.rnn_num_layers * cfg.rnn_size * (2 if self.is_lstm else 1)
        initialize(self, cfg.policy_init_gain)

    def forward(self, features: Tensor, rnn_states: Tensor, new_episode: Tensor) -> tuple[Tensor, Tensor]:
        """Run over sequences.

        Args:
            features: [B, L, in_size] float32.
            rnn_states: the hidden states before the first step, [B, state_size] float32.
            new_episode: [B, L] bool; the state before such a step counts as 0.

        Returns:
            Outputs [B, L, out_size] and the hidden states after the last step [B, state_size].
        """
        length = features.shape[1]
        begins = new_episode[:, 1:].any(0).tolist() if length > 1 else []  # on a GPU a synchronization
        cuts = [0, *(t for t, begin in enumerate(begins, 1) if begin), length]
        outputs = []
        for begin, end in itertools.pairwise(cuts):
            rnn_states = rnn_states.masked_fill(new_episode[:, begin, None], 0.0)
            output, rnn_states = self._run(features[:, begin:end], rnn_states)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), rnn_states

    def _run(self, features: Tensor, rnn_states: Tensor) -> tuple[Tensor, Tensor]:
        state = rnn_states.unflatten(1, (self.num_layers, -1)).transpose(0, 1).contiguous()  # [layers, B, ...]
        state = tuple(half.contiguous() for half in state.chunk(2, -1)) if self.is_lstm else state
        output, state = self.rnn(features, state)
        state = torch.cat(state, -1) if self.is_lstm else state
        return output, state.transpose(0, 1).flatten(1)


# ---- actor-critic ------------------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """Policy and value for one observation space and one action space, with a shared encoder and core.

    `obs_space` maps the names of leaves to spaces (`envs/flat_spaces.py`). A model of your own is best a subclass: it
    takes the same arguments, and everything that is public here is used by the other components.
    """

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> None:
        super().__init__()
        check_action_space(cfg, action_space)
        self.arithmetic = torch.float32  # of the encoder
        self.action_space, self.squash = action_space, cfg.squash_actions
        self.leaves = {name: space for name, space in obs_space.items() if name != ACTION_MASK}
        if not self.leaves:
            raise UserError("the observation is nothing but an action mask; there is nothing to learn from")
        running = normalized_names(cfg, self.leaves)
        self.normalizers = nn.ModuleList((RunningNormalizer if name in running else FixedNormalizer)(cfg, space)
                                         for name, space in self.leaves.items())
        self.returns = ReturnNormalizer(running=cfg.normalize_returns)
        self.make_body(cfg, {name: expanded_space(space) for name, space in self.leaves.items()})
        self.state_size: int = self.core.state_size
        self.policy_head = nn.Linear(self.core.out_size, num_action_parameters(action_space))
        self.value_head = nn.Linear(self.core.out_size, 1)
        initialize(self.value_head, cfg.policy_init_gain)
        initialize(self.policy_head, 0.01)  # an almost uniform first policy
        is_log_std, is_logit = parameter_kinds(action_space)
        with torch.no_grad():
            self.policy_head.bias[is_log_std] = math.log(cfg.initial_stddev)
        # parameters that do not depend on the observation: their bias is what is learned
        self.has_constants = bool(is_log_std.any()) and not cfg.adaptive_stddev
        self.register_buffer("constant", is_log_std, persistent=False)
        self.register_buffer("maskable", is_logit.nonzero()[:, 0], persistent=False)

    def make_body(self, cfg: Config, obs_space: dict[str, spaces.Box]) -> None:
        """Make `encoder` and `core`, the parts between the normalizers and the heads."""
        make_encoder = find_function("encoder", cfg.encoder) if cfg.encoder else LeafEncoders
        self.encoder = make_encoder(cfg, obs_space)
        require(self.encoder, "encoder", "out_size")
        make_core = (find_function("core", cfg.core) if cfg.core else
                     RecurrentCore if cfg.use_rnn else FeedForwardCore)
        self.core = make_core(cfg, self.encoder.out_size)
        require(self.core, "core", "out_size", "state_size")

    def normalize(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Normalize raw observations [B, ...] into the arithmetic of the encoder; an action mask stays as it is."""
        normalized = {name: normalizer(expand(space, obs[name]), self.arithmetic)
                      for (name, space), normalizer in zip(self.leaves.items(), self.normalizers, strict=True)}
        return normalized | {name: mask for name, mask in obs.items() if name == ACTION_MASK}

    def forward(self, normalized: dict[str, Tensor], rnn_states: Tensor,
                new_episode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate B sequences of L steps.

        Args:
            normalized: observations {name: [B * L, ...]}, the steps of one sequence one after another.
            rnn_states: the hidden states before the first steps, [B, state_size] float32.
            new_episode: [B, L] bool, True where an episode begins and the hidden state counts as 0.

        Returns:
            Parameters of the action distribution [B * L, D] (masked logits: forbidden), normalized values [B * L],
            hidden states after the last step [B, state_size]; float32.
        """
        features = self.encoder(normalized)
        with in_float32(features.device):
            features, rnn_states = self.core(features.float().unflatten(0, new_episode.shape), rnn_states, new_episode)
            features = features.flatten(0, 1)
            parameters = self.policy_head(features)
            if self.has_constants:
                parameters = torch.where(self.constant, self.policy_head.bias, parameters)
            if ACTION_MASK in normalized:
                parameters = forbid(parameters, normalized[ACTION_MASK].bool(), self.maskable)
            return parameters, self.values(features, normalized), rnn_states

    def values(self, features: Tensor, normalized: dict[str, Tensor]) -> Tensor:
        """Compute the normalized values [B] of the core's outputs [B, out_size] (for the observations [B, ...])."""
        return self.value_head(features).squeeze(-1)

    def distribution(self, parameters: Tensor) -> ActionDistribution:
        """Make the action distribution of parameters [..., D]."""
        return ActionDistribution(self.action_space, parameters, squash=self.squash)

    def update_normalizers(self, obs: dict[str, Tensor], reducer: Reducer = ALONE) -> None:
        """Move the running statistics by raw observations [B, ...], and those of the other ranks."""
        for (name, space), normalizer in zip(self.leaves.items(), self.normalizers, strict=True):
            if isinstance(normalizer, RunningNormalizer):
                normalizer.update(expand(space, obs[name]), reducer)

    def body_to(self, dtype: torch.dtype) -> "ActorCritic":
        """Convert the encoder's weights, for acting: casting weights at every step would cost more than it saves."""
        self.encoder.to(dtype)
        self.arithmetic = dtype
        return self


def require(module: nn.Module, kind: str, *attributes: str) -> None:
    """Raise `UserError` when a part made by a user's function lacks an attribute."""
    for name in attributes:
        if not isinstance(getattr(module, name, None), numbers.Integral):
            raise UserError(f"the {kind} {type(module).__name__} needs an attribute {name}, a whole number")


def parameter_kinds(space: spaces.Space) -> tuple[Tensor, Tensor]:
    """Tell which parameters of a distribution are log standard deviations and which are logits of choices: [D] bool."""
    is_log_std, is_logit = [], []
    for leaf in action_leaves(space).values():
        size = num_action_parameters(leaf)
        is_box = isinstance(leaf, spaces.Box)
        is_log_std += [False] * (size // 2) + [True] * (size // 2) if is_box else [False] * size
        is_logit += [bool(num_options(leaf))] * size
    return torch.tensor(is_log_std), torch.tensor(is_logit)


def make_model(cfg: Config, obs_space: dict[str, spaces.Space], action_space: spaces.Space) -> ActorCritic:
    """Make the model of a configuration: the user's own, or `ActorCritic`."""
    model = (find_function("model", cfg.model) if cfg.model else ActorCritic)(cfg, obs_space, action_space)
    require(model, "model", "state_size")
    return model
