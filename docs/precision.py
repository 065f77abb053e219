"""How much bfloat16 changes the gradient: `python -m docs.precision`, while Pong is being learned.

From time to time the learner computes the gradient of a minibatch in bfloat16 and in float32, with the same weights,
and that of another minibatch, and prints the cosine between the first and each of the others. A cosine near 1 for the
same minibatch, far nearer than between two minibatches, means that rounding is lost in the noise of sampling. All flags
of `train.py` work here too.
"""

import contextlib
import io
import sys
import tempfile

import torch
from torch import Tensor

from learner import Learner
from runtime.command_line import make_parser
from runtime.user_error import UserError
from trainer import APPO

EVERY = 128  # SGD steps
SETTINGS = {"env": "PongNoFrameskip-v4", "train_for_env_steps": 300_000}


class ComparingLearner(Learner):
    """A learner that compares gradients before some of its SGD steps."""

    previous: dict[str, Tensor] | None = None  # minibatch

    def sgd_step(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compare the gradients of this minibatch and the one before now and then, then learn as always."""
        if self.previous is not None and self.state.sgd_steps % EVERY == 1:
            exact = self.gradient(data, torch.float32)
            cosines = [cosine(exact, self.gradient(minibatch, torch.bfloat16)) for minibatch in (data, self.previous)]
            rows = zip(*(cosine_of.values() for cosine_of in cosines), strict=True)
            numbers = [f"{same:9.4f} {other:6.2f}" for same, other in rows]
            print("  ".join([f"{self.state.decisions_trained:>9,}", *numbers]), file=sys.__stdout__, flush=True)
        self.previous = data
        return super().sgd_step(data)

    def gradient(self, data: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Compute the gradient of a minibatch with the network body in some arithmetic; change nothing."""
        own, self.model.arithmetic = self.model.arithmetic, dtype
        self.model.zero_grad(set_to_none=True)
        self.backward(data)
        self.model.arithmetic = own
        return {name: tensor.grad.clone() for name, tensor in self.model.named_parameters()}


class ComparingSystem(APPO):
    """The system with a learner that compares."""

    learner_class = ComparingLearner


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Return the cosine between two gradients, {name of a part of the network: value in [-1, 1]}."""
    cosines = {}
    for part in ("encoder", "policy_head", "value_head"):
        x, y = (torch.cat([tensor.double().flatten() for name, tensor in gradient.items() if name.startswith(part)])
                for gradient in (a, b))
        cosines[part] = float(x @ y / (x.norm() * y.norm()))
    return cosines


def main() -> None:
    """Learn for a while and print a table."""
    given = SETTINGS | vars(make_parser(__doc__).parse(sys.argv[1:]))
    print("cosine between the gradient in float32 and, in bfloat16, that of the same and of another minibatch\n")
    header = [f"{'env_steps':>9}", *(f"{part:>16}" for part in ("encoder", "policy head", "value head"))]
    print("  ".join(header), flush=True)
    silence = contextlib.redirect_stdout(io.StringIO())  # only the learner prints
    with tempfile.TemporaryDirectory() as folder, silence, ComparingSystem(**given | {"train_dir": folder}) as system:
        system.train()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"docs.precision: {error}", file=sys.stderr)
        sys.exit(2)
