"""Keeps a set of child processes running until told to stop. It knows nothing about what they do.

Each child is one loop: *start it, forward its output, wait for its end, restart it after a pause*. Only three things
leave that loop: a stop signal; a child that rejects its configuration before it ever worked; a child that keeps
crashing before it ever worked.

The supervisor stops children in `stop_order`, each with its own timeout, then kills its process group. If the
supervisor itself dies, the kernel kills the children, because each has asked for that (`die_with_parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from pagoda.processes.exit_codes import EXIT_CONFIG, EXIT_CRASH, EXIT_OK, describe_exit
from pagoda.processes.process import STOP_SIGNALS, UP_EVENTS, insists
from pagoda.processes.restarts import Lives, Pauses
from pagoda.processes.template import Forked, Template, execute, supported
from pagoda_proto import times
from pagoda_proto.times import StallGuard

STARTS_BEFORE_GIVING_UP = 3  # consecutive deaths of a child that was never up

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One child. `command` is called at every start, so it can use what was learned since (a port)."""

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    prepares: bool = False  # where supported, its lives are forks of a template that has called `prepare`
    inherits: Sequence[int] = ()  # file descriptors that each life inherits under the same numbers
    stop_order: int
    stop_timeout_s: float
    silence_timeout_s: float = 0.0  # a child that sends no event for this long is considered hung and killed; 0: never
    first_word_s: float = times.FIRST_WORD_S  # the timeout before its first event, if that is longer


class Observer(Protocol):
    """Receives the children's events and output lines."""

    def on_event(self, child: str, event: dict[str, Any]) -> None: ...

    def on_line(self, child: str, line: str) -> None: ...


