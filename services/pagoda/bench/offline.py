"""`pagoda bench throughput`: how many tokens per second one process makes of a model, without any server."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, default=32, help="[%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    return 0
