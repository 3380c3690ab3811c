"""Runs `pagoda worker` in separate processes, forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import NamedTuple

# The processes are forked from one that has only imported these: a fresh interpreter would need two seconds to.
LOADED = ["pagoda.cli", "pagoda.commands.worker", "pagoda_worker.process.loop", "pagoda_worker.process.startup"]
PATIENCE_S = 240.0


class Ended(NamedTuple):
    returncode: int | None
    stderr: str


def run_worker(model: Path, log: Path) -> Ended:
    """Run a worker until it ends; its output goes to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    words = ["worker", "--engine", "tcp://127.0.0.1:9", "--model", str(model)]
    process = context.Process(target=_main, args=(words, str(log), dict(os.environ)))
    process.start()
    process.join(PATIENCE_S)
    process.kill()
    process.join()
    return Ended(process.exitcode, log.read_text(encoding="utf-8"))


def _main(words: list[str], log: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from pagoda.cli import main

    sys.exit(main(words))
