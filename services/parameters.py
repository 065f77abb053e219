"""What goes into a run from Python, and what comes out: settings, parameters, actions.

Most functions are methods of `trainer.Trainer`, which is their `self`. The arguments `encoder`, `encodersubtype` and
`policy_kwargs` are those of AsynRL.
"""

import contextlib
import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import Values, tunable
from evaluate import Policy, check_policy
from runtime import checkpoint
from runtime.utils import STOP_SIGNAL, UserError, nearest, reference, this_rank
from services.saving import Saving
from shared_buffers import CONFIGURE, LOAD

Parameters = Mapping[str, Tensor]
CHANGEABLE = ("train_for_seconds", "stop_at_return", "report_interval_sec", "save_every_sec", "save_milestones_sec")
# AsynRL's names of encoders (those of Sample Factory 1), the default of each kind first; and ours where they differ
ENCODERS = {"conv": ("convnet_simple", "convnet_impala", "convnet_atari", "minigrid_convnet_tiny"),
            "resnet": ("resnet_impala",), "mlp": ("mlp_mujoco",)}  # vectors always have an MLP, --encoder_mlp_layers
OUR_NAMES = {"convnet_impala": "convnet_a3c", "minigrid_convnet_tiny": "convnet_small"}


# ---- settings ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's own, and anything else as it is."""
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0)
    return value.item() if is_number else value


def as_settings(given: Values, *more: Values) -> Values:
    """Join what a `Trainer` was given to settings of `Config`; None: not given. Raises `UserError`."""
    for part in more:
        if twice := {name for name in part if given.get(name) is not None}:
            raise UserError(f"{min(twice)} is given twice; give it once")
        given |= part
    given = {name: plain(value) for name, value in given.items() if value is not None}
    if "device" in given:
        given["device"] = "cuda" if str(given["device"]) == "gpu" else str(given["device"])
    if not isinstance(given.get("env_kwargs", ""), str):
        given["env_kwargs"] = json.dumps(given["env_kwargs"])
    return {name: reference(value) if callable(value) or name == "env" else value for name, value in given.items()}


def encoder_settings(encoder: str | Callable, subtype: str) -> Values:
    """Return the settings that the arguments `encoder` and `encodersubtype` mean. Raises `UserError`."""
    if not isinstance(encoder, str) or ":" in encoder or not (encoder or subtype):
        if subtype:
            raise UserError(f"encodersubtype={subtype} belongs to encoder='conv', 'resnet' or 'mlp'; leave it out")
        return {"encoder": encoder} if encoder else {}
    known = [(kind, name) for kind, names in ENCODERS.items() for name in names]
    for kind, name in known:
        if encoder in (kind, "") and subtype in (name, ""):
            return {} if kind == "mlp" else {"encoder_conv_architecture": OUR_NAMES.get(name, name)}
    pairs = ", ".join(map("/".join, known))
    raise UserError(f"encoder={encoder!r} with encodersubtype={subtype!r} is unknown; use one of {pairs}, or a class")


def change(self: Any, **settings: Any) -> None:
    """Change settings of a system that was made, between calls of `train` or in its callback.

    What the loss weighs and how fast it learns can change (the numbers that population-based training tunes), and
    when to report, save and stop. With lr_schedule='kl_adaptive' a learning rate only moves the schedule's for a
    while. Raises `UserError` for all others, naming them.
    """
    self.check_alive()
    changeable = {*CHANGEABLE, *(() if self.cfg.with_pbt else tunable(self.cfg))}
    for name in settings.keys() - changeable:
        if not hasattr(self.cfg, name):
            raise UserError(f"unknown setting {name}{nearest(name, changeable)}")
        raise UserError(f"{name} cannot change in a system that was made; make a new one with it. These can: "
                        + ", ".join(sorted(changeable)))
    self.cfg = dataclasses.replace(self.cfg, **{name: plain(value) for name, value in settings.items()})
    if "learning_rate" in settings and self.cfg.lr_schedule == "kl_adaptive":
        self.log("lr_schedule='kl_adaptive' goes on from this learning_rate, and soon leaves it; one that stays "
                 "needs lr_schedule='constant' from the start")
    if settings.keys() - set(CHANGEABLE):
        self.buffers.settings[:] = torch.tensor([*tunable(self.cfg).values()], dtype=torch.float64)
        for policy in self.buffers.policies:
            for commands in policy.commands:
                commands.put((CONFIGURE, 0))
    self.tell("changed")


