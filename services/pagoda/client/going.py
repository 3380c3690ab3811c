"""One request over all of its connections: where the next one goes, what it sends, and when to give up. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import httpx

from pagoda.client.events import EventCutter
from pagoda_proto import times

GENERATING = ("/chat/completions", "/completions", "/responses", "/messages")
KEY, LAST_ID, RESUMES = "Idempotency-Key", "Last-Event-ID", "Pagoda-Resumes"
TRIED_AGAIN = frozenset((502, 503, 504, 529))  # and 409 if the server says so
MAX_FAILURES = 12  # consecutive
# After these errors a gateway may have begun, and others do not notice its loss before its lease expires.
BROKE_OFF = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
# Limit of all pauses together while the caller can still use its own retries; restarts if a gateway is working on it.
FIRST_EVENT_WITHIN_S = 2 * times.TICKET_LEASE_S


def origins_of(base_urls: Sequence[str]) -> list[httpx.URL]:
    """Raises ValueError for an invalid URL."""
    urls = [httpx.URL(each) for each in base_urls]
    for url in urls:
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"a base URL must look like http://host:port, got {str(url)!a}")
    if len({url.path.rstrip("/") for url in urls}) > 1:
        raise ValueError("base URLs must have the same path and differ only in host and port")
    return urls


def is_generating(request: httpx.Request) -> bool:
    return request.method == "POST" and request.url.path.rstrip("/").endswith(GENERATING)


class Going:
    """`request` must have been read. It gets a key if it has none."""

    def __init__(self, request: httpx.Request, origins: Sequence[httpx.URL], max_failures: int) -> None:
        self.events = EventCutter()
        self._request = request
        self._origins = origins or [request.url]
        self._at = 0
        self._max_failures = max_failures
        self._num_failed = 0
        self._key = request.headers.get(KEY) or str(uuid.uuid4())
        self._got_to = ""
        self.begun = False  # the caller has an answer, so it can no longer use its own retries
        self._in_progress = False  # a gateway is working on it, or may have been when the connection broke
        self._waited_s = self._asked_s = 0.0  # in total; the last refusal's `retry-after`

    def request(self) -> httpx.Request:
        """The request for the next connection."""
        origin = self._origins[self._at % len(self._origins)]
        self.events.begin()
        url = self._request.url.copy_with(scheme=origin.scheme, host=origin.host, port=origin.port)
        headers = httpx.Headers(self._request.headers)
        headers["Host"], headers[KEY], headers[RESUMES] = url.netloc.decode("ascii"), self._key, "1"
        if self.events.last_id:
            headers[LAST_ID] = self.events.last_id
        return httpx.Request("POST", url, headers=headers, content=self._request.content, extensions=self._extensions)

    @property
    def _extensions(self) -> dict[str, object]:
        return dict(self._request.extensions)

    def feed(self, data: bytes) -> bytes:
        """The part of the data to pass on."""
        told = self.events.feed(data)
        if self.events.last_id != self._got_to:
            self._got_to, self._num_failed = self.events.last_id, 0
        return told

    def over(self, broken: Exception | None) -> bool:
        """Whether a connection that ended or broke was the last. Raises `broken` if the stream cannot be resumed."""
        if self.events.ended or (broken is None and not self.events.last_id and not self.events.interrupted):
            return True
        if broken is not None and not self.events.resumable:
            raise broken
        return False

    def unanswered(self, error: httpx.TransportError) -> None:
        """The connection failed without an answer. After a timeout, the caller has waited as long as it wants to."""
        self._asked_s = 0.0
        if isinstance(error, BROKE_OFF):
            self._in_progress = True
        elif isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
            self._in_progress = False

    def pause_s(self) -> float | None:
        """After a failure: how long to wait before connecting to the next origin; None to give up. A request that has
        no answer yet, and that no gateway is working on, is tried once at each origin."""
        self._num_failed += 1
        self._at += 1
        once = not self.begun and not self._in_progress
        if self._num_failed > self._max_failures or (once and self._num_failed >= len(self._origins)):
            return None
        if self._num_failed < len(self._origins):
            return 0.0
        pause_s = times.RECONNECT_FIRST_S * 2.0 ** (self._num_failed - len(self._origins))
        pause_s = min(pause_s, times.RECONNECT_MOST_S)
        if self.begun:
            return pause_s
        pause_s = max(pause_s, self._asked_s)
        self._waited_s += pause_s
        return pause_s if self._waited_s <= FIRST_EVENT_WITHIN_S else None

    def may_try_again(self, response: httpx.Response) -> bool:
        said = response.headers.get("x-should-retry")
        self._asked_s = 0.0
        if response.status_code == 409 and said == "true":
            self._in_progress, self._waited_s = True, 0.0
            return True
        self._asked_s = min(_seconds_of(response.headers.get("retry-after", "")), times.RECONNECT_MOST_S)
        return response.status_code in TRIED_AGAIN and said != "false"


def _seconds_of(text: str) -> float:
    """0 for a date, which our gateways never send."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0


def is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


def not_resumed(response: httpx.Response) -> httpx.RemoteProtocolError:
    """`response` must have been read."""
    return httpx.RemoteProtocolError(f"the stream was not resumed: {response.status_code} {response.text[:512]}")
