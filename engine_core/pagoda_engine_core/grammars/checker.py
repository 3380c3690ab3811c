"""Grammars are checked one after the other, by a process that is kept until one of them takes it down.

Nothing of a grammar reaches a command line: the process is always the same, and reads grammars from a socket.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from pagoda_engine_core.grammars.program import LENGTH, MEMORY_BYTES, READY, frame
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.times import GRAMMAR_CHECK_S, GRAMMAR_COMPUTE_S, GRAMMAR_REFUSED_S, GRAMMAR_SILENT_S, START_S

log = logging.getLogger(__name__)

MAX_WAITING = 32
MAX_DEAR = 1024
COMMAND = (sys.executable, "-P", "-m", "pagoda_engine_core.grammars.program")


class Verdict(NamedTuple):
    """`error` says why a grammar is refused, None if it is not. `final`: asking again would bring the same."""

    error: PagodaError | None
    final: bool


Told = Callable[[str, Verdict], object]


class Checker(Protocol):
    def check(self, grammar: str, told: Told) -> None:
        """Have `told` called, by any thread. Raises PagodaError when it cannot take another one."""

    def close(self) -> None:
        """Nobody is told anything any more."""


class GrammarChecker:
    """`check` is for one thread, `told` is called by another one. The process is started with the first grammar."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._waiting: queue.Queue[tuple[str, Told] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._process: _Process | None = None
        self._dear: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why each was refused, and until when
        self._closed = False

    def check(self, grammar: str, told: Told) -> None:
        """See `Checker`; raises PagodaError OVERLOADED when too many wait already."""
        if self._waiting.qsize() >= MAX_WAITING:
            raise PagodaError(ErrorCode.OVERLOADED, f"{MAX_WAITING} grammars wait to be checked", "grammar")
        self._waiting.put((grammar, told))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """See `Checker`; the process ends."""
        self._closed = True
        self._waiting.put(None)
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join(GRAMMAR_SILENT_S)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None and not self._closed:
            grammar, told = item
            try:
                verdict = self._judge(grammar)
            except Exception:  # those that wait behind it are judged by another process
                log.exception("a grammar cannot be judged")
                self._end_process()
                verdict = Verdict(
                    PagodaError(ErrorCode.INTERNAL, "this grammar cannot be judged", "grammar"), final=False
                )
            if not self._closed:
                told(grammar, verdict)
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None

    def _judge(self, grammar: str) -> Verdict:
        """One that cost a process is refused unread for a while: a new process takes longer than most grammars."""
        digest = sha256(grammar.encode(errors="replace")).digest()
        why, until = self._dear.get(digest, ("", 0.0))
        if time.monotonic() < until:
            return Verdict(_refused(why), final=False)
        try:
            if self._process is not None and not self._process.alive:
                self._end_process()
            self._process = self._process or _Process(self._command)
        except OSError as error:
            log.error("the process that checks grammars does not start: %s", error)
            return Verdict(PagodaError(ErrorCode.UNAVAILABLE, "grammars cannot be checked at the moment"), final=False)
        try:
            problem = self._process.ask(grammar.encode(errors="replace")).decode()
        except OSError:
            why = self._process.end()
            if not self._process.was_killed:
                self._remember(digest, why)
            return Verdict(_refused(why), final=False)
        return Verdict(_refused(problem) if problem else None, final=True)

    def _remember(self, digest: bytes, why: str) -> None:
        self._dear[digest] = why, time.monotonic() + GRAMMAR_REFUSED_S
        self._dear.move_to_end(digest)
        if len(self._dear) > MAX_DEAR:
            self._dear.popitem(last=False)


class _Process:
    """One life of the process. Raises OSError when it cannot be talked to."""

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

    @property
    def was_killed(self) -> bool:
        """By somebody else, whatever it was asked: nothing that it does itself ends it so."""
        return self._popen.returncode == -signal.SIGKILL

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, text: bytes) -> bytes:
        self._socket.sendall(frame(text))
        return self._receive(GRAMMAR_SILENT_S)

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> str:
        """End it, if it has not; how it ended."""
        self._socket.close()
        try:
            code = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            code = -signal.SIGALRM  # which it was in no state to take
        if code == -signal.SIGPROF:
            return f"it takes more than {GRAMMAR_COMPUTE_S:g} s of processor time to compile"
        if code == -signal.SIGALRM:
            return f"it takes longer than {GRAMMAR_CHECK_S:g} s to compile"
        return f"it needs more than {MEMORY_BYTES >> 20} MB to be compiled, or breaks the compiler"

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


def _refused(problem: str) -> PagodaError:
    return PagodaError(ErrorCode.INVALID_ARGUMENT, f"this cannot be used: {problem}", "grammar")
