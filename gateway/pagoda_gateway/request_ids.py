"""The id of an HTTP request, given by its client or else by us: in response headers, errors and the log.

Code that runs on a request's behalf finds the id without being passed it, also in tasks that it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NOBODYS = "-"

_current: ContextVar[str] = ContextVar("request_id", default=NOBODYS)


def current() -> str:
    """NOBODYS for work that no HTTP request asked for, such as a line of a batch."""
    return _current.get()


@contextmanager
def serving(request_id: str) -> Iterator[None]:
    token = _current.set(request_id)
    try:
        yield
    finally:
        _current.reset(token)