@dataclass
class Child:
    """The state of one child; only the supervisor's tasks touch it."""

    spec: ChildSpec
    lives: Lives
    template: Template | None = None
    process: asyncio.subprocess.Process | Forked | None = None
    heard_at: float = 0.0
    spoke: bool = False  # whether this life has sent an event
    why: str = ""  # the failure that this life reported
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    def kill_group(self) -> None:
        """Kill the child and everything it started; it leads its own process group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_template(self) -> None:
        """Called if a life hangs or dies before it is up: the state shared through the template may be the cause."""
        if self.template is not None:
            self.template.kill()

    def ask_to_stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)


class Supervisor:
    def __init__(self, specs: Sequence[ChildSpec], observer: Observer, pauses: Pauses | None = None) -> None:
        self.children = [Child(spec, Lives(pauses or Pauses())) for spec in specs]
        self._observer = observer
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._verdict = EXIT_OK

    async def run(self) -> int:
        """Start everything, keep it running, stop it on a signal; returns the exit code."""
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, self.stop, signum)
        keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
        for keeper in keepers:
            keeper.add_done_callback(lambda _: self._stopping.set())  # a keeper ends only when everything is to end
        pulse = asyncio.create_task(self._watch_silence())
        try:
            await self._stopping.wait()
            await self._stop_in_order()
            await asyncio.gather(*keepers)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # no signal may interrupt the clean-up below
            pulse.cancel()
            for child in self.children:
                if child.process is not None and child.process.returncode is None:
                    child.kill_group()
                if child.template is not None:
                    await child.template.end()
            for signum in STOP_SIGNALS:
                loop.remove_signal_handler(signum)
        return EXIT_CRASH if self._killing.is_set() else self._verdict

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask for an orderly stop; a second, insistent signal kills everything."""
        if not self._stopping.is_set():
            log.info("stopping; a second signal kills everything at once")
        elif insists(signum):
            self._killing.set()
        self._stopping.set()

    async def _keep(self, child: Child) -> None:
        while not self._stopping.is_set():
            try:
                code = await self._live(child)
            except OSError as error:
                log.error("%s cannot be started: %s", child.spec.name, error)
                return self._give_up(EXIT_CRASH)
            if self._stopping.is_set():
                return None
            pause_s = child.lives.end(time.monotonic(), code)
            if code == EXIT_CONFIG and not child.lives.was_up:
                log.error("%s cannot start: %s", child.spec.name, child.why or "it refuses its configuration")
                return self._give_up(EXIT_CONFIG)
            if not child.lives.was_up and child.lives.deaths_in_a_row >= STARTS_BEFORE_GIVING_UP:
                deaths, cause = child.lives.deaths_in_a_row, child.why or describe_exit(code)
                log.error("%s died %d times without ever becoming ready; giving up: %s", child.spec.name, deaths, cause)
                return self._give_up(EXIT_CRASH)
            if child.lives.failing:
                child.kill_template()
            await self._pause(child, code, pause_s)
        return None

    async def _live(self, child: Child) -> int:
        """Run one life of a child from start to end; returns its exit code."""
        # We create the pipes: with asyncio's, `wait` would not return until grandchildren had closed their copies, too.
        with contextlib.ExitStack() as ends:
            status_read, status_write = _pipe(ends)
            lines_read, lines_write = _pipe(ends)
            begin = _begin_forked if child.spec.prepares and supported() else _begin_afresh
            child.process = await begin(child, status_write.fileno(), lines_write.fileno())
            status_write.close()
            lines_write.close()
            ends.pop_all()
        child.heard_at = time.monotonic()
        child.lives.begin(child.heard_at)
        child.why, child.spoke = "", False
        if self._stopping.is_set():
            child.kill_group()  # started too late to have anything to finish
        child.readers = [
            asyncio.create_task(_read_lines(status_read, lambda line: self._take_event(child, line))),
            asyncio.create_task(_read_lines(lines_read, lambda line: self._observer.on_line(child.spec.name, line))),
        ]
        code = await child.process.wait()
        child.kill_group()  # processes that it started and left behind
        await self._finish_readers(child)
        return code

    async def _watch_silence(self) -> None:
        guard = StallGuard(times.WATCH_S, time.monotonic())
        while not self._stopping.is_set():
            await asyncio.sleep(times.WATCH_S)
            now = time.monotonic()
            held_up_s = guard.tick(now)
            if held_up_s:
                log.warning("was suspended for %.1f s; the silence of others in that time is ignored", held_up_s)
            for child in self.children:
                child.heard_at = min(now, child.heard_at + held_up_s)
                limit = child.spec.silence_timeout_s
                if limit and not child.spoke:
                    limit = max(limit, child.spec.first_word_s)
                running = child.process is not None and child.process.returncode is None
                if limit and running and now - child.heard_at > limit:
                    log.error("%s has been silent for %g s and is killed", child.spec.name, limit)
                    child.kill_group()
                    if not child.lives.is_up:
                        child.kill_template()

    async def _finish_readers(self, child: Child) -> None:
        """Read the remaining output, but do not wait for a grandchild that holds the pipe open."""
        _, late = await asyncio.wait(child.readers, timeout=times.LAST_WORDS_S)
        for reader in late:
            reader.cancel()
        await asyncio.gather(*child.readers, return_exceptions=True)

    async def _pause(self, child: Child, code: int, pause_s: float) -> None:
        pid = child.process.pid if child.process is not None else 0
        level, what = logging.WARNING, f": {child.why}" if child.why else ""
        if child.lives.in_crash_loop:
            level, what = logging.ERROR, f"{what} (crash loop: {child.lives.deaths_in_a_row} deaths in a row)"
        when = f"in {pause_s:.2g} s" if pause_s else "at once"
        log.log(level, "%s (pid %d) %s%s; restarting %s", child.spec.name, pid, describe_exit(code), what, when)
        self._observer.on_event(child.spec.name, {"event": "died", "code": code})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    def _give_up(self, code: int) -> None:
        self._verdict = code
        self._stopping.set()

    async def _stop_in_order(self) -> None:
        by_order = sorted(self.children, key=lambda child: child.spec.stop_order)
        for _, group in itertools.groupby(by_order, key=lambda child: child.spec.stop_order):
            await asyncio.gather(*(self._stop_child(child) for child in group))

    async def _stop_child(self, child: Child) -> None:
        if child.process is None:
            return
        child.ask_to_stop()
        ended = asyncio.create_task(child.process.wait())
        killed = asyncio.create_task(self._killing.wait())
        await asyncio.wait({ended, killed}, timeout=child.spec.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not ended.done():
            if not self._killing.is_set():
                log.warning("%s did not stop within %g s and is killed", child.spec.name, child.spec.stop_timeout_s)
            child.kill_group()
        await ended

    def _take_event(self, child: Child, line: str) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError):
            log.warning("%s sent a status line that is not an event: %.200s", child.spec.name, line)
            return
        child.heard_at, child.spoke = time.monotonic(), True
        if kind == "beat":
            return
        if kind in UP_EVENTS:
            child.lives.come_up(child.heard_at)
        if kind == "failed":
            child.why = str(event.get("why", ""))
        self._observer.on_event(child.spec.name, event)


async def _begin_afresh(child: Child, status: int, output: int) -> asyncio.subprocess.Process:
    spec = child.spec
    command = [*spec.command(), f"--status-fd={status}", f"--parent-pid={os.getpid()}"]
    return await execute(command, spec.environment, output, [status, *spec.inherits])


async def _begin_forked(child: Child, status: int, output: int) -> Forked:
    """Have the child's template fork it; start a template if there is none or it has died."""
    if child.template is not None and not child.template.alive:
        await child.template.end()
        child.template = None
    if child.template is None:
        spec = child.spec
        child.template = await Template.start(spec.name, spec.environment, output, spec.inherits)
    return child.template.bear(child.spec.command(), status, output)


def _pipe(ends: contextlib.ExitStack) -> tuple[BinaryIO, BinaryIO]:
    read, write = os.pipe()
    return (
        ends.enter_context(os.fdopen(read, "rb", buffering=0)),
        ends.enter_context(os.fdopen(write, "wb", buffering=0)),
    )


async def _read_lines(pipe: BinaryIO, take: Callable[[str], None]) -> None:
    """Pass on lines of any length, without line ends, until the pipe is closed; an unterminated last line counts."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    rest = b""
    try:
        while chunk := await reader.read(65536):
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                take(line.decode("utf-8", "replace"))
        if rest:
            take(rest.decode("utf-8", "replace"))
    finally:
        transport.close()


def python_command(*arguments: str) -> list[str]:
    """A command of this program's own command line, under the same interpreter."""
    return [sys.executable, "-m", "pagoda.cli", *arguments]
