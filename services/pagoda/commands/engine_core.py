"""The process of one engine core."""

from __future__ import annotations

import argparse
import importlib

from pagoda.processes import tier
from pagoda.processes.exit_codes import EXIT_OK
from pagoda.processes.process import run_async
from pagoda.settings.flags import add_options
from pagoda_engine_core.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "engine-core")


def prepare(_: argparse.Namespace) -> int:
    """Import what every life needs."""
    importlib.import_module("pagoda_engine_core.server")
    return EXIT_OK


def main(arguments: argparse.Namespace) -> int:
    settings, report = tier.begin("engine-core", arguments)
    config = settings.build(EngineConfig)

    from pagoda_engine_core.server import serve

    return run_async(lambda stop: serve(config, report, stop), report)
