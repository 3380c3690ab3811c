"""What a route needs besides the request. Built once by the app, handed to every router, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.engine import EngineClient
from pagoda_gateway.text.model_text import ModelText


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """`created` is the Unix time the gateway reports for its model."""

    config: GatewayConfig
    text: ModelText
    engine: EngineClient
    served_model_name: str
    created: int
