"""Keeps health checks answered while all connections are taken: a full gateway is not a dead one.

A connection beyond the limits gets one of a few spare places, long enough to send one head: health requests are
answered, all others refused. Silent connections hold no place for long: when places run out, the oldest silent one is
closed, of the new client if it has its share, otherwise of the clients with the most places.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from pagoda_gateway.clients import HEALTH_PATHS

SPARE_PLACES = 32
SPARE_PLACES_PER_CLIENT = 4
SPARE_S = 2.0  # for a head; a kubelet waits that long at most

_PATHS = frozenset(path.encode() for path in HEALTH_PATHS)


class Spare(Protocol):
    """A connection beyond the limits. `asked`: its head is complete, and it is about to be answered."""

    asked: bool

    def put_out(self) -> None:
        """Refuse and close it. It has lost its place."""


class SparePlaces:
    def __init__(self) -> None:
        self._clients: dict[Spare, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._clients)

    def take(self, connection: Spare, client: str) -> bool:
        """Take a place, making room if needed. Returns whether it got one; if so, it must `leave`."""
        held = Counter(self._clients.values())
        if held[client] >= SPARE_PLACES_PER_CLIENT:
            found = self._made_room(frozenset((client,)))
        elif len(self) >= SPARE_PLACES:
            most = max(held.values())
            found = self._made_room(frozenset(each for each, count in held.items() if count == most))
        else:
            found = True
        if found:
            self._clients[connection] = client
        return found

    def leave(self, connection: Spare) -> None:
        """Give the place back. Safe without one."""
        self._clients.pop(connection, None)

    def _made_room(self, clients: frozenset[str]) -> bool:
        silent = (each for each, client in self._clients.items() if client in clients and not each.asked)
        longest = next(silent, None)
        if longest is None:
            return False
        self.leave(longest)
        longest.put_out()
        return True


def asks_health(target: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether this is a health request without a body, to be answered at once. Names of `headers` are lower-case."""
    if target.partition(b"?")[0] not in _PATHS:
        return False
    return all(
        name != b"transfer-encoding" and (name != b"content-length" or value.strip() == b"0") for name, value in headers
    )
