"""The headers by which a client names a repeatable request: read and checked before anything is stored."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request

from pagoda_gateway.dialects.dialect import Asked
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.positions import Position
from pagoda_gateway.http.sse import NO_HEADERS
from pagoda_gateway.store.tickets import Found, ticket_name
from pagoda_proto.errors import InvalidParams, Problem

KEY, LAST_ID = "Idempotency-Key", "Last-Event-ID"
RESUMES = "Pagoda-Resumes"  # any value: the client resumes at another gateway if its stream says it cannot continue
STREAMS = "/v1/streams"
HEADERS = ("content-location", "idempotency-status", "idempotent-replayed")  # response headers
_KEY_FORM = re.compile(r"[\x21-\x7e]{1,255}")


class Named(NamedTuple):
    """A request that its client named by a `key`; `digest` is that of path and body, `at` the client's position."""

    owner: str
    key: str
    path: str
    digest: str
    stream: bool
    background: bool = False
    at: Position | None = None

    @property
    def name(self) -> str:
        return ticket_name(self.owner, self.key)


class Opened(NamedTuple):
    """`found` is None if no ticket can be stored now; then `job` is the new job, or None if it has yet to be made.
    `repeated`: the ticket was there before."""

    found: Found | None
    job: Job | None
    repeated: bool = False


class Reader(NamedTuple):
    """A reader of an answer: its position, whether it resumes elsewhere when told that the stream ends here, and its
    deadline in Unix seconds; 0 means none."""

    at: Position | None
    resumes: bool
    due_at: float = 0.0


class Naming:
    """One request's key and digest; `seen` adds the body to the digest."""

    def __init__(self, request: Request) -> None:
        """Raises InvalidParams."""
        self._request = request
        self.key = _one(request, KEY)
        if self.key is not None and not _KEY_FORM.fullmatch(self.key):
            raise InvalidParams([Problem(KEY, "must have 1 to 255 visible characters of ASCII")])
        if self.key is None and _one(request, LAST_ID) is not None:
            raise InvalidParams([Problem(LAST_ID, f"needs the {KEY} of the stream to be resumed")])
        self._digest = hashlib.sha256(request.url.path.encode() + b"\n")

    def seen(self, body: bytes) -> None:
        if self.key is not None:
            self._digest.update(body)

    def named(self, body: Asked, owner: str) -> Named | None:
        """None if it has no key. Raises InvalidParams."""
        if self.key is None:
            return None
        background = bool(getattr(body, "background", False))
        if _one(self._request, LAST_ID) is not None and (background or not body.stream):
            rule = "a response in the background is resumed by starting_after" if background else "needs stream: true"
            raise InvalidParams([Problem(LAST_ID, rule)])
        return Named(
            owner=owner,
            key=self.key,
            path=self._request.url.path,
            digest=self._digest.hexdigest(),
            stream=bool(body.stream),
            background=background,
            at=reader_of(self._request).at,
        )


def reader_of(request: Request) -> Reader:
    """Raises InvalidParams."""
    last = _one(request, LAST_ID)
    if not last:
        return Reader(None, RESUMES in request.headers)
    try:
        return Reader(Position.read(last), resumes=True)
    except ValueError as error:
        raise InvalidParams([Problem(LAST_ID, str(error))]) from error


def headers_of(named: Named | None, opened: Opened) -> Mapping[str, str]:
    """The response headers that describe the ticket."""
    if named is None:
        return NO_HEADERS
    if opened.found is None:
        return {"idempotency-status": "unavailable"}
    place = {"content-location": f"{STREAMS}/{opened.found.name}"} if named.stream and not named.background else {}
    return place | ({"idempotent-replayed": "true"} if opened.repeated else {})


def _one(request: Request, name: str) -> str | None:
    """Raises InvalidParams for a header that is given twice."""
    found = request.headers.getlist(name)
    if len(found) > 1:
        raise InvalidParams([Problem(name, "is given twice in the headers")])
    return found[0].strip() if found else None
