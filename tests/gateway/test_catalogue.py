"""Which model a name means, and what is known about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes_engine import MODEL, make_gateway, play, scratch
from tests.gateway.model_dir import MAX_MODEL_LEN, write_model_dir

from pagoda_gateway.catalogue import Catalogue, ServedModel
from pagoda_gateway.clients import NOBODY
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import ModelLimits
from pagoda_proto.records import Load


async def test_a_request_is_read_and_answered_by_the_model_it_names(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    (tiny,) = gateway.context.catalogue
    other_text = ModelText.load(write_model_dir(tmp_path / "other"), "other: {{ messages[0].content }}")
    other = ServedModel(name="other", text=other_text, engine=gateway.engine, created=5)
    object.__setattr__(gateway.context, "catalogue", Catalogue([tiny, other]))
    gateway.engine.script = play(gateway.ids("x"))
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    for name, found in ((None, MODEL), (MODEL, MODEL), ("other", "other")):
        gateway.engine.generations.clear()
        answer = await gateway.client.post("/v1/chat/completions", json=ask | {"model": name})
        assert answer.json()["model"] == found
        shown = gateway.text.decode(gateway.engine.record.prompt_token_ids)
        assert (shown == "other: hello") == (found == "other")
    listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["created"]) for model in listed] == [(MODEL, tiny.created), ("other", 5)]
    refused = await gateway.client.post("/v1/chat/completions", json=ask | {"model": "no"})
    assert refused.status_code == 404
    assert f"'{MODEL}', 'other'" in refused.json()["error"]["message"]


async def test_workers_know_better_than_the_models_files(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    (model,) = gateway.context.catalogue
    gateway.engine.load = Load(engine_id="x")
    assert model.limits == ModelLimits(gateway.text.vocab_size, MAX_MODEL_LEN)
    gateway.engine.load = msgspec.structs.replace(gateway.engine.load, vocab_size=9, max_model_len=7)
    assert model.limits == ModelLimits(9, 7)


async def test_without_any_word_of_the_context_there_are_no_limits(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    (model,) = gateway.context.catalogue
    gateway.engine.load = Load(engine_id="x")
    object.__setattr__(gateway.text, "max_model_len", 0)
    assert model.max_model_len == 0
    with pytest.raises(PagodaError) as caught:
        _ = model.limits
    assert caught.value.code is ErrorCode.UNAVAILABLE


def _context(tmp_path: Path, names: str) -> GatewayContext:
    gateway = make_gateway(tmp_path)
    config = GatewayConfig(engine="unix:/e", served_model_name=names)
    names = config.model_names
    return GatewayContext.new(config, gateway.text, gateway.engine, names=names, created=1, store=scratch())


def test_a_model_has_several_names(tmp_path: Path) -> None:
    catalogue = _context(tmp_path, "m, gpt-4,m").catalogue
    assert [model.name for model in catalogue] == ["m", "gpt-4"]
    assert catalogue.model.name == catalogue.find(None, NOBODY).name == "m"
    assert catalogue.find("gpt-4", NOBODY).text is catalogue.model.text


def test_a_model_without_a_name_has_its_directorys(tmp_path: Path) -> None:
    assert GatewayConfig(model=str(tmp_path), engine="unix:/e", served_model_name=" ,").model_names == (tmp_path.name,)


@pytest.mark.parametrize("name", ["m", "gpt-4"])
def test_no_adapter_takes_a_name_of_the_model(tmp_path: Path, name: str) -> None:
    adapters = _context(tmp_path, "m,gpt-4").adapters
    with pytest.raises(ValueError, match=f"'{name}' is the name of the model itself"):
        adapters.name_all({name: (Adapter("0" * 64, "/a"), "")})
