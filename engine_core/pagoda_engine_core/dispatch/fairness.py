"""Of the waiting tenants, the one served least goes next; a tenant that returns starts level with the least served.

Service is counted in prompt tokens: a prompt when it starts, output as it is produced. So idle tenants do not save up
turns, no tenant pays later for what an idle machine gave it, and while two tenants are both waiting, their service
differs by at most twice what can be in progress at once, whatever they send (the virtual token counter of "Fairness in
Serving Large Language Models", OSDI 2024).

If several tenants were active lately, one that has a row does not take a worker's last row: the next tenant to come
starts in the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pagoda_engine_core.scheduling.request import Request

OUTPUT_COST = 2.0
"""Cost of an output token, in prompt tokens."""
SPARED_FOR_S = 30.0
"""For how long after a tenant's request others leave room for it."""
MAX_COUNTERS = 4096
"""Above this many tenants, some without waiting requests are forgotten."""


class Fairness:
    """Service per tenant, divided by its weight. Without `counting`, all are one tenant."""

    def __init__(self, *, counting: bool) -> None:
        self._counting = counting
        self._served: dict[str, float] = {}
        self._last = ""  # the last tenant to have no waiting requests any more
        self._asked: list[tuple[str, float]] = []  # the two tenants that asked last, and when

    def tenant(self, request: Request) -> str:
        return request.record.tenant if self._counting else ""

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def asked(self, tenant: str, now: float) -> None:
        """Note that a tenant has sent a request."""
        self._asked = [(tenant, now), *(each for each in self._asked if each[0] != tenant)][:2]

    def is_alone(self, tenant: str, now: float) -> bool:
        """Whether no other tenant has sent a request lately."""
        return all(other == tenant or now - at > SPARED_FOR_S for other, at in self._asked)

    def comes(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant gets its first waiting request. `waiting` are the other tenants that have some."""
        if not self._counting:
            return
        floor = min(map(self.served, waiting or (self._last,)))
        if len(self._served) >= MAX_COUNTERS:
            self._forget({*waiting, self._last}, floor)
        self._served[tenant] = max(self.served(tenant), floor)

    def goes(self, tenant: str) -> None:
        """A tenant has no waiting requests any more."""
        self._last = tenant

    def charge(self, requests: Iterable[Request]) -> None:
        """Count what requests that have started were served since they were last charged."""
        if not self._counting:
            return
        for request in requests:
            cost = (request.num_prompt_tokens + OUTPUT_COST * request.num_output_tokens) / request.record.weight
            if cost > request.charged:
                tenant = request.record.tenant
                self._served[tenant] = self.served(tenant) + cost - request.charged
                request.charged = cost

    def _forget(self, kept: Collection[str], floor: float) -> None:
        """Drop idle tenants at or below the floor, where they would start anyway, and the less served half of all."""
        idle = sorted((count, tenant) for tenant, count in self._served.items() if tenant not in kept)
        for place, (count, tenant) in enumerate(idle):
            if count <= floor or 2 * place < len(idle):
                del self._served[tenant]
