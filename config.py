"""The one configuration: every setting with its default, unit and meaning, what it may be, and where it comes from.

`Config` is a frozen dataclass: nobody fills a setting in while a run goes on; only population-based training and
`Trainer.change` replace the configuration of a learner. A value comes from, in rising order: the default below, the
profiles of the family of the environment and of the algorithm for it (in a resumed run: its saved configuration), and
the command line. An algorithm adds settings of its own (`appo.Settings`). Names are Sample Factory's wherever it has a
flag for the same thing. Read next: `pbt.py`.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from algorithms import algorithm_class
from envs.families import FAMILIES, family
from runtime.checkpoint import holds_run, load_saved, run_dir_of
from runtime.command_line import as_typed, check_values, make_parser
from runtime.guard import COMPONENT
from runtime.machine import Machine, automatic, cpu_cores, this_machine
from runtime.utils import MAX_SEED, UserError, Values, check_trusted, nearest, say


class Bounds(NamedTuple):
    """Which values a setting may have, in code and in words."""

    allows: Callable[[Any], bool]
    words: str


def is_json_object(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(json.loads(text or "{}"), dict)
    return False


POSITIVE = Bounds(lambda x: x > 0, "be greater than 0")
NOT_NEGATIVE = Bounds(lambda x: x >= 0, "not be negative")
FRACTION = Bounds(lambda x: 0 <= x <= 1, "lie between 0 and 1")
BELOW_ONE = Bounds(lambda x: 0 <= x < 1, "lie between 0 and 1, 1 excluded")
SEED = Bounds(lambda x: 0 <= x <= MAX_SEED, f"lie between 0 and {MAX_SEED}")
SIZES = Bounds(lambda sizes: all(isinstance(size, int) and size > 0 for size in sizes), "be positive layer sizes")
CODE = Bounds(lambda name: not name or name.count(":") == 1, "be module:function, for example my_file:my_function")
NAME = Bounds(lambda name: name not in (".", "..") and "/" not in name, "be a plain name; --train_dir is the folder")
JSON = Bounds(is_json_object, "be a JSON object, as '{\"size\": 7}'")


def option(default: Any, group: str, help_text: str, bounds: Bounds | Sequence[str] | None = None, *,
           tune: tuple[float, float] | None = None) -> Any:
    """Declare a setting.

    Args:
        default: its default; a callable one (the number of cores) is called when the configuration is made.
        bounds: what it may be: `Bounds`, or a few words.
        tune: the range in which population-based training may change a float.
    """
    choices, bounds = (None, bounds) if isinstance(bounds, Bounds) else (bounds, None)
    metadata = {"group": group, "help": help_text, "choices": choices, "bounds": bounds, "tune": tune}
    return dataclasses.field(**{"default_factory" if callable(default) else "default": default}, metadata=metadata)


def settings(**defaults: Any) -> Callable[[type], type]:
    """Return a decorator that makes a class a frozen dataclass, in which inherited settings have other defaults."""
    def decorate(cls: type) -> type:
        for name, default in defaults.items():
            inherited = cls.__dataclass_fields__[name]
            cls.__annotations__[name] = inherited.type
            setattr(cls, name, dataclasses.field(default=default, metadata=inherited.metadata))
        return dataclasses.dataclass(frozen=True)(cls)
    return decorate


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run. Raises `UserError`, saying what to set instead, when a value is impossible."""

    roles: ClassVar[tuple[str, ...]] = ()  # names of a policy's learners, where each has a task of its own

    # ---- run -------------------------------------------------------------------------------------------------
    env: str = option("", "run", "environment id: PongNoFrameskip-v4, ALE/Breakout-v5, CartPole-v1, module:Name-v0, "
                      "pettingzoo:mpe2.simple_spread_v3; or module:function, which makes one, of one agent or several")
    env_kwargs: str = option("", "run", "arguments of what makes it, in JSON: '{\"size\": 7}'", JSON)
    algo: str = option("appo", "run", "appo, impala, a3c, apex, pql; or module:class (examples/custom_algorithm.py)")
    train_dir: str = option("train_dir", "run", "folder that holds all runs")
    experiment: str = option("", "run", "name of this run's folder; empty: the environment id", NAME)
    restart_behavior: str = option(
        "resume", "run", "if the run's folder exists: resume it, with its settings where none are given (but not how "
        "it runs: device, threads, ...); restart (rename it to ..._old and begin anew); overwrite (delete it)",
        ("resume", "restart", "overwrite"))
    train_for_env_steps: int = option(10_000_000, "run", "stop after this many env_steps (calls of step(), not "
                                      "frames), of all environments, resumes included", POSITIVE)
    train_for_seconds: float = option(math.inf, "run", "stop after so many seconds, resumes included", POSITIVE)
    stop_at_return: float = option(math.inf, "run", "stop when the mean return of the last 100 episodes, or of an "
                                   "evaluation if there are some, reaches this; of several policies the best one's")
    trust_run: bool = option(False, "run", "import the code that the settings of a resumed run name, though the "
                             "command line does not (SECURITY.md)")
    seed: int = option(0, "run", "seed of environments, networks and sampling", SEED)
    device: str = option("auto", "run", "where networks run: auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    precision: str = option("auto", "run", "arithmetic of the network body: bfloat16 where the hardware has it "
                            "(auto), or float32", ("auto", "float32", "bfloat16"))
    tf32: bool = option(False, "run", "multiply float32 matrices in TF32, ten bits of mantissa; a GPU only")
    torch_compile: bool = option(False, "run", "compile the network, in a minute; a learner has one thread then")
    async_rl: bool = option(True, "run", "collect experience while learning; False: take turns (hardly a policy lag)")
    serial_mode: bool = option(False, "run", "run all in this process, in a fixed order and one thread, for debugging")

    # ---- sampler ---------------------------------------------------------------------------------------------
    num_workers: int = option(cpu_cores, "sampler", "rollout worker processes, one for each core", POSITIVE)
    num_envs_per_worker: int = option(16, "sampler", "environments of a rollout worker, all splits together", POSITIVE)
    worker_num_splits: int = option(2, "sampler", "groups of environments per rollout worker, 2 with a GPU, else 1; of "
                                    "two, one is stepped while the actions of the other are computed", POSITIVE)
    policy_workers_per_policy: int = option(1, "sampler", "policy worker processes", POSITIVE)
    set_workers_cpu_affinity: bool = option(False, "sampler", "bind each rollout worker to a core, in their order")
    rollout: int = option(32, "sampler", "T, the env_steps of one trajectory", POSITIVE)
    env_frameskip: int = option(1, "sampler", "simulator frames per env_step (Atari, VizDoom and Doom)", POSITIVE)
    env_framestack: int = option(1, "sampler", "frames stacked in one observation (Atari only)", POSITIVE)
    res_w: int = option(0, "sampler", "resize images to this width; 0: as they come (not Atari)", NOT_NEGATIVE)
    res_h: int = option(0, "sampler", "resize images to this height; 0: as they come (not Atari)", NOT_NEGATIVE)

    # ---- learner ---------------------------------------------------------------------------------------------
    batch_size: int = option(1024, "learner", "samples of one minibatch (one SGD step)", POSITIVE)
    num_batches_per_epoch: int = option(1, "learner", "minibatches in one dataset", POSITIVE)
    num_epochs: int = option(1, "learner", "passes over each dataset", POSITIVE)
    max_epochs: int = option(1, "learner", "up to so many passes, while the next dataset is not there", POSITIVE)
    gamma: float = option(0.99, "learner", "discount per env_step", FRACTION, tune=(0.0, 0.999999))
    learning_rate: float = option(1e-4, "learner", "initial learning rate", POSITIVE, tune=(1e-8, 1e-1))
    lr_schedule: str = option("constant", "learner", "linear_decay reaches 0 at train_for_env_steps; kl_adaptive "
                              "holds KL(acting policy || new policy) near its threshold",
                              ("constant", "linear_decay", "kl_adaptive"))
    lr_schedule_kl_threshold: float = option(0.008, "learner", "target of kl_adaptive: the rate shrinks by 1.5 above "
                                             "twice this KL and grows by 1.5 below half of it", POSITIVE)
    lr_adaptive_min: float = option(1e-6, "learner", "smallest rate of kl_adaptive", POSITIVE)
    lr_adaptive_max: float = option(1e-2, "learner", "largest rate of kl_adaptive", POSITIVE)
    adam_eps: float = option(1e-6, "learner", "epsilon of Adam", POSITIVE)
    adam_beta1: float = option(0.9, "learner", "decay of Adam's first moment", BELOW_ONE)
    adam_beta2: float = option(0.999, "learner", "decay of Adam's second moment", BELOW_ONE)
    max_grad_norm: float = option(4.0, "learner", "clip the gradient's norm; 0: off", NOT_NEGATIVE, tune=(1e-3, 1e3))
    max_policy_lag: int = option(1000, "learner", "ignore samples acted more SGD steps ago than this", NOT_NEGATIVE)
    reward_scale: float = option(1.0, "learner", "multiply rewards by this (logged returns stay true)", POSITIVE)
    reward_clip: float = option(math.inf, "learner", "clip scaled rewards to +- this before learning", POSITIVE)
    recurrence: int = option(0, "learner", "env_steps of backpropagation through time where the policy has a memory; "
                             "0: the whole rollout", NOT_NEGATIVE)
    normalize_input: bool = option(True, "learner", "normalize observations by their running mean and deviation")
    normalize_input_keys: tuple[str, ...] = option((), "learner", "only these of them; none: all images and vectors")
    obs_subtract_mean: float = option(0.0, "learner", "subtract this from images and vectors first")
    obs_scale: float = option(0.0, "learner", "then divide images and vectors by this; 0: by 255 for uint8 images, "
                              "by 1 for everything else", NOT_NEGATIVE)
    normalize_returns: bool = option(True, "learner", "learn values in units of the running deviation of the returns")
    learner_threads: int = option(1, "learner", "CPU threads of a learner", POSITIVE)
    num_learners: int = option(1, "learner", "learners of each policy, on the same weights (Hogwild)", POSITIVE)

    # ---- model -----------------------------------------------------------------------------------------------
    encoder: str = option("", "model", "module:function, an encoder of your own (examples/custom_encoder.py)", CODE)
    core: str = option("", "model", "module:function, a core of your own (examples/custom_core.py)", CODE)
    model: str = option("", "model", "module:function, a whole model of your own (examples/custom_model.py)", CODE)
    encoder_conv_architecture: str = option(
        "auto", "model", "encoder of images (auto: layers that fit their size; convnet_atari: the Nature CNN; "
        "convnet_a3c: the two layers of A3C; convnet_small: three 2x2 layers, for grids of a few cells)",
        ("auto", "convnet_simple", "convnet_atari", "convnet_a3c", "convnet_small", "resnet_impala"))
    encoder_conv_mlp_layers: tuple[int, ...] = option((512,), "model", "layers after the convolutions", SIZES)
    encoder_mlp_layers: tuple[int, ...] = option((512, 512), "model", "layers of the encoder of vectors", SIZES)
    use_rnn: bool = option(False, "model", "give the policy a memory: a recurrent core behind the encoders")
    rnn_type: str = option("gru", "model", "kind of recurrent core", ("gru", "lstm"))
    rnn_size: int = option(512, "model", "hidden units of each recurrent layer", POSITIVE)
    rnn_num_layers: int = option(1, "model", "recurrent layers", POSITIVE)
    nonlinearity: str = option("elu", "model", "activation function", ("elu", "relu", "silu", "tanh"))
    policy_init_gain: float = option(1.0, "model", "gain of the orthogonal initialization", POSITIVE)
    adaptive_stddev: bool = option(False, "model", "continuous actions: the network gives the standard deviation; "
                                   "False: one learned value per action")
    initial_stddev: float = option(1.0, "model", "initial standard deviation of continuous actions", POSITIVE)
    squash_actions: bool = option(False, "model", "squash continuous actions into their bounds by tanh; False: clip")

    # ---- population ------------------------------------------------------------------------------------------
    num_policies: int = option(1, "population", "policies trained at once, each with its own learners; every agent "
                               "draws one of them at random when its episode begins", POSITIVE)
    pbt_mix_policies_in_one_env: bool = option(True, "population", "draw a policy for each agent of an environment; "
                                               "False: one draw for all of them; not with --policy_mapping")
    policy_mapping: str = option("", "population", "module:function, who plays whom (examples/custom_mapping.py)", CODE)
    self_play_past_fraction: float = option(0.0, "population", "share of the opponents of a policy that are played by "
                                            "earlier versions of it; these do not learn", FRACTION)
    self_play_snapshots: int = option(5, "population", "earlier versions of each policy to keep as opponents", POSITIVE)
    self_play_snapshot_every_env_steps: int = option(100_000, "population", "decisions of all agents of a policy "
                                                     "between two snapshots of it; the newest are kept", POSITIVE)
    with_pbt: bool = option(False, "population", "population-based training: replace bad policies by good ones and "
                            "mutate their settings")
    pbt_target_objective: str = option("true_objective", "population", "key of the info of an episode's last step that "
                                       "policies are ranked by; without it their returns are")
    pbt_period_env_steps: int = option(5_000_000, "population", "decisions of all agents of a policy between two of "
                                       "its updates", POSITIVE)
    pbt_start_mutation: int = option(20_000_000, "population", "decisions of all agents of a policy before its first "
                                     "update", NOT_NEGATIVE)
    pbt_replace_fraction: float = option(0.3, "population", "share of the best policies, and of the worst", FRACTION)
    pbt_replace_reward_gap: float = option(0.1, "population", "replace a policy only when the better one's objective "
                                           "is this much better, relative to itself", NOT_NEGATIVE)
    pbt_replace_reward_gap_absolute: float = option(1e-6, "population", "and by this, in absolute terms", NOT_NEGATIVE)
    pbt_mutation_rate: float = option(0.15, "population", "probability that a mutation changes a setting", FRACTION)
    pbt_perturb_min: float = option(1.1, "population", "smallest factor of a mutation", POSITIVE)
    pbt_perturb_max: float = option(1.5, "population", "largest factor of a mutation", POSITIVE)
    pbt_optimize_gamma: bool = option(False, "population", "let population-based training change gamma as well")

    # ---- evaluation ------------------------------------------------------------------------------------------
    eval_every_env_steps: int = option(0, "evaluation", "score the policy on separate environments every so many "
                                       "env_steps, beside the training; 0: never", NOT_NEGATIVE)
    eval_episodes: int = option(10, "evaluation", "episodes of one evaluation", POSITIVE)
    eval_deterministic: bool = option(False, "evaluation", "take the most likely actions instead of sampling")

    # ---- records ---------------------------------------------------------------------------------------------
    report_interval_sec: float = option(5.0, "records", "seconds between reports", POSITIVE)
    save_every_sec: float = option(15.0, "records", "seconds between checkpoints: what a run may lose that is killed; "
                                   "a hundred times as long as writing one takes if that is more", POSITIVE)
    keep_checkpoints: int = option(2, "records", "periodic checkpoints to keep", POSITIVE)
    save_milestones_sec: float = option(math.inf, "records", "seconds between checkpoints that stay", POSITIVE)
    trace_sec: float = option(0.0, "records", "record what every process does in the last so many seconds of training "
                              "(trace.json, drawn by tools.timeline); 0: off", NOT_NEGATIVE)

    # ---- failures --------------------------------------------------------------------------------------------
    stall_timeout_sec: float = option(300.0, "failures", "a component that hangs for so long has failed", POSITIVE)
    env_timeout_sec: float = option(math.inf, "failures", "and so has a worker whose environments take so long for one "
                                    "step of all that it steps together", POSITIVE)
    max_restarts: int = option(10, "failures", "replace failed components at most so often within "
                               "--restart_window_sec, then end; 0: end at once", NOT_NEGATIVE)
    restart_window_sec: float = option(600.0, "failures", "seconds in which replacements count", POSITIVE)

    def __post_init__(self) -> None:
        check_values(type(self), vars(self))
        check_combinations(self)

    # ---- derived values --------------------------------------------------------------------------------------
    @property
    def run_dir(self) -> Path:
        return run_dir_of(self.train_dir, self.experiment, self.env)

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
    def trajectories_per_dataset(self) -> int:
        return self.batch_size // self.rollout * self.num_batches_per_epoch

    def as_dict(self) -> Values:
        """Return all settings as plain values: a name takes nothing along."""
        return {name: str(value) if isinstance(value, str) else value for name, value in vars(self).items()}

    def __reduce__(self) -> tuple[Any, ...]:
        # by value, if it is a class of the user's script, which no other process runs
        return _restore, (cloudpickle.dumps(type(self)), vars(self))


