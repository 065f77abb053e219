"""The system for use from Python: train a while, look at the parameters, change them, train on, predict.

    from trainer import APPO, load

    with APPO("CartPole-v1", experiment="first", learning_rate=1e-3) as appo:
        print(appo.train(50_000)["mean_return"])
        parameters = appo.get_parameters()          # {policy: {name: tensor}}
        appo.set_parameters(parameters)
        action, _ = appo.predict([0.0, 0.1, 0.0, 0.1])
    policy = load("train_dir/first")                # plays without starting a process

`Trainer` adds to `supervisor.Supervisor` what a person calls; each algorithm has a subclass at the end of the file.
The arguments `encoder`, `encodersubtype` and `policy_kwargs` are those of AsynRL. Read next: `supervisor.py`.
"""

import copy
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from config import tunable
from runtime import checkpoint
from runtime.by_name import remember
from runtime.files import replacing
from runtime.policy import Policy, check_policy, load
from runtime.user_error import ComponentError, UserError, nearest
from shared_buffers import CONFIGURE, LOAD
from supervisor import Supervisor

__all__ = ["A3C", "APEX", "APPO", "IMPALA", "PQL", "Trainer", "load"]

# AsynRL's names of encoders (those of Sample Factory 1), and what they are here
ENCODERS: dict[tuple[str, str], dict[str, Any]] = {
    ("conv", "convnet_simple"): {"encoder_conv_architecture": "convnet_simple"},
    ("conv", "convnet_impala"): {"encoder_conv_architecture": "convnet_a3c"},
    ("conv", "convnet_atari"): {"encoder_conv_architecture": "convnet_atari"},
    ("conv", "minigrid_convnet_tiny"): {"encoder_conv_architecture": "convnet_small"},
    ("resnet", "resnet_impala"): {"encoder_conv_architecture": "resnet_impala"},
    ("mlp", "mlp_mujoco"): {},  # vectors always have an MLP, --encoder_mlp_layers
}
RECORDS_SETTINGS = ("train_for_seconds", "stop_at_return", "report_interval_sec", "save_every_sec",
                    "save_milestones_sec")
CPU = torch.device("cpu")
Parameters = Mapping[str, Tensor]


