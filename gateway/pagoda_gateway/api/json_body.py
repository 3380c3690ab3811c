"""Parses request bodies as strict JSON, and answers 400 for anything else.

Refused: other encodings and byte order marks, duplicate keys, NaN and Infinity (also written as 1e999), lone
surrogates, absurdly long integers, deep nesting. The size was bounded while the body was read.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from pagoda_proto.errors import ErrorCode, PagodaError

MAX_DEPTH = 64
MAX_VALUES = 2**19  # in arrays and objects together; more would stall the event loop, however small the body
BYTES_PER_VALUE = 100  # memory of a value as a Python object, in a container
MAX_KEYS = 2048  # of one object
MAX_INT_CHARS = 128  # parsing and printing one takes time quadratic in its length
MAX_SHOWN_CHARS = 64
CHUNK_BYTES = 256 * 1024  # searched in one call, which blocks the event loop
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UTF8 = frozenset({"utf-8", "utf8", "us-ascii"})


def _bad(message: str) -> PagodaError:
    return PagodaError(ErrorCode.INVALID_ARGUMENT, message)


def check_content_type(header: str) -> None:
    """Raises PagodaError unless it is application/json in UTF-8.

    Browsers send some other content types across origins without a preflight, so only this one is accepted.
    """
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if media_type != "application/json":
        raise PagodaError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in _UTF8:
            raise PagodaError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "the body must be UTF-8")


def parsed_bytes(body: bytes, max_values: int = MAX_VALUES) -> int:
    """Estimate the memory of the parsed body before parsing it; bodies with more values are refused."""
    return len(body) + BYTES_PER_VALUE * min(body.count(b","), max_values)


def parse_object(body: bytes, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Raises PagodaError INVALID_ARGUMENT if `body` is not a strict JSON object."""
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise _bad("the body starts with a byte order mark; send plain UTF-8")
    _check_shape(body, max_values)
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_integer,
        )
        if _MAYBE_SURROGATE.search(body):
            _check_encodable(value)
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise _bad("the body is not valid UTF-8") from error
    except UnicodeEncodeError as error:
        raise _bad("the body has a lone surrogate; it is not valid Unicode") from error
    except RecursionError as error:
        raise _bad("the body is nested too deep") from error
    if not isinstance(value, dict):
        raise _bad("the body must be a JSON object")
    return value


def _check_shape(body: bytes, max_values: int) -> None:
    """Bound the parser's work before it starts, at the speed of a byte search."""
    skeleton = outside_strings(body)
    brackets = skeleton.translate(_ONE_KIND, _NO_BRACKETS)
    num_opened = brackets.count(b"[")
    if max(num_opened, skeleton.count(b",")) >= max_values:
        raise _bad(f"the body has more than {max_values} values")
    if num_opened <= MAX_DEPTH:
        return
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # one level less
    if brackets:
        raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels, or its brackets do not match")


def outside_strings(body: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The text outside of strings, found chunk by chunk, as searching blocks all threads. Once escapes are removed,
    every second quote ends a string."""
    pieces: list[bytes] = []
    start = inside = 0
    while start < len(body):
        chunk = body[start : start + chunk_bytes]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # an escape continues in the next chunk
            chunk += body[start + chunk_bytes : start + chunk_bytes + 1]
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        pieces.append(b"".join(parts[inside::2]))
        inside ^= (len(parts) - 1) & 1
        start += len(chunk)
    return b"".join(pieces)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _bad(f"an object has more than {MAX_KEYS} keys")
    value = dict(pairs)
    if len(value) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _bad(f"the key {key[:MAX_SHOWN_CHARS]!a} occurs twice in one object")
    return value


def _check_encodable(value: Any) -> None:
    """Check string by string, so that other threads wait for one string at most. Raises UnicodeEncodeError."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, dict):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _refuse_constant(name: str) -> NoReturn:
    raise _bad(f"{name} is not JSON")


def _integer(text: str) -> int:
    """Written in Python, so that other threads can run between two of very many integers."""
    if len(text) > MAX_INT_CHARS:
        raise _bad("the body has a number that is too long")
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _bad("the body has a number that is too large")
    return value
