"""Exit codes.

0  stopped cleanly        1  crashed
2  refused: the configuration cannot work, and a restart will not help
3  something it depends on could not be reached at startup
"""

from __future__ import annotations

import signal

EXIT_OK, EXIT_CRASH, EXIT_CONFIG, EXIT_UNREACHABLE = 0, 1, 2, 3


def describe_exit(code: int) -> str:
    """`was killed by SIGKILL` or `exited with code 1`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
