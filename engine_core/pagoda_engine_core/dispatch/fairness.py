"""Of those who wait, the one who was served least goes next; whoever comes back begins level with the least served.

Service is counted in prompt tokens: a prompt when it begins, output as it is made. So nobody saves up turns by asking
for nothing, nobody pays for what a free machine gave, and between two tenants who both wait all along the service
differs by no more than twice what can be under way at once, whatever either of them sends (the virtual token counter
of "Fairness in Serving Large Language Models", OSDI 2024).

Where several have asked lately, none that has a row takes a worker's last one: who comes next begins in the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pagoda_engine_core.scheduling.request import Request

OUTPUT_COST = 2.0
"""Of an output token, in prompt tokens."""
SPARED_FOR_S = 30.0
"""So long after a tenant has asked for something, others leave room for it."""
MAX_COUNTERS = 4096
"""Tenants remembered while they wait for nothing."""


class Fairness:
    """What each tenant has been served, by its weight. Without `counting`, all are one tenant."""

    def __init__(self, *, counting: bool) -> None:
        self._counting = counting
        self._served: dict[str, float] = {}
        self._last = ""  # the tenant that had somebody waiting last
        self._asked: list[tuple[str, float]] = []  # the two tenants that asked last, and when

    def tenant(self, request: Request) -> str:
        return request.record.tenant if self._counting else ""

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def asked(self, tenant: str, now: float) -> None:
        """It wants something."""
        self._asked = [(tenant, now), *(each for each in self._asked if each[0] != tenant)][:2]

    def is_alone(self, tenant: str, now: float) -> bool:
        """Whether nobody else has asked lately."""
        return all(other == tenant or now - at > SPARED_FOR_S for other, at in self._asked)

    def comes(self, tenant: str, waiting: Collection[str]) -> None:
        """It had nobody waiting, and has now. `waiting` are the others who have."""
        if not self._counting:
            return
        floor = min(map(self.served, waiting or (self._last,)))
        if len(self._served) >= MAX_COUNTERS:
            self._forget({*waiting, self._last}, floor)
        self._served[tenant] = max(self.served(tenant), floor)

    def goes(self, tenant: str) -> None:
        """It has nobody waiting any more."""
        self._last = tenant

    def charge(self, requests: Iterable[Request]) -> None:
        """Count what they have been served since this was last asked. They have begun."""
        if not self._counting:
            return
        for request in requests:
            cost = (request.num_prompt_tokens + OUTPUT_COST * request.num_output_tokens) / request.record.weight
            if cost > request.charged:
                tenant = request.record.tenant
                self._served[tenant] = self.served(tenant) + cost - request.charged
                request.charged = cost

    def _forget(self, kept: Collection[str], floor: float) -> None:
        """Those at the floor lose nothing by it, for there they would begin; of the others, half, the least served."""
        idle = sorted((count, tenant) for tenant, count in self._served.items() if tenant not in kept)
        for place, (count, tenant) in enumerate(idle):
            if count <= floor or 2 * place < len(idle):
                del self._served[tenant]
