"""Writes one line of log per request that is answered with an error, like the line per generation of `request_meter`.

A line contains nothing that clients write except the request's id, whose form is checked: routes and methods come from
closed sets, and error messages, which may quote the request, are left out. Errors are cheap to provoke, so lines per
minute are limited, separately for strangers and for holders of keys; the next line says how many were left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from pagoda_gateway.api.errors import FAILURE
from pagoda_gateway.keys.buckets import Bucket
from pagoda_gateway.metrics import METHODS, OTHER

logger = logging.getLogger(__name__)

LINES_PER_MINUTE = 600


class FailureLog:
    """`routes` are templates of paths; `now` is any monotonic clock."""

    def __init__(self, routes: frozenset[str], *, on: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._routes = routes
        self._on = on
        self._now = now
        self._room = {has_key: Bucket(LINES_PER_MINUTE, now()) for has_key in (False, True)}
        self._left_out = 0

    def answered(self, scope: Mapping[str, Any], status: int | None, request_id: str, route: str) -> None:
        """Called for every request; `status` is None if it got no response."""
        code = scope["state"].get(FAILURE)
        if code is None or not self._on:
            return
        caller = scope["state"].get("caller")  # if no key is required, strangers are callers too
        room, now = self._room[caller is not None and caller.tenant != ""], self._now()
        if room.wait_s(1.0, now):
            self._left_out += 1
            return
        room.take(1.0, now)
        method = scope["method"] if scope["method"] in METHODS else OTHER
        fields = {
            "request_id": request_id,
            "status": "-" if status is None else status,
            "error": code,
            "method": method,
            "route": route if route in self._routes else OTHER,
        }
        if self._left_out:
            fields["lines_left_out"] = self._left_out
            self._left_out = 0
        logger.info("failed %s", " ".join(f"{name}={value}" for name, value in fields.items()))