class Trainer(Supervisor):
    """A system that trains, with what is comfortable in Python."""

    def __init__(self, env: str | Callable, encoder: str | Callable = "", encodersubtype: str = "",
                 num_envs_per_worker: int | None = None, num_workers: int | None = None, device: Any = None,
                 policy_kwargs: Mapping[str, Any] | None = None, *, env_kwargs: Mapping[str, Any] | None = None,
                 **settings: Any) -> None:
        """Make the system; it starts its processes and waits.

        Args:
            env: an environment id, or a function or class that makes one environment, of one agent or several.
            encoder: a function or class, or "module:name"; or with `encodersubtype` AsynRL's names (`ENCODERS`).
            num_envs_per_worker, num_workers: None: what fits the machine.
            device: auto (None), cpu, cuda, cuda:1, ..., or a torch.device; gpu is cuda.
            policy_kwargs: more settings, as in AsynRL.
            env_kwargs: arguments for the maker of the environment; what JSON can hold.
            settings: of `Config` and the algorithm (`train.py --help`); None: the default. `core`, `model`,
                `policy_mapping` and `algo` may be functions or classes.

        Raises `UserError` for impossible settings.
        """
        given = {"num_envs_per_worker": num_envs_per_worker, "num_workers": num_workers, "device": device,
                 "env_kwargs": env_kwargs, **settings}
        for more in (encoder_settings(encoder or "", encodersubtype or ""), policy_kwargs or {}):
            if twice := {name for name in more if given.get(name) is not None}:
                raise UserError(f"{min(twice)} is given twice; give it once")
            given |= more
        given = {name: plain(value) for name, value in given.items() if value is not None}
        if "device" in given:
            given["device"] = "cuda" if str(given["device"]) == "gpu" else str(given["device"])
        if not isinstance(given.get("env_kwargs", ""), str):
            given["env_kwargs"] = json.dumps(given["env_kwargs"])
        self._policies: dict[int, Policy] = {}  # for predict()
        self._in_callback = False
        super().__init__(env, **given)
        remember(self.cfg.run_dir, vars(self.cfg))

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, train_for_env_steps: int | None = None,
              callback: Callable[[dict[str, Any]], Any] | None = None,
              should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Train for so many more env_steps, or until `train_for_env_steps`, `train_for_seconds` or `stop_at_return`.

        It takes at most one step of each environment more than asked for, and the next call so many fewer. It returns
        when the workers have paused and all complete datasets are trained on; in between no process is busy.

        Args:
            callback: is called with each report, a row of metrics.jsonl; it may `change` settings, and stops the
                training by returning False.
            should_stop: is asked all the time, and stops the training by returning True. An error of either is raised
                when the training has stopped; the system can be used on.

        Returns what this call has done: env_steps, sgd_steps, num_episodes, train_sec, fps (env_frames per second), and
        the last row of metrics.jsonl, with the totals of the run as total_env_steps and total_sgd_steps. Ctrl-C saves
        and raises `KeyboardInterrupt`; afterwards the system can be used as before.
        """
        self._check_alive()
        if self.records.begun is not None:
            raise UserError("train() is running already; a callback stops it by returning False")
        if train_for_env_steps is not None and train_for_env_steps <= 0:
            raise UserError(f"train_for_env_steps={train_for_env_steps} must be above 0")
        before = np.array([self.env_steps, sum(self.versions), self.records.num_episodes])
        begun, told, stops, failure = time.monotonic(), self.records.row, False, []

        def ask() -> bool:
            """Tell the callback of a new row; return whether it or should_stop() asks for a stop, or has failed."""
            nonlocal told, stops
            row, is_new = self.records.row, self.records.row is not told
            told, self._in_callback = row, True
            try:
                stops = stops or bool(should_stop())
                if callback and is_new and "env_steps" in row:
                    stops = callback(dict(row)) is False or stops
            except BaseException as error:  # noqa: BLE001  raised again when the training has paused
                failure.append(error)
                stops = True
            self._in_callback = False
            return stops

        super().train(train_for_env_steps, ask)
        ask()
        if failure:
            raise failure[0]
        seconds = time.monotonic() - begun
        totals = np.array([self.env_steps, sum(self.versions), self.records.num_episodes])
        done = dict(zip(("env_steps", "sgd_steps", "num_episodes"), (totals - before).tolist(), strict=True))
        return {**self.records.row, **done, "total_env_steps": int(totals[0]), "total_sgd_steps": int(totals[1]),
                "train_sec": seconds, "fps": done["env_steps"] * self.cfg.env_frameskip / seconds}

    def change(self, **settings: Any) -> None:
        """Change settings of a system that was made, between calls of `train` or in its callback.

        What the loss weighs and how fast it learns can change (the numbers that population-based training tunes), and
        when to report, save and stop. With lr_schedule='kl_adaptive' a learning rate only moves the schedule's for a
        while. Raises `UserError` for all others, naming them.
        """
        self._check_alive()
        changeable = {*RECORDS_SETTINGS, *(() if self.cfg.with_pbt else tunable(self.cfg))}
        for name in settings.keys() - changeable:
            if not hasattr(self.cfg, name):
                raise UserError(f"unknown setting {name}{nearest(name, changeable)}")
            raise UserError(f"{name} cannot change in a system that was made; make a new one with it. These can: "
                            + ", ".join(sorted(changeable)))
        settings = {name: plain(value) for name, value in settings.items()}
        self.cfg = self.records.cfg = dataclasses.replace(self.cfg, **settings)
        if "learning_rate" in settings and self.cfg.lr_schedule == "kl_adaptive":
            self.records.log("lr_schedule='kl_adaptive' goes on from this learning_rate, and soon leaves it; one that "
                             "stays needs lr_schedule='constant' from the start")
        if settings.keys() - set(RECORDS_SETTINGS):
            self.buffers.settings[:] = torch.tensor([*tunable(self.cfg).values()], dtype=torch.float64)
            for policy in self.buffers.policies:
                for commands in policy.commands:
                    commands.put((CONFIGURE, 0))
        self.records.save_config()

    # ---- parameters ----------------------------------------------------------------------------------------------

    def get_parameters(self) -> dict[int, dict[str, Tensor]]:
        """Return the newest parameters of each policy, {policy: {name: tensor}}: copies on the CPU.

        The running statistics of observations and returns are among them, in float64.
        """
        return {policy: buffers.weights.read()[0]
                for policy, buffers in enumerate(self.buffers.policies)}

    def set_parameters(self, parameters: str | os.PathLike | Parameters | Mapping[int, Parameters], *,
                       reset_optimizer: bool = False) -> None:
        """Replace parameters, between two calls of `train`; the next action is computed with them.

        What was sampled with others and not yet trained on is left out (but a replay keeps it), recurrent policies
        begin with an empty memory, and the mean return with the next episode. Counters stay.

        Args:
            parameters: {policy: state dict}, also of some policies only; a state dict, for a system of one policy; or
                the path of a run, whose newest checkpoints are taken, or, for one policy, of a checkpoint.
            reset_optimizer: forget the moments of the optimizer.

        Raises `UserError`, and changes nothing, for what does not fit.
        """
        if isinstance(parameters, str | os.PathLike):
            states = {policy: {name: state[name] for name in ("algo", "model") if name in state}
                      for policy, state in self._read(Path(parameters)).items()}
        else:
            if not isinstance(parameters, Mapping):
                raise UserError(f"parameters are a {type(parameters).__name__}; give a state dict, or "
                                "{policy: state dict}")
            by_policy = parameters if all(isinstance(key, int) for key in parameters) else self._for_all(parameters)
            states = {policy: {"model": state} for policy, state in by_policy.items()}
        self._replace_parameters(states, reset_optimizer=reset_optimizer)

    def save(self, path: str | os.PathLike | None = None, policy: int = 0) -> None:
        """Write a checkpoint of each policy into the run's folder, or one of `policy` to a file.

        Raises `ComponentError` when it cannot be written.
        """
        self._check_alive()
        check_policy(policy, self.cfg)
        self._save()
        self.records.check_saved()
        if path is not None:
            newest = checkpoint.find_checkpoint(self.cfg.run_dir, "latest", policy)
            try:
                with newest.open("rb") as source, replacing(Path(path)) as target:
                    shutil.copyfileobj(source, target)
            except (OSError, ValueError) as error:
                raise UserError(f"save({str(path)!r}) cannot be written: {error}") from error

    def load(self, path: str | os.PathLike, policy: int | None = None) -> None:
        """Take over parameters and optimizer from a checkpoint of one policy, or from the newest ones of a run.

        The best one of an evaluator holds no optimizer; then that stays as it is.
        """
        states = {number: {name: state[name] for name in ("algo", "model", "optimizer") if name in state}
                  for number, state in self._read(Path(path), policy).items()}
        self._replace_parameters(states, reset_optimizer=False)

    def _for_all(self, of_one: Any) -> dict[int, Any]:
        """Name the policy that something is meant for."""
        if self.cfg.num_policies > 1:
            raise UserError(f"there are {self.cfg.num_policies} policies; name one: {{policy: state dict}}, or policy=")
        return {0: of_one}

    def _read(self, path: Path, policy: int | None = None) -> dict[int, dict[str, Any]]:
        """Read the checkpoint of a file, or those of a run. Raises `UserError` where they are of other spaces."""
        if not path.is_dir():
            try:
                state = checkpoint.load_checkpoint(path)
            except checkpoint.DamagedCheckpoint as error:
                raise UserError(f"{error}; what torch.save has made of a state dict is none: give torch.load(path)"
                                ) from None
            states = self._for_all(state) if policy is None else {policy: state}
        else:
            states = {policy: checkpoint.load_newest(path, policy)[1] for policy in range(self.cfg.num_policies)}
        if None in states.values():
            raise UserError(f"{path} holds no checkpoint of each of the {self.cfg.num_policies} policies")
        for number, state in states.items():
            kind = self.buffers.policies[check_policy(number, self.cfg)].kind
            leaves, _ = self.buffers.info.as_trained(kind, state, path)
            if list(leaves) != list(self.buffers.info.kinds[kind][0]):
                raise UserError(f"{path} takes the observations in another order: {', '.join(leaves)}")
        return states

    def _replace_parameters(self, states: Mapping[int, dict[str, Any]], *, reset_optimizer: bool) -> None:
        self._check_alive()
        self._refuse("set_parameters", self.records.begun is not None)
        if not states:
            raise UserError("there are no parameters; give {policy: state dict}")
        for policy, state in states.items():
            check_policy(policy, self.cfg)
            if state.get("algo", self.cfg.algo) != self.cfg.algo:
                raise UserError(f"the checkpoint is of --algo={state['algo']}, not of {self.cfg.algo}; choose another")
            state["model"] = fit(state["model"], self.models[policy], policy)
        paths = [checkpoint.policy_dir(self.cfg.run_dir, policy) / checkpoint.GIVEN for policy in states]
        try:
            for state, path in zip(states.values(), paths, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                checkpoint.save_checkpoint({"algo": self.cfg.algo, "sgd_steps": 0, "env_steps": 0, **state}, path)
            self.refused = ""
            for policy in states:
                self.commands.send(policy, LOAD, int(reset_optimizer))
            self._wait_for_answers(LOAD, "take the parameters over")
        except OSError as error:
            raise UserError(f"parameters are handed over in {error.filename}, which cannot be written: {error.strerror}"
                            ) from error
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        if self.refused:
            raise UserError(self.refused)

    def close(self) -> None:
        """Save, stop every component, and write the final records. Raises `ComponentError` when it cannot save."""
        self._refuse("close", self._in_callback)
        super().close()

    def __enter__(self) -> "Trainer":
        self._check_alive()
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is not None and issubclass(kind, ComponentError) and not self.ended and self.process == os.getpid():
            self._give_up(save=True)
        try:
            self.close()
        except ComponentError:
            if kind is None:  # else the first error counts
                raise

    @staticmethod
    def _refuse(what: str, is_within: bool) -> None:
        if is_within:
            raise UserError(f"{what}() is for between two calls of train(); a callback stops one by returning False")

    # ---- acting --------------------------------------------------------------------------------------------------

    def predict(self, obs: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False,
                policy: int = 0, action_mask: Any = None) -> tuple[Any, Tensor]:
        """Choose the action of a policy with its newest parameters; as `Policy.predict`, which says more."""
        if self.process != os.getpid():
            raise UserError("predict() works in the process that made the system; load() a checkpoint in another one")
        if policy not in self._policies:
            check_policy(policy, self.cfg)
            kind = self.buffers.policies[policy].kind
            self._policies[policy] = Policy.of_info(self.cfg, self.buffers.info, kind, self.models[policy], CPU)
        self._policies[policy].refresh(self.buffers.policies[policy].weights)
        return self._policies[policy].predict(obs, state, episode_start, deterministic, action_mask)


def plain(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's own, and anything else as it is."""
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0)
    return value.item() if is_number else value


