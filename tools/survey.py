"""Try environments of other packages: `python -m tools.survey --seconds 20 --output docs/environments.md`.

Each one is named on the command line of `train.py` and trained for some seconds, in a command of its own. Names of
packages (`python -m tools.survey minatar popgym ...`) choose among them: some packages need versions of others that do
not go together, so that each needs an environment of its own (`--python`, the interpreter there). What was found before
of all others is kept: FILE.jsonl beside the table holds a line for each.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from runtime.user_error import UserError, nearest

ROOT = Path(__file__).resolve().parent.parent
BEYOND_SEC = 180.0  # to start, to stop, to compile what JAX compiles
NOW = ("--decorrelate_experience_max_seconds", "0")  # no seconds of play before the training


class Entry(NamedTuple):
    """An environment to try."""

    package: str  # what pip installs
    env: str
    flags: str = ""  # beside --env


MAKERS = "examples.third_party_envs"
FEW = "--num_envs_per_worker 2"  # each takes seconds to be made
ENTRIES = [
    Entry("minatar==1.0.15", "MinAtar/Breakout-v1"), Entry("minatar==1.0.15", "MinAtar/SpaceInvaders-v1"),
    Entry("popgym==1.0.7", "popgym-RepeatFirstEasy-v0", "--use_rnn"),
    Entry("crafter==1.8.3 ruamel.yaml==0.19.1", f"{MAKERS}:crafter"),
    Entry("shimmy[dm-control]==2.0.1 dm_control==1.0.28", "dm_control/cartpole-swingup-v0"),
    Entry("shimmy[dm-control]==2.0.1 dm_control==1.0.28", "dm_control/walker-walk-v0"),
    Entry("gymnasium-robotics==1.4.2", "PointMaze_UMaze-v3"),
    Entry("gymnasium-robotics==1.4.2", "FetchReach-v4"),
    Entry("gymnasium-robotics==1.4.2", "AdroitHandHammer-v1"),
    Entry("metaworld==3.1.1", f"{MAKERS}:reach", FEW),
    Entry("gym-xarm==0.1.1", "gym_xarm/XarmLift-v0"),
    Entry("gym-aloha==0.1.5", "gym_aloha/AlohaInsertion-v0"),
    Entry("gym-hil==0.1.14", "gym_hil/PandaPickCube-v0"),
    Entry("gym-pusht==0.1.8 pymunk==6.11.1", "gym_pusht/PushT-v0"),
    Entry("panda-gym==3.0.7", "panda_gym:PandaReach-v3"),
    Entry("pybullet_envs_gymnasium==0.6.0", "pybullet_envs_gymnasium:HopperBulletEnv-v0"),
    Entry("PyFlyt==0.21.0", "PyFlyt/QuadX-Hover-v1"),
    Entry("gym-electric-motor==3.0.3", "gym_electric_motor:Cont-SC-PermExDc-v0"),
    Entry("highway-env==1.12.1", "highway-fast-v0"), Entry("highway-env==1.12.1", "highway_env:parking-v0"),
    Entry("flappy-bird-gymnasium==0.4.0", "FlappyBird-v0"),
    Entry("gymnasium-snake-game==0.2.1", "gymnasium_snake_game:Snake-v1"),
    Entry("gymnasium-2048==0.1.2", "gymnasium_2048/TwentyFortyEight-v0"),
    Entry("memory-gym==1.0.2", "memory_gym:MortarMayhem-v0", "--use_rnn"),
    Entry("tetris-gymnasium==0.3.1", "tetris_gymnasium/Tetris"),
    Entry("gym-simplegrid==1.1.0", "gym_simplegrid:SimpleGrid-4x4-v0"),
    Entry("gym-anytrading==2.0.0", "gym_anytrading:stocks-v0"),
    Entry("mo-gymnasium==1.3.2", f"{MAKERS}:deep_sea"),
    Entry("mo-gymnasium==1.3.2", "mo_gymnasium:deep-sea-treasure-v0"),
    Entry("jumanji==1.1.2", f"{MAKERS}:snake", FEW),
    Entry("gymnax==0.0.9", f"{MAKERS}:catch", FEW),
    Entry("stable-retro==1.0.1", f"{MAKERS}:airstriker", "--num_envs_per_worker 1"),
    Entry("lbforaging==2.0.0", "Foraging-8x8-2p-3f-v3"), Entry("rware==2.0.0", "rware-tiny-2ag-v2"),
    Entry("miniworld==2.1.0", "MiniWorld-OneRoom-v0"), Entry("sumo-rl==1.4.5", "sumo_rl:sumo-rl-v0"),
    Entry("safety-gymnasium==1.0.0", "safety_gymnasium:SafetyPointGoal1-v0"),
    Entry("gymnasium-search-race==4.1.1", "gymnasium_search_race/SearchRace-v3"),
    Entry("gym-multigrid==1.0.0", "gym_multigrid:multigrid-collect-v0"),
]

SPACES = """
import json, sys
from config import make_config
from envs.families import probe, profile
for env in sys.argv[1:]:
    kinds = probe(make_config(profile(env, {}), {"env": env})).kinds
    print(json.dumps([[{name: [str(leaf.dtype), *leaf.shape] for name, leaf in obs.items()}, str(actions)]
                      for obs, actions in kinds]), flush=True)
