"""Splits a batch's input file into lines, and checks all lines before any of them is answered."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from pagoda_gateway.api.json_body import parse_object
from pagoda_gateway.batches.batch import Fault
from pagoda_proto.errors import PagodaError

MAX_LINES = 50_000
MAX_CUSTOM_ID_CHARS = 512
MAX_FAULTS = 100
ENVELOPE_BYTES = 4096  # allowed in a line besides its body
FIELDS = frozenset({"custom_id", "method", "url", "body"})


class Line(NamedTuple):
    """`number` counts from 1, including blank lines."""

    number: int
    data: bytes


class Head(msgspec.Struct):
    custom_id: str


def custom_id_of(line: Line) -> str:
    """`line` must have been checked."""
    return msgspec.json.decode(line.data, type=Head).custom_id


class LineTooLong(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def lines_of(content: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[list[Line]]:
    """Yield the lines that each piece of the content completes, without blank ones. Raises LineTooLong."""
    number, rest = 0, b""
    async for piece in content:
        *whole, rest = (rest + piece).split(b"\n")
        found = [Line(number + i, data) for i, data in enumerate(whole, 1) if data.strip()]
        number += len(whole)
        _check_lengths([*found, Line(number + 1, rest)], max_bytes)
        yield found
    if rest.strip():
        yield [Line(number + 1, rest)]


def _check_lengths(lines: Iterable[Line], max_bytes: int) -> None:
    for line in lines:
        if len(line.data) > max_bytes:
            raise LineTooLong(line.number)


class Checker:
    """Checks the lines of a batch, each by itself and all together. `known` returns the served name for the model name
    in a line, or for None; it raises PagodaError."""

    def __init__(self, endpoint: str, known: Callable[[str | None], str]) -> None:
        self.model = ""
        self.total = 0
        self.faults: list[Fault] = []
        self._endpoint = endpoint
        self._known = known
        self._seen: set[bytes] = set()

    @property
    def full(self) -> bool:
        """Whether enough faults are known to refuse the batch."""
        return len(self.faults) >= MAX_FAULTS or self.total > MAX_LINES

    def check(self, lines: Sequence[Line]) -> None:
        """May run in a thread."""
        for line in lines:
            self.total += 1
            if self.total > MAX_LINES:
                self.faults.append(Fault("too_many_lines", f"a batch has at most {MAX_LINES} lines", line.number))
            if self.full:
                return
            fault = self._fault(line)
            if fault is not None:
                self.faults.append(fault)

    def end(self) -> None:
        if not self.total:
            self.faults.append(Fault("empty_file", "the input file has no lines"))

    def _fault(self, line: Line) -> Fault | None:
        try:
            value = parse_object(line.data)
        except PagodaError as error:
            return Fault("invalid_json_line", error.message.replace("the body", "the line"), line.number)
        problem = _shape(value) or self._place(value) or self._model(value) or self._once(value)
        if problem is None:
            return None
        code, message, param = problem
        return Fault(code, message, line.number, param)

    def _place(self, value: dict[str, Any]) -> tuple[str, str, str] | None:
        if value["method"] != "POST":
            return "invalid_method", "method must be POST", "method"
        if value["url"] != self._endpoint:
            return "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url"
        return None

    def _model(self, value: dict[str, Any]) -> tuple[str, str, str] | None:
        name = value["body"].get("model")
        if name is not None and not isinstance(name, str):
            return "invalid_model", "model must be a name", "body.model"
        try:
            model = self._known(name)
        except PagodaError as error:
            return "model_not_found", error.message, "body.model"
        if self.model and model != self.model:
            return "mismatched_model", f"all lines must be for one model; the first is for {self.model!a}", "body.model"
        self.model = model
        return None

    def _once(self, value: dict[str, Any]) -> tuple[str, str, str] | None:
        custom_id = value["custom_id"]
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            return "duplicate_custom_id", f"the custom_id {custom_id[:64]!a} stands in an earlier line", "custom_id"
        self._seen.add(digest)
        return None


def _shape(value: dict[str, Any]) -> tuple[str, str, str] | None:
    for name in sorted(FIELDS - set(value)):
        return "missing_field", f"{name} is required", name
    for name in sorted(set(value) - FIELDS):
        return "unknown_field", f"{name[:64]!a} is not a known field", name[:64]
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(value[name], kind):
            return "invalid_field", f"{name} must be {'an object' if kind is dict else 'text'}", name
    if not 0 < len(value["custom_id"]) <= MAX_CUSTOM_ID_CHARS:
        return "invalid_field", f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
    return None
