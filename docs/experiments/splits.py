"""When does it pay to step one half of the environments while the actions of the other half are computed?

    python -m docs.experiments.splits --seconds 6

Pong with 64 environments in one split or two for each rollout worker: without a learner, on one worker; then on two
with a learner, which works in whatever time the others leave.
"""

import argparse
import contextlib
import io
import tempfile
import time
from typing import Any

import psutil

from learner import Learner
from trainer import APPO


class NoLearner(Learner):
    """Frees every trajectory at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.feed.insert = self.feed.free_slots


class Sampler(APPO):
    """The system without learning."""

    learner_class = NoLearner


def measure(system: type[APPO], seconds: float, **settings: Any) -> tuple[float, float]:
    """Return env_steps a second, and the share of the cores that was idle, after a warm-up that is as long."""
    silence = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, silence, system(
            "PongNoFrameskip-v4", train_dir=folder, train_for_env_steps=10**9, **settings) as running:
        for _ in range(2):
            begin, idle, steps = time.monotonic(), psutil.cpu_times().idle, running.env_steps
            running.train(should_stop=lambda begin=begin: time.monotonic() > begin + seconds)
            elapsed = time.monotonic() - begin
            found = (running.env_steps - steps) / elapsed, (psutil.cpu_times().idle - idle) / elapsed
    return found[0], found[1] / psutil.cpu_count()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    print("               rollout workers  splits  env_steps/s  cores idle")
    for what, system, workers in (("sampling only", Sampler, 1), ("learning", APPO, 2)):
        for splits in (1, 2):
            speed, idle = measure(system, seconds, num_workers=workers, num_envs_per_worker=64 // workers,
                                  worker_num_splits=splits)
            print(f"{what:14} {workers:15} {splits:7} {speed:12,.0f} {idle:11.0%}", flush=True)
