"""Makes command-line flags from the settings tree, and reads them back."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from pagoda.settings.resolving import COMMANDS, SECTIONS, Option, command_options, joined

# What most people need, shown before everything else.
FIRST = (
    "host", "port", "served_model_name", "workers", "max_model_len", "device", "dtype", "quantization", "kv_cache_gib",
    "config",
)  # fmt: skip
TITLES = {
    "serve": "processes", "model source": "model", "gateway": "gateway (HTTP, text)",
    "engine core": "engine core (requests, scheduling, KV blocks)", "worker": "worker (weights, tensors, kernels)",
    "process": "every process",
}  # fmt: skip
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add one flag per option of the command; flags that are not given do not appear in the namespace."""
    options = command_options(command)
    parser.usage = f"{parser.prog} [MODEL] [options]" if "workers" in options else f"{parser.prog} [options]"
    first = parser.add_argument_group("common options")
    for name in FIRST:
        if name in options:
            _add_option(first, options[name], hidden=False)
    for section, config in SECTIONS.items():
        if config not in COMMANDS[command]:
            continue
        group = parser.add_argument_group(TITLES.get(section, section))
        for option in options.values():
            if option.owners[0] is config and option.name not in FIRST:
                _add_option(group, option, hidden=section == "child")


def add_named_options(parser: argparse.ArgumentParser, command: str, names: Iterable[str]) -> None:
    """Add some of the command's options; `given_flags` returns them like any others."""
    options = command_options(command)
    for name in names:
        _add_option(parser, options[name], hidden=False)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional_model",
        metavar="MODEL",
        nargs="?",
        default=None,
        help="checkpoint directory or hub id (org/name); default: the bundled demo model",
    )


def given_flags(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """The options that were given as flags (or as the positional MODEL), by name."""
    names = command_options(command)
    given = {name: value for name, value in vars(arguments).items() if name in names}
    model = getattr(arguments, "positional_model", None)
    return given | ({"model": model} if model is not None else {})


def _add_option(group: Any, option: Option, *, hidden: bool) -> None:
    default = " or ".join(str(value) for value in dict.fromkeys(option.defaults) if value != "")
    text = option.help + (f" [{default}]" if default else "")
    common: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if hidden else text.replace("%", "%%"),
    }
    if option.type is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    elif option.several:
        group.add_argument(option.flag, metavar="TEXT", nargs="+", action=_Joined, **common)
    else:
        group.add_argument(option.flag, metavar=_METAVARS.get(option.type, "VALUE"), **common)


class _Joined(argparse.Action):
    """Joins all values of a flag, which may be repeated, into one text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, joined([before, *(values or ())]))
