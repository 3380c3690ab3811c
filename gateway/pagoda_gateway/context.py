"""What a route needs besides the request. Built once by the app, handed to every router, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_gateway.catalogue import Catalogue, ServedModel
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.http.memory import MemoryBudget
from pagoda_gateway.http.text_pool import FairQueue, TextPool
from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_gateway.text.model_text import ModelText


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """Whoever builds a context closes its `pool` and its `store`."""

    config: GatewayConfig
    engine: EngineClient
    catalogue: Catalogue
    pool: TextPool
    memory: MemoryBudget
    store: Store

    @classmethod
    def new(
        cls,
        config: GatewayConfig,
        text: ModelText,
        engine: EngineClient,
        *,
        served_model_name: str,
        created: int,
        store: Store | None = None,
    ) -> GatewayContext:
        """With one model, a pool and a budget of the configured sizes, and a store in memory where none is given."""
        model = ServedModel(name=served_model_name, text=text, engine=engine, created=created)
        queue = FairQueue(config.max_waiting_texts, config.max_waiting_texts_per_client)
        return cls(
            config=config,
            engine=engine,
            catalogue=Catalogue([model]),
            pool=TextPool(config.text_threads, queue),
            memory=MemoryBudget(config.max_held_bytes),
            store=SqliteStore(MEMORY) if store is None else store,
        )
