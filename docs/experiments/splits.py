"""When does it pay to step one half of the environments while the actions of the other half are computed?

    python -m docs.experiments.splits --seconds 6

Pong with 64 environments in one split or two for each rollout worker: without a learner, on one worker and on two; then
with a learner, which works in whatever time the others leave.
"""

import argparse

from appo import APPO
from tools.benchmark import Sampler, measure_throughput

SYSTEMS = (("sampling only", Sampler, 1), ("sampling only", Sampler, 2), ("learning", APPO, 2))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    print("               rollout workers  splits  env_steps/s  cores idle")
    for what, system, workers in SYSTEMS:
        for splits in (1, 2):
            settings = {"env": "PongNoFrameskip-v4", "num_workers": workers, "num_envs_per_worker": 64 // workers,
                        "worker_num_splits": splits, "train_for_env_steps": 10**9}
            result = measure_throughput(settings, seconds, system)
            speed = f"{result.env_steps_per_sec:12,.0f} {result.idle:11.0%}"
            print(f"{what:14} {workers:15} {splits:7} {speed}", flush=True)
