"""`pagoda <tier> ..` with functions that raise on command: `python -m tests.faults.failing worker ..`.

This runs the real tier, not a test double. The file named by FAIL_FILE holds the command: with `POINT SEED`, every call
for the request with this seed raises; with `POINT once`, the next call raises.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda import cli

FAIL_FILE = "FAIL_FILE"
POINTS = {
    "gateway": (
        "pagoda_gateway.generation.run:Run.__init__",
        "pagoda_gateway.generation.run:Part._read",
        "pagoda_gateway.text.generation:ChoiceText.push",
        "pagoda_gateway.dialects.completions:CompletionWriter.chunks",
        "pagoda_gateway.engine.open_request:OpenRequest.take",
    ),
    "engine-core": (
        "pagoda_engine_core.dispatch.admission:Admission.admit",
        "pagoda_engine_core.dispatch.router:Router.add",
        "pagoda_engine_core.dispatch.router:Router._try",
        "pagoda_engine_core.scheduling.scheduler:Scheduler.add",
        "pagoda_engine_core.scheduling.scheduler:Scheduler.need",
        "pagoda_engine_core.scheduling.scheduler:Scheduler._start",
        "pagoda_engine_core.scheduling.scheduler:Scheduler._apply_row",
        "pagoda_engine_core.scheduling.request:Request.add_tokens",
    ),
    "worker": (
        "pagoda_worker.step.table:RowTable._add",
        "pagoda_worker.step.compute:Compute.start",
        "pagoda_worker.step.compute:Compute._answer",
    ),
}
MEMORY_POINT = "pagoda_worker.step.compute:Compute.start"
INSIDE = ("params", "_params", "record", "records", "task", "request", "submission", "job", "run")


def about(value: Any, seed: int, depth: int = 8) -> bool:
    """Whether `value` contains something that belongs to the request with this seed."""
    if depth == 0 or isinstance(value, str | bytes | int | float | None):
        return False
    if getattr(value, "seed", None) == seed:
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(about(item, seed, depth - 1) for item in value)
    return any(about(getattr(value, name, None), seed, depth - 1) for name in INSIDE)


def wrap(point: str, order: Path) -> None:
    """Make the function read the command file before anything else.

    Raises:
        AttributeError: there is no such function.
    """
    module, _, path = point.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    @functools.wraps(original)
    def failing(*arguments: Any, **named: Any) -> Any:
        try:
            where, whom = order.read_text().split()
        except FileNotFoundError:
            where = whom = ""
        if where == point and whom == "once":
            order.unlink()
            raise MemoryError("a test took the memory away")
        if where == point and about([*arguments, *named.values()], int(whom)):
            raise RuntimeError("a test let this fail")
        return original(*arguments, **named)

    setattr(owner, name, failing)


if __name__ == "__main__":
    for point in POINTS[sys.argv[1]]:
        wrap(point, Path(os.environ[FAIL_FILE]))
    sys.exit(cli.main(sys.argv[1:]))
