"""`pagoda worker ..` in which one step runs out of memory: the first one after a file named by FAIL_FILE appears.

Not a test double of a worker but the worker: only the forward pass of that step raises.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pagoda import cli
from pagoda_worker.step.compute import Compute

FAIL_FILE = "FAIL_FILE"


def fail_once(trigger: Path) -> None:
    start = Compute.start

    def starting(self: Compute, *arguments: Any, **named: Any) -> Any:
        if trigger.exists():
            trigger.unlink()
            raise MemoryError("a test took the memory away")
        return start(self, *arguments, **named)

    Compute.start = starting  # type: ignore[method-assign]


if __name__ == "__main__":
    fail_once(Path(os.environ[FAIL_FILE]))
    sys.exit(cli.main(sys.argv[1:]))
