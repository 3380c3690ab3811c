"""Limits the rate at which one client's bodies are read, over all of its connections.

A client that sends too fast owes the time that its bytes would have taken at that rate, and is not read from meanwhile.
The first `FREE_BYTES` of a request are not counted, so small requests never wait for uploads. Waiting uploads take
memory, here and in socket buffers: one that would wait more than `MAX_WAIT_S` for others of its client is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Message, Receive

from pagoda_proto.errors import ErrorCode, PagodaError

FREE_BYTES = 64 * 1024
BURST_S = 0.05  # how far a client may be ahead of its rate
MAX_WAIT_S = 2.0


class UploadRate:
    """The time that each client owes. Clients that owe nothing are forgotten."""

    def __init__(self, max_bytes_per_s: float) -> None:
        self.max_bytes_per_s = max_bytes_per_s
        self._through_at: OrderedDict[str, float] = OrderedDict()  # by client, latest sender last

    def __len__(self) -> int:
        return len(self._through_at)

    def take(self, client: str, num_bytes: int, now: float) -> float:
        """Count bytes read; return the seconds until more may be read."""
        while self._through_at and next(iter(self._through_at.values())) <= now - BURST_S:
            self._through_at.popitem(last=False)
        begun_at = max(self._through_at.pop(client, 0.0), now - BURST_S)
        self._through_at[client] = begun_at + num_bytes / self.max_bytes_per_s
        return max(0.0, self._through_at[client] - now)


class Upload:
    """A request's body as it arrives: bytes so far, and the seconds its client owes before more is read."""

    def __init__(self, receive: Receive, rate: UploadRate, client: str, now: Callable[[], float]) -> None:
        self.num_bytes = 0
        self.owed_s = 0.0
        self._receive = receive
        self._rate = rate
        self._client = client
        self._now = now

    async def next(self) -> Message:
        """The next part of the body, or a disconnect. Raises PagodaError OVERLOADED if its client owes too much."""
        before = self.num_bytes
        message = await self.read()
        others_s = self.owed_s - (self.num_bytes - before) / self._rate.max_bytes_per_s
        if others_s > MAX_WAIT_S:
            raise PagodaError(ErrorCode.OVERLOADED, "this address is sending too much at once", retry_after_s=others_s)
        return message

    async def read(self) -> Message:
        """The same, however much its client owes."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self.num_bytes += size
        counted = min(size, self.num_bytes - FREE_BYTES)
        self.owed_s = self._rate.take(self._client, counted, self._now()) if counted > 0 else 0.0
        return message
