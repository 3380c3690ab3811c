"""The process of one worker."""

from __future__ import annotations

import argparse

from pagoda.processes import tier
from pagoda.processes.process import run_blocking
from pagoda.settings.flags import add_options
from pagoda.settings.options import ModelSourceConfig
from pagoda.tools import checkpoints
from pagoda_worker.config import WorkerConfig
from pagoda_worker.library_choice import choose_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "worker")


def main(arguments: argparse.Namespace) -> int:
    settings, report = tier.begin("worker", arguments)
    model = settings.build(WorkerConfig).model
    model_dir = checkpoints.locate(model, settings.build(ModelSourceConfig).revision)
    config = settings.build(WorkerConfig, model=str(model_dir))

    choose_libraries()
    from pagoda_worker.process.loop import run

    return run_blocking(lambda stop: run(config, report, stop), report)
