"""A name that clients use leads to one served model; whoever means a request's model asks here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import ModelLimits


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """`created` is since when it is served, in Unix seconds."""

    name: str
    text: ModelText
    engine: EngineClient
    created: int

    @property
    def max_model_len(self) -> int:
        """What the workers report; until one has, what the model's files say. 0: nobody knows yet."""
        return self.engine.load.max_model_len or self.text.max_model_len

    @property
    def limits(self) -> ModelLimits:
        """Raises PagodaError UNAVAILABLE when nobody knows the context length yet."""
        if not self.max_model_len:
            raise PagodaError(ErrorCode.UNAVAILABLE, "no worker has registered yet", retry_after_s=1.0)
        return ModelLimits(self.engine.load.vocab_size or self.text.vocab_size, self.max_model_len)


class Catalogue:
    """Served models, the first of which is meant where a request names none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def find(self, name: str | None) -> ServedModel:
        """Raises PagodaError MODEL_NOT_FOUND."""
        found = next(iter(self)) if name is None else self._by_name.get(name)
        if found is None:
            names = ", ".join(map(repr, self._by_name))
            message = f"the model {str(name)[:64]!a} does not exist here; this server has {names}"
            raise PagodaError(ErrorCode.MODEL_NOT_FOUND, message, "model")
        return found
