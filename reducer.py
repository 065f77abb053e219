"""What stands between the gradients and the optimizer: how several learners of one policy become one.

`Reducer` is the simplest case, one learner, and costs nothing. Subclasses for several (none is built) would override:

    all-reduce   `sum` and `share`, to add over the learners; `step`, to add the gradients in one flat tensor first;
                 `any`, true everywhere when it is true somewhere, so that all learners take the same steps
    Hogwild      `step`, to add the gradients to weights that all learners share, without a lock

Used by `learner.py` and `losses.py`. Read next: `pbt.py`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Reducer:
    """One learner: nothing to agree upon."""

    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor without gradient over all learners."""
        return x

    def share(self, part: Tensor) -> Tensor:
        """Add over all learners a part of a mean: the value is that of all, the gradient that of this part."""
        return part

    def any(self, flag: bool) -> bool:
        """Tell whether a flag is set on any learner."""
        return flag

    def step(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients to a norm, take one step, return the norm before. Raises for one that is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
        optimizer.step()
        return norm
