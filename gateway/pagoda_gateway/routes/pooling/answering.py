"""Shared by the pooling endpoints: reads a body's texts while its client stays, and charges its key for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from msgspec.structs import replace

from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.api.pooling_schemas import EmbedRequest, Reading
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.http.sse import until_disconnect
from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.pooling.inputs import Given, check_kind, held_bytes
from pagoda_gateway.pooling.run import PoolRun
from pagoda_gateway.routes.body import caller_of, hold_for, read_body
from pagoda_proto.records import RequestRecord

Asks = TypeVar("Asks", bound=Reading | EmbedRequest)


class Place(NamedTuple):
    """A request's caller, model and charge. `hold` counts bytes as held for it, instead of its body's; `priority` turns
    the priority a body asks for into that of its records."""

    ctx: GatewayContext
    model: ServedModel
    caller: Caller
    charge: Charge
    hold: Callable[[int], None]
    priority: Callable[[int], int] = int

    async def read(self, records: Sequence[RequestRecord]) -> list[bytes]:
        """Return the outputs of `records`. Raises PagodaError."""
        self.hold(held_bytes(records, self.model.text.reading.width))
        self.charge.check(num_tokens(records))
        placed = [replace(record, priority=self.priority(record.priority)) for record in records]
        return await PoolRun(placed).run(self.model.engine, self.charge)


@asynccontextmanager
async def asking(
    ctx: GatewayContext, request: Request, schema: type[Asks], *kinds: str
) -> AsyncIterator[tuple[Asks, Place]]:
    """Yield the parsed body, and cancel the block if the client leaves.

    Raises:
        PagodaError: the body is invalid, or there is no such model, or the model is none of `kinds`.
    """
    body, caller = await read_body(ctx, request, schema), caller_of(request)
    async with until_disconnect(request.receive):
        model = model_for(ctx, body.model, caller, *kinds)
        hold = partial(hold_for, request, instead=True)
        yield body, Place(ctx, model, caller, ctx.charge_for(caller, model.name), hold)


def model_for(ctx: GatewayContext, name: str | None, caller: Caller, *kinds: str) -> ServedModel:
    """Raises PagodaError if there is no such model, or it is none of `kinds`."""
    model = ctx.catalogue.find(name, caller)
    check_kind(model, *kinds)
    return model


def num_tokens(records: Sequence[RequestRecord]) -> int:
    return sum(len(record.prompt_token_ids) for record in records)


def usage_of(records: Sequence[RequestRecord]) -> dict[str, int]:
    count = num_tokens(records)
    return {"prompt_tokens": count, "total_tokens": count}


async def listed(
    place: Place, prefix: str, data: Iterable[dict[str, Any]], values_each: int, records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """OpenAI's list, with vLLM's additional fields."""
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
