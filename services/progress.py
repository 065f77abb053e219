"""How far a run has come: what each policy has reported, and the lines that say so in the console."""

import math
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gymnasium import spaces

from config import Config, Values
from runtime.machine import body_dtype, this_machine
from runtime.utils import combine

TOTALS = ("sgd_steps", "env_steps_trained")  # of all learners of the policy
WINDOWS = ("returns", "lengths", "objectives", "matches")  # of `PolicyProgress`
RETURN_WINDOW = 100  # mean_return is over the last so many finished episodes
WIDTH = 79  # a terminal of 80 columns breaks a line that fills it
COUNTERS = {"env_steps", "env_frames", "sgd_steps", "env_steps_trained", "wall_sec", "num_episodes", "eval_env_steps",
            "eval_sgd_steps"}  # of a row; as charts they say nothing
TAGS = {"mean_return": "episode/return_mean", "return_min": "episode/return_min", "return_max": "episode/return_max",
        "mean_length": "episode/length_mean", "true_objective": "episode/true_objective",
        "win_rate_vs_past": "episode/win_rate_vs_past", "policy_lag_mean": "lag/mean", "policy_lag_max": "lag/max",
        "fps": "system/frames_per_sec"}  # of the rest; others are "train/..."


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of no values."""
    return sum(values) / len(values) if values else None


class PolicyProgress:
    """What one policy has reported: its last episodes, and its training since the last row of metrics.jsonl."""

    def __init__(self, sgd_steps: int) -> None:
        # a resumed policy waits for a full window: it would else be ranked by a single episode
        self.min_episodes = RETURN_WINDOW if sgd_steps else 1
        self.returns, self.lengths, self.objectives, self.matches = (deque(maxlen=RETURN_WINDOW) for _ in WINDOWS)
        self.has_objective = False  # the environment has told a true objective; until then returns stand for it
        self.training: list[Values] = []  # statistics of the datasets since the last row
        self.latest: Values = {"sgd_steps": sgd_steps}
        self.evaluation: Values = {}  # the one since the last row, if any
        self.last_evaluation: Values = {}
        self.reached = -math.inf  # what was compared with `stop_at_return` last; once high enough it stays
        self.lag_sum = self.lag_max = self.num_datasets = 0

    @property
    def mean_return(self) -> float | None:
        return mean(self.returns)

    @property
    def objective(self) -> float | None:
        """Return the mean true objective where the environment tells one, or else return; None at first."""
        return mean(self.objectives)

    def add_episode(self, episode_return: float, length: int, objective: float) -> None:
        self.returns.append(episode_return)
        self.lengths.append(length)
        if not math.isnan(objective) and not self.has_objective:  # what came before were returns
            self.has_objective = True
            self.objectives.clear()
        if self.has_objective != math.isnan(objective):  # an episode without an objective says nothing about it
            self.objectives.append(objective if self.has_objective else episode_return)

    def add_training(self, stats: Values) -> None:
        self.training.append(stats)
        self.latest = {name: max(stats[name], self.latest.get(name, 0)) for name in TOTALS}  # of whichever learner
        self.latest["learning_rate"] = stats["learning_rate"]
        self.lag_sum += stats["policy_lag_mean"]
        self.lag_max = max(self.lag_max, stats["policy_lag_max"])
        self.num_datasets += 1

    def window(self) -> Values:
        """Return the last episodes, and what was said of them, to be saved."""
        told = {"objectives_told": self.has_objective, "evaluation": self.last_evaluation}
        if math.isfinite(self.reached):
            told["reached"] = self.reached
        return {name: list(getattr(self, name)) for name in WINDOWS} | told

    def restore_window(self, saved: Values) -> None:
        """Take what `window` returned. Raises `LookupError`, `TypeError` or `ValueError` for anything else."""
        values = {name: [float(value) for value in saved[name]] for name in WINDOWS}
        # earlier versions did not save these
        evaluation, self.reached = dict(saved.get("evaluation", {})), float(saved.get("reached", -math.inf))
        self.has_objective, self.last_evaluation = bool(saved["objectives_told"]), evaluation
        for name in WINDOWS:
            getattr(self, name).extend(filter(math.isfinite, values[name]))

    def forget_episodes(self) -> None:
        """Begin a new window of episodes: the parameters are others."""
        for name in WINDOWS:
            getattr(self, name).clear()
        self.last_evaluation, self.reached = {}, -math.inf

    def is_good_enough(self, cfg: Config) -> bool:
        """Return whether its last evaluation, or else a full window of episodes, has reached `stop_at_return`."""
        if self.reached < cfg.stop_at_return:
            of_window = self.mean_return if len(self.returns) == RETURN_WINDOW else -math.inf
            self.reached = self.last_evaluation.get("eval_return", -math.inf) if cfg.eval_every_env_steps else of_window
        return self.reached >= cfg.stop_at_return

    def take_row(self) -> Values:
        """Return this policy's part of a row, and begin the next one."""
        row: Values = {
            "mean_return": self.mean_return, "return_min": min(self.returns, default=None),
            "return_max": max(self.returns, default=None), "mean_length": mean(self.lengths)}
        if self.has_objective:
            row["true_objective"] = self.objective
        if self.matches:
            row["win_rate_vs_past"] = mean(self.matches)
        row |= combine(self.training) | self.latest | self.evaluation
        self.training, self.evaluation = [], {}
        return row


