"""Starts a program as at a terminal, however the tests themselves were started."""

from __future__ import annotations

import sys

_DEFAULT = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
AT_A_TERMINAL = [sys.executable, "-c", _DEFAULT]
"""Prefix of a command. Under `nohup make test` the command would otherwise ignore SIGHUP, as the tests do."""
