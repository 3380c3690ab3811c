"""`pagoda COMMAND`: each command is a module with `add_arguments` and `main`, imported only when it is called.

So the gateway process never imports torch, and `pagoda version` imports no tier.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagoda.processes.exit_codes import EXIT_CONFIG, EXIT_CRASH, EXIT_UNREACHABLE
from pagoda.settings.hints import hint, names_of
from pagoda.settings.problems import ConfigError, UnreachableError


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "serve": Command("pagoda.commands.serve", "start gateway, engine cores and workers on this machine"),
    "gateway": Command("pagoda.commands.gateway", "start one gateway: HTTP API, text"),
    "engine-core": Command("pagoda.commands.engine_core", "start one engine core: requests, scheduling, KV blocks"),
    "worker": Command("pagoda.commands.worker", "start one worker: weights, KV tensors, kernels"),
    "chat": Command("pagoda.commands.chat", "chat with a running server"),
    "complete": Command("pagoda.commands.complete", "complete a text on a running server"),
    "replay": Command("pagoda.commands.replay", "compute a finished request again and compare the results"),
    "bench": Command("pagoda.bench.command", "benchmark a running server, the offline engine, startup or the kernels"),
    "config": Command("pagoda.commands.config", "show or check the settings and where each value comes from"),
    "keys": Command("pagoda.commands.keys", "create, list and revoke API keys"),
    "workers": Command("pagoda.commands.workers", "list or drain workers, or drop their cached prefixes"),
    "keygen": Command("pagoda.commands.keygen", "create encryption keys for tiers on different hosts"),
    "ping": Command("pagoda.commands.ping", "check whether a process is healthy"),
    "doctor": Command("pagoda.commands.doctor", "check what this machine offers"),
    "version": Command("pagoda.tools.version", "print versions"),
}


SERVING = ("serve", "gateway", "engine-core", "worker")


class Parser(argparse.ArgumentParser):
    """argparse's, with hints for unknown arguments. Subcommands use this class, too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")]
            ours = [flag.replace("-", "_") for flag in flags]
            told = [word.partition("=")[0] if word.startswith("-") else word for word in unknown]
            lines = [f"unrecognized arguments: {word}{hint(word, ours, _flag, _whose)}" for word in told]
            self.error(f"\n{self.prog}: error: ".join(lines))
        return found, unknown


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whose(name: str) -> str:
    """The commands that have this option, as text."""
    from pagoda.settings.resolving import command_options

    takers = [command for command in SERVING if name in names_of(command_options(command))]
    return " and ".join(filter(None, (", ".join(takers[:-1]), *takers[-1:])))


def parser_of(chosen: str = "") -> argparse.ArgumentParser:
    """The parser. Only the chosen command knows its arguments, because only its module is imported."""
    parser = Parser(
        prog="pagoda",
        description="LLM serving whose streams survive kill -9.",
        epilog="Server options can also be set as PAGODA_<NAME> in the environment or as <name> in the --config file.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="same as the command version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if name == chosen:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see `pagoda.processes.exit_codes`)."""
    return _run("main", list(sys.argv[1:] if argv is None else argv))


def prepare(argv: Sequence[str]) -> int:
    """Prepare what all runs of a command share that will be forked from this process; returns as `main` does."""
    return _run("prepare", list(argv))


def _run(what: str, words: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr: no printed name may crash a command
    words = ["version"] if words == ["--version"] else words
    arguments = parser_of(words[0] if words else "").parse_args(words)
    try:
        code: int = getattr(importlib.import_module(COMMANDS[arguments.command].module), what)(arguments)
    except ConfigError as error:
        for problem in error.problems:
            print(f"pagoda: error: {problem}", file=sys.stderr)
        return EXIT_UNREACHABLE if isinstance(error, UnreachableError) else EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CRASH
    return code


if __name__ == "__main__":
    sys.exit(main())
