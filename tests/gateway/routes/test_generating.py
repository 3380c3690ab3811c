"""Whatever goes wrong on an endpoint that generates is said in the shape of its own dialect."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import Script, breaking, failing, make_gateway

from pagoda_gateway.dialects.completions import COMPLETIONS
from pagoda_gateway.routes import generating
from pagoda_proto.errors import PagodaError

PATH = "/other"


def other_shape(error: PagodaError) -> dict[str, Any]:
    return {"oh": error.code.value}


def bug(record: object) -> list[Any]:
    return [RuntimeError("bug")]


def one_token_and_a_failure(record: Any) -> Any:
    return breaking(72)(record)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "said"),
    [
        (failing(), {}, "overloaded"),
        (failing(), {"prompt": 1.5}, "invalid_argument"),
        (failing(), {"n": 99}, "invalid_argument"),
        (bug, {}, "internal_error"),
        (one_token_and_a_failure, {}, "stream_interrupted"),
    ],
)
async def test_a_failure_has_its_dialects_shape(
    tmp_path: Path, script: Script, fields: dict[str, Any], said: str, stream: bool
) -> None:
    other = dataclasses.replace(COMPLETIONS, name="other", path=PATH, error=other_shape)
    gateway = make_gateway(tmp_path, script)
    gateway.app.include_router(generating.router(gateway.context, [other]))
    response = await gateway.client.post(PATH, json={"prompt": "hello", "stream": stream} | fields)
    last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last) == {"oh": said}
    elsewhere = await gateway.client.post("/tokenize", json={})
    assert set(elsewhere.json()) == {"error"}
