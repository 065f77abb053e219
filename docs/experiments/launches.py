"""How often is a GPU asked to do something, and how often does somebody wait for it? No GPU needed.

    python -m docs.experiments.launches

Pong runs on `tools/pretend_gpu.py`, a device written in Python that counts operators (launches), copies and waits.
"""

import contextlib
import io
import tempfile

from appo import APPO
from learner import Learner
from policy_worker import PolicyWorker
from tools.pretend_gpu import DEVICE, PretendGPU

found = {}  # what was counted in the last batch of actions, and in the last SGD step


class CountingPolicyWorker(PolicyWorker):
    def act(self, *args):
        gpu.take_counts()
        super().act(*args)
        found["a batch of actions"] = gpu.take_counts()


class CountingLearner(Learner):
    def sgd_step(self, data):
        gpu.take_counts()
        statistics = super().sgd_step(data)
        found["an SGD step"] = gpu.take_counts()
        return statistics


class System(APPO):
    policy_worker_class, learner_class = CountingPolicyWorker, CountingLearner


if __name__ == "__main__":
    for num_envs in (2, 4):
        with (PretendGPU() as gpu, tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
              System("PongNoFrameskip-v4", train_dir=folder, device=DEVICE, serial_mode=True, num_workers=1,
                     num_envs_per_worker=num_envs, rollout=64, batch_size=64 * num_envs, num_batches_per_epoch=1,
                     precision="float32", encoder_conv_architecture="convnet_atari") as system):
            system.train(64 * num_envs)
        for what, counts in found.items():
            copies = counts.up + counts.down
            print(f"{num_envs} environments, {what:18}  {counts.launches:3} launches, {copies} copies,",
                  f"waits: {counts.waits}")
