"""An APPO whose policy acts with the weights of some SGD steps ago: what does a policy lag cost in any task?

    python train.py --env PongNoFrameskip-v4 --serial_mode --async_rl=False \
        --algo docs.experiments.late_policy:LatePolicy --late 8
    python -m tools.study docs/studies/policy_lag.toml FOLDER

In one process, in turns, so that the lag is what it is set to; the records' `policy_lag_mean` does not know of it.
"""

from dataclasses import dataclass

import appo
from config import NOT_NEGATIVE, option

KEPT = []  # the weights after the last SGD steps, the oldest first


@dataclass(frozen=True)
class Settings(appo.Settings):
    """The settings of APPO, and the lag."""

    late: int = option(0, "late policy", "act with the weights of so many SGD steps ago", bounds=NOT_NEGATIVE)


class LatePolicy(appo.AsyncPPO):
    """APPO with a policy lag that is held."""

    Settings = Settings

    def __init__(self, cfg, role=""):
        assert cfg.serial_mode and not cfg.async_rl, "a lag is held in one process; add --serial_mode --async_rl=False"
        super().__init__(cfg, role)

    def after_sgd_step(self, model, sgd_steps):
        """Keep a copy of the weights."""
        KEPT.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        del KEPT[: -self.cfg.late - 1]

    def act(self, model, *args, **how):
        """Act with the oldest weights kept."""
        if self.cfg.late and KEPT:
            model.load_state_dict(KEPT[0])
        return super().act(model, *args, **how)
