"""A user's request that was made of others: it ends once, and its tokens come with its end."""

from __future__ import annotations

from typing import NamedTuple

from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, RequestRecord, Usage


class WholeRequest(NamedTuple):
    """`code` says why where `outcome` is ERROR."""

    record: RequestRecord
    usage: Usage
    outcome: FinishReason
    code: ErrorCode | None
    total_s: float
