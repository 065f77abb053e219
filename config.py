"""The one configuration: every setting with its default, unit and meaning, and its validation.

`Config` is a frozen dataclass: nobody fills a setting in while a run goes on; only population-based training replaces
the configuration of a learner. A value comes from, in rising order: the default below, the profiles of the family of
the environment and of the algorithm for it (in a resumed run: its saved configuration), and the command line. An
algorithm adds settings of its own (`appo.Settings`). Names are Sample Factory's wherever it has a flag for the same
thing. Read next: `pbt.py`.
"""

import contextlib
import dataclasses
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from runtime.console import say
from runtime.container import cpu_cores
from runtime.files import run_dir_of, save_settings
from runtime.seeding import MAX_SEED
from runtime.user_error import UserError, nearest


class Bounds(NamedTuple):
    """Which numbers a setting may have, in code and in words."""

    allows: Callable[[float], bool]
    words: str


POSITIVE = Bounds(lambda x: x > 0, "be greater than 0")
NOT_NEGATIVE = Bounds(lambda x: x >= 0, "not be negative")
FRACTION = Bounds(lambda x: 0 <= x <= 1, "lie between 0 and 1")
BELOW_ONE = Bounds(lambda x: 0 <= x < 1, "lie between 0 and 1, 1 excluded")
SEED = Bounds(lambda x: 0 <= x <= MAX_SEED, f"lie between 0 and {MAX_SEED}")
FACTOR = Bounds(lambda x: 1 < x < math.inf, "be a factor above 1")


def option(default: Any, group: str, help_text: str, choices: Sequence[str] | None = None, *,
           bounds: Bounds | None = None, tune: tuple[float, float] | None = None) -> Any:
    """Declare a setting.

    Args:
        default: its default; a callable one (the number of cores) is called when the configuration is made.
        tune: the range in which population-based training may change it.
    """
    metadata = {"group": group, "help": help_text, "choices": choices, "bounds": bounds, "tune": tune}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def settings(**defaults: Any) -> Callable[[type], type]:
    """Return a decorator that makes a class a frozen dataclass, in which inherited settings have other defaults."""
    def decorate(cls: type) -> type:
        for name, default in defaults.items():
            inherited = cls.__dataclass_fields__[name]
            cls.__annotations__[name] = inherited.type
            setattr(cls, name, dataclasses.field(default=default, metadata=inherited.metadata))
        return dataclass(frozen=True)(cls)
    return decorate


def max_workers(num_policies: int = 1, num_learners: int = 1) -> int:
    """Return how many rollout workers there can be beside so many policies with so many learners each.

    A process can be handed 250 file descriptors; up to 58 are tables and trajectories. A learner and a policy worker
    get one of each rollout worker, a learner two of each learner of its policy, a rollout worker three of each policy.
    """
    return 192 - 3 * num_policies - 2 * num_learners


