"""A request continues only with the weights and numerics it began under.

What an engine core reports of them, and the verdict. Pure: loads and begun requests in, verdicts out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_proto.records import SESSION_SPOKEN, Begun, Load
from pagoda_proto.steps import Versions

SHORT = 16  # characters of a digest, enough to tell two apart in a log


@dataclass(frozen=True)
class Obstacle:
    """Why a request cannot continue now. `final`: and never will."""

    why: str
    final: bool


@dataclass(frozen=True, kw_only=True)
class ModelView:
    """What an engine core's workers have loaded; "" and 0 while it has no workers."""

    fingerprint: str = ""
    numerics_id: str = ""
    vocab_size: int = 0

    @staticmethod
    def of(load: Load) -> ModelView:
        return ModelView(fingerprint=load.model_fingerprint, numerics_id=load.numerics_id, vocab_size=load.vocab_size)

    def obstacle(self, begun: Begun | None, vocab_size: int) -> Obstacle | None:
        """What keeps a request from continuing here; None if nothing does.

        A request without tokens is bound only to its token ids: `vocab_size` is that of the model it was tokenised
        for, 0 if unknown. While the model is unknown, the engine core holds the request.
        """
        if begun is None:
            if _differ(self.vocab_size, vocab_size):
                why = f"the prompt was made for a vocabulary of {vocab_size} tokens and the model now has"
                return Obstacle(f"{why} {self.vocab_size}", final=True)
            return None
        if _differ(self.fingerprint, begun.model_fingerprint):
            why = f"it began with model {begun.model_fingerprint[:SHORT]!r} and the engine core now serves"
            return Obstacle(f"{why} {self.fingerprint[:SHORT]!r}", final=True)
        if _differ(self.numerics_id, begun.numerics_id):
            why = f"it began under the numerics {begun.numerics_id!r} and the workers have {self.numerics_id!r}"
            return Obstacle(why, final=False)
        return None


def _differ(one: str | int, other: str | int) -> bool:
    return bool(one) and bool(other) and one != other


def protocol_problem(load: Load, spoken: Versions = SESSION_SPOKEN) -> str:
    """Why no session with this engine core is possible; "" if one is: it chose the newest version that both know."""
    if spoken.oldest <= load.protocol <= spoken.newest:
        return ""
    return f"speaks version {load.protocol} of the session's protocol, this gateway {spoken}"


class EngineProgress:
    """When the model last made progress, in `LivedClock`'s time: a token arrived here, or a step advanced any request.

    An engine core's `seconds_since_progress` grows by itself and falls only when a step advances; that of a restarted
    one says nothing until then.
    """

    def __init__(self) -> None:
        self.at = -float("inf")
        self._engine_id = ""
        self._idle_s = float("inf")
        self._stepped = False

    def on_token(self, now: float) -> None:
        self.at = now

    def on_load(self, load: Load, now: float) -> None:
        same_life = load.engine_id == self._engine_id
        self._stepped = same_life and (self._stepped or load.seconds_since_progress < self._idle_s)
        self._engine_id = load.engine_id
        self._idle_s = load.seconds_since_progress
        if self._stepped:
            self.at = max(self.at, now - load.seconds_since_progress)
