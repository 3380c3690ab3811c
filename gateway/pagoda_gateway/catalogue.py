"""A name that clients use leads to one served model; whoever means a request's model asks here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pagoda_gateway.clients import NOBODY, Caller
from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import ModelLimits


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """`created` is since when it is served, in Unix seconds. With an `adapter` it is that of the model `parent`."""

    name: str
    text: ModelText
    engine: EngineClient
    created: int
    adapter: Adapter | None = None
    parent: str | None = None

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
    """Served models. To a caller there are those that its key allows; the first is meant where a request names none.

    The first is the model itself, which may have other names, and stays; adapters of it come and go. A request keeps
    what it found.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}

    @property
    def model(self) -> ServedModel:
        """Without an adapter."""
        return next(iter(self))

    def is_model(self, name: str) -> bool:
        """Whether it is a name of the model itself."""
        found = self._by_name.get(name)
        return found is not None and found.adapter is None

    def put(self, model: ServedModel) -> None:
        """Served from now on, in place of what has had its name."""
        self._by_name[model.name] = model

    def remove(self, name: str) -> None:
        """Served no more, if it was. What has begun goes on."""
        self._by_name.pop(name, None)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._by_name.values()))

    def of_job(self, name: str, adapter: Adapter | None) -> ServedModel:
        """Of a job, which was made by who might use it, and which has its adapter with it, whatever the name means by
        now. Raises PagodaError MODEL_NOT_FOUND."""
        if adapter is None:
            return self.find(name, NOBODY)
        return replace(self.model, name=name, adapter=adapter, parent=self.model.name)

    def of(self, caller: Caller) -> list[ServedModel]:
        return [model for model in self if caller.grant.allows_model(model.name)]

    def find(self, name: str | None, caller: Caller) -> ServedModel:
        """Raises PagodaError MODEL_NOT_FOUND."""
        models = self.of(caller)
        found = next((model for model in models if name in (None, model.name)), None)
        if found is None:
            names = ", ".join(repr(model.name) for model in models) or "none for this API key"
            what = "a default model" if name is None else f"the model {name[:64]!a}"
            raise PagodaError(
                ErrorCode.MODEL_NOT_FOUND, f"{what} does not exist here; this server has {names}", "model"
            )
        return found
