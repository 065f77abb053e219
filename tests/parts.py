"""Settings, and the components of a system in serial mode."""

from collections.abc import Mapping
from typing import Any

import config
from algorithms import algorithm_class
from learner import Learner
from rollout_worker import RolloutWorker
from supervisor import Supervisor

# a run of one worker, as small as can be
SMALL: dict[str, Any] = {
    "num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 1,
    "num_epochs": 1, "encoder_mlp_layers": (8,), "device": "cpu"}

ONE_STEP = {"num_epochs": 1, "num_batches_per_epoch": 1, "lr_schedule": "constant"}  # on each dataset


def make_config(*layers: Mapping[str, Any]) -> config.Config:
    """Make the settings of the algorithm that the layers name."""
    algo = {name: value for layer in layers for name, value in layer.items()}.get("algo", config.Config.algo)
    return config.make_config(algorithm_class(algo).Settings, *layers)


def learners(system: Supervisor) -> list[Learner]:
    """Return the learner of each policy."""
    return [component for component in system.crew.components if isinstance(component, Learner)]


def rollout_workers(system: Supervisor) -> list[RolloutWorker]:
    return [component for component in system.crew.components if isinstance(component, RolloutWorker)]