def _restore(settings: bytes, values: Values) -> Config:
    return cloudpickle.loads(settings)(**values)


def tunable(cfg: Config) -> Values:
    """Return the settings that population-based training may change, with their values."""
    return {field.name: float(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)
            if field.metadata["tune"] and (field.name != "gamma" or cfg.pbt_optimize_gamma)}


# ---- what is refused ---------------------------------------------------------------------------------------------


def check_combinations(c: Config) -> None:
    """Raise `UserError` for settings that cannot go together, saying what to set instead."""
    one_rate = c.async_rl and not c.with_pbt and not c.serial_mode and c.lr_schedule != "kl_adaptive"
    for is_refused, words in (
            (c.num_envs_per_worker % c.worker_num_splits, f"--num_envs_per_worker={c.num_envs_per_worker} must be a "
             f"multiple of --worker_num_splits={c.worker_num_splits}"),
            (c.batch_size % c.rollout, f"--batch_size={c.batch_size} must be a multiple of --rollout={c.rollout}"),
            (c.rollout % (c.recurrence or c.rollout), f"--recurrence={c.recurrence} must divide --rollout={c.rollout}"),
            (c.core and c.use_rnn, "--core replaces the recurrent core of --use_rnn; give only one of them"),
            (c.model and (c.encoder or c.core), "--model replaces the encoder and the core; give either it or these"),
            ((c.res_w == 0) != (c.res_h == 0), "--res_w and --res_h belong together; give both"),
            (c.num_learners > 1 and not one_rate, f"--num_learners={c.num_learners} needs --async_rl=True and "
             "--lr_schedule=constant or linear_decay, and neither --with_pbt nor --serial_mode"),
            (c.with_pbt and c.num_policies < 2, "--with_pbt needs a population; set --num_policies to 2 or more"),
            (not c.async_rl and (c.num_policies > 1 or c.self_play_past_fraction), "--async_rl=False, where all slots "
             "of a policy come back together, needs --num_policies=1 and --self_play_past_fraction=0")):
        if is_refused:
            raise UserError(words)


