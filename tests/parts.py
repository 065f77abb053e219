"""Settings, and the components of a system in serial mode."""

from collections.abc import Mapping
from typing import Any

import config
from algorithms import algorithm_class
from learner import Learner
from rollout_worker import RolloutWorker
from supervisor import Supervisor


def make_config(*layers: Mapping[str, Any]) -> config.Config:
    """Make the settings of the algorithm that the layers name."""
    algo = {name: value for layer in layers for name, value in layer.items()}.get("algo", config.Config.algo)
    return config.make_config(algorithm_class(algo).Settings, *layers)


def learners(system: Supervisor) -> list[Learner]:
    """Return the learner of each policy."""
    return [component for component in system.crew.components if isinstance(component, Learner)]


def rollout_workers(system: Supervisor) -> list[RolloutWorker]:
    return [component for component in system.crew.components if isinstance(component, RolloutWorker)]
