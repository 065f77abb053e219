"""The experiments of the walkthrough. Each file answers one question: `python -m docs.experiments.time_limits`.

A run that `system` makes stays in one process (`--serial_mode`), so the same seed gives the same numbers.
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator
from typing import Any

from learner import Learner
from trainer import Trainer


@contextlib.contextmanager
def system(env: Any, learner: type[Learner] = Learner, **settings: Any) -> Iterator[Trainer]:
    """Make a system that prints nothing and whose folder is deleted at the end of the `with` block."""
    class System(Trainer):
        learner_class = learner

    silence = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, silence, System(
            env, train_dir=folder, device="cpu", serial_mode=True, **settings) as made:
        yield made


def arguments(description: str, env_steps: int | None = None) -> argparse.Namespace:
    """Parse the command line of an experiment: its seed and, where it trains, the env_steps of each run."""
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=0)
    if env_steps is not None:
        parser.add_argument("--env_steps", type=int, default=env_steps, help="of each run (default: %(default)s)")
    return parser.parse_args()
