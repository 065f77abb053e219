"""What does the age of the acting policy do to learning? `python -m docs.experiments.lag`

CartPole; the lag is forced: only every K-th version of the weights is published. rho = min(1, pi/mu) is the weight that
V-trace gives a step.

On 2 cores of a shared Zen 3 (AMD EPYC Milan), no GPU, seed 0, 30 s:

                   lag: mean  largest   mean rho   pi/mu > 1   mean return
    V-trace              0.0        0      0.982         55%         299.5
    GAE                  0.0        0      0.972         51%         215.2
    V-trace             23.4       48      0.955         55%         191.7
    GAE                 23.4       48      0.965         56%         135.5
    V-trace            107.2      240      0.938         54%          60.6
    GAE                107.2      240      0.949         54%          56.6

The returns of seed 1: 280.3, 296.7; 175.4, 188.2; 62.4, 59.8. The lag costs speed: all that is sampled between two
published versions is of one policy. rho stays near 1, so V-trace has little to correct, and makes no difference beyond
that of seeds; nor without the KL penalty and with a constant learning rate (lag 107: rho 0.92, 67 with it, 66 without).
Without lag it is still not GAE: it computes its targets anew in every SGD step. For a lag that biases values see
`chain.py`.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from appo import AsyncPPO
from docs.experiments import arguments, system
from learner import Learner

EVERY = (1, 64, 256)  # SGD steps


class Weighed(AsyncPPO):
    """APPO that also reports the mean of rho, and the share of the steps where pi/mu is above 1, which rho cuts."""

    def loss(self, model: Any, outputs: tuple[Tensor, ...], data: dict[str, Tensor], mean: Any) -> Any:
        loss = super().loss(model, outputs, data, mean)
        policy = model.distribution(outputs[0][:-1].detach())
        ratios = mean.masked(policy.log_prob(data["actions"]) - data["log_probs"]).exp()
        rho, cut = mean(torch.stack([ratios.clamp(max=1), (ratios > 1).float()]))
        return loss._replace(statistics=loss.statistics | {"rho": rho, "cut": cut})


def late(every: int) -> type[Learner]:
    """Make a learner that publishes every so-many-th version of its weights only."""
    class Late(Learner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            publish = self.weights.publish
            self.weights.publish = lambda model, version, **how: version % every or publish(model, version, **how)
    return Late


def main() -> None:
    """Print the table."""
    given = arguments(__doc__, env_steps=40_000)
    print("               lag: mean  largest   mean rho   pi/mu > 1   mean return")
    for every, with_vtrace in itertools.product(EVERY, (True, False)):
        rows = []
        with system("CartPole-v1", late(every), algo=Weighed, with_vtrace=with_vtrace, seed=given.seed) as made:
            made.train(given.env_steps, rows.append)
        lag, rho, cut = (sum(row[name] for row in rows) / len(rows) for name in ("policy_lag_mean", "rho", "cut"))
        print(f"{'V-trace' if with_vtrace else 'GAE':15}{lag:9.1f}{max(row['policy_lag_max'] for row in rows):9}"
              f"{rho:11.3f}{cut:12.0%}{rows[-1]['mean_return']:14.1f}", flush=True)


if __name__ == "__main__":
    main()
