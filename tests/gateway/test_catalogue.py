"""Which model a name means, and what is known of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes_engine import MODEL, make_gateway, play
from tests.gateway.model_dir import MAX_MODEL_LEN, write_model_dir

from pagoda_gateway.catalogue import Catalogue, ServedModel
from pagoda_gateway.text.model_text import ModelText
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