"""


def name_of(entry: Entry) -> str:
    """Return the name of the package to be tried, without extras and version."""
    return entry.package.split()[0].split("==")[0].split("[")[0]


def try_entry(entry: Entry, python: str, seconds: float) -> dict[str, Any]:
    """Train an environment for some seconds; return what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(ROOT / "train.py"), "--env", entry.env, "--train_dir", folder, "--experiment", "survey",
                   "--train_for_seconds", str(seconds), *NOW, *shlex.split(entry.flags)]
        result = {"package": entry.package, "env": entry.env, "flags": entry.flags, "status": 1}
        try:
            run = subprocess.run(command, cwd=ROOT, env=drawing(), capture_output=True, text=True, check=False,
                                 timeout=seconds + BEYOND_SEC)
        except subprocess.TimeoutExpired as error:
            return result | {"why_not": f"it had not ended after {error.timeout:g} s"}
        result["status"] = run.returncode
        if run.returncode:
            last = run.stderr.strip().splitlines()[-1].removeprefix("train.py: ")
            return result | {"why_not": last.removeprefix("runtime.user_error.EnvironmentFailure: ")}
        summary = json.loads((Path(folder) / "survey/summary.json").read_text())
    return result | {"env_steps": summary["env_steps"], "per_sec": summary["env_steps"] / summary["wall_sec"],
                     "episodes": summary["num_episodes"], "mean_return": summary["mean_return"][0]}


def add_spaces(rows: list[dict[str, Any]], python: str) -> None:
    """Add the spaces of environments that were trained, seen by a process of their own."""
    shown = subprocess.run([python, "-c", SPACES, *(row["env"] for row in rows)], cwd=ROOT, env=drawing(),
                           capture_output=True, text=True, check=False, timeout=BEYOND_SEC + len(rows))
    lines = [line for line in shown.stdout.splitlines() if line.startswith("[[{")]
    for row, line in zip(rows, lines, strict=False):  # fewer when one has ended the process
        (row["obs"], row["actions"]), *_ = json.loads(line)


def drawing() -> dict[str, str]:
    """Return the variables of this process, and how MuJoCo draws without a display."""
    return dict(os.environ) if "DISPLAY" in os.environ else {"MUJOCO_GL": "egl"} | os.environ


def make_table(results: Iterable[dict[str, Any]], seconds: float) -> str:
    """Write what came of all in Markdown."""
    rows = list(results)
    works = [row for row in rows if row["status"] == 0]
    packages = {row["package"] for row in works}
    lines = [
        "# Environments of other packages", "",
        f"Each was trained for {seconds:g} seconds by naming it, `python train.py --env ...`, with the "
        f"flags that are shown and without decorrelated starts: {len(works)} of {len(rows)} run, from {len(packages)} "
        "packages. The others say in one line why not. `python -m tools.survey` does it again.", "",
        "The mean return is that of the last 100 episodes, after so short a time; it shows that episodes end and are "
        "counted, not how well the task can be learned. The speed was measured beside other work.", "",
        "| package | `--env` | observations | actions | result |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        name = f"`{row['env']}`" + (f" `{row['flags']}`" if row["flags"] else "")
        if row["status"]:
            lines.append(f"| {row['package']} | {name} | | | {_cell(row['why_not'])} |")
            continue
        obs = ", ".join(f"{leaf} {'x'.join(map(str, shape)) or 1} {dtype}".removeprefix("obs ")
                        for leaf, (dtype, *shape) in row.get("obs", {}).items())
        score = "no episode ended" if row["mean_return"] is None else f"mean return {row['mean_return']:.4g}"
        lines.append(f"| {row['package']} | {name} | {obs} | {_cell(row.get('actions', ''))} | "
                     f"{row['per_sec']:,.0f} env_steps/s, {score} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def survey(args: argparse.Namespace) -> None:
    """Try the environments of the packages that were named, and write the table of all."""
    names = {name_of(entry) for entry in ENTRIES}
    for name in args.packages:
        if name not in names:
            raise UserError(f"{name} is no package of the survey{nearest(name, names)}")
    lines = args.output.with_suffix(".jsonl")
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    results = {row["env"]: row for row in known}
    chosen = [entry for entry in ENTRIES if not args.packages or name_of(entry) in args.packages]
    for entry in chosen:
        results[entry.env] = try_entry(entry, args.python, args.seconds)
        print(json.dumps(results[entry.env]), flush=True)
        if entry == chosen[-1]:
            add_spaces([results[tried.env] for tried in chosen if results[tried.env]["status"] == 0], args.python)
        ordered = [results[other.env] for other in ENTRIES if other.env in results]
        lines.write_text("".join(json.dumps(row) + "\n" for row in ordered))
        args.output.write_text(make_table(ordered, args.seconds))


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="those to try [all]")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each is trained [20]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the packages [this one]")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/environments.md", help="the table")
    try:
        survey(parser.parse_args(argv))
    except UserError as error:
        print(f"survey.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
