"""What a run says of itself: a few lines at its start, the progress line, its end; the pictures that it leaves."""

import math
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from config import Config
from runtime.machine import body_dtype, this_machine
from runtime.plan import Plan
from runtime.policy_records import PolicyRecords, mean
from runtime.user_error import UserError

WIDTH = 79  # a terminal of 80 columns breaks a line that fills it


def describe_run(cfg: Config, plan: Plan) -> list[str]:
    """Describe a run in lines of at most `WIDTH` characters, but for the last one, which names its folder."""
    lines = []
    for number, (obs_space, action_space) in enumerate(plan.info.kinds):
        agents = [name for name, kind in zip(plan.info.agents, plan.info.kind_of_agent, strict=True) if kind == number]
        obs = ", ".join(f"{name} {'x'.join(map(str, space.shape)) if isinstance(space, spaces.Box) else space}"
                        for name, space in obs_space.items())
        of_agents = f" ({', '.join(agents)})" if len(plan.info.agents) > 1 else ""
        lines.append(f"{cfg.env}{of_agents}: {obs} -> {action_space}")
    mode = ", serial" if cfg.serial_mode else "" if cfg.async_rl else ", in turns"
    dtype = str(body_dtype(cfg, plan.devices[0], plan.info.kinds[0][0])).removeprefix("torch.")
    policies = f"{cfg.num_policies} policies of " if cfg.num_policies > 1 else ""
    lines += [f"{cfg.algo}{mode}: {cfg.num_workers} workers x {cfg.num_envs_per_worker} environments, "
              f"{cfg.num_epochs} x {cfg.num_batches_per_epoch} x {cfg.batch_size:,} samples a dataset; rollout "
              f"{cfg.rollout}, splits {cfg.worker_num_splits}, policy workers {cfg.policy_workers_per_policy}, "
              f"learner threads {cfg.learner_threads}",
              f"{policies}{sum(p.numel() for p in plan.models[0].parameters()):,} parameters, {dtype} on "
              f"{', '.join(dict.fromkeys(map(str, plan.devices)))} ({this_machine(cfg.device)})"]
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    return [*wrapped, f"records in {cfg.run_dir}"]


def describe_progress(cfg: Config, row: dict[str, Any], policies: Sequence[PolicyRecords], seconds_left: float,
                      goal: int, return_so_far: float, trouble: Sequence[str]) -> str:
    """Describe how far a run has come, from a row of metrics.jsonl, in at most `WIDTH` characters.

    return_so_far: that of the episodes under way, for as long as none has finished.
    """
    fraction = min(max(row["env_steps"] / goal, row["wall_sec"] / cfg.train_for_seconds), 1.0)
    left = format_duration(seconds_left) if seconds_left < math.inf else "?"
    aim = f" of {cfg.stop_at_return:g}" if cfg.stop_at_return < math.inf else ""  # which may come sooner
    come_so_far = [*trouble, f"at most {left}"] if aim else [f"{fraction:.1%}", *trouble, f"{left} left"]
    of_aim = aim * (not cfg.eval_every_env_steps and cfg.num_policies == 1)  # else another return must reach it
    returned = f"{return_so_far:.2f} so far" if row["mean_return"] is None else f"{row['mean_return']:.2f}{of_aim}"
    parts = [*come_so_far, f"{row['env_frames']:,} frames", f"{row['fps']:,.0f}/s", f"return {returned}"]
    if evaluations := [policy.last_evaluation["eval_return"] for policy in policies if policy.last_evaluation]:
        parts.append(f"eval {mean(evaluations):.2f}{aim * (cfg.num_policies == 1)}")
    if "policy_lag_mean" in row:
        parts.append(f"lag {row['policy_lag_mean']:.1f}")
    return " | ".join(parts)[:WIDTH]


def describe_finished(cfg: Config, env_steps: int, goal: int, wall_sec: float, policies: list[PolicyRecords]) -> str:
    """Say in one line how far a run has come, and which flags would let it train on: one for each limit it is at."""
    done, flags = [f"{env_steps:,} of {goal:,} env_steps"], []
    if env_steps >= goal:
        flags.append(f"--train_for_env_steps={goal * (env_steps // max(goal, 1) + 1)}")
    if wall_sec >= cfg.train_for_seconds:
        done.append(f"{wall_sec:.0f} of {cfg.train_for_seconds:g} s")
        flags.append(f"--train_for_seconds={math.ceil(wall_sec + cfg.train_for_seconds)}")
    if (reached := max(policy.reached for policy in policies)) >= cfg.stop_at_return:
        done.append(f"a return of {reached:.2f} of {cfg.stop_at_return:g}")
        flags.append("--stop_at_return=inf")
    return (f"nothing to do: the run has {', '.join(done)}; train on with {' '.join(flags)}, or begin anew with "
            "--restart_behavior=restart")


def describe_end(cfg: Config, summary: dict[str, Any], policies: Sequence[PolicyRecords]) -> str:
    """Say in a few lines what a run has come to, and where it was good enough that it ended for that reason."""
    reached = max(policy.reached for policy in policies)
    come_to = (f"{summary['env_steps']:,} env_steps in {format_duration(summary['wall_sec'])}, mean return "
               f"{show_scores(summary['mean_return'])}, best score {show_scores(summary['best_score'])}")
    why = f"\nfinished: a return of {reached:.2f} has reached --stop_at_return={cfg.stop_at_return:g}"
    return (textwrap.fill(come_to, WIDTH, subsequent_indent="  ")
            + f"\npeak memory {summary['peak_memory_mb'] / 1e3:.2f} GB; records in {cfg.run_dir}"
            + why * (reached >= cfg.stop_at_return))


def show_scores(scores: list[float | None]) -> str:
    """Write the score of each policy, if there is one."""
    return ", ".join("none" if one is None else f"{one:.2f}" for one in scores) if {*scores} != {None} else "none yet"


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def introduce(system: Any, plan: Plan, news: str) -> None:
    """Tell what a run is made of."""
    is_resumed = any(plan.states)
    system.records.log(news + (f"resumed at env_steps={system.env_steps:,} sgd_steps={sum(system.versions):,}\n"
                               + plan.describe_resume() if is_resumed else ""))
    system.records.log("\n".join(describe_run(system.cfg, plan)))
    if system.population is not None:
        system.records.add_population([], system.population.all_numbers(), system.env_steps)
    system.records.resting_since = time.time()


def draw(system: Any) -> None:
    """Draw what a run leaves in its folder: the timeline, the population."""
    try:
        if system.cfg.trace_sec and system.trained_until:
            from tools import timeline  # noqa: PLC0415  nothing that trains needs it

            path = system.cfg.run_dir / "trace.json"
            begin = int(max(0.0, system.trained_until - system.cfg.trace_sec * 1e9))  # infinite: all of it
            timeline.write_trace(path, system.crew.spans, begin, system.trained_until)
            system.records.log(f"{path}: open it in https://ui.perfetto.dev")
            timeline.draw_last(path, path.with_name("timeline.png"), 0.5)
        if system.population is not None:
            system.population.draw()
    except (OSError, UserError) as error:  # the disk is full, matplotlib is missing
        system.records.log(f"no picture was drawn ({error})")
