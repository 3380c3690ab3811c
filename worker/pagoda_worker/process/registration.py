"""One registration: everything a worker holds of an engine core, from its Hello until anything at all goes wrong.

Both connections, the heartbeat thread and the membership begin and end together, and none is reused. So nothing of an
earlier attempt can get in the way of the next: no link that drops messages, and no routing id that the engine core
still attributes to a connection it does not know to be dead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from pagoda_proto.channel import FrameError, decode_to_worker
from pagoda_proto.steps import Hello, Message, Refused, ToWorker, Welcome
from pagoda_worker.process.control import Control, Membership, Progress, Signs, Standing
from pagoda_worker.process.departure import Departure
from pagoda_worker.process.wire import Link, Wire

log = logging.getLogger(__name__)

POLL_S = 0.1  # how soon a waiting thread notices that the worker is leaving
SEND_TIMEOUT_S = 1.0
LINGER_S = 0.5  # the last messages may still be sent within this time


class Registration:
    """Use as a context manager, in the thread that made it.

    Attributes:
        hello: The message to send; its registration number is part of the routing ids.
        standing: Given by the engine core's Welcome; matches nothing before.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        link: Link,
        hello: Hello,
        progress: Progress,
        departure: Departure,
        signs: Signs,
    ) -> None:
        route = f"{hello.incarnation}.{hello.registration}"
        self.hello = msgspec.structs.replace(hello, protocol=link.spoken.newest, oldest_protocol=link.spoken.oldest)
        self.standing = Standing("", 0, link.spoken.oldest)
        self._version = link.spoken.oldest  # of the last answer
        self._membership = Membership()
        self._endpoint = link.endpoint
        self._wire = Wire(context, link, f"{route}/d")
        connect = partial(Wire, context, link, f"{route}/c")
        self._control = Control(connect, self._membership, progress, departure, signs)

    def __enter__(self) -> Registration:
        self._control.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._control.__exit__()
        self._wire.close(LINGER_S if kind is None else 0.0)

    def ask(self, answer_s: float, leaving: Callable[[], bool]) -> Welcome | Refused | None:
        """Send Hello once; None if no answer comes, or if this worker is leaving.

        `answer_s` limits the time to connect, and then again the time to the answer.
        """
        said, deadline = False, time.monotonic() + answer_s
        while not leaving() and time.monotonic() < deadline:
            self._control.check()
            if not said and self._control.connected.wait(POLL_S) and self._wire.send(self.hello, *self.standing):
                said, deadline = True, time.monotonic() + answer_s
            frame = self._wire.receive(POLL_S)
            answer = self._decode(frame[1]) if frame else None
            if frame is not None and isinstance(answer, Welcome | Refused):
                self._version = frame[0].version
                return answer
        return None

    @property
    def why_unanswered(self) -> str:
        """The address asked, and what is known of why no answer comes from there."""
        return f"{self._endpoint}: {self._wire.why_silent()}"

    def admit(self, welcome: Welcome) -> Standing:
        """Begin the membership. Connections that broke earlier do not matter to it."""
        self._wire.broke()
        self.standing = self._membership.admit(welcome, self._version, time.monotonic())
        return self.standing

    @property
    def over(self) -> bool:
        return self._membership.standing(time.monotonic()) != self.standing

    @property
    def why_over(self) -> str:
        return self._membership.why_lost

    def lose(self, reason: str) -> None:
        self._membership.lose(self.standing, reason)

    def send(self, message: Message) -> bool:
        """False if the engine core could not be reached."""
        return self._wire.send(message, *self.standing, timeout_s=SEND_TIMEOUT_S)

    def receive(self, timeout_s: float) -> ToWorker | None:
        """The next message of this standing; frames of another standing are dropped undecoded. A broken connection, an
        unreadable frame, or one read after the lease ran out ends the standing. Raises RuntimeError if the heartbeat
        thread has died."""
        self._control.check()
        if self._wire.broke():
            self.lose("the connection broke")
            return None
        frame = self._wire.receive(timeout_s)
        if frame is None:
            return None
        envelope, payload = frame
        if not self.standing.covers(envelope):
            of = f"epoch {envelope.epoch} of engine core {envelope.engine_boot_id!r}"
            self._wire.drop(f"it is of {of}, not {self.standing}")
            return None
        if not self._membership.heard(self.standing, time.monotonic()):
            return None
        message = self._decode(payload)
        if message is None:
            self.lose("a frame could not be read")
        return message

    def _decode(self, payload: bytes) -> ToWorker | None:
        try:
            return decode_to_worker(payload)
        except FrameError as error:
            self._wire.drop(str(error))
            return None
