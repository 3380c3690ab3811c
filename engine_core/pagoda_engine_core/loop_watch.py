"""An engine core whose loop has stopped helps nobody: the process ends, and its successor gets what it held.

The loop's thread cannot tell that it is stuck, and the beat its supervisor hears comes from the event loop. So the
event loop watches: if it ran all the while and the other did not come round, the fault is not the machine's. Whoever
watches over the event loop in turn needs no key for it: the age of a file tells.
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
TELLING_S = 1.0  # for the stacks to be told; then the process ends all the same
EXIT_CODE = 1


class LoopWatch:
    """Judges from what it sees: `rounds` is any number that changes whenever the loop comes round."""

    def __init__(self, stuck_s: float, rounds: float, now: float) -> None:
        self._stuck_s = stuck_s
        self._guard = StallGuard(LOOK_S, now)
        self._rounds = rounds
        self._changed_at = now

    def look(self, rounds: float, now: float) -> bool:
        """Whether the loop is stuck. To be called every `LOOK_S`."""
        self._changed_at += self._guard.tick(now)
        if rounds != self._rounds:
            self._rounds, self._changed_at = rounds, now
        return now - self._changed_at > self._stuck_s


async def keep_touching(file: SignFile, alive: Callable[[], bool]) -> None:
    """While both loops come round."""
    while True:
        if alive():
            await asyncio.to_thread(file.touch)  # a disk may hang
        await asyncio.sleep(TOUCH_S)


async def end_when_stuck(passed_at: Callable[[], float], stuck_s: float = LOOP_STUCK_S) -> None:
    """Watch a loop whose rounds begin at `passed_at`; end the process, with all stacks told, when it is stuck."""
    clock = asyncio.get_running_loop().time
    watch = LoopWatch(stuck_s, passed_at(), clock())
    while True:
        await asyncio.sleep(LOOK_S)
        if watch.look(passed_at(), clock()):
            break
    stderr = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(TELLING_S, exit=True, file=stderr)  # logging may be what is stuck
    log.critical("the engine loop has not come round for %g s; this process ends", stuck_s)
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    os._exit(EXIT_CODE)
