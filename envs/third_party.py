"""Packages of environments: which module registers an id, and which package brings a module. Facts, for `families.py`.

Gymnasium knows the environments of another package only after its module was imported. Ids that begin as below are
looked up there without naming the module, and so is namespace/Name-v0 in the module `namespace`; for all others
module:Name-v0 does it. Which environments were tried: docs/environments.md.
"""

import importlib.util
from collections.abc import Iterable
from types import ModuleType

from runtime.by_name import import_module
from runtime.user_error import UserError, closest

# the beginning of an id -> the module that registers it, or module:function to be called for that
REGISTERED_BY = {
    "Vizdoom": "vizdoom.gymnasium_wrapper", "MiniGrid": "minigrid", "BabyAI": "minigrid",
    "MinAtar/": "minatar.gym:register_envs", "dm_control/": "shimmy", "PyFlyt/": "PyFlyt.gym_envs",
    "Meta-World/": "metaworld", "MiniWorld": "miniworld", "popgym-": "popgym", "tetris_gymnasium/":
    "tetris_gymnasium.envs", "Fetch": "gymnasium_robotics", "HandManipulate": "gymnasium_robotics",
    "HandReach": "gymnasium_robotics", "AdroitHand": "gymnasium_robotics", "PointMaze_": "gymnasium_robotics",
    "AntMaze_": "gymnasium_robotics", "FrankaKitchen": "gymnasium_robotics", "highway-": "highway_env",
    "FlappyBird-": "flappy_bird_gymnasium", "Foraging-": "lbforaging", "rware-": "rware", "NetHack": "nle",
    "MiniHack": "minihack",
}

# the top module -> what pip installs
PACKAGES = {
    "ale_py": "ale-py", "mujoco": "'gymnasium[mujoco]'", "Box2D": "'gymnasium[box2d]'", "minigrid": "minigrid",
    "vizdoom": "vizdoom", "pettingzoo": "pettingzoo", "minatar": "minatar", "shimmy": "'shimmy[dm-control]'",
    "dm_control": "'shimmy[dm-control]'", "PyFlyt": "PyFlyt", "metaworld": "metaworld", "miniworld": "miniworld",
    "popgym": "popgym", "tetris_gymnasium": "tetris-gymnasium", "gymnasium_robotics": "gymnasium-robotics",
    "highway_env": "highway-env", "flappy_bird_gymnasium": "flappy-bird-gymnasium", "lbforaging": "lbforaging",
    "rware": "rware", "nle": "nle", "minihack": "minihack", "crafter": "crafter ruamel.yaml", "jumanji": "jumanji",
    "gymnax": "gymnax", "panda_gym": "panda-gym", "pybullet_envs_gymnasium": "pybullet_envs_gymnasium",
    "mo_gymnasium": "mo-gymnasium", "gym_pusht": "gym-pusht", "gym_aloha": "gym-aloha", "gym_xarm": "gym-xarm",
    "gym_hil": "gym-hil", "sumo_rl": "sumo-rl", "stable_retro": "stable-retro", "gym_anytrading": "gym-anytrading",
    "gym_simplegrid": "gym-simplegrid", "gymnasium_2048": "gymnasium-2048", "memory_gym": "memory-gym",
    "gymnasium_search_race": "gymnasium-search-race", "gymnasium_snake_game": "gymnasium-snake-game",
    "gym_electric_motor": "gym-electric-motor", "gym_multigrid": "gym-multigrid", "craftax": "craftax", "pgx": "pgx",
    "safety_gymnasium": "safety-gymnasium", "procgen": "procgen", "textworld": "textworld", "bsuite": "bsuite",
    "gfootball": "gfootball", "gym_super_mario_bros": "gym-super-mario-bros", "bluesky_gym": "bluesky-gym",
    "evogym": "evogym",
}

