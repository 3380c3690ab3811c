"""The usage of each key, by day and model: counted here at once, and in the store a few seconds later.

Each life of a gateway writes its totals into records that nobody else writes, so writing one again changes nothing and
gateways never wait for each other; a key's usage is the sum over a day's records. A gateway that is killed loses what
it has not written yet: at most `USAGE_FLUSH_S` worth, while the store is reachable. Days are in UTC.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from typing import NamedTuple

import msgspec

from pagoda_gateway.store.interface import MAX_PAGE_RECORDS, Conflict, Record, Store, decoded
from pagoda_proto import times
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Usage

logger = logging.getLogger(__name__)

USAGE, TENANTS = "usage", "usage_tenants"
DAY_S = 86400.0
KEPT_DAYS = 400
LATE_DAYS = 7  # after an outage of the store, records may be written this much later, behind those of later days


class Counts(msgspec.Struct, omit_defaults=True):
    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Counts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class UsageRow(NamedTuple):
    """`day` is in ISO 8601."""

    day: str
    tenant: str
    model: str
    counts: Counts


_Models = dict[str, Counts]


class UsageLedger:
    """Call `count` at a run's end; the process calls `start` and `aclose`. `clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._life = secrets.token_hex(6)
        self._totals: dict[tuple[str, str], _Models] = {}  # per day and tenant
        self._unwritten: set[tuple[str, str]] = set()
        self._listed: set[str] = set()
        self._versions: dict[tuple[str, str], int] = {}  # of the records written
        self._flushing = asyncio.Lock()  # otherwise an older total might be written after a newer one
        self._task: asyncio.Task[None] | None = None

    def count(self, tenant: str, model: str, usage: Usage) -> None:
        """Count one request. Never fails or waits."""
        place = self._today().isoformat(), tenant
        counts = self._totals.setdefault(place, {}).setdefault(model, Counts())
        counts.add(Counts(1, usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens))
        self._unwritten.add(place)

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage")

    async def aclose(self) -> None:
        """Write what is left, if the store accepts it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(times.USAGE_LAST_S):
                await self.flush()
        except (PagodaError, TimeoutError):
            logger.warning("the recent usage of %d keys is lost: the store cannot be reached", len(self._unwritten))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(times.USAGE_FLUSH_S)
            try:
                await self.flush()
            except PagodaError:
                continue  # the store's guard has said so
            except Exception:
                logger.exception("the usage of keys could not be written; retrying")

    async def flush(self) -> None:
        """Write what was counted since the last flush. Raises PagodaError; what is not written yet stays queued."""
        async with self._flushing:
            for place in sorted(self._unwritten):
                await self._write(place)
            self._forget()

    async def _write(self, place: tuple[str, str]) -> None:
        day, tenant = place
        if tenant not in self._listed:
            await self._store.put(TENANTS, f"tenant.{tenant}", tenant.encode())
            self._listed.add(tenant)
        self._unwritten.discard(place)  # counts added while it is being written mark it again
        value = msgspec.json.encode(self._totals[place])
        expires_at = self._clock() + KEPT_DAYS * DAY_S
        key, known = f"{day}.{tenant}.{self._life}", self._versions.pop(place, None)
        try:
            put = self._store.put(USAGE, key, value, owner=tenant, expect=known, expires_at=expires_at)
            self._versions[place] = await put
        except Conflict:  # nobody else writes this record, so the store has lost its data
            self._listed.clear()
            self._versions.clear()
            self._unwritten |= self._totals.keys()
        except BaseException:
            self._unwritten.add(place)
            raise

    def _forget(self) -> None:
        """Drop the totals of past days, which no longer change."""
        today = self._today().isoformat()
        for place in [place for place in self._totals if place[0] < today and place not in self._unwritten]:
            del self._totals[place]
            self._versions.pop(place, None)

    async def tenants(self) -> list[str]:
        """All tenants with usage. Raises PagodaError."""
        await self.flush()
        return [record.value.decode() for record in await self._all(TENANTS, "", lambda record: False)]

    async def rows(self, tenants: Iterable[str], first: date, last: date) -> list[UsageRow]:
        """Usage of all gateways by day, tenant and model; this gateway's part is up to date. Raises PagodaError."""
        await self.flush()
        sums: dict[tuple[str, str, str], Counts] = {}
        too_old = days_before(first, LATE_DAYS).isoformat()
        for tenant in tenants:
            for record in await self._all(USAGE, tenant, lambda record: record.key[:10] < too_old):
                day = record.key[:10]
                if first.isoformat() <= day <= last.isoformat():
                    for model, counts in _read(record).items():
                        sums.setdefault((day, tenant, model), Counts()).add(counts)
        return [UsageRow(*place, counts) for place, counts in sorted(sums.items())]

    async def _all(self, collection: str, owner: str, until: Callable[[Record], bool]) -> list[Record]:
        """Records newest first, up to the page that ends with one for which `until` holds."""
        found: list[Record] = []
        after = None
        while True:
            page = await self._store.page(collection, owner, limit=MAX_PAGE_RECORDS, after=after)
            found += page.records
            if not page.more or until(page.records[-1]):
                return found
            after = page.records[-1].position


def days_before(day: date, days: int) -> date:
    """`days` earlier, but no earlier than the first day that `date` can hold."""
    return date.fromordinal(max(1, day.toordinal() - days))


def _read(record: Record) -> _Models:
    return decoded(record.key, record.value, _Models)
