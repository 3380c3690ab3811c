"""`pagoda ping TARGET`: a health check for containers and probes; exit code 0 means healthy."""

from __future__ import annotations

import argparse
import sys

from pagoda.settings.numbers import number
from pagoda.tools import ping


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="http://.., unix:PATH, grpc://.., grpcs://.. or file:PATH")
    parser.add_argument("--keys-dir", default="", help="keys for grpcs://")
    parser.add_argument("--max-age-s", type=number(), default=10.0, help="of a file [%(default)s]")
    parser.add_argument("--timeout-s", type=number(), default=3.0, help="[%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    problem = ping.ping(
        arguments.target,
        keys_dir=arguments.keys_dir,
        max_age_s=arguments.max_age_s,
        timeout_s=arguments.timeout_s,
    )
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None else 1
