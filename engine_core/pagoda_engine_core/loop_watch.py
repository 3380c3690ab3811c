"""Ends the process when the engine loop is stuck, so that a successor takes over its requests.

The loop thread cannot notice that it is stuck, and the beat to the supervisor comes from the event loop. So the event
loop watches: if it ran all the time while the engine loop made no pass, the machine is not to blame. A watcher of the
event loop needs no key: it reads the age of a file.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable

from pagoda_proto.health.sign_file import SignFile
from pagoda_proto.times import LOOP_STUCK_S, StallGuard

log = logging.getLogger(__name__)

LOOK_S = 0.5
TOUCH_S = 1.0
TELLING_S = 1.0  # for writing the stacks; then the process ends regardless
EXIT_CODE = 1


class LoopWatch:
    """Decides whether a loop is stuck. `rounds` is any number that changes with every pass of the loop."""

    def __init__(self, stuck_s: float, rounds: float, now: float) -> None:
        self._stuck_s = stuck_s
        self._guard = StallGuard(LOOK_S, now)
        self._rounds = rounds
        self._changed_at = now

    def look(self, rounds: float, now: float) -> bool:
        """Whether the loop is stuck. Call it every `LOOK_S`."""
        self._changed_at += self._guard.tick(now)
        if rounds != self._rounds:
            self._rounds, self._changed_at = rounds, now
        return now - self._changed_at > self._stuck_s


async def keep_touching(file: SignFile, alive: Callable[[], bool]) -> None:
    """Touch the file while both loops make passes."""
    while True:
        if alive():
            await asyncio.to_thread(file.touch)  # a disk may hang
        await asyncio.sleep(TOUCH_S)


async def end_when_stuck(passed_at: Callable[[], float], stuck_s: float = LOOP_STUCK_S) -> None:
    """Watch a loop whose last pass began at `passed_at`. When it is stuck, write all stacks and end the process."""
    clock = asyncio.get_running_loop().time
    watch = LoopWatch(stuck_s, passed_at(), clock())
    while True:
        await asyncio.sleep(LOOK_S)
        if watch.look(passed_at(), clock()):
            break
    stderr = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(TELLING_S, exit=True, file=stderr)  # logging may be what is stuck
    log.critical("the engine loop has been stuck for %g s; exiting", stuck_s)
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    os._exit(EXIT_CODE)
