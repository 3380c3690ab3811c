"""`pagoda keygen DIR`: write the keys of a deployment whose tiers are on different hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagoda.settings.numbers import whole
from pagoda.settings.problems import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write one directory per role")
    parser.add_argument(
        "--valid-days", type=whole(1, 36500), default=825, help="validity of the certificates [%(default)s]"
    )


def main(arguments: argparse.Namespace) -> int:
    try:
        from pagoda.tools.keygen import generate
    except ImportError as error:
        raise ConfigError([f"keygen needs the package {error.name}"]) from error
    try:
        written = generate(arguments.directory, arguments.valid_days)
    except OSError as error:
        raise ConfigError([f"{arguments.directory}: {error.strerror}: {error.filename}"]) from error
    for path in written:
        print(path)
    return 0
