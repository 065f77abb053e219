"""The one configuration: every setting with its default, unit and meaning, its validation, its command line.

`Config` is a frozen dataclass, so no component can fill in or change a setting while it runs. A value comes
from, in rising order: the default below, the profile of the environment's family (data, in `envs.py`), the
saved configuration of the run that is being resumed, and the command line. Names are Sample Factory's wherever
it has a flag for the same thing.

Read next: `shared_buffers.py`.
"""

import argparse
import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeding import MAX_SEED


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, never a traceback."""


def option(default: Any, group: str, help_text: str, choices: Sequence[str] | None = None) -> Any:
    """Declare a setting. A callable default (the number of cores) is called when the configuration is made."""
    metadata = {"group": group, "help": help_text, "choices": choices}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


MAX_WORKERS = 100  # a child process can be handed about 250 file descriptors, and each worker's queue takes two
MAX_POLICIES = 20  # whose queues and weights take six each


def max_workers(num_policies: int) -> int:
    """Return how many rollout workers there can be beside so many policies."""
    return MAX_WORKERS - 3 * (num_policies - 1)


def cpu_cores() -> int:
    """Count the cores that this process may use (a container is often given fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Config:
    """All settings of a run. Raises `UserError`, saying what to set instead, when a value is impossible."""

    # ---- run -------------------------------------------------------------------------------------------------
    env: str = option("", "run", "environment id: PongNoFrameskip-v4, ALE/Breakout-v5, CartPole-v1, module:Name-v0, "
                      "pettingzoo:mpe2.simple_spread_v3; or module:function, which makes one environment, of one agent "
                      "or several")
    train_dir: str = option("train_dir", "run", "folder that holds all runs")
    experiment: str = option("", "run", "name of this run's folder; empty: the environment id")
    restart_behavior: str = option(
        "resume", "run", "if the run's folder exists: resume it; restart (rename it to ..._old and begin anew); "
        "overwrite (delete it and begin anew)", ("resume", "restart", "overwrite"))
    train_for_env_steps: int = option(10_000_000, "run", "stop after this many env_steps (calls of step()), "
                                      "all environments and resumes together")
    train_for_seconds: float = option(math.inf, "run", "stop after this many seconds of training, resumes together")
    seed: int = option(0, "run", "seed of environments, networks and sampling")
    device: str = option("auto", "run", "where networks run: auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    precision: str = option("auto", "run", "arithmetic of the network body: bfloat16 where the hardware has it "
                            "(auto), or float32", ("auto", "float32", "bfloat16"))
    async_rl: bool = option(True, "run", "collect experience while learning; False: take turns (no policy lag)")
    serial_mode: bool = option(False, "run", "run every component in this process, in a fixed order, "
                               "with one policy worker and one thread, for debugging")

    # ---- sampler ---------------------------------------------------------------------------------------------
    num_workers: int = option(lambda: min(cpu_cores(), MAX_WORKERS), "sampler",
                              "rollout worker processes; default: the cores of the machine")
    num_envs_per_worker: int = option(16, "sampler", "environments of each rollout worker, all splits together")
    worker_num_splits: int = option(2, "sampler", "groups of environments per rollout worker, 2 with a GPU, else 1 by "
                                    "default; 2: double-buffered sampling, one group is stepped while the other's "
                                    "actions are computed")
    policy_workers_per_policy: int = option(1, "sampler", "policy worker processes")
    set_workers_cpu_affinity: bool = option(False, "sampler", "bind each rollout worker to one core, in turns (Linux)")
    decorrelate_experience_max_seconds: float = option(
        0.0, "sampler", "before training play at random for at most so many seconds, so that environments are at "
        "different moments of their episodes; 0: off; not with Atari and CartPole")
    decorrelate_envs_on_one_worker: bool = option(True, "sampler", "then also those of one worker among themselves")
    rollout: int = option(32, "sampler", "T, the env_steps of one trajectory")
    env_frameskip: int = option(1, "sampler", "simulator frames per env_step (Atari and VizDoom)")
    env_framestack: int = option(1, "sampler", "frames stacked in one observation (Atari only)")
    res_w: int = option(0, "sampler", "resize image observations to this width in pixels; 0: as they come (not Atari)")
    res_h: int = option(0, "sampler", "resize image observations to this height in pixels; 0: as they come (not Atari)")

    # ---- learner ---------------------------------------------------------------------------------------------
    batch_size: int = option(1024, "learner", "samples of one minibatch (one SGD step)")
    num_batches_per_epoch: int = option(1, "learner", "minibatches in one dataset")
    num_epochs: int = option(1, "learner", "passes over each dataset")
    gamma: float = option(0.99, "learner", "discount per env_step")
    gae_lambda: float = option(0.95, "learner", "lambda of the V-trace and GAE targets")
    with_vtrace: bool = option(True, "learner", "correct value targets for the policy lag; False: plain GAE")
    vtrace_rho: float = option(1.0, "learner", "rho_bar, the truncation of the weights of the V-trace TD errors")
    vtrace_c: float = option(1.0, "learner", "c_bar, the truncation of the V-trace traces")
    ppo_clip_ratio: float = option(0.1, "learner", "clip pi/mu to [1/(1+eps), 1+eps] in the policy loss; 0: off")
    ppo_clip_value: float = option(1.0, "learner", "largest change of a value from the one predicted when acting "
                                   "that still gets a gradient, in units of the value head; 0: off")
    value_loss_coeff: float = option(0.5, "learner", "weight of the value loss")
    exploration_loss: str = option("entropy", "learner", "keep the policy random by its entropy or its symmetric KL "
                                   "to the uniform policy", ("entropy", "symmetric_kl"))
    exploration_loss_coeff: float = option(0.003, "learner", "weight of the exploration loss")
    exploration_loss_decay_env_steps: int = option(0, "learner", "the weight falls linearly to 0 over so many "
                                                   "env_steps, resumes together; 0: it stays")
    kl_loss_coeff: float = option(0.0, "learner", "weight of KL(acting policy || new policy) in the loss")
    learning_rate: float = option(1e-4, "learner", "initial Adam learning rate")
    lr_schedule: str = option("constant", "learner", "linear_decay reaches 0 at train_for_env_steps; kl_adaptive "
                              "holds KL(acting policy || new policy) near its threshold",
                              ("constant", "linear_decay", "kl_adaptive"))
    lr_schedule_kl_threshold: float = option(0.008, "learner", "target of kl_adaptive: the rate shrinks by 1.5 above "
                                             "twice this KL and grows by 1.5 below half of it")
    lr_adaptive_min: float = option(1e-6, "learner", "smallest rate of kl_adaptive")
    lr_adaptive_max: float = option(1e-2, "learner", "largest rate of kl_adaptive")
    adam_eps: float = option(1e-6, "learner", "epsilon of Adam")
    adam_beta1: float = option(0.9, "learner", "decay of Adam's first moment")
    adam_beta2: float = option(0.999, "learner", "decay of Adam's second moment")
    max_grad_norm: float = option(4.0, "learner", "clip the norm of the gradient; 0: off")
    max_policy_lag: int = option(1000, "learner", "ignore samples acted by a policy this many SGD steps older")
    reward_scale: float = option(1.0, "learner", "multiply rewards before learning (logged returns stay true)")
    reward_clip: float = option(math.inf, "learner", "clip scaled rewards to +- this before learning")
    recurrence: int = option(0, "learner", "env_steps of backpropagation through time where the policy has a memory; "
                             "0: the whole rollout")
    normalize_input: bool = option(True, "learner", "normalize observations by their running mean and deviation")
    normalize_input_keys: tuple[str, ...] = option(
        (), "learner", "names of the observations to normalize; none: all images and vectors")
    obs_subtract_mean: float = option(0.0, "learner", "subtract this from images and vectors first")
    obs_scale: float = option(0.0, "learner", "then divide images and vectors by this; 0: by 255 for uint8 images, "
                              "by 1 for everything else")
    normalize_returns: bool = option(True, "learner", "learn values in units of the running deviation of the returns")
    learner_threads: int = option(1, "learner", "CPU threads of the learner")

    # ---- model -----------------------------------------------------------------------------------------------
    encoder: str = option("", "model", "module:function, an encoder of your own (examples/custom_encoder.py)")
    core: str = option("", "model", "module:function, a core of your own (examples/custom_core.py)")
    model: str = option("", "model", "module:function, a whole model of your own (examples/custom_model.py)")
    encoder_conv_architecture: str = option(
        "convnet_atari", "model", "encoder of image observations (convnet_atari: the Nature CNN; convnet_a3c: the two "
        "layers of A3C; convnet_small: three 2x2 layers, for grids of a few cells)",
        ("convnet_simple", "convnet_atari", "convnet_a3c", "convnet_small", "resnet_impala"))
    encoder_conv_mlp_layers: tuple[int, ...] = option((512,), "model", "layers after the convolutions")
    encoder_mlp_layers: tuple[int, ...] = option((512, 512), "model", "layers of the encoder of vector observations")
    use_rnn: bool = option(False, "model", "give the policy a memory: a recurrent core behind the encoders")
    rnn_type: str = option("gru", "model", "kind of recurrent core", ("gru", "lstm"))
    rnn_size: int = option(512, "model", "hidden units of each recurrent layer")
    rnn_num_layers: int = option(1, "model", "recurrent layers")
    nonlinearity: str = option("elu", "model", "activation function", ("elu", "relu", "tanh"))
    policy_init_gain: float = option(1.0, "model", "gain of the orthogonal initialization")
    adaptive_stddev: bool = option(False, "model", "continuous actions: the network gives the standard deviation; "
                                   "False: one learned value per action")
    initial_stddev: float = option(1.0, "model", "initial standard deviation of continuous actions")
    squash_actions: bool = option(False, "model", "continuous actions: squash a Gaussian into the bounds with tanh; "
                                  "False: clip it")

    # ---- population ------------------------------------------------------------------------------------------
    num_policies: int = option(1, "population", "policies trained at once, each with its own learner; every agent "
                               "draws one of them at random when its episode begins")
    pbt_mix_policies_in_one_env: bool = option(True, "population", "draw a policy for each agent of an environment; "
                                               "False: one draw for all of them; not with --policy_mapping")
    policy_mapping: str = option("", "population", "module:function, a choice of policies of your own "
                                 "(examples/custom_mapping.py)")
    self_play_past_fraction: float = option(0.0, "population", "share of the opponents of a policy that are played by "
                                            "earlier versions of it; these do not learn")
    self_play_snapshots: int = option(5, "population", "earlier versions of each policy to keep as opponents")
    self_play_snapshot_every_env_steps: int = option(
        100_000, "population", "decisions of all agents of a policy between two snapshots of it; the newest are kept")
    with_pbt: bool = option(False, "population", "population-based training: replace bad policies by good ones and "
                            "mutate their settings")
    pbt_period_env_steps: int = option(5_000_000, "population", "decisions of all agents of a policy between two of "
                                       "its updates")
    pbt_start_mutation: int = option(20_000_000, "population", "decisions of all agents of a policy before its first "
                                     "update")
    pbt_replace_fraction: float = option(0.3, "population", "share of the policies that count as the best, and as the "
                                         "worst")
    pbt_replace_reward_gap: float = option(0.1, "population", "replace a policy only when the better one's objective "
                                           "is this much better, relative to itself")
    pbt_replace_reward_gap_absolute: float = option(1e-6, "population", "and this much better in absolute terms")
    pbt_mutation_rate: float = option(0.15, "population", "probability that a mutation changes a setting")
    pbt_perturb_min: float = option(1.1, "population", "smallest factor of a mutation")
    pbt_perturb_max: float = option(1.5, "population", "largest factor of a mutation")
    pbt_optimize_gamma: bool = option(False, "population", "let population-based training change gamma as well")

    # ---- evaluation ------------------------------------------------------------------------------------------
    eval_every_env_steps: int = option(0, "evaluation", "score the policy on separate environments every so many "
                                       "env_steps, beside the training; 0: never")
    eval_episodes: int = option(10, "evaluation", "episodes of one evaluation")
    eval_deterministic: bool = option(False, "evaluation", "take the most likely actions instead of sampling")

    # ---- records ---------------------------------------------------------------------------------------------
    report_interval_sec: float = option(5.0, "records", "seconds between reports (metrics.jsonl, TensorBoard)")
    save_every_sec: float = option(120.0, "records", "seconds between checkpoints")
    keep_checkpoints: int = option(2, "records", "periodic checkpoints to keep")
    save_milestones_sec: float = option(math.inf, "records", "seconds between checkpoints that are kept for ever")
    stall_timeout_sec: float = option(300.0, "records", "fail when nothing was sampled or learned for so long")
    trace_sec: float = option(0.0, "records", "record what every process does in the last so many seconds of training "
                              "(trace.json, timeline.png); 0: off")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
        _validate(self)

    # ---- derived values --------------------------------------------------------------------------------------
    @property
    def run_dir(self) -> Path:
        """Return the folder of this run."""
        return run_dir_of(self.train_dir, self.experiment, self.env)

    @property
    def envs_per_split(self) -> int:
        return self.num_envs_per_worker // self.worker_num_splits

    @property
    def num_splits(self) -> int:
        """Return the number of splits of all rollout workers."""
        return self.num_workers * self.worker_num_splits

    @property
    def bptt_steps(self) -> int:
        """Return how many env_steps the learner unrolls a model that has a memory."""
        return self.recurrence or self.rollout

    @property
    def trajectories_per_minibatch(self) -> int:
        return self.batch_size // self.rollout

    @property
    def trajectories_per_dataset(self) -> int:
        return self.trajectories_per_minibatch * self.num_batches_per_epoch

    def save(self, path: Path) -> None:
        """Write all settings as JSON, infinity as "inf"."""
        settings = {name: "inf" if value == math.inf else value for name, value in dataclasses.asdict(self).items()}
        write_atomically(path, json.dumps(settings, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is always whole, also after a crash: to a temporary name on the disk, then rename."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def run_dir_of(train_dir: str, experiment: str, env: str) -> Path:
    """Return the folder of a run; its name is the experiment's, or else the environment's."""
    return Path(train_dir) / (experiment or re.sub(r"[/:]", "_", env))


def _check_type(field: dataclasses.Field, value: Any) -> None:
    kind = typing.get_origin(field.type) or field.type
    allowed = (int, float) if kind is float else (list, tuple) if kind is tuple else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"--{field.name}={value!r} is not of type {kind.__name__}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"--{field.name}={value} is unknown{nearest(value, choices)}; choose from {', '.join(choices)}")


POSITIVE = (
    "train_for_env_steps", "train_for_seconds", "num_workers", "num_envs_per_worker", "worker_num_splits",
    "policy_workers_per_policy", "rollout", "env_frameskip", "env_framestack", "batch_size", "num_batches_per_epoch",
    "num_epochs", "vtrace_rho", "vtrace_c", "learning_rate", "lr_schedule_kl_threshold", "lr_adaptive_min",
    "lr_adaptive_max", "adam_eps", "reward_scale", "reward_clip", "learner_threads", "policy_init_gain",
    "initial_stddev", "rnn_size", "rnn_num_layers", "eval_episodes", "num_policies", "self_play_snapshots",
    "self_play_snapshot_every_env_steps", "pbt_period_env_steps", "report_interval_sec", "save_every_sec",
    "keep_checkpoints", "save_milestones_sec",
    "stall_timeout_sec")
NON_NEGATIVE = (
    "seed", "ppo_clip_ratio", "ppo_clip_value", "value_loss_coeff", "exploration_loss_coeff",
    "exploration_loss_decay_env_steps", "kl_loss_coeff", "max_grad_norm", "max_policy_lag", "res_w", "res_h",
    "recurrence", "obs_scale", "eval_every_env_steps", "pbt_start_mutation", "trace_sec",
    "decorrelate_experience_max_seconds", "pbt_replace_reward_gap", "pbt_replace_reward_gap_absolute")


def _validate(c: Config) -> None:
    """Refuse impossible values and combinations, naming the nearest that work."""
    for name in POSITIVE:
        if not getattr(c, name) > 0:
            raise UserError(f"--{name}={getattr(c, name)} must be greater than 0")
    for name in NON_NEGATIVE:
        if not getattr(c, name) >= 0:
            raise UserError(f"--{name}={getattr(c, name)} must not be negative")
    for name in ("gamma", "gae_lambda", "self_play_past_fraction", "pbt_replace_fraction", "pbt_mutation_rate"):
        if not 0 <= getattr(c, name) <= 1:
            raise UserError(f"--{name}={getattr(c, name)} must lie between 0 and 1")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(c, name) < 1:
            raise UserError(f"--{name}={getattr(c, name)} must lie between 0 and 1, 1 excluded")
    _validate_model(c)
    if c.seed > MAX_SEED:
        raise UserError(f"--seed={c.seed} is too large; use at most {MAX_SEED}")
    if c.experiment in (".", "..") or "/" in c.experiment:
        raise UserError(f"--experiment={c.experiment} is no plain name; choose the folder with --train_dir")
    if c.lr_schedule == "kl_adaptive" and c.lr_adaptive_min > c.lr_adaptive_max:
        raise UserError(f"--lr_adaptive_min={c.lr_adaptive_min} is above --lr_adaptive_max={c.lr_adaptive_max}")
    if c.num_envs_per_worker < c.worker_num_splits:
        raise UserError(f"--num_envs_per_worker={c.num_envs_per_worker} is fewer environments than "
                        f"--worker_num_splits={c.worker_num_splits}; use {c.worker_num_splits}")
    if c.num_envs_per_worker % c.worker_num_splits:
        lower = c.num_envs_per_worker - c.num_envs_per_worker % c.worker_num_splits
        raise UserError(f"--num_envs_per_worker={c.num_envs_per_worker} cannot be divided into "
                        f"--worker_num_splits={c.worker_num_splits}; use {lower} or {lower + c.worker_num_splits}")
    if c.batch_size % c.rollout:
        lower = c.batch_size - c.batch_size % c.rollout
        fits = f"{lower} or {lower + c.rollout}" if lower else f"{c.rollout}"
        raise UserError(f"--batch_size={c.batch_size} is not a multiple of --rollout={c.rollout}; use {fits}")
    _validate_population(c)


def _validate_population(c: Config) -> None:
    """Refuse impossible populations."""
    if c.num_policies > MAX_POLICIES:
        raise UserError(f"--num_policies={c.num_policies} is too many: their queues need more file descriptors than a "
                        f"process can be handed; use at most {MAX_POLICIES}")
    if c.num_workers > max_workers(c.num_policies):
        beside = f" beside --num_policies={c.num_policies}" if c.num_policies > 1 else ""
        raise UserError(f"--num_workers={c.num_workers} is too many{beside}; use {max_workers(c.num_policies)} and "
                        "more --num_envs_per_worker")
    if c.with_pbt and c.num_policies < 2:
        raise UserError("--with_pbt needs a population; set --num_policies to 2 or more")
    if not 1 < c.pbt_perturb_min <= c.pbt_perturb_max < math.inf:
        raise UserError(f"--pbt_perturb_min={c.pbt_perturb_min} and --pbt_perturb_max={c.pbt_perturb_max} must be "
                        "factors above 1, the smaller one first")
    if not c.async_rl and (c.num_policies > 1 or c.self_play_past_fraction):
        raise UserError("--async_rl=False, where a dataset holds one trajectory of every agent, needs --num_policies=1 "
                        "and --self_play_past_fraction=0")
    if c.policy_mapping and c.policy_mapping.count(":") != 1:
        raise UserError(f"--policy_mapping={c.policy_mapping} must be module:function, for example "
                        "my_file:choose_policies")


def _validate_model(c: Config) -> None:
    """Refuse impossible networks and observations."""
    for name in ("encoder_conv_mlp_layers", "encoder_mlp_layers"):
        if not all(isinstance(size, int) and size > 0 for size in getattr(c, name)):
            raise UserError(f"--{name} must be positive layer sizes")
    if c.recurrence and not (c.use_rnn or c.core or c.model):
        raise UserError(f"--recurrence={c.recurrence} needs a policy with a memory; add --use_rnn")
    if c.normalize_input_keys and not c.normalize_input:
        raise UserError("--normalize_input_keys needs --normalize_input=True")
    if c.rollout % c.bptt_steps:
        raise UserError(f"--recurrence={c.recurrence} does not divide --rollout={c.rollout}; use {c.rollout}")
    if not math.isfinite(c.obs_subtract_mean):
        raise UserError(f"--obs_subtract_mean={c.obs_subtract_mean} must be finite")
    if (c.res_w == 0) != (c.res_h == 0):
        raise UserError("--res_w and --res_h belong together; give both")
    for name in ("encoder", "core", "model"):
        if getattr(c, name) and ":" not in getattr(c, name):
            raise UserError(f"--{name}={getattr(c, name)} must be module:function, for example my_file:make_{name}")
    if c.model and (c.encoder or c.core):
        raise UserError("--model replaces the encoder and the core; give either it or --encoder and --core")
    if c.core and c.use_rnn:
        raise UserError("--core replaces the recurrent core of --use_rnn; give only one of them")


# ---- functions by name -------------------------------------------------------------------------------------------


def reference(function: typing.Callable) -> str:
    """Name a function or class so that every process can find it: "module:name".

    One of the running script is named by the script's file, which must guard its main part with
    `if __name__ == "__main__"`. Raises `UserError` for one that cannot be found by name.
    """
    module, name = function.__module__, getattr(function, "__qualname__", "")  # a partial() has none
    if module == "__main__":
        main = sys.modules["__main__"]
        module = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", "")).stem
    if not module or not name or "<" in name or "." in name:
        raise UserError(f"{function!r} must be defined at the top level of a file, so that other processes can find it")
    return f"{module}:{name}"


def find_function(flag: str, name: str) -> typing.Callable:
    """Import the function or class that "module:name" names. Raises `UserError` when there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"--{flag}={name}: there is no module '{error.name}'; run it from the folder of its file, or "
                        "set PYTHONPATH to that folder") from error
    except (ImportError, ValueError) as error:
        raise UserError(f"--{flag}={name}: module '{module_name}' cannot be imported: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"--{flag}={name}: module '{module_name}' has no function '{attribute}'"
                        f"{nearest(attribute, vars(module))}")
    return function


# ---- command line ------------------------------------------------------------------------------------------------


def nearest(word: Any, known: typing.Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known word closest to a misspelled one, else an empty string."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def _parse_int(text: str) -> int:
    try:
        number = float(text) if "e" in text.lower() else int(text)  # 1e7 is welcome, 1.5 is not
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that refuses bad input with one line, naming the nearest known flag."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.replace("argument ", "", 1))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the command line. Raises `UserError`, naming the nearest flag for an unknown one."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            flags = [f for action in self._actions for f in action.option_strings]
            raise UserError(f"unknown argument {flag}{nearest(flag, flags)}")
        return known


def make_parser(description: str, epilog: str = "") -> OneLineParser:
    """Make the command line of all settings, grouped, with their defaults in the help.

    The parsed namespace holds only what was given.
    """
    parser = OneLineParser(description=description, epilog=epilog, allow_abbrev=False,
                           argument_default=argparse.SUPPRESS,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # keeps the epilog's lines
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        arguments: dict[str, Any] = {"help": f"{meta['help']} [{_show(default)}]".replace("%", "%%")}
        if field.type is bool:
            arguments |= {"type": parse_bool, "nargs": "?", "const": True, "metavar": "BOOL"}
        elif typing.get_origin(field.type) is tuple:
            parse, metavar = (_parse_int, "SIZE") if int in typing.get_args(field.type) else (str, "NAME")
            arguments |= {"type": parse, "nargs": "*", "metavar": metavar}
        else:
            parse = {int: _parse_int, float: _parse_float, str: str}[field.type]
            metavar = "|".join(meta["choices"]) if meta["choices"] else field.type.__name__.upper()
            arguments |= {"type": parse, "metavar": metavar}
        groups[meta["group"]].add_argument(f"--{field.name}", **arguments)
    return parser


def _show(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        value = " ".join(map(str, value))
    return "none" if value == "" else str(value)


def make_config(*layers: Mapping[str, Any]) -> Config:
    """Merge settings, the later layers winning, and validate them. Raises `UserError`, also for unknown names."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name not in fields:
                raise UserError(f"unknown setting {name}{nearest(name, fields)}")
            is_tuple = typing.get_origin(fields[name].type) is tuple and isinstance(value, list)
            merged[name] = tuple(value) if is_tuple else value
    return Config(**merged)


def load_saved(path: Path) -> dict[str, Any]:
    """Read the settings that `Config.save` wrote. Raises `UserError` when the file is damaged."""
    try:
        saved = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); use --restart_behavior=restart to begin anew") from error
    if not isinstance(saved, dict) or "env" not in saved:
        raise UserError(f"{path} holds no settings; use --restart_behavior=restart to begin anew")
    return {name: math.inf if value == "inf" else value for name, value in saved.items()}


