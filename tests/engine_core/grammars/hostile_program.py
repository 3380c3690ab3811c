"""The real checking program, with a compiler that misbehaves on command; the limits are the program's own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from pagoda_engine_core.grammars import program


def obey(grammar: str) -> str:
    match grammar:
        case "spin":
            while True:
                pass
        case "wait":
            time.sleep(program.GRAMMAR_CHECK_S + 60)
        case "eat":
            return str(len(bytearray(program.MEMORY_BYTES)))
        case "crash":
            ctypes.string_at(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "pid":
            return str(os.getpid())
        case "parent":
            return str(os.getppid())
        case "bad":
            return "bad grammar"
    return ""


def obey_afterwards(grammar: str) -> str:
    return obey(grammar.removeprefix("after, ")) if grammar.startswith("after, ") else ""


program.problem_of, program.leaking = obey, obey_afterwards
program.main(sys.stdin.buffer, sys.stdout.buffer)
