"""Runs `supervise_program` and reads its events."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.services.processes.terminal import AT_A_TERMINAL

PROGRAM = Path(__file__).with_name("supervise_program.py")
STEADY = ["ready", "linger"]


class Running:
    """A supervisor process; `event` reads its events one by one. A child's lines and events arrive through different
    pipes, so only those of one kind are ordered.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def event(self, **wanted: Any) -> dict[str, Any]:
        """The next event with these items."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if wanted.items() <= event.items():
                return event
        raise AssertionError(f"the supervisor ended without the event {wanted}")

    def end(self) -> int:
        return self.process.wait(timeout=240)


@contextlib.contextmanager
def supervise(how: str = "forked", **children: list[str]) -> Iterator[Running]:
    names = {name.replace("_", "-"): words for name, words in children.items()}
    command = [*AT_A_TERMINAL, sys.executable, str(PROGRAM), how, json.dumps(names)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def gone(pid: int) -> bool:
    """Wait for a process to end; False if it does not."""
    try:
        psutil.Process(pid).wait(timeout=120)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True