# ---- lines -------------------------------------------------------------------------------------------------------


def describe_run(trainer: Any) -> str:
    """Describe a run in lines of at most `WIDTH` characters, but for the last one, which names its folder."""
    cfg, info, lines = trainer.cfg, trainer.buffers.info, []
    for number, own in enumerate(info.kinds):
        agents = [name for name, kind in zip(info.agents, info.kind_of_agent, strict=True) if kind == number]
        obs = ", ".join(f"{name} {'x'.join(map(str, space.shape)) if isinstance(space, spaces.Box) else space}"
                        for name, space in own.obs_space.items())
        of_agents = f" ({', '.join(agents)})" if len(info.agents) > 1 else ""
        lines.append(f"{cfg.env}{of_agents}: {obs} -> {own.action_space}")
    mode = ", serial" if cfg.serial_mode else "" if cfg.async_rl else ", in turns"
    dtype = str(body_dtype(cfg.precision, trainer.devices[0], info.kinds[0].obs_space)).removeprefix("torch.")
    policies = f"{cfg.num_policies} policies of " if cfg.num_policies > 1 else ""
    lines += [f"{cfg.algo}{mode}: {cfg.num_workers} workers x {cfg.num_envs_per_worker} environments, "
              f"{cfg.num_epochs} x {cfg.num_batches_per_epoch} x {cfg.batch_size:,} samples a dataset; rollout "
              f"{cfg.rollout}, splits {cfg.worker_num_splits}, policy workers {cfg.policy_workers_per_policy}, "
              f"learner threads {cfg.learner_threads}",
              f"{policies}{sum(p.numel() for p in trainer.models[0].parameters()):,} parameters, {dtype} on "
              f"{', '.join(dict.fromkeys(map(str, trainer.devices)))} ({this_machine(cfg.device)})"]
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    return "\n".join([*wrapped, f"records in {cfg.run_dir}"])


def describe_progress(trainer: Any, policies: Sequence[PolicyProgress], summary: Values) -> str:
    """Describe how far a run has come, by its summary and the last row of metrics.jsonl, in `WIDTH` characters at most.

    The speed since the start says how long it will take.
    """
    cfg, row, goal, num_replaced = trainer.cfg, trainer.row, trainer.goal, summary["num_replaced"]
    steps_per_sec = summary["fps"] / cfg.env_frameskip
    seconds_left = max(0.0, min((goal - row["env_steps"]) / steps_per_sec if steps_per_sec else math.inf,
                                cfg.train_for_seconds - row["wall_sec"]))
    trouble = [trainer.trouble] * bool(trainer.trouble) + [f"{num_replaced} replaced"] * bool(num_replaced)
    left = format_duration(seconds_left) if seconds_left < math.inf else "?"
    fraction = min(max(row["env_steps"] / goal, row["wall_sec"] / cfg.train_for_seconds), 1.0)
    aim = f" of {cfg.stop_at_return:g}" if cfg.stop_at_return < math.inf else ""  # which may come sooner
    come_so_far = [*trouble, f"at most {left}"] if aim else [f"{fraction:.1%}", *trouble, f"{left} left"]
    of_aim = aim * (not cfg.eval_every_env_steps and cfg.num_policies == 1)  # else another return must reach it
    so_far = trainer.buffers.agent_return.mean().item()  # of the episodes under way, while none has finished
    returned = f"{so_far:.2f} so far" if row["mean_return"] is None else f"{row['mean_return']:.2f}{of_aim}"
    besides = trainer.besides or f"{row['env_frames']:,} frames"
    parts = [*come_so_far, besides, f"{row['fps']:,.0f}/s", f"return {returned}"]
    if evaluations := [policy.last_evaluation["eval_return"] for policy in policies if policy.last_evaluation]:
        parts.append(f"eval {mean(evaluations):.2f}{aim * (cfg.num_policies == 1)}")
    if "policy_lag_mean" in row:
        parts.append(f"lag {row['policy_lag_mean']:.1f}")
    return " | ".join(parts)[:WIDTH]


