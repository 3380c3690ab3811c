"""/tokenize, /detokenize and /v1/models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import MODEL, Gateway, make_gateway
from tests.gateway.model_dir import MAX_MODEL_LEN


async def post(gateway: Gateway, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(path, json=fields)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_text_there_and_back(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    answer = await post(gateway, "/tokenize", prompt="hello 🙂", return_token_strs=True)
    ids = gateway.ids("hello 🙂")
    strings = ["hello", " ", "\\xf0", "\\x9f", "\\x99", "\\x82"]
    assert answer == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": strings}
    assert await post(gateway, "/detokenize", tokens=ids) == {"prompt": "hello 🙂"}


async def test_a_conversation(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    answer = await post(gateway, "/tokenize", model=MODEL, messages=messages, chat_template_kwargs={"mood": "ok"})
    expected = gateway.text.encode_chat(messages, mood="ok")
    assert answer["tokens"] == expected
    text = await post(gateway, "/detokenize", tokens=expected)
    assert text["prompt"].endswith("<|im_start|>assistant\n(ok)")


async def test_a_text_longer_than_the_context_is_counted(tmp_path: Path) -> None:
    answer = await post(make_gateway(tmp_path), "/tokenize", prompt="ab" * 5000)
    assert answer["count"] == 10_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, None),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"prompt": "x", "tokens": []}, "prompt"),
    ],
)
async def test_refusals(tmp_path: Path, path: str, fields: dict[str, Any], param: str | None) -> None:
    error = (await post(make_gateway(tmp_path), path, 400, **fields))["error"]
    assert error["param"] == param


async def test_models(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    model = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "pagoda",
        "root": MODEL,
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
    }
    assert (await gateway.client.get("/v1/models")).json() == {"object": "list", "data": [model]}
    assert (await gateway.client.get(f"/v1/models/{MODEL}")).json() == model
    missing = await gateway.client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await post(gateway, "/tokenize", 404, prompt="x", model="other"))["error"]["param"] == "model"
