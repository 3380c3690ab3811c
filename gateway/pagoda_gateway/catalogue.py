"""Maps the names that clients use to served models; every lookup of a request's model goes through here."""

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
    """`created` is when serving began, in Unix seconds. With an `adapter`, it is an adapter of the model `parent`."""

    name: str
    text: ModelText
    engine: EngineClient
    created: int
    adapter: Adapter | None = None
    parent: str | None = None

    @property
    def max_model_len(self) -> int:
        """As the workers report it; until one has, as the model's files say. 0: not known yet."""
        return self.engine.load.max_model_len or self.text.max_model_len

    @property
    def limits(self) -> ModelLimits:
        """Raises PagodaError UNAVAILABLE while the context length is not known."""
        if not self.max_model_len:
            raise PagodaError(ErrorCode.UNAVAILABLE, "no worker has registered yet", retry_after_s=1.0)
        return ModelLimits(self.engine.load.vocab_size or self.text.vocab_size, self.max_model_len)


class Catalogue:
    """Served models. A caller sees those that its key allows; a request that names no model gets the first of them.

    The first of all is the model itself, which may have several names and stays; its adapters come and go. A request
    keeps the model it found.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}

    @property
    def model(self) -> ServedModel:
        """The model without an adapter."""
        return next(iter(self))

    def is_model(self, name: str) -> bool:
        """Whether `name` is one of the model itself."""
        found = self._by_name.get(name)
        return found is not None and found.adapter is None

    def put(self, model: ServedModel) -> None:
        """Serve a model from now on, in place of any other of its name."""
        self._by_name[model.name] = model

    def remove(self, name: str) -> None:
        """Stop serving this name, if it is served. Running requests continue."""
        self._by_name.pop(name, None)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._by_name.values()))

    def of_job(self, name: str, adapter: Adapter | None) -> ServedModel:
        """The model of a job. Its caller's access was checked when the job was made; its adapter is the job's own,
        whatever the name means by now. Raises PagodaError MODEL_NOT_FOUND."""
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
