"""A long-lived process checks grammars one at a time, each in a fork, so a hostile grammar takes down only the fork.

No part of a grammar reaches a command line: the command is always the same and reads grammars from a socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from pagoda_engine_core.grammars.program import ENDED, JUDGED, LENGTH, MEMORY_BYTES, READY, frame
from pagoda_engine_core.grammars.turns import Told, Turns
from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.times import GRAMMAR_CHECK_S, GRAMMAR_COMPUTE_S, GRAMMAR_SILENT_S, START_S

log = logging.getLogger(__name__)

MAX_WAITING = 32
COMMAND = (sys.executable, "-P", "-m", "pagoda_engine_core.grammars.program")


class Checker(Protocol):
    def check(self, grammar: str, tenant: str, told: Told) -> None:
        """Have `told` called, by any thread. Raises PagodaError if it cannot take another grammar of this tenant."""

    def close(self) -> None:
        """From now on, call no `told`."""


class GrammarChecker:
    """`check` is for one thread. `told` is called by another thread, or by that one for a grammar that must make room.
    The first grammar starts the process."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._turns = Turns(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._process: _Process | None = None
        self._closed = False

    def check(self, grammar: str, tenant: str, told: Told) -> None:
        """See `Checker`. Raises PagodaError OVERLOADED if too many wait already and no tenant has more of them."""
        if (gone := self._turns.put(tenant, grammar, told)) is not None:
            whose, unread, its = gone
            its(unread, Verdict(self._turns.overloaded(), final=False, tenant=whose))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """See `Checker`; the process ends."""
        self._closed = True
        self._turns.close()
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join(GRAMMAR_SILENT_S)

    def _run(self) -> None:
        while (item := self._turns.take()) is not None:
            grammar, told = item
            try:
                verdict = self._judge(grammar)
            except Exception:  # another process checks those that wait
                log.exception("a grammar cannot be judged")
                self._end_process()
                message = "checking this grammar failed; try again, or send another one"
                verdict = Verdict(PagodaError(ErrorCode.INTERNAL, message, "grammar"), final=False)
            if not self._closed:
                told(grammar, verdict)
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None

    def _judge(self, grammar: str) -> Verdict:
        try:
            answer = self._ask(grammar.encode(errors="replace"))
        except OSError as error:
            if not self._closed:
                log.error("the process that checks grammars does not start, or stay: %s", error)
            unavailable = PagodaError(ErrorCode.UNAVAILABLE, "grammars cannot be checked at the moment")
            return Verdict(unavailable, final=False)
        if answer.startswith(ENDED):
            return Verdict(_refused(_why(int(answer.removeprefix(ENDED)))), final=False, dear=True)
        problem = answer.removeprefix(JUDGED).decode()
        return Verdict(_refused(problem) if problem else None, final=True)

    def _ask(self, text: bytes) -> bytes:
        """Ask the current process or, if it is lost for whatever reason, a new one."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                return self._process.ask(text)
            self._end_process()
        self._process = _Process(self._command)
        if self._closed:
            raise OSError("it is to end")
        return self._process.ask(text)


class _Process:
    """One instance of the process. Raises OSError if communication with it fails."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            with theirs:
                self._popen = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, process_group=0
                )
            undo.callback(self.end)
            if self._receive(START_S) != READY:
                raise OSError("it says something else")
            undo.pop_all()

    def ask(self, text: bytes) -> bytes:
        self._socket.sendall(frame(text))
        try:
            return self._receive(GRAMMAR_SILENT_S)
        except TimeoutError:
            self.kill()  # the signal that ends a check did not end it
            return ENDED + str(int(-signal.SIGALRM)).encode()

    def kill(self) -> None:
        """Kill the process and its fork, whatever their state."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        self._socket.close()
        self.kill()
        self._popen.wait()

    def _receive(self, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise OSError("it has ended")
            data += part
        return data


def _why(code: int) -> str:
    """Why a grammar ended the process that compiled it, by that process's exit code."""
    if code == -signal.SIGPROF:
        return f"it takes more than {GRAMMAR_COMPUTE_S:g} s of processor time to compile"
    if code == -signal.SIGALRM:
        return f"it takes longer than {GRAMMAR_CHECK_S:g} s to compile"
    return f"it needs more than {MEMORY_BYTES >> 20} MB to be compiled, or breaks the compiler"


def _refused(problem: str) -> PagodaError:
    return PagodaError(ErrorCode.INVALID_ARGUMENT, f"this grammar or schema cannot be used: {problem}", "grammar")