# ---- making one --------------------------------------------------------------------------------------------------


def make_config(*layers: Values) -> Config:
    """Merge settings, the later layers winning, and check them. Raises `UserError`, also for unknown names."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    settings = algorithm_class(merged.get("algo", Config.algo)).Settings
    known = [field.name for field in dataclasses.fields(settings)]
    if unknown := [f"{name}{nearest(name, known)}" for name in merged if name not in known]:
        raise UserError(f"unknown setting {', '.join(unknown)}")
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in merged.items()})


def defaults(env_id: str, given: Values, machine: Machine | None = None) -> Values:
    """Return the settings that learn well on this environment's family and machine, beside those that are given.

    machine: None is this one. Raises `UserError` for an unknown environment, and for given values that are impossible.
    """
    algorithm = algorithm_class(given.get("algo", Config.algo))
    check_values(algorithm.Settings, given)
    kind = family(env_id)
    usual = {name: getattr(algorithm.Settings, name) for name in ("batch_size", "num_batches_per_epoch", "rollout")}
    of_env, of_algorithm = FAMILIES[kind].profile, algorithm.profiles.get(FAMILIES[kind].like or kind, {})
    without_gpu = {"without_gpu": of_env.get("without_gpu", {}) | of_algorithm.get("without_gpu", {})}
    return automatic(machine or this_machine(given.get("device", "auto")),
                     usual | of_env | of_algorithm | without_gpu, given,
                     num_roles=len(algorithm.Settings.roles), large_observations=FAMILIES[kind].large_observations)


# ---- going on with a run -----------------------------------------------------------------------------------------

# How one start runs, not what is learned: as given, or as the machine has it now, never as the run had it before. The
# number and grouping of environments, their trajectories and batches shape what is learned, so these stay.
MODES = ("restart_behavior", "trust_run", "device", "serial_mode", "policy_workers_per_policy",
         "set_workers_cpu_affinity", "learner_threads", "trace_sec", "tf32", "torch_compile")
# what a run is of: with others its weights and its scores would mean something else; another seed is another run
KIND = ("env", "env_kwargs", "algo", "nonlinearity", "squash_actions", "adaptive_stddev", "obs_subtract_mean",
        "obs_scale", "normalize_input_keys", "normalize_returns", "seed")
ANOTHER = "use another --experiment NAME, or --restart_behavior=restart"


def configure(given: Values) -> Config:
    """Complete the settings that were given: from the run that is resumed (but for `MODES`), or else by `defaults`.

    Raises `UserError` for impossible settings, an unknown environment, or a folder with a run of another kind.
    """
    if COMPONENT in os.environ:  # it would start itself for ever
        raise UserError("put what starts the training under 'if __name__ == \"__main__\":': it is imported by name")
    # in full: an environment may change the working folder
    given = {"env": "", "experiment": "", **given, "train_dir": os.path.abspath(given.get("train_dir", "train_dir"))}
    if ":" not in str(given.get("algo", ":")):
        given["algo"] = str(given["algo"]).lower()  # --algo=APPO is appo
    of_env = defaults(given["env"], given)
    run_dir = run_dir_of(*(given[name] for name in ("train_dir", "experiment", "env")))
    if given.get("restart_behavior", "resume") != "resume" or not holds_run(run_dir):
        return make_config(of_env, given)
    saved = load_saved(run_dir / "config.json")
    # Only a population that population-based training tends may grow or shrink: it would soon replace a bad beginner.
    # Networks with weights of other shapes are refused when the weights are loaded.
    for name in (*KIND, *(() if saved.get("with_pbt") else ("num_policies",))):
        old = saved.get(name, getattr(Config, name))  # the oldest runs do not name all
        if as_typed(given.get(name, old)) != as_typed(old):
            raise UserError(f"{run_dir} holds a run of --{name}={as_typed(old)}, not of {as_typed(given[name])}; "
                            f"{ANOTHER}")
    check_trusted(saved, given, run_dir)
    kept = {name: value for name, value in known_of(saved | given).items() if name not in MODES}
    of_machine = defaults(given["env"], kept | given)
    return make_config(kept, {name: of_machine[name] for name in MODES if name in of_machine}, given)


def known_of(saved: Values) -> Values:
    """Return the settings that a run or a checkpoint has saved, without those of other versions; print their names."""
    known = algorithm_class(saved.get("algo", Config.algo)).Settings.__dataclass_fields__
    if unknown := saved.keys() - known:
        say(f"saved settings that this version does not have: {', '.join(sorted(unknown))}")
    return {name: value for name, value in saved.items() if name in known}


def changes(cfg: Config) -> dict[str, str]:
    """Say of each setting of a resumed run that is no longer the saved one what it was and is; before it is saved."""
    resumes = cfg.restart_behavior == "resume" and holds_run(cfg.run_dir)
    saved = load_saved(cfg.run_dir / "config.json") if resumes else {}
    compared = saved.keys() - {"env", "train_dir", "experiment", "restart_behavior", "trust_run"}
    return {name: f"{name} {as_typed(saved[name])} -> {as_typed(value)}" for name, value in vars(cfg).items()
            if name in compared and as_typed(saved[name]) != as_typed(value)}


# ---- the command line --------------------------------------------------------------------------------------------


def parse_settings(argv: Sequence[str], description: str) -> Values:
    """Return the settings that a command line gives; with --help show those that its environment gets, and end."""
    words = [word for word in argv if word not in ("-h", "--help")]
    algo = vars(make_parser(Config, description).parse_known_args(words)[0]).get("algo", Config.algo)
    settings = algorithm_class(algo).Settings
    parser = make_parser(settings, description)
    given = vars(parser.parse_known_args(words)[0])
    if len(words) < len(argv) and "env" in given:
        parser = make_parser(settings, description, defaults(given["env"], given) | given)
    return vars(parser.parse(argv))
