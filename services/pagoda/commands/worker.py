"""The process of one worker."""

from __future__ import annotations

import argparse
import importlib

from pagoda.processes import tier
from pagoda.processes.process import StatusPipe, beating, run_blocking, run_guarded
from pagoda.settings.flags import add_options
from pagoda.settings.options import ModelSourceConfig
from pagoda.tools import checkpoints
from pagoda_worker.config import WorkerConfig
from pagoda_worker.library_choice import choose_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "worker")


def main(arguments: argparse.Namespace) -> int:
    config, report = _begin(arguments)
    from pagoda_worker.process.loop import run

    return run_blocking(lambda stop: run(config, report, stop), report)


def prepare(arguments: argparse.Namespace) -> int:
    """Import what every life needs, and load the model for all of them, where forks can share it."""
    config, report = _begin(arguments)
    importlib.import_module("pagoda_worker.process.startup")
    from pagoda_worker.process.loop import load_for_forks

    with beating(report):
        return run_guarded(lambda: load_for_forks(config, report), report)


def _begin(arguments: argparse.Namespace) -> tuple[WorkerConfig, StatusPipe]:
    settings, report = tier.begin("worker", arguments)
    model = settings.build(WorkerConfig).model
    model_dir = checkpoints.locate(model, settings.build(ModelSourceConfig).revision)
    choose_libraries()
    return settings.build(WorkerConfig, model=str(model_dir)), report