def encoder_settings(encoder: str | Callable, subtype: str) -> dict[str, Any]:
    """Return the settings that the arguments `encoder` and `encodersubtype` mean. Raises `UserError`."""
    if not isinstance(encoder, str) or ":" in encoder or not (encoder or subtype):
        if subtype:
            raise UserError(f"encodersubtype={subtype} belongs to encoder='conv', 'resnet' or 'mlp'; leave it out")
        return {"encoder": encoder} if encoder else {}
    for (kind, name), settings in ENCODERS.items():
        if encoder in (kind, "") and subtype in (name, ""):
            return dict(settings)
    known = ", ".join("/".join(pair) for pair in ENCODERS)
    raise UserError(f"encoder={encoder!r} with encodersubtype={subtype!r} is unknown; use one of {known}, or a class")


def fit(given: Parameters, model: nn.Module, policy: int) -> dict[str, Tensor]:
    """Return parameters as those of a model. Raises `UserError` where they differ from its own in names or shapes."""
    model = copy.deepcopy(model)
    try:
        model.load_state_dict(given)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"the parameters of policy {policy} do not fit: {error}") from error
    return model.state_dict()


# ---- the system with each algorithm --------------------------------------------------------------------------------


class APPO(Trainer):
    """With asynchronous PPO (`appo.py`)."""

    algo = "appo"


class IMPALA(Trainer):
    """With IMPALA (`algorithms/impala.py`)."""

    algo = "impala"


class A3C(Trainer):
    """With A3C (`algorithms/a3c.py`)."""

    algo = "a3c"


class APEX(Trainer):
    """With Ape-X (`algorithms/apex.py`)."""

    algo = "apex"


class PQL(Trainer):
    """With PQL (`algorithms/pql.py`)."""

    algo = "pql"
