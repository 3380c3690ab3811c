"""What a route needs besides the request. Built once, passed to every router, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda_gateway.adapters import AdapterNames
from pagoda_gateway.catalogue import Catalogue, ServedModel
from pagoda_gateway.clients import Caller
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.http.memory import MemoryBudget
from pagoda_gateway.http.text_pool import FairQueue, TextPool
from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.keys.gate import Gate, OptionKeys
from pagoda_gateway.keys.grants import Limits
from pagoda_gateway.keys.quota import Quotas
from pagoda_gateway.keys.register import KeyRegister
from pagoda_gateway.keys.usage import UsageLedger
from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.responses import KeptResponses
from pagoda_gateway.store.room import Held
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_gateway.store.transcripts import Transcripts
from pagoda_gateway.text.model_text import ModelText


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """Its builder closes its `pool`, `gate`, `ledger` and `transcripts`, and then its `store`."""

    config: GatewayConfig
    engine: EngineClient
    catalogue: Catalogue
    adapters: AdapterNames
    pool: TextPool
    memory: MemoryBudget
    store: Store
    keys: KeyRegister
    gate: Gate
    quotas: Quotas
    ledger: UsageLedger
    transcripts: Transcripts
    responses: KeptResponses

    @classmethod
    def new(
        cls,
        config: GatewayConfig,
        text: ModelText,
        engine: EngineClient,
        *,
        names: Sequence[str],
        created: int,
        store: Store | None = None,
    ) -> GatewayContext:
        """Build a context with one model under these names, a pool and a memory budget of the configured sizes, and a
        store in memory if none is given."""
        catalogue = Catalogue([ServedModel(name=name, text=text, engine=engine, created=created) for name in names])
        queue = FairQueue(config.max_waiting_texts, config.max_waiting_texts_per_client)
        store = SqliteStore(MEMORY) if store is None else store
        register = KeyRegister(store)
        return cls(
            config=config,
            engine=engine,
            catalogue=catalogue,
            adapters=AdapterNames(config, catalogue),
            pool=TextPool(config.text_threads, queue),
            memory=MemoryBudget(config.max_held_bytes),
            store=store,
            keys=register,
            gate=gate_of(config, register),
            quotas=Quotas(),
            ledger=UsageLedger(store),
            transcripts=Transcripts(store, config.keep_transcripts),
            responses=KeptResponses(
                store, config.keep_responses_s, Held(config.max_responses, config.max_responses_bytes)
            ),
        )

    def charge_for(self, caller: Caller, model: str) -> Charge:
        quota = self.quotas.of(caller.tenant, caller.grant.limits)
        return Charge(quota, self.ledger, caller.tenant, model)

    def charge_for_owner(self, tenant: str, model: str) -> Charge:
        """For a job whose caller has gone."""
        return Charge(self.quotas.known(tenant), self.ledger, tenant, model)

    def charge_for_batch(self, tenant: str, model: str) -> Charge:
        """A batch runs behind all requests that somebody waits for, so limits per minute do not apply to it."""
        return Charge(self.quotas.none, self.ledger, tenant, model)


def gate_of(config: GatewayConfig, register: KeyRegister) -> Gate:
    defaults = Limits(
        requests_per_minute=config.key_requests_per_minute,
        tokens_per_minute=config.key_tokens_per_minute,
        concurrent_requests=config.key_concurrent_requests,
    )
    return Gate(
        register, OptionKeys(client=config.api_key, admin=config.admin_api_key), auth=config.auth, defaults=defaults
    )
