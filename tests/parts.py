"""The components of a system in serial mode."""

from learner import Learner
from rollout_worker import RolloutWorker
from supervisor import Supervisor


def learners(system: Supervisor) -> list[Learner]:
    """Return the learner of each policy."""
    return [component for component in system.crew.components if isinstance(component, Learner)]


def rollout_workers(system: Supervisor) -> list[RolloutWorker]:
    return [component for component in system.crew.components if isinstance(component, RolloutWorker)]
