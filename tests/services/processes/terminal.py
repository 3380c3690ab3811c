"""How a program is started that has a terminal, whatever the tests themselves were started with."""

from __future__ import annotations

import sys

_DEFAULT = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
AT_A_TERMINAL = [sys.executable, "-c", _DEFAULT]
"""Before a command: `nohup make test` would have it ignore SIGHUP as we do."""
