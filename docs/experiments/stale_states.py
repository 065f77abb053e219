"""How stale is a recurrent state that older weights have computed? `python -m docs.experiments.stale_states`

The learner unrolls a trajectory with today's weights, from the state that the sampler stored with those of some SGD
steps ago. The task is that of `memory.py`: here the older weights see the cue, and today's weights give the answer.

On 2 cores of a shared Zen 3 (AMD EPYC Milan), no GPU, seed 0, 12 s (seed 1 at lag 20: 0.2763, 0.0668, 0.6930):

    lag (SGD steps)   distance of the state   change of a log-probability: mean   largest
                  0                  0.0000                              0.0000    0.0000
                  1                  0.0294                              0.0154    0.1691
                  5                  0.1217                              0.0584    0.4037
                 20                  0.2970                              0.1040    0.9853
"""

import numpy as np
import torch
from torch import Tensor, nn

from docs.experiments import arguments, system
from docs.experiments.memory import DELAY, SETTINGS, Recall, observation
from learner import Learner

LAGS = (0, 1, 5, 20)  # SGD steps
Weights = dict[str, Tensor]


def keeping(kept: list[Weights]) -> type[Learner]:
    """Make a learner that keeps the weights after each SGD step."""
    class Keeping(Learner):
        def sgd_step(self, data: dict[str, Tensor], **last: bool) -> dict[str, Tensor]:
            statistics = super().sgd_step(data, **last)
            kept.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
            return statistics
    return Keeping


@torch.no_grad()
def unroll(model: nn.Module, weights: Weights, steps: range, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run both cues through some steps; return log-probabilities of all actions [2, 2] at the last, and the state."""
    model.load_state_dict(weights)
    obs = torch.tensor(np.stack([observation(t, cue) for cue in range(2) for t in steps]))
    parameters, _, state = model(model.normalize({"obs": obs}), state, torch.zeros(2, len(steps), dtype=torch.bool))
    return parameters.unflatten(0, (2, -1))[:, -1].log_softmax(-1), state


def staleness(model: nn.Module, kept: list[Weights], lag: int) -> tuple[float, float, float]:
    """Compare states of older weights with those of the newest, at every 10th SGD step of the training.

    Returns their mean distance, relative to their size, and the mean and the largest change of a log-probability.
    """
    distances, changes, empty = [], [], torch.zeros(2, model.state_size)
    for now in range(max(LAGS), len(kept), 10):
        stale, fresh = (unroll(model, weights, range(DELAY), empty)[1] for weights in (kept[now - lag], kept[now]))
        answers = [unroll(model, kept[now], range(DELAY, DELAY + 1), state)[0] for state in (stale, fresh)]
        distances.append((stale - fresh).norm() / fresh.norm())
        changes.append((answers[0] - answers[1]).abs())
    return float(torch.stack(distances).mean()), float(torch.stack(changes).mean()), float(torch.stack(changes).max())


def main() -> None:
    """Print the table; it takes more than 20 SGD steps, 5,000 env_steps."""
    given, kept = arguments(__doc__, env_steps=40_000), []
    with system(Recall, keeping(kept), use_rnn=True, seed=given.seed, **SETTINGS) as made:
        made.train(given.env_steps)
    print("lag (SGD steps)   distance of the state   change of a log-probability: mean   largest")
    for lag in LAGS:
        distance, mean, largest = staleness(made.models[0], kept, lag)
        print(f"{lag:15}{distance:24.4f}{mean:36.4f}{largest:10.4f}", flush=True)


if __name__ == "__main__":
    main()
