"""One client's bodies are read as through a line of bounded speed, however many connections they come by.

Whoever sent too fast owes the time that such a line would have taken, and is not read from meanwhile. What a request
brings below `FREE_BYTES` is not counted, so small requests wait for nobody's upload. What waits is held, here and in
the buffers of connections: whose upload would wait for more than `MAX_WAIT_S` of others of his sends too much at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Message, Receive

from pagoda_proto.errors import ErrorCode, PagodaError

FREE_BYTES = 64 * 1024
BURST_S = 0.05  # what a client may be ahead of its line
MAX_WAIT_S = 2.0


class UploadRate:
    """What each client owes. Clients that owe nothing are forgotten."""

    def __init__(self, max_bytes_per_s: float) -> None:
        self.max_bytes_per_s = max_bytes_per_s
        self._through_at: OrderedDict[str, float] = OrderedDict()  # by client; who sent last is last

    def __len__(self) -> int:
        return len(self._through_at)

    def take(self, client: str, num_bytes: int, now: float) -> float:
        """Count bytes that were read; the seconds until more may be."""
        while self._through_at and next(iter(self._through_at.values())) <= now - BURST_S:
            self._through_at.popitem(last=False)
        begun_at = max(self._through_at.pop(client, 0.0), now - BURST_S)
        self._through_at[client] = begun_at + num_bytes / self.max_bytes_per_s
        return max(0.0, self._through_at[client] - now)


class Upload:
    """A request's body as it comes in: how much came, and how long its client owes before more is read."""

    def __init__(self, receive: Receive, rate: UploadRate, client: str, now: Callable[[], float]) -> None:
        self.num_bytes = 0
        self.owed_s = 0.0
        self._receive = receive
        self._rate = rate
        self._client = client
        self._now = now

    async def next(self) -> Message:
        """The next part of the body, or the client's leaving. Raises PagodaError OVERLOADED."""
        before = self.num_bytes
        message = await self.read()
        others_s = self.owed_s - (self.num_bytes - before) / self._rate.max_bytes_per_s
        if others_s > MAX_WAIT_S:
            raise PagodaError(ErrorCode.OVERLOADED, "this address is sending too much at once", retry_after_s=others_s)
        return message

    async def read(self) -> Message:
        """The same, whatever its client owes."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self.num_bytes += size
        counted = min(size, self.num_bytes - FREE_BYTES)
        self.owed_s = self._rate.take(self._client, counted, self._now()) if counted > 0 else 0.0
        return message
