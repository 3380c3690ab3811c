"""`pagoda complete TEXT`: let a running server continue a text, from the command line or standard input."""

from __future__ import annotations

import argparse
import asyncio
import sys

from pagoda.tools.asking import add_server_arguments, ask, connect, problem_of
from pagoda.tools.http_stream import HttpError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help="text to complete; default: standard input")
    add_server_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    try:
        session = asyncio.run(connect(arguments))
        prompt = sys.stdin.read() if arguments.text is None else arguments.text
        asyncio.run(ask(session, "/v1/completions", {"prompt": prompt}))
    except (HttpError, ValueError) as error:
        raise problem_of(error) from error
    return 0
