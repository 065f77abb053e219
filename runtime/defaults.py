"""What `--help` says of defaults: where the machine or the family of the environment decides, no number of `Config`.

Used by `train.py` and `tools/benchmark.py`.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from config import Config
from envs.families import LARGE_OBSERVATIONS, PROFILES, family_profile
from runtime.command_line import OneLineParser, as_typed, make_parser
from runtime.machine import Machine, automatic

WIDTH = 79


def make_full_parser(description: str, epilog: str = "", algo: str = Config.algo) -> OneLineParser:
    """Make the command line of all settings, with the defaults of the families in its help."""
    return make_parser(description, epilog + describe_profiles(algo), algo, shown_defaults(algo))


def shown_defaults(algo: str = Config.algo) -> dict[str, str]:
    """Return what the help shows in place of the default of a setting; where that may apply, "{}" stands for it."""
    profiles = {kind: family_profile(kind, algo) for kind in PROFILES}
    decided = [automatic(Machine(2, 0), profile, {"algo": algo}, large_observations=kind in LARGE_OBSERVATIONS)
               for kind, profile in profiles.items()]
    shown = dict.fromkeys(set().union(*decided), "by machine")
    for name in set().union(*profiles.values(), *(profile["without_gpu"] for profile in profiles.values())):
        shown[name] = "by family" if all(name in profile for profile in profiles.values()) else "{}, or by family"
    return shown


def describe_profiles(algo: str = Config.algo) -> str:
    """Describe the defaults of the families in one paragraph each, what most have in common first."""
    profiles = {kind: family_profile(kind, algo) for kind in PROFILES}
    most: dict[str, Any] = {}
    for name in next(iter(profiles.values())):
        if name != "without_gpu" and all(name in profile for profile in profiles.values()):
            value, count = Counter(profile[name] for profile in profiles.values()).most_common(1)[0]
            most |= {name: value} if count > len(profiles) / 2 else {}
    paragraphs = [f"most families: {list_settings(most)}"] if most else []
    for kind, profile in profiles.items():
        own = {name: value for name, value in profile.items() if name != "without_gpu" and most.get(name) != value}
        without_gpu = f"; without a GPU {list_settings(profile['without_gpu'])}" if profile["without_gpu"] else ""
        paragraphs.append(f"{kind}: {list_settings(own)}{without_gpu}")
    return "\n".join([
        "[by machine] follows from the cores and the GPU; the start of a run shows it.",
        "[by family] follows from the environment. For two cores; environments, batches",
        "and trajectories grow with the machine:",
        *(textwrap.fill(paragraph, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
          for paragraph in paragraphs)])


def list_settings(settings: Mapping[str, Any]) -> str:
    """List settings as name=value; the number of environments, which no setting has, in words."""
    return ", ".join(f"{value} environments in all" if name == "num_envs" else f"{name}={as_typed(value)}"
                     for name, value in settings.items())
