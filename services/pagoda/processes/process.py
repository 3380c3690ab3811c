"""What every process does around its work: die with its parent, obey signals, report, exit with a meaningful code.

The first SIGTERM or SIGINT asks it to stop; the second one ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pagoda.processes.exit_codes import EXIT_CONFIG, EXIT_CRASH, EXIT_OK, EXIT_UNREACHABLE
from pagoda.processes.garbage import keep_out_of_collections
from pagoda.settings.problems import ConfigError
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MANY_FILES = 65536  # wanted limit of open files
LONGEST_WHY = 1000  # an event must fit into a pipe in one write
UP_EVENTS = frozenset({"listening", "loaded", "ready"})
# SIGHUP comes when a terminal is closed, and counts unless nohup has it ignored.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT) + (
    () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
)

Report = Callable[[dict[str, Any]], None]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_CONFIG_CODES = {ErrorCode.INVALID_ARGUMENT, ErrorCode.MODEL_NOT_FOUND, ErrorCode.NOT_FOUND}


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason. Does nothing except on Linux.

    The parent may end before the request is made, so the parent's pid is checked after it.
    """
    if not parent_pid or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_CRASH)


def allow_files() -> None:
    """Raise the limit of open files as far as wanted and allowed. The usual soft limit, 1024, exists for programs that
    use `select`; a gateway allows more connections, and without a free file it could not even report its health."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < MANY_FILES:
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit than `hard`
            resource.setrlimit(resource.RLIMIT_NOFILE, (MANY_FILES if hard < 0 else min(hard, MANY_FILES), hard))


class StatusPipe:
    """Writes events to the supervisor, one JSON object per line; without a pipe it logs them.

    A supervisor that does not read must not block our work, so an event is dropped if the pipe is full.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self.up = False  # has reported that it works: later failures are not the configuration's
        if fd >= 0:
            os.set_blocking(fd, False)

    @property
    def connected(self) -> bool:
        return self._fd >= 0

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] in UP_EVENTS and not self.up:
            self.up = True
            keep_out_of_collections()
        if self._fd < 0:
            log.info("%s", " ".join(f"{key}={value}" for key, value in event.items()))
            return
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, json.dumps(event).encode() + b"\n")


def run_async(serve: Callable[[asyncio.Event], Awaitable[None]], report: StatusPipe) -> int:
    """Run a tier on an event loop until it ends or a signal asks it to; returns the exit code.

    The loop itself sends heartbeats on the status pipe, so a loop that hangs falls silent.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, stop_on, stop, signum)
        beats = asyncio.create_task(_beat(report))
        try:
            await serve(stop)
        finally:
            beats.cancel()

    def run() -> None:
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            runner.run(main())

    return run_guarded(run, report)


async def _beat(report: StatusPipe) -> None:
    while report.connected:
        report({"event": "beat"})
        await asyncio.sleep(times.CHILD_BEAT_S)


def insists(signum: int) -> bool:
    """Whether this signal, sent a second time, ends us at once."""
    return signum != signal.SIGHUP  # which both a shell and the kernel send


def stop_on(stop: threading.Event | asyncio.Event, signum: int) -> None:
    """Ask for an orderly stop; a second signal ends the process at once."""
    if stop.is_set() and insists(signum):
        os._exit(EXIT_CRASH)
    stop.set()


def run_blocking(run: Callable[[threading.Event], None], report: StatusPipe) -> int:
    """Run a tier in the main thread until it ends or a signal asks it to; returns the exit code.

    A thread sends heartbeats meanwhile; the engine core judges whether the tier's work advances.
    """
    stop = threading.Event()

    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda signum, _: stop_on(stop, signum))
    with beating(report):
        return run_guarded(lambda: run(stop), report)


@contextlib.contextmanager
def beating(report: StatusPipe) -> Iterator[None]:
    """Send heartbeats on the status pipe from a separate thread, which shows that the process is not frozen."""
    over = threading.Event()

    def beat() -> None:
        while report.connected and not over.is_set():
            report({"event": "beat"})
            over.wait(times.CHILD_BEAT_S)

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run_guarded(run: Callable[[], None], report: StatusPipe) -> int:
    """Run, and turn an exception into an exit code; logs one line if an operator can fix it, a traceback for a bug."""
    try:
        run()
    except Exception as error:
        code = exit_code(error, up=report.up)
        if report.connected:
            report({"event": "failed", "why": _in_one_line(error)})
        if code == EXIT_CRASH:
            log.exception("crashed")
        else:
            for line in str(error).splitlines():
                log.error("%s", line)
        return code
    return EXIT_OK


def _in_one_line(error: Exception) -> str:
    told = "; ".join(str(error).splitlines()) or type(error).__name__
    return told if len(told) <= LONGEST_WHY else told[:LONGEST_WHY] + " .."


def exit_code(error: Exception, *, up: bool) -> int:
    """The exit code for an error. `up` says whether the process ever worked."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, PagodaError):
        if error.code is ErrorCode.UNAVAILABLE:
            return EXIT_UNREACHABLE
        return EXIT_CONFIG if error.code in _CONFIG_CODES else EXIT_CRASH
    if up:
        return EXIT_CRASH
    if isinstance(error, ConnectionError | TimeoutError):
        return EXIT_UNREACHABLE
    return EXIT_CONFIG if isinstance(error, ValueError | OSError) else EXIT_CRASH


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner(loop_factory=..)`: uvloop's if it is installed, otherwise None."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
