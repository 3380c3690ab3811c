"""The process of one engine core."""

from __future__ import annotations

import argparse

from pagoda.processes import tier
from pagoda.processes.process import run_async
from pagoda.settings.flags import add_options
from pagoda_engine_core.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "engine-core")


def main(arguments: argparse.Namespace) -> int:
    settings, report = tier.begin("engine-core", arguments)
    config = settings.build(EngineConfig)

    from pagoda_engine_core.server import serve

    return run_async(lambda stop: serve(config, report, stop), report)