@dataclass(frozen=True)
class Config:
    """All settings of a run. Raises `UserError`, saying what to set instead, when a value is impossible."""

    roles: ClassVar[tuple[str, ...]] = ()  # names of a policy's learners, where each has a task of its own

    # ---- run -------------------------------------------------------------------------------------------------
    env: str = option("", "run", "environment id: PongNoFrameskip-v4, ALE/Breakout-v5, CartPole-v1, module:Name-v0, "
                      "pettingzoo:mpe2.simple_spread_v3; or module:function, which makes one, of one agent or several")
    env_kwargs: str = option("", "run", "arguments of the function or class that makes it, in JSON: '{\"size\": 7}'")
    algo: str = option("appo", "run", "algorithm: appo, impala, a3c, apex or pql; or module:class, one of "
                       "your own (examples/custom_algorithm.py)")
    train_dir: str = option("train_dir", "run", "folder that holds all runs")
    experiment: str = option("", "run", "name of this run's folder; empty: the environment id")
    restart_behavior: str = option(
        "resume", "run", "if the run's folder exists: resume it, with its settings where none are given (but device, "
        "tf32, torch_compile, serial_mode, trace_sec, learner_threads, policy_workers_per_policy, trust_run and "
        "set_workers_cpu_affinity); restart (rename it to ..._old and begin anew); overwrite (delete it and begin "
        "anew)", ("resume", "restart", "overwrite"))
    train_for_env_steps: int = option(10_000_000, "run", "stop after this many env_steps (calls of step(), not "
                                      "frames), of all environments, resumes included", bounds=POSITIVE)
    train_for_seconds: float = option(math.inf, "run", "stop after this many seconds of training, resumes included",
                                      bounds=POSITIVE)
    stop_at_return: float = option(math.inf, "run", "stop when the mean return of the last 100 episodes, or of an "
                                   "evaluation if there are some, reaches this; of several policies the best one's")
    trust_run: bool = option(False, "run", "import the code that the settings of a resumed run name, though the "
                             "command line does not (SECURITY.md)")
    seed: int = option(0, "run", "seed of environments, networks and sampling", bounds=SEED)
    device: str = option("auto", "run", "where networks run: auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    precision: str = option("auto", "run", "arithmetic of the network body: bfloat16 where the hardware has it "
                            "(auto), or float32", ("auto", "float32", "bfloat16"))
    tf32: bool = option(False, "run", "multiply float32 matrices in TF32, ten bits of mantissa; a GPU only")
    torch_compile: bool = option(False, "run", "compile the network with torch.compile, which takes a minute; a "
                                 "learner has one thread then")
    async_rl: bool = option(True, "run", "collect experience while learning; False: take turns (hardly a policy lag)")
    serial_mode: bool = option(False, "run", "run every component in this process, in a fixed order, "
                               "with one policy worker and one thread, for debugging")

    # ---- sampler ---------------------------------------------------------------------------------------------
    num_workers: int = option(lambda: min(cpu_cores(), max_workers()), "sampler",
                              "rollout worker processes, one for each core", bounds=POSITIVE)
    num_envs_per_worker: int = option(16, "sampler", "environments of each rollout worker, all splits together",
                                      bounds=POSITIVE)
    worker_num_splits: int = option(2, "sampler", "groups of environments per rollout worker, 2 with a GPU, else 1; 2: "
                                    "double-buffered sampling, one group is stepped while the other's actions are "
                                    "computed", bounds=POSITIVE)
    policy_workers_per_policy: int = option(1, "sampler", "policy worker processes", bounds=POSITIVE)
    set_workers_cpu_affinity: bool = option(False, "sampler", "bind each rollout worker to one core, the first "
                                            "to the first core, the second to the second, and so on")
    rollout: int = option(32, "sampler", "T, the env_steps of one trajectory", bounds=POSITIVE)
    env_frameskip: int = option(1, "sampler", "simulator frames per env_step (Atari and VizDoom)", bounds=POSITIVE)
    env_framestack: int = option(1, "sampler", "frames stacked in one observation (Atari only)", bounds=POSITIVE)
    res_w: int = option(0, "sampler", "resize image observations to this width in pixels; 0: as they come (not Atari)",
                        bounds=NOT_NEGATIVE)
    res_h: int = option(0, "sampler", "resize image observations to this height in pixels; 0: as they come (not Atari)",
                        bounds=NOT_NEGATIVE)

    # ---- learner ---------------------------------------------------------------------------------------------
    batch_size: int = option(1024, "learner", "samples of one minibatch (one SGD step)", bounds=POSITIVE)
    num_batches_per_epoch: int = option(1, "learner", "minibatches in one dataset", bounds=POSITIVE)
    num_epochs: int = option(1, "learner", "passes over each dataset", bounds=POSITIVE)
    gamma: float = option(0.99, "learner", "discount per env_step", bounds=FRACTION, tune=(0.0, 0.999999))
    learning_rate: float = option(1e-4, "learner", "initial learning rate", bounds=POSITIVE, tune=(1e-8, 1e-1))
    lr_schedule: str = option("constant", "learner", "linear_decay reaches 0 at train_for_env_steps; kl_adaptive "
                              "holds KL(acting policy || new policy) near its threshold",
                              ("constant", "linear_decay", "kl_adaptive"))
    lr_schedule_kl_threshold: float = option(0.008, "learner", "target of kl_adaptive: the rate shrinks by 1.5 above "
                                             "twice this KL and grows by 1.5 below half of it", bounds=POSITIVE)
    lr_adaptive_min: float = option(1e-6, "learner", "smallest rate of kl_adaptive", bounds=POSITIVE)
    lr_adaptive_max: float = option(1e-2, "learner", "largest rate of kl_adaptive", bounds=POSITIVE)
    adam_eps: float = option(1e-6, "learner", "epsilon of Adam", bounds=POSITIVE)
    adam_beta1: float = option(0.9, "learner", "decay of Adam's first moment", bounds=BELOW_ONE)
    adam_beta2: float = option(0.999, "learner", "decay of Adam's second moment", bounds=BELOW_ONE)
    max_grad_norm: float = option(4.0, "learner", "clip the norm of the gradient; 0: off", bounds=NOT_NEGATIVE,
                                  tune=(1e-3, 1e3))
    max_policy_lag: int = option(1000, "learner", "ignore samples acted more than so many SGD steps ago",
                                 bounds=NOT_NEGATIVE)
    reward_scale: float = option(1.0, "learner", "multiply rewards before learning (logged returns stay true)",
                                 bounds=POSITIVE)
    reward_clip: float = option(math.inf, "learner", "clip scaled rewards to +- this before learning", bounds=POSITIVE)
    recurrence: int = option(0, "learner", "env_steps of backpropagation through time where the policy has a memory; "
                             "0: the whole rollout", bounds=NOT_NEGATIVE)
    normalize_input: bool = option(True, "learner", "normalize observations by their running mean and deviation")
    normalize_input_keys: tuple[str, ...] = option(
        (), "learner", "names of the observations to normalize; none: all images and vectors")
    obs_subtract_mean: float = option(0.0, "learner", "subtract this from images and vectors first")
    obs_scale: float = option(0.0, "learner", "then divide images and vectors by this; 0: by 255 for uint8 images, "
                              "by 1 for everything else", bounds=NOT_NEGATIVE)
    normalize_returns: bool = option(True, "learner", "learn values in units of the running deviation of the returns")
    learner_threads: int = option(1, "learner", "CPU threads of a learner", bounds=POSITIVE)
    num_learners: int = option(1, "learner", "learners of each policy, which change the same weights without a lock "
                               "(Hogwild)", bounds=POSITIVE)

    # ---- model -----------------------------------------------------------------------------------------------
    encoder: str = option("", "model", "module:function, an encoder of your own (examples/custom_encoder.py)")
    core: str = option("", "model", "module:function, a core of your own (examples/custom_core.py)")
    model: str = option("", "model", "module:function, a whole model of your own (examples/custom_model.py)")
    encoder_conv_architecture: str = option(
        "auto", "model", "encoder of image observations (auto: layers that fit their size; convnet_atari: the Nature "
        "CNN; convnet_a3c: the two layers of A3C; convnet_small: three 2x2 layers, for grids of a few cells)",
        ("auto", "convnet_simple", "convnet_atari", "convnet_a3c", "convnet_small", "resnet_impala"))
    encoder_conv_mlp_layers: tuple[int, ...] = option((512,), "model", "layers after the convolutions")
    encoder_mlp_layers: tuple[int, ...] = option((512, 512), "model", "layers of the encoder of vector observations")
    use_rnn: bool = option(False, "model", "give the policy a memory: a recurrent core behind the encoders")
    rnn_type: str = option("gru", "model", "kind of recurrent core", ("gru", "lstm"))
    rnn_size: int = option(512, "model", "hidden units of each recurrent layer", bounds=POSITIVE)
    rnn_num_layers: int = option(1, "model", "recurrent layers", bounds=POSITIVE)
    nonlinearity: str = option("elu", "model", "activation function", ("elu", "relu", "tanh"))
    policy_init_gain: float = option(1.0, "model", "gain of the orthogonal initialization", bounds=POSITIVE)
    adaptive_stddev: bool = option(False, "model", "continuous actions: the network gives the standard deviation; "
                                   "False: one learned value per action")
    initial_stddev: float = option(1.0, "model", "initial standard deviation of continuous actions", bounds=POSITIVE)
    squash_actions: bool = option(False, "model", "continuous actions: squash a Gaussian into the bounds with tanh; "
                                  "False: clip it")

    # ---- population ------------------------------------------------------------------------------------------
    num_policies: int = option(1, "population", "policies trained at once, each with its own learners; every agent "
                               "draws one of them at random when its episode begins", bounds=POSITIVE)
    pbt_mix_policies_in_one_env: bool = option(True, "population", "draw a policy for each agent of an environment; "
                                               "False: one draw for all of them; not with --policy_mapping")
    policy_mapping: str = option("", "population", "module:function, a choice of policies of your own "
                                 "(examples/custom_mapping.py)")
    self_play_past_fraction: float = option(0.0, "population", "share of the opponents of a policy that are played by "
                                            "earlier versions of it; these do not learn", bounds=FRACTION)
    self_play_snapshots: int = option(5, "population", "earlier versions of each policy to keep as opponents",
                                      bounds=POSITIVE)
    self_play_snapshot_every_env_steps: int = option(100_000, "population", "decisions of all agents of a policy "
                                                     "between two snapshots of it; the newest are kept",
                                                     bounds=POSITIVE)
    with_pbt: bool = option(False, "population", "population-based training: replace bad policies by good ones and "
                            "mutate their settings")
    pbt_target_objective: str = option("true_objective", "population", "key of the info of an episode's last step that "
                                       "policies are ranked by; without it their returns are")
    pbt_period_env_steps: int = option(5_000_000, "population", "decisions of all agents of a policy between two of "
                                       "its updates", bounds=POSITIVE)
    pbt_start_mutation: int = option(20_000_000, "population", "decisions of all agents of a policy before its first "
                                     "update", bounds=NOT_NEGATIVE)
    pbt_replace_fraction: float = option(0.3, "population", "share of the policies that count as the best, and as the "
                                         "worst", bounds=FRACTION)
    pbt_replace_reward_gap: float = option(0.1, "population", "replace a policy only when the better one's objective "
                                           "is this much better, relative to itself", bounds=NOT_NEGATIVE)
    pbt_replace_reward_gap_absolute: float = option(1e-6, "population", "and this much better in absolute terms",
                                                    bounds=NOT_NEGATIVE)
    pbt_mutation_rate: float = option(0.15, "population", "probability that a mutation changes a setting",
                                      bounds=FRACTION)
    pbt_perturb_min: float = option(1.1, "population", "smallest factor of a mutation", bounds=FACTOR)
    pbt_perturb_max: float = option(1.5, "population", "largest factor of a mutation", bounds=FACTOR)
    pbt_optimize_gamma: bool = option(False, "population", "let population-based training change gamma as well")

    # ---- evaluation ------------------------------------------------------------------------------------------
    eval_every_env_steps: int = option(0, "evaluation", "score the policy on separate environments every so many "
                                       "env_steps, beside the training; 0: never", bounds=NOT_NEGATIVE)
    eval_episodes: int = option(10, "evaluation", "episodes of one evaluation", bounds=POSITIVE)
    eval_deterministic: bool = option(False, "evaluation", "take the most likely actions instead of sampling")

    # ---- records ---------------------------------------------------------------------------------------------
    report_interval_sec: float = option(5.0, "records", "seconds between reports; after each dataset in serial mode",
                                        bounds=POSITIVE)
    save_every_sec: float = option(15.0, "records", "seconds between checkpoints: what a run may lose that is killed; "
                                   "a hundred times as long as writing one takes if that is more", bounds=POSITIVE)
    keep_checkpoints: int = option(2, "records", "periodic checkpoints to keep", bounds=POSITIVE)
    save_milestones_sec: float = option(math.inf, "records", "seconds between checkpoints that are kept for ever",
                                        bounds=POSITIVE)
    trace_sec: float = option(0.0, "records", "record what every process does in the last so many seconds of training "
                              "(trace.json, timeline.png); 0: off", bounds=NOT_NEGATIVE)

    # ---- failures --------------------------------------------------------------------------------------------
    stall_timeout_sec: float = option(300.0, "failures", "a component that does nothing for so long has failed",
                                      bounds=POSITIVE)
    env_timeout_sec: float = option(math.inf, "failures", "and so has a worker whose environments take so long for one "
                                    "step of all that it steps together", bounds=POSITIVE)
    max_restarts: int = option(10, "failures", "replace failed components at most so often within "
                               "--restart_window_sec, then end; 0: end at once", bounds=NOT_NEGATIVE)
    restart_window_sec: float = option(600.0, "failures", "seconds in which replacements count", bounds=POSITIVE)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_value(field, getattr(self, field.name))
        _validate(self)

    # ---- derived values --------------------------------------------------------------------------------------
    @property
    def run_dir(self) -> Path:
        return run_dir_of(self.train_dir, self.experiment, self.env)

    @property
    def env_arguments(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            return json.loads(self.env_kwargs or "{}")

    @property
    def envs_per_split(self) -> int:
        return self.num_envs_per_worker // self.worker_num_splits

    @property
    def num_splits(self) -> int:
        """Return the number of splits of all rollout workers."""
        return self.num_workers * self.worker_num_splits

    @property
    def learners(self) -> tuple[str, ...]:
        """Name the learners of each policy: by their roles, or by numbers where there are several."""
        numbered = tuple(map(str, range(self.num_learners))) if self.num_learners > 1 else ("",)
        return self.roles or numbered

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
        save_settings(path, dataclasses.asdict(self))

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain values: a name takes nothing along."""
        return {name: str(value) if isinstance(value, str) else value for name, value in vars(self).items()}

    def __reduce__(self) -> tuple[Any, ...]:
        # by value, if it is a class of the user's script, which no other process runs
        return _restore, (cloudpickle.dumps(type(self)), dataclasses.asdict(self))


def _restore(settings: bytes, values: Mapping[str, Any]) -> Config:
    return cloudpickle.loads(settings)(**values)


def tunable(cfg: Config) -> dict[str, float]:
    """Return the settings that population-based training may change, with their values."""
    return {field.name: float(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)
            if field.metadata["tune"] and (field.name != "gamma" or cfg.pbt_optimize_gamma)}


def check_value(field: dataclasses.Field, value: Any) -> None:
    """Raise `UserError` for a value of a setting that has another type, or is not allowed."""
    kind = typing.get_origin(field.type) or field.type
    allowed = (int, float) if kind is float else (list, tuple) if kind is tuple else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"--{field.name}={value!r} is not of type {kind.__name__}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"--{field.name}={value} is unknown{nearest(value, choices)}; choose from {', '.join(choices)}")
    endless = field.default == math.inf == value or field.name.endswith(("_sec", "_seconds"))  # never, or all the time
    if kind in (int, float) and not (abs(value) <= 1e18 or (endless and value > 0)):
        raise UserError(f"--{field.name}={str(value)[:20]} must be finite, at most 1e18")
    bounds = field.metadata["bounds"]
    if bounds and not bounds.allows(value):
        raise UserError(f"--{field.name}={value} must {bounds.words}")


def _validate(c: Config) -> None:
    """Refuse impossible values and combinations, naming the nearest that work."""
    _validate_model(c)
    for name in ("encoder", "core", "model", "policy_mapping"):
        if getattr(c, name) and getattr(c, name).count(":") != 1:
            raise UserError(f"--{name}={getattr(c, name)} must be module:function, for example my_file:my_{name}")
    if not isinstance(c.env_arguments, dict):
        raise UserError(f"--env_kwargs={c.env_kwargs[:200]} is no JSON object; write it as '{{\"size\": 7}}'")
    run_dir_of(c.train_dir, c.experiment, c.env)
    for name, is_refused in (("with_pbt", c.with_pbt), ("async_rl", not c.async_rl), ("serial_mode", c.serial_mode),
                             ("lr_schedule", c.lr_schedule == "kl_adaptive")):  # each learner would have its own rate
        if is_refused and c.num_learners > 1:
            raise UserError(f"--{name}={getattr(c, name)} needs --num_learners=1, not {c.num_learners}")
    for low, high in (("lr_adaptive_min", "lr_adaptive_max"), ("pbt_perturb_min", "pbt_perturb_max")):
        if getattr(c, low) > getattr(c, high):
            raise UserError(f"--{low}={getattr(c, low)} is above --{high}={getattr(c, high)}")
    for name, part in (("num_envs_per_worker", "worker_num_splits"), ("batch_size", "rollout")):
        whole, unit = getattr(c, name), getattr(c, part)
        if whole % unit:
            fits = " or ".join(str(multiple * unit) for multiple in (whole // unit, whole // unit + 1) if multiple)
            raise UserError(f"--{name}={whole} is not a multiple of --{part}={unit}; use {fits}")
    _validate_population(c)


def _validate_population(c: Config) -> None:
    """Refuse impossible populations."""
    most = max_workers(c.num_policies, len(c.learners))
    if c.num_workers > most and not c.serial_mode:
        raise UserError(f"--num_workers={c.num_workers} beside --num_policies={c.num_policies} is too many; "
                        + (f"use at most {most}" if most > 0 else "use fewer policies"))
    if c.with_pbt and c.num_policies < 2:
        raise UserError("--with_pbt needs a population; set --num_policies to 2 or more")
    if not c.async_rl and (c.num_policies > 1 or c.self_play_past_fraction):
        raise UserError("--async_rl=False, where all slots of a policy come back together, needs --num_policies=1 "
                        "and --self_play_past_fraction=0")


def _validate_model(c: Config) -> None:
    """Refuse impossible networks and observations."""
    for name in ("encoder_conv_mlp_layers", "encoder_mlp_layers"):
        if not all(isinstance(size, int) and size > 0 for size in getattr(c, name)):
            raise UserError(f"--{name} must be positive layer sizes")
    if c.recurrence and not (c.use_rnn or c.core or c.model):
        raise UserError(f"--recurrence={c.recurrence} needs a policy with a memory; add --use_rnn, or leave it out")
    if c.normalize_input_keys and not c.normalize_input:
        raise UserError("--normalize_input_keys needs --normalize_input=True")
    if c.rollout % c.bptt_steps:
        raise UserError(f"--recurrence={c.recurrence} does not divide --rollout={c.rollout}; use {c.rollout}")
    if (c.res_w == 0) != (c.res_h == 0):
        raise UserError("--res_w and --res_h belong together; give both")
    if c.model and (c.encoder or c.core):
        raise UserError("--model replaces the encoder and the core; give either it or --encoder and --core")
    if c.core and c.use_rnn:
        raise UserError("--core replaces the recurrent core of --use_rnn; give only one of them")


# ---- making one --------------------------------------------------------------------------------------------------

def canonical_algo(name: str) -> str:
    """Return the name of an algorithm as it is saved: --algo=APPO is appo."""
    return name if ":" in name else name.lower()


GONE = {"cuda_graphs", "decorrelate_envs_on_one_worker", "decorrelate_experience_max_seconds", "epsilon_base",
        "epsilon_power", "half_precision_copies", "noise_min", "replay_beta_rise_env_steps", "rmsprop_alpha",
        "rmsprop_eps", "target_noise"}  # settings of earlier versions


def without_gone(saved: Mapping[str, Any], settings: type[Config]) -> dict[str, Any]:
    """Return the settings that a run or a checkpoint has saved, without those that are gone; print their names."""
    if gone := sorted((GONE & saved.keys()) - settings.__dataclass_fields__.keys()):
        say(f"settings of an earlier version that are gone: {', '.join(gone)}")
    return {name: value for name, value in saved.items() if name not in gone}


def fields_of(settings: type[Config]) -> dict[str, dataclasses.Field]:
    """Return the settings of a class by their names. Raises `UserError` for one that is no `option`."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for field in fields.values():
        if "group" not in field.metadata or isinstance(field.type, str):
            raise UserError(f"{settings.__qualname__}: write a setting as {field.name}: type = option(...), without "
                            "'from __future__ import annotations'")
    return fields


def make_config(settings: type[Config], *layers: Mapping[str, Any]) -> Config:
    """Merge settings, the later layers winning, and validate them. Raises `UserError`, also for unknown names.

    settings: the class of the algorithm's, which the layers should name as `algo`.
    """
    merged = {name: value for layer in layers for name, value in layer.items()}
    merged["algo"] = canonical_algo(merged.get("algo", Config.algo))
    fields = fields_of(settings)
    if unknown := [f"{name}{nearest(name, fields)}" for name in merged if name not in fields]:
        raise UserError(f"unknown setting {', '.join(unknown)}")
    for name, value in merged.items():
        if typing.get_origin(fields[name].type) is tuple and isinstance(value, list):
            merged[name] = tuple(value)
    return settings(**merged)
