"""Numbers on the command line that belong to a command and not to a config; these have bounds, too."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pagoda.settings.values import convert
from pagoda_proto.options import MOST_NUMBER, MOST_WHOLE, Rule


def whole(least: int = 0, most: int = MOST_WHOLE) -> Callable[[str], int]:
    """For `type=` of an argument: a whole number from `least` to `most`."""
    return lambda text: int(_read(text, int, Rule(least, most)))


def wholes(text: str) -> tuple[int, ...]:
    """For `type=` of an argument: whole numbers from 1, with commas between them."""
    return tuple(whole(1)(part) for part in text.split(",") if part)


def number(least: float = 0.0, most: float = MOST_NUMBER) -> Callable[[str], float]:
    """For `type=` of an argument: a number from `least` to `most`."""
    return lambda text: float(_read(text, float, Rule(least, most)))


def seed() -> Callable[[str], int]:
    """For `type=` of an argument: any number of 64 bits."""
    return whole(-(2**63), 2**64 - 1)


def _read(text: str, type_: type, rule: Rule) -> float:
    try:
        value: float = convert(text, type_)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if wrong := rule.problem(value):
        raise argparse.ArgumentTypeError(wrong)
    return value