@contextlib.contextmanager
def asking(trainer: Any, callback: Callable[[Values], Any] | None,
           should_stop: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yield what asks whether a call of `Trainer.train` is to stop: its callback, for each new row, and should_stop.

    A signal stops it too, and so does a failure of one of them, which is raised when the training has paused.
    """
    told, stops, failures = trainer.row, False, []

    def asks() -> bool:
        nonlocal told, stops
        row, is_new, told = trainer.row, trainer.row is not told, trainer.row
        try:
            stops = stops or bool(should_stop())
            if callback and is_new and "env_steps" in row:
                stops = callback(dict(row)) is False or stops
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
            stops = True
        return stops or STOP_SIGNAL()

    trainer.asks = asks
    try:
        yield asks
        asks()  # of the last row
    finally:
        trainer.asks = None
    if failures:
        raise failures[0]


# ---- parameters and actions --------------------------------------------------------------------------------------


def save(self: Any, path: str | os.PathLike | None = None, policy: int = 0) -> None:
    """Write a checkpoint of each policy into the run's folder, and one of `policy` to a file; of ranks the first does.

    Raises `ComponentError` or `UserError` when it cannot be written.
    """
    self.check_alive()
    check_policy(policy, self.cfg)
    saving = self.find(Saving)
    if saving is None:
        raise UserError("save() needs a Saving of services/saving.py among the services")
    saving.save_all()
    saving.check_saved()
    if path is not None and this_rank().rank == 0:  # the others have no checkpoints
        _, state, _ = checkpoint.load_newest(self.cfg.run_dir, policy)
        try:
            checkpoint.save_checkpoint(state, Path(path))
        except (OSError, ValueError) as error:
            raise UserError(f"save({str(path)!r}) cannot be written: {error}") from error


def get_parameters(self: Any) -> dict[int, dict[str, Tensor]]:
    """Return the newest parameters of each policy, {policy: {name: tensor}}: copies on the CPU.

    The running statistics of observations and returns are among them, in float64.
    """
    return {policy: buffers.weights.read()[0] for policy, buffers in enumerate(self.buffers.policies)}


def set_parameters(self: Any, parameters: str | os.PathLike | Parameters | Mapping[int, Parameters]) -> None:
    """Replace parameters, between two calls of `train`; the next action is computed with them.

    What was sampled with others and not yet trained on is left out (but a replay keeps it), recurrent policies begin
    with an empty memory, and the mean return with the next episode. Counters stay.

    Args:
        parameters: {policy: state dict}, also of some policies only; a state dict, for a system of one policy; or the
            path of a run, whose newest checkpoints are taken, or, for one policy, of a checkpoint.

    Raises `UserError`, and changes nothing, for what does not fit.
    """
    if isinstance(parameters, str | os.PathLike):
        states = read_states(self, Path(parameters))
    elif isinstance(parameters, Mapping):
        is_of_policies = all(isinstance(key, int) for key in parameters)
        given = parameters if is_of_policies else of_one(self, parameters)
        states = {policy: {"model": state} for policy, state in given.items()}
    else:
        raise UserError(f"parameters are a {type(parameters).__name__}; give a state dict, or {{policy: state dict}}")
    hand_over(self, states, optimizer=False)


def load_parameters(self: Any, path: str | os.PathLike, policy: int | None = None) -> None:
    """Take parameters and optimizer from a checkpoint of one policy, or from a run's newest, of `policy` or of each.

    The best one of an evaluator holds no optimizer; then that stays as it is.
    """
    hand_over(self, read_states(self, Path(path), policy), optimizer=True)


def of_one(trainer: Any, value: Any) -> dict[int, Any]:
    """Name the policy that something is meant for."""
    if trainer.cfg.num_policies > 1:
        raise UserError(f"there are {trainer.cfg.num_policies} policies; name one: {{policy: state dict}}, or policy=")
    return {0: value}


def read_states(trainer: Any, path: Path, policy: int | None = None) -> dict[int, Values]:
    """Read the checkpoint of a file, or those of a run. Raises `UserError` where they are of other spaces."""
    cfg, info = trainer.cfg, trainer.buffers.info
    if path.is_dir():
        wanted = range(cfg.num_policies) if policy is None else [policy]
        states = {number: checkpoint.load_newest(path, number)[1] for number in wanted}
    else:
        try:
            state = checkpoint.load_checkpoint(path)
        except checkpoint.DamagedCheckpoint as error:
            raise UserError(f"{error}; of a state dict that torch.save has written give torch.load(path)") from None
        states = of_one(trainer, state) if policy is None else {policy: state}
    if None in states.values():
        raise UserError(f"{path} holds no checkpoint of each of the policies {list(states)}")
    for number, state in states.items():
        kind = info.kinds[trainer.buffers.policies[check_policy(number, cfg)].kind]
        leaves = kind.as_trained(state, path)
        if list(leaves) != list(kind.obs_space):
            raise UserError(f"{path} takes the observations in another order: {', '.join(leaves)}")
    return states


def hand_over(trainer: Any, states: Mapping[int, Values], *, optimizer: bool) -> None:
    """Hand states to the learners, in files, and wait until they have taken them. Raises `UserError` for misfits."""
    cfg, given = trainer.cfg, {}
    trainer.check_alive()
    trainer.check_paused("set_parameters")
    if not states:
        raise UserError("there are no parameters; give {policy: state dict}")
    for policy, state in states.items():
        path = checkpoint.policy_dir(cfg.run_dir, check_policy(policy, cfg)) / checkpoint.GIVEN
        if state.get("algo", cfg.algo) != cfg.algo:
            raise UserError(f"the checkpoint is of --algo={state['algo']}, not of {cfg.algo}; choose another")
        model = copy.deepcopy(trainer.models[policy])
        try:
            model.load_state_dict(state["model"])
        except (RuntimeError, TypeError) as error:  # of other names or shapes
            raise UserError(f"the parameters of policy {policy} do not fit: {error}") from error
        given[path] = {"algo": cfg.algo, "sgd_steps": 0, "env_steps": 0, "model": model.state_dict(),
                       "optimizer": state.get("optimizer") if optimizer else None}
    with checkpoint.refusing_files(cfg.train_dir):
        for path, state in given.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.save_checkpoint(state, path)
    for policy in states:
        trainer.commands.send(policy, LOAD, policy)
    trainer.wait_for_answers(LOAD, "take the parameters over")
    for path in given:  # who is interrupted before leaves it to learners that read it later
        path.unlink()


def predict(self: Any, obs: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False,
            policy: int = 0, action_mask: Any = None) -> tuple[Any, Tensor]:
    """Choose the action of a policy with its newest parameters; as `Policy.predict`, which says more."""
    if self.process != os.getpid():
        raise UserError("predict() works in the process that made the system; load() a checkpoint in another one")
    own = self.buffers.policies[check_policy(policy, self.cfg)]
    if policy not in self.policies:
        self.policies[policy] = Policy(self.cfg, self.buffers.info, own.kind, torch.device("cpu"))
    player = self.policies[policy]
    player.refresh(own.weights)
    return player.predict(obs, state, episode_start, deterministic, action_mask)
