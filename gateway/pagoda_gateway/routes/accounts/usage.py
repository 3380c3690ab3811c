"""GET /v1/usage: what API keys used, by day and model; a client sees its own, an admin everybody's."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.accounts.schemas import UsageAnswer, UsageQuery
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.keys.grants import Right
from pagoda_gateway.keys.usage import KEPT_DAYS, Counts, UsageRow, days_before
from pagoda_gateway.routes.body import caller_of, json_response, query_of
from pagoda_gateway.routes.described import endpoint
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

DAYS = 30
COLUMNS = ("day", "key_id", "model", *Counts.__struct_fields__)
CSV = "text/csv"


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["usage"])

    @endpoint(routes, "/v1/usage", "Requests and tokens by day and model", UsageAnswer)
    async def usage(request: Request) -> Response:
        asked = query_of(request, UsageQuery)
        first, last = _days(asked)
        tenants = await _tenants(ctx, caller_of(request), asked.key_id)
        rows = await ctx.ledger.rows(tenants, first, last)
        if asked.format == "csv" or (asked.format is None and _wants_csv(request)):
            return Response(_table(rows), media_type=CSV, headers={"cache-control": "no-store"})
        total = Counts()
        for row in rows:
            total.add(row.counts)
        data = [_shown(row) for row in rows]
        between = {"from": first.isoformat(), "to": last.isoformat()}
        return json_response({"object": "list", **between, "data": data, "total": _numbers(total)})

    return routes


def _days(asked: UsageQuery) -> tuple[date, date]:
    """Raises InvalidParams."""
    last = asked.to or datetime.now(UTC).date()
    first = asked.from_ or days_before(last, DAYS - 1)
    if first > last:
        raise InvalidParams([Problem("from", f"must not be after `to`, {last}, got {first}")])
    if (last - first).days >= KEPT_DAYS:
        raise InvalidParams([Problem("from", f"usage is kept for {KEPT_DAYS} days, so ask for no more; got {first}")])
    return first, last


async def _tenants(ctx: GatewayContext, caller: Caller, key_id: str | None) -> list[str]:
    """Raises PagodaError FORBIDDEN if a client asks for another key's usage."""
    if Right.MANAGE in caller.grant.rights:
        return [key_id] if key_id else await ctx.ledger.tenants()
    if key_id not in (None, caller.tenant):
        raise PagodaError(ErrorCode.FORBIDDEN, "only a key of the role admin may ask what other keys used", "key_id")
    return [caller.tenant]


def _wants_csv(request: Request) -> bool:
    kinds = (part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(","))
    return CSV in kinds


def _numbers(counts: Counts) -> dict[str, int]:
    return msgspec.structs.asdict(counts)


def _shown(row: UsageRow) -> dict[str, Any]:
    return {"day": row.day, "key_id": row.tenant or None, "model": row.model, **_numbers(row.counts)}


def _table(rows: Sequence[UsageRow]) -> str:
    written = io.StringIO()
    table = csv.DictWriter(written, COLUMNS)
    table.writeheader()
    table.writerows(map(_shown, rows))
    return written.getvalue()
