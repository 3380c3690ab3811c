"""Whether a request may have caused the loss of its workers, judged by the losses since its last new token.

Only a death is evidence. Silence counts as a death until the same process registers again.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.request import Request

SUSPECT_DEATHS = 2
"""A request that was running at this many losses of a worker may be what kills them."""
SUSPECT_LIVES = 4
"""A request that was running in this many lost lives, whatever ended them, may be what makes workers silent. It is set
apart, so that no other request is lost with it, but not convicted."""


def is_suspect(request: Request) -> bool:
    return request.deaths >= SUSPECT_DEATHS or request.lost_lives >= SUSPECT_LIVES


def blame(request: Request, silent: str, *, alone: bool) -> None:
    """A worker that computed it was lost. `silent`: that worker's incarnation, if it only fell silent; `alone`: no
    other request there was unproven."""
    if alone or request.deaths < SUSPECT_DEATHS:
        request.deaths += 1
        if silent:
            request.silences.add(silent)


def relieve(request: Request, incarnation: str) -> None:
    """This process is alive, so its silence was not a death."""
    if incarnation in request.silences:
        request.silences.remove(incarnation)
        request.deaths -= 1
