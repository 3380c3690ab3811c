"""What a route needs besides the request. Built once by the app, handed to every router, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.http.memory import MemoryBudget
from pagoda_gateway.http.text_pool import FairQueue, TextPool
from pagoda_gateway.text.model_text import ModelText


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """`created` is the Unix time the gateway reports for its model. Whoever builds a context closes its `pool`."""

    config: GatewayConfig
    text: ModelText
    engine: EngineClient
    served_model_name: str
    created: int
    pool: TextPool
    memory: MemoryBudget

    @classmethod
    def new(
        cls, config: GatewayConfig, text: ModelText, engine: EngineClient, *, served_model_name: str, created: int
    ) -> GatewayContext:
        """With a pool and a budget of the configured sizes."""
        queue = FairQueue(config.max_waiting_texts, config.max_waiting_texts_per_client)
        return cls(
            config=config,
            text=text,
            engine=engine,
            served_model_name=served_model_name,
            created=created,
            pool=TextPool(config.text_threads, queue),
            memory=MemoryBudget(config.max_held_bytes),
        )
