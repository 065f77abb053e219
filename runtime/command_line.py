"""The command line: every setting of the configuration as a flag. Used by `train.py` and the other commands."""

import argparse
import contextlib
import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from algorithms import NAMES, algorithm_class
from config import GONE, Config, fields_of
from runtime.machine import defaults
from runtime.user_error import UserError, nearest

MAX_METAVAR = 40  # characters of all choices of a setting; more would not fit into a line
OTHER_DEFAULTS = "An environment, an algorithm and a machine have defaults of their own:\n--env ID --help shows them."


def parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def _parse_int(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    number = _parse_float(text)  # 1e7 is welcome, 1.5 is not
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


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

    algo: str | None = None  # whose settings it knows

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.replace("argument ", "", 1))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the command line. Raises `UserError` with all unknown flags and the nearest ones to them."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [text.split("=")[0] for text in unknown if text.startswith("--")]
            own = [flag for action in self._actions for flag in action.option_strings]
            raise UserError("unknown argument " + (describe_unknown(flags, own, self.algo) or
                                                   f"{unknown[0]}; an environment is named with --env"))
        return known


def describe_unknown(flags: Iterable[str], known: Iterable[str], algo: str | None) -> str:
    """Name unknown flags, each with what it may be: gone, another algorithm's, misspelled.

    algo: whose settings are known; None: of no algorithm.
    """
    texts = []
    for flag in flags:
        name = flag.removeprefix("--")
        others = [other for other in NAMES
                  if other != algo and name in algorithm_class(other).Settings.__dataclass_fields__]
        hint = f"a setting of --algo={' and '.join(others)}, name that too" if algo else "a setting of train.py"
        texts.append(flag + (" (gone)" if name in GONE else f" ({hint})" if others else nearest(flag, known)))
    return ", ".join(texts)


def algo_of(argv: Sequence[str]) -> str:
    """Return what --algo is on a command line: it decides which settings there are."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--algo", default=Config.algo)
    return parser.parse_known_args(argv)[0].algo


def make_parser(description: str, algo: str = Config.algo, values: Mapping[str, Any] | None = None) -> OneLineParser:
    """Make the command line of all settings of an algorithm, grouped, with their defaults in the help.

    values: those that differ from the defaults for the environment in question, if there is one. The parsed namespace
    holds only what was given.
    """
    epilog = "In brackets: what a new run gets by this command on this machine." if values else OTHER_DEFAULTS
    parser = OneLineParser(description=description, epilog=epilog, allow_abbrev=False,
                           argument_default=argparse.SUPPRESS, usage="%(prog)s --env ID [--setting VALUE ...]",
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # keeps the epilog's lines
    parser.algo = algo
    groups: dict[str, Any] = {}
    for field in fields_of(algorithm_class(algo).Settings).values():
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        default = (values or {}).get(field.name, default)
        arguments: dict[str, Any] = {"help": f"{meta['help']} [{show_default(default)}]".replace("%", "%%")}
        if field.type is bool:
            arguments |= {"type": parse_bool, "nargs": "?", "const": True, "metavar": "BOOL"}
        elif typing.get_origin(field.type) is tuple:
            parse, metavar = (_parse_int, "SIZE") if int in typing.get_args(field.type) else (str, "NAME")
            arguments |= {"type": parse, "nargs": "*", "metavar": metavar}
        else:
            parse = {int: _parse_int, float: _parse_float, str: str}[field.type]
            metavar = "|".join(meta["choices"]) if meta["choices"] else field.type.__name__.upper()
            if len(metavar) > MAX_METAVAR:
                arguments["help"] = f"{', '.join(meta['choices'])}: {arguments['help']}"
                metavar = "NAME"
            arguments |= {"type": parse, "metavar": metavar}
        groups[meta["group"]].add_argument(f"--{field.name}", **arguments)
    return parser


def as_typed(value: Any) -> str:
    """Write a setting as on the command line; "none" where it is empty."""
    if isinstance(value, float):
        return f"{value:g}"  # also 1.0 as 1
    return (" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)) or "none"


def show_default(value: Any) -> str:
    """Show a default so that it is easily read."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_whole else as_typed(value)


def parse_settings(argv: Sequence[str], description: str) -> dict[str, Any]:
    """Return the settings that a command line gives; with --help show those that its environment gets, and end."""
    parser = make_parser(description, algo_of(argv))
    if {"-h", "--help"} & set(argv):
        given = vars(parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])[0])
        parser = make_parser(description, parser.algo, defaults(given["env"], given) | given if "env" in given else {})
    return vars(parser.parse(argv))
