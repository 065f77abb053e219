"""Settings, and the components of a system in serial mode."""

from typing import Any

import config
from learner import Learner
from rollout_worker import RolloutWorker
from trainer import Trainer

make_config = config.make_config
# a run of one worker, as small as can be
SMALL: dict[str, Any] = {
    "num_workers": 1, "num_envs_per_worker": 4, "rollout": 8, "batch_size": 32, "num_batches_per_epoch": 1,
    "num_epochs": 1, "encoder_mlp_layers": (8,), "device": "cpu"}

ONE_STEP = {"num_epochs": 1, "num_batches_per_epoch": 1, "lr_schedule": "constant"}  # on each dataset


def learners(system: Trainer) -> list[Learner]:
    """Return the learner of each policy."""
    return [component for component in system.crew.components if isinstance(component, Learner)]


def rollout_workers(system: Trainer) -> list[RolloutWorker]:
    return [component for component in system.crew.components if isinstance(component, RolloutWorker)]


def observe(seeing: Any, obs: Any) -> None:
    """Move the statistics of a model, or of one of its normalizers, by raw observations."""
    summaries = [part[None] for part in seeing.summarize(obs)]
    if hasattr(seeing, "update"):
        seeing.update(*summaries)
    else:
        seeing.update_normalizers(summaries)
