"""A command line made of settings: each field of a dataclass is a flag, each refusal is one line.

The fields carry what `config.option` notes of a setting: its group, its help, and the words that it may be.
"""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from configparser import ConfigParser
from typing import Any

from runtime.utils import UserError, Values, nearest

EPILOG = ("In brackets: what a new run gets. An environment, an algorithm and a machine\n"
          "have defaults of their own: --env ID --help shows them.")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that refuses bad input with one line, naming the nearest known flag."""

    def __init__(self, description: str, **more: Any) -> None:
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.replace("argument ", "", 1))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line. Raises `UserError` with all unknown flags, and the nearest known ones."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
            texts = [flag + nearest(flag, self._option_string_actions) for flag in flags]
            raise UserError(f"unknown argument {', '.join(texts) or f'{unknown[0]}; name an environment by --env'}")
        return known


def make_parser(settings: type, description: str, values: Values | None = None) -> OneLineParser:
    """Make the command line of a class of settings, in groups, with their defaults in the help.

    values: the defaults that differ for the environment in question, if there is one. The parsed namespace holds only
    what was given.
    """
    parser = OneLineParser(description, epilog=EPILOG, argument_default=argparse.SUPPRESS,
                           usage="%(prog)s --env ID [--setting VALUE ...]")
    groups: dict = {}
    for field in dataclasses.fields(settings):
        group, text, choices = (field.metadata[key] for key in ("group", "help", "choices"))
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        shown = as_typed((values or {}).get(field.name, default))
        text = f"{', '.join(choices)}: {text}" if choices else text
        groups[group].add_argument(f"--{field.name}", help=f"{text} [{shown}]".replace("%", "%%"), **form(field.type))
    return parser


def form(kind: Any) -> dict:
    """Return how argparse reads a setting of a type."""
    if kind is bool:
        return {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    if typing.get_origin(kind) is tuple:
        return form(typing.get_args(kind)[0]) | {"nargs": "*"}
    return {"type": whole_number if kind is int else kind, "metavar": kind.__name__.upper()}


def boolean(text: str) -> bool:
    """Read True or False; argparse refuses what raises `ValueError`."""
    if text.lower() not in ConfigParser.BOOLEAN_STATES:
        raise ValueError
    return ConfigParser.BOOLEAN_STATES[text.lower()]


def whole_number(text: str) -> int:
    """Read an integer, 1e7 too."""
    number = float(text)
    if not number.is_integer():
        raise ValueError
    return int(number)


def check_values(settings: type, values: Values) -> None:
    """Raise `UserError` for the value of a setting that has another type, or is not allowed; others may be missing."""
    for field in dataclasses.fields(settings):
        if field.name not in values:
            continue
        value, kind = values[field.name], typing.get_origin(field.type) or field.type
        flag, choices, bounds = f"--{field.name}={value}"[:200], field.metadata["choices"], field.metadata["bounds"]
        allowed = {float: (int, float), tuple: (list, tuple)}.get(kind, kind)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{flag} is not of type {kind.__name__}")
        if choices and value not in choices:
            raise UserError(f"{flag} is unknown{nearest(value, choices)}; choose from {', '.join(choices)}")
        if bounds and not bounds.allows(value):
            raise UserError(f"{flag} must {bounds.words}")


def as_typed(value: Any) -> str:
    """Write a setting as on the command line; "none" where it is empty."""
    if isinstance(value, float):
        return f"{value:g}"  # also 1.0 as 1
    return (" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)) or "none"
