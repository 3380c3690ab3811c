"""What these endpoints share: a body's texts are read while its client stays, and its key is charged for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fastapi import Request

from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.pooling.inputs import Given, check_kind, held_bytes
from pagoda_gateway.pooling.run import PoolRun
from pagoda_gateway.routes.body import caller_of, hold_for
from pagoda_proto.records import RequestRecord


class Place(NamedTuple):
    """Whose request of which model it is."""

    ctx: GatewayContext
    request: Request
    model: ServedModel
    caller: Caller

    async def read(self, records: Sequence[RequestRecord]) -> list[bytes]:
        """What comes of them. Raises PagodaError."""
        hold_for(self.request, held_bytes(records, self.model.text.reading.width), instead=True)
        charge = self.ctx.charge_for(self.caller, self.model.name)
        charge.check(num_tokens(records))
        return await PoolRun(records).run(self.model.engine, charge)


def place_of(ctx: GatewayContext, request: Request, name: str | None, *kinds: str) -> Place:
    """Raises PagodaError where there is no such model, or it is for something else."""
    caller = caller_of(request)
    model = ctx.catalogue.find(name, caller)
    check_kind(model, *kinds)
    return Place(ctx, request, model, caller)


def num_tokens(records: Sequence[RequestRecord]) -> int:
    return sum(len(record.prompt_token_ids) for record in records)


def usage_of(records: Sequence[RequestRecord]) -> dict[str, int]:
    count = num_tokens(records)
    return {"prompt_tokens": count, "total_tokens": count}


async def listed(
    place: Place, prefix: str, data: Iterable[dict[str, Any]], values_each: int, records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """OpenAI's list, and what vLLM says besides."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": place.model.name,
        "data": await encoded_list(data, values_each),
        "usage": usage_of(records),
    }


def given(value: Any) -> list[Given]:
    """The texts, or lists of token ids, of an `input`."""
    if isinstance(value, str):
        return [value]
    return [value] if value and isinstance(value[0], int) else list(value)


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
