"""What an HTTP request is called, by its client or else by us: in its answer's headers, in errors, and in the log.

Whatever is begun on its behalf finds the name without being handed it, also when that goes on in a task of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NOBODYS = "-"

_current: ContextVar[str] = ContextVar("request_id", default=NOBODYS)


def current() -> str:
    """NOBODYS for what no HTTP request asked for, as a line of a batch."""
    return _current.get()


@contextmanager
def serving(request_id: str) -> Iterator[None]:
    token = _current.set(request_id)
    try:
        yield
    finally:
        _current.reset(token)
