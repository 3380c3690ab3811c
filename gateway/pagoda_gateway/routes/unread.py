"""Under overload, refuses requests by their head alone, without reading the body.

This applies if a request of the same kind was just refused. It excludes requests with an Idempotency-Key, which may
have an answer here already, and /v1/responses, which may be meant for the background, where they wait.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from pagoda_gateway.clients import origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.engine.refusals import Kind
from pagoda_gateway.http.limits import Unread
from pagoda_gateway.routes.body import timeout_of
from pagoda_gateway.routes.generating import DIALECTS
from pagoda_gateway.tickets.naming import KEY
from pagoda_proto.errors import InvalidParams, PagodaError

PATHS = frozenset(dialect.path for dialect in DIALECTS)


def refusing_unread(ctx: GatewayContext) -> Unread:
    most_urgent = min(0, ctx.config.min_priority)  # a body may ask for

    def refusal(scope: Scope) -> PagodaError | None:
        if scope["method"] != "POST" or scope["path"] not in PATHS:
            return None
        headers = Headers(scope=scope)
        if KEY in headers:
            return None
        try:
            timeout_s = timeout_of(headers)
        except InvalidParams:
            return None  # the route reports this error
        policy, tenant = ctx.engine.load.policy, origin_of(scope["state"]["caller"]).tenant
        return ctx.engine.refusals.repeated(Kind.under(policy, tenant, most_urgent, timeout_s or 0.0))

    return refusal
