"""Whether this worker may compute is one fact, its membership, shared by the step loop and the heartbeat thread.

Welcome grants a membership for a lease, and everything heard from the engine core renews the lease. Once the lease has
run out the membership is over for good, even if an answer arrives later: a process that was stopped and continued finds
its membership lost before it reads the messages that queued up meanwhile.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pagoda_proto import times
from pagoda_proto.channel import Envelope, FrameError, decode_to_worker
from pagoda_proto.health.sign_file import SignFile
from pagoda_proto.steps import Beat, BeatAck, Drain, Refused, ResetWorker, Welcome
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.departure import Departure
from pagoda_worker.process.wire import Wire

log = logging.getLogger(__name__)

STUCK_EXIT_CODE = 1
IDLE_INTERVAL_S = 0.1  # how soon the thread notices that a membership began or must end


class Standing(NamedTuple):
    """What frames are sent and accepted under: one boot of the engine core, one epoch of this worker and one protocol
    version."""

    boot_id: str
    epoch: int
    version: int

    def covers(self, envelope: Envelope) -> bool:
        return (envelope.engine_boot_id, envelope.epoch, envelope.version) == self


class Membership:
    """Thread-safe. `now` is always the caller's monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: Standing | None = None
        self._lease_s = 0.0
        self._heard_at = 0.0
        self.why_lost = ""  # of the last membership

    def admit(self, welcome: Welcome, version: int, now: float) -> Standing:
        with self._lock:
            self._standing = Standing(welcome.engine_boot_id, welcome.epoch, version)
            self._lease_s, self._heard_at, self.why_lost = welcome.lease_s, now, ""
            return self._standing

    def standing(self, now: float) -> Standing | None:
        """The present standing; None if there is none, or none any more."""
        with self._lock:
            if self._standing is not None and now - self._heard_at > self._lease_s:
                self._lose(f"nothing heard from the engine core for {now - self._heard_at:.1f} s")
            return self._standing

    def heard(self, standing: Standing, now: float) -> bool:
        """Renew the lease; False if it has run out already or another membership has begun."""
        if self.standing(now) != standing:
            return False
        with self._lock:
            self._heard_at = now
        return True

    def lose(self, standing: Standing, reason: str) -> None:
        """End this membership, unless another one has replaced it."""
        with self._lock:
            if self._standing == standing:
                self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._standing, self.why_lost = None, reason


@dataclass
class Progress:
    """Written by the step loop alone, reported by heartbeats."""

    busy_since: float | None = None

    def beat(self, now: float, leaving: bool = False) -> Beat:
        since = self.busy_since
        return Beat(busy_s=0.0 if since is None else now - since, rss_bytes=_rss_bytes(), leaving=leaving)


class Signs(NamedTuple):
    """Sign files. `alive` is touched while this process works, whether or not an engine core knows it, since a restart
    would bring no engine core back; `ready` at every acknowledged heartbeat."""

    alive: SignFile
    ready: SignFile

    @classmethod
    def of(cls, config: WorkerConfig) -> Signs:
        """Call before the model is loaded. Raises ValueError for a file that cannot be made."""
        return cls(SignFile("alive_file", config.alive_file), SignFile("ready_file", config.ready_file))


NO_SIGNS = Signs(SignFile("alive_file", ""), SignFile("ready_file", ""))


class StuckWatch:
    """Detects a step that runs on long after its membership was lost: it will not end, and only a new process helps.

    Only time in which the watcher itself ran counts; `now` is any monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._guard = times.StallGuard(IDLE_INTERVAL_S, now)
        self._since: float | None = None

    def stuck(self, now: float, lost_and_busy: bool) -> bool:
        held_up_s = self._guard.tick(now)
        if not lost_and_busy:
            self._since = None
            return False
        self._since = now if self._since is None else self._since + held_up_s
        return now - self._since > times.STUCK_EXIT_S


class Control:
    """The control connection of one registration, and its thread. Use as a context manager; leaving it ends both.

    Attributes:
        connected: Set while connected. Hello waits for it: an engine core may use this connection right after Welcome.

    `connect` makes its wire, in the thread that owns it. `departure` is announced to the engine core at once, and
    notified when the engine core dismisses this worker.
    """

    def __init__(
        self,
        connect: Callable[[], Wire],
        membership: Membership,
        progress: Progress,
        departure: Departure,
        signs: Signs,
    ) -> None:
        self.connected = threading.Event()
        self._connect = connect
        self._departure = departure
        self._membership = membership
        self._progress = progress
        self._signs = signs
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pagoda-worker-control", daemon=True)

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def check(self) -> None:
        """Raises RuntimeError if the thread has died: a worker without heartbeats must not go on computing."""
        if self._failure is not None:
            raise RuntimeError("the control thread failed") from self._failure

    def _run(self) -> None:
        wire = self._connect()
        try:
            self._serve(wire)
        except Exception as error:  # noqa: BLE001 - the thread's outermost loop: the step loop raises it
            self._failure = error
        finally:
            wire.close()

    def _serve(self, wire: Wire) -> None:
        next_beat, next_sign, announced = 0.0, 0.0, False
        watch = StuckWatch(time.monotonic())
        while not self._closing.is_set():
            now = time.monotonic()
            standing = self._membership.standing(now)
            leaving = self._departure.announced
            if now >= next_sign:
                self._signs.alive.touch()
                next_sign = now + times.BEAT_S
            if standing is not None and (now >= next_beat or leaving > announced):
                wire.send(self._progress.beat(now, leaving), *standing)
                next_beat, announced = now + times.BEAT_S, leaving
            reached = wire.reaches(0.0 if self.connected.is_set() else IDLE_INTERVAL_S)
            if reached:
                self.connected.set()
            else:
                self.connected.clear()
            frame = wire.receive(IDLE_INTERVAL_S if reached else 0.0)
            now = time.monotonic()
            standing = self._membership.standing(now)
            if frame is not None and standing is not None:
                self._receive(wire, standing, *frame)
            if watch.stuck(now, standing is None and self._progress.busy_since is not None):
                log.critical("a step still runs %.0f s after its membership was lost; exiting", times.STUCK_EXIT_S)
                os._exit(STUCK_EXIT_CODE)

    def _receive(self, wire: Wire, standing: Standing, envelope: Envelope, payload: bytes) -> None:
        if not standing.covers(envelope) and envelope.epoch != 0:
            wire.drop(f"it is of epoch {envelope.epoch} of engine core {envelope.engine_boot_id!r}, not {standing}")
            return
        try:
            message = decode_to_worker(payload)
        except FrameError as error:
            wire.drop(str(error))
            return
        match message:
            case Refused():  # also under epoch 0: from an engine core that does not know us
                self._membership.lose(standing, f"refused: {message.reason}")
            case BeatAck() if envelope.epoch:
                if self._membership.heard(standing, time.monotonic()):
                    self._signs.ready.touch()
            case Drain() if envelope.epoch:
                self._departure.dismiss()
            case ResetWorker() if envelope.epoch:
                self._membership.lose(standing, "reset by the engine core")
            case _:
                wire.drop(f"a {type(message).__name__} has no place on the control connection")


def _rss_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return 0
