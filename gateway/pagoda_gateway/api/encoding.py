"""Encodes JSON answers. Large ones are encoded in slices, between which other tasks may run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

VALUES_PER_SLICE = 4096
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
# OpenAI's client turns a blank line after an id into an event without data, and fails on it.
PING_BETWEEN_IDS = b": ping\n"
encoded = msgspec.json.Encoder().encode


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event; JSON has no raw line breaks, so its data is one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(value) + b"\n\n"


class Events:
    """Server-sent events that differ in one field, `name`; the fields `before` and `after` it are encoded once."""

    def __init__(self, before: Mapping[str, Any], name: str, after: Mapping[str, Any]) -> None:
        self._before = b"data: " + encoded(before)[:-1] + b"," + encoded(name) + b":"
        self._after = (b"," + encoded(after)[1:] if after else b"}") + b"\n\n"

    def event(self, value: Any) -> bytes:
        """The event of `{**before, name: value, **after}`."""
        return self._before + encoded(value) + self._after


def slices(items: Iterable[Any], values_each: int) -> Iterator[list[Any]]:
    """Yield lists of items with about `VALUES_PER_SLICE` values, if each item has `values_each`."""
    rest = iter(items)
    while part := list(islice(rest, max(1, VALUES_PER_SLICE // values_each))):
        yield part


async def encoded_list(items: Iterable[Any], values_each: int) -> msgspec.Raw:
    """A JSON array of the items."""
    pieces: list[bytes] = []
    for part in slices(items, values_each):
        if pieces:
            await asyncio.sleep(0)
        pieces.append(encoded(part)[1:-1])
    return _array(pieces)


async def encoded_columns(
    rows: Iterable[Sequence[Any]], names: Sequence[str], values_each: int
) -> dict[str, msgspec.Raw]:
    """Encode rows as one JSON array per column."""
    pieces: list[list[bytes]] = [[] for _ in names]
    for part in slices(rows, values_each):
        if pieces[0]:
            await asyncio.sleep(0)
        for column, values in zip(pieces, zip(*part, strict=True), strict=True):
            column.append(encoded(values)[1:-1])
    return {name: _array(column) for name, column in zip(names, pieces, strict=True)}


def _array(pieces: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
