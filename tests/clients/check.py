"""Starts a stack and runs `programs.py` against it in another environment: `make test-clients`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.stack import running_stack

PROGRAMS = Path(__file__).with_name("programs.py")


def main() -> int:
    """The first argument is the Python of the environment with the libraries."""
    # By default the libraries fetch model prices and send telemetry.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "ANONYMIZED_TELEMETRY": "False", "LANGSMITH_TRACING": "false"}
    with (
        tempfile.TemporaryDirectory(prefix="pagoda-clients-") as scratch,
        running_stack(Path(scratch), "--served-model-name", "demo") as stack,
    ):
        command = [sys.argv[1], "-W", "ignore", str(PROGRAMS), stack.url]
        return subprocess.run(command, env=os.environ | quiet, timeout=600, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