def describe_evaluation(of_policy: str, result: Values) -> str:
    """Say in one line what an evaluation has come to."""
    return (f"evaluation{of_policy} at env_steps={result['eval_env_steps']:,}: return {result['eval_return']:.2f} +- "
            f"{result['eval_return_std']:.2f}, length {result['eval_length']:.1f}")


def describe_finished(trainer: Any, policies: Sequence[PolicyProgress]) -> str:
    """Say in one line that a run has come to its end before, and what would let it train on."""
    cfg, reached = trainer.cfg, max(policy.reached for policy in policies)
    return (f"nothing to do: the run has {trainer.env_steps:,} of {trainer.goal:,} env_steps, {trainer.wall_sec:.0f} "
            f"of {cfg.train_for_seconds:g} s, a return of {reached:.2f} of {cfg.stop_at_return:g}; raise "
            "--train_for_env_steps, --train_for_seconds or --stop_at_return, or begin anew with "
            "--restart_behavior=restart")


def describe_end(cfg: Config, summary: Values, policies: Sequence[PolicyProgress]) -> str:
    """Say in a few lines what a run has come to, and where it was good enough that it ended for that reason."""
    reached = max(policy.reached for policy in policies)
    come_to = (f"{summary['env_steps']:,} env_steps in {format_duration(summary['wall_sec'])}, mean return "
               f"{show_scores(summary['mean_return'])}, best score {show_scores(summary['best_score'])}")
    why = f"\nfinished: a return of {reached:.2f} has reached --stop_at_return={cfg.stop_at_return:g}"
    return (textwrap.fill(come_to, WIDTH, subsequent_indent="  ")
            + f"\nrecords in {cfg.run_dir}"
            + why * (reached >= cfg.stop_at_return))


def show_scores(scores: list[float | None]) -> str:
    """Write the score of each policy, if there is one."""
    return ", ".join("none yet" if score is None else f"{score:.2f}" for score in scores)


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


# ---- TensorBoard -------------------------------------------------------------------------------------------------


class TensorBoard:
    """The page of one policy. The first error, such as a full disk, ends it and is told once."""

    def __init__(self, folder: Path, purge_step: int, tell: Callable[[str], None]) -> None:
        """purge_step: the curves of earlier files in the folder are hidden from this step on."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  0.5 s; the processes start meanwhile

        self.folder, self.tell = str(folder), tell
        self.make = lambda: SummaryWriter(self.folder, purge_step=purge_step)
        self.writer = None
        self.has_failed = False

    def write(self, method: str, *args: Any) -> None:
        """Call a method of the writer, unless a call before has failed."""
        if self.has_failed:
            return
        try:
            self.writer = self.writer or self.make()
            getattr(self.writer, method)(*args)
        except OSError as error:  # also that of the thread which writes
            self.has_failed = True
            self.tell(f"the curves in {self.folder} end here: {error.strerror or error}")

    def add_row(self, row: Values, step: int) -> None:
        """Add what a row of metrics.jsonl holds of this policy; an evaluation at the env_steps of its weights."""
        for name, value in row.items():
            if name in COUNTERS or value is None:
                continue
            is_evaluation = name.startswith("eval_")
            tag = f"eval/{name.removeprefix('eval_')}" if is_evaluation else TAGS.get(name, f"train/{name}")
            at = row["eval_env_steps"] if is_evaluation else step
            self.write("add_scalar", tag, value, at)
        self.write("flush")

    def add_settings(self, cfg: Config) -> None:
        """Add the settings of the run as a text."""
        table = "\n".join(f"| {name} | {value} |" for name, value in vars(cfg).items())
        self.write("add_text", "config", "| setting | value |\n|---|---|\n" + table, 0)