# packages whose environments are no gymnasium classes, or lie behind a module of another name -> what to type
MAKERS = "examples.third_party_envs"
TYPE = {
    "minatar": "--env MinAtar/Breakout-v1", "crafter": f"--env {MAKERS}:crafter", "jumanji": f"--env {MAKERS}:snake",
    "gymnax": f"--env {MAKERS}:catch", "dm_control": "--env dm_control/walker-walk-v0",
    "shimmy": "--env dm_control/walker-walk-v0", "metaworld": f"--env {MAKERS}:reach",
    "stable_retro": f"--env {MAKERS}:airstriker", "retro": f"--env {MAKERS}:airstriker",
    "PyFlyt": "--env PyFlyt/QuadX-Hover-v1", "pgx": f"a function of your own, as in {MAKERS}",
    "craftax": f"a function of your own, as in {MAKERS}", "brax": f"a function of your own, as in {MAKERS}",
    "procgen": f"a function of your own that adapts the API of old gym, as in {MAKERS}",
    "bsuite": f"a function of your own that adapts dm_env with shimmy's DmEnvCompatibilityV0, as in {MAKERS}",
    "gfootball": f"a function of your own that adapts the API of old gym, as in {MAKERS}",
    "gym_super_mario_bros": f"a function of your own that adapts the API of old gym, as in {MAKERS}",
}


def registering_module(env_id: str) -> str:
    """Return the module, or module:function, that registers an id without a module; "": gymnasium itself, or none."""
    for beginning, module in REGISTERED_BY.items():
        if env_id.startswith(beginning):
            return module
    namespace, slash, _ = env_id.partition("/")
    known = namespace in PACKAGES or (namespace.isidentifier() and importlib.util.find_spec(namespace) is not None)
    return namespace if slash and known else ""


def import_for(env_id: str, module: str) -> ModuleType:
    """Import a module that brings an environment. Raises `UserError` with what to install."""
    module, _, function = module.partition(":")
    package = module.split(".")[0]
    try:
        found = import_module(module)
        if function:
            getattr(found, function)()
    except ModuleNotFoundError as error:
        root = error.name.split(".")[0]
        if root not in (error.name, package) and importlib.util.find_spec(root):
            raise UserError(f"--env={env_id}: module '{module}' needs '{error.name}', which the {root} that is "
                            f"installed does not have: it was written for another version of {root}") from error
        cure = (f"pip install {PACKAGES[root]}" if root in PACKAGES else
                f"pip install {root}" if package in PACKAGES and error.name == root else
                f"install {root}, or run it from the folder of its file, or set PYTHONPATH to that folder")
        raise UserError(f"--env={env_id}: there is no module '{error.name}'; {cure}") from error
    return found


def explain_package(env_id: str) -> str:
    """Say what to type for an environment that is named by its package alone, or like it; "": no such package."""
    top = env_id.partition(":")[0].split("-")[0].split("/")[0].split(".")[0].lower()
    for module, package in PACKAGES.items():
        if top in (module.lower(), package.lower()) and (":" not in env_id or module in TYPE):
            what = TYPE.get(module, f"--env {module}:NAME, an id of that package")
            return f"; {module} (pip install {package}): {what}"
    return ""


def split_id(env_id: str) -> tuple[str, str, int]:
    """Split an id into its namespace, its name in small letters, and its version; -1: none."""
    name, dash_v, version = env_id.rpartition("-v")
    if not dash_v or not version.isdigit():
        name, version = env_id, "-1"
    namespace, _, name = name.rpartition("/")
    return namespace, name.lower(), int(version)


def nearest_id(env_id: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' for the id of the same or nearly the same name, with its version or the newest one."""
    namespace, name, version = split_id(env_id)
    parts = {other: split_id(other) for other in known}
    names = {part[1] for part in parts.values()}
    meant = name if name in names else closest(name, sorted(names), shortened=False)
    if meant is None:
        return ""

    def preferred(other: str) -> tuple[bool, bool, int, bool]:
        its_namespace, _, its_version = parts[other]
        return its_namespace in (namespace, "", "ALE"), its_version == version, its_version, its_namespace == namespace

    return f"; did you mean {max((other for other in parts if parts[other][1] == meant), key=preferred)}?"
