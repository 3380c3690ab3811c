"""The process that compiles clients' grammars: for each frame in, one frame out with its problem, "" if there is none.

It compiles them in a fork of itself, which is all that a hostile grammar can take down: the kernel ends the fork when a
check takes too long, and refuses it memory beyond its limit. The next fork takes milliseconds, where a new process
would have to load the compiler. All end with the process at the other end of the socket.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from pagoda_engine_core.grammars.pointing import leaking, located
from pagoda_proto.grammars import LIMITS
from pagoda_proto.times import GRAMMAR_CHECK_S, GRAMMAR_COMPUTE_S

MEMORY_BYTES = 512 * 2**20  # of address space
MAX_TOLD_CHARS = 400
LENGTH = struct.Struct("<I")
READY = b"ready"
JUDGED, ENDED = b"judged ", b"ended "
"""Prefixes of answers: the problem follows, or the exit code with which a check ended (negative: a signal)."""
NO_TOKENIZER = "no tokenizer"  # its warning about special tokens; all others are about keywords it may ignore
ELIDED = "<non-verbose/>"  # replaces the grammar's text, without verbose_errors


def frame(text: bytes) -> bytes:
    return LENGTH.pack(len(text)) + text


def problem_of(grammar: str) -> str:
    """What keeps the grammar from compiling and yielding a first mask. The model's special tokens are unknown here, so
    a grammar that names some is left to the workers."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(**LIMITS)
    failed, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if failed:
        return told[0] or "it is not valid"
    if any(NO_TOKENIZER in each for each in told):
        return ""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def main(asked: BinaryIO, answers: BinaryIO) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem_of("start: /a/")  # loads everything that is loaded lazily
    answers.write(frame(READY))
    answers.flush()
    checking = mmap.mmap(-1, 1)  # shared: 1 during a check
    while True:
        code = _in_a_fork(asked, answers, checking)
        if code == -signal.SIGKILL or not checking[0]:
            return  # no check caused this; a peer that waits for an answer sees our end
        checking[0] = 0
        answers.write(frame(ENDED + str(code).encode()))
        answers.flush()


def _in_a_fork(asked: BinaryIO, answers: BinaryIO, checking: mmap.mmap) -> int:
    """Serve in a fork until the peer is gone or a check ends the fork. Returns its exit code."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        _serve(asked, answers, checking)
        code = 0
    finally:
        os._exit(code)


def _serve(asked: BinaryIO, answers: BinaryIO, checking: mmap.mmap) -> None:
    while length := asked.read(LENGTH.size):
        grammar = asked.read(LENGTH.unpack(length)[0]).decode()
        checking[0] = 1
        # The timers' signals have no handlers, so they end the process whatever it is doing.
        signal.setitimer(signal.ITIMER_REAL, GRAMMAR_CHECK_S)
        signal.setitimer(signal.ITIMER_PROF, GRAMMAR_COMPUTE_S)
        problem = located(problem_of(grammar), grammar) or leaking(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        checking[0] = 0
        answers.write(frame(JUDGED + problem.replace(ELIDED, "").strip()[:MAX_TOLD_CHARS].encode()))
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
