"""Float32 bytes as numbers or base64, and the cosine similarity of two vectors."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from pagoda_proto.pooling.late import Marks

BASE64 = "base64"


def floats(data: bytes) -> list[float]:
    """Little-endian float32."""
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def shown(data: bytes, encoding: str | None) -> Any:
    return b64encode(data).decode() if encoding == BASE64 else floats(data)


def of_tokens(data: bytes, token_ids: Sequence[int], marks: Marks | None) -> list[bytes]:
    """The vectors of a text's tokens, in order, without those that late interaction leaves out."""
    size = len(data) // len(token_ids)
    kept = range(len(token_ids)) if marks is None else marks.kept(token_ids)
    return [data[place * size : (place + 1) * size] for place in kept]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine similarity; 0 if a vector is zero."""
    lengths = math.sqrt(math.fsum(x * x for x in one) * math.fsum(y * y for y in other))
    return math.fsum(x * y for x, y in zip(one, other, strict=True)) / lengths if lengths else 0.0
