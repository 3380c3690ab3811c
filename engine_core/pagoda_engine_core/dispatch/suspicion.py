"""Whether a request may be what its workers were lost of, by the losses since its last new token.

Only a death is evidence. Silence passes for one until the same process registers again.
"""

from __future__ import annotations

from pagoda_engine_core.scheduling.request import Request

SUSPECT_DEATHS = 2
"""A request that was running at so many losses of a worker may be what kills them."""
SUSPECT_LIVES = 4
"""One that was running in so many lost lives, whoever was to blame, may be what makes workers silent: it is set apart,
so that nobody else is lost with it, and not convicted."""


def is_suspect(request: Request) -> bool:
    return request.deaths >= SUSPECT_DEATHS or request.lost_lives >= SUSPECT_LIVES


def blame(request: Request, silent: str, *, alone: bool) -> None:
    """A worker was lost that computed it. `silent`: the incarnation that was only heard no more; `alone`: nobody else
    there was unproven."""
    if alone or request.deaths < SUSPECT_DEATHS:
        request.deaths += 1
        if silent:
            request.silences.add(silent)


def relieve(request: Request, incarnation: str) -> None:
    """This process lives, so what it was silent for was no death."""
    if incarnation in request.silences:
        request.silences.remove(incarnation)
        request.deaths -= 1
