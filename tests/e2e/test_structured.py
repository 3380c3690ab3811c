"""Formed output over HTTP goes on with the same bytes when the worker under it is killed, and so does its grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.test_recovery import run_all

pytestmark = pytest.mark.e2e
MODEL = "demo"
SCHEMA = {
    "type": "array", "minItems": 6, "maxItems": 7,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["id", "tag"],
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999}, "tag": {"type": "string", "maxLength": 9},
        },
    },
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"structured_outputs": {"regex": "([a-z]{3} [0-9]{2},){30}"}},
    {"guided_grammar": 'start: ("(" /[a-z]{2}/ ")"){40}'},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), "--served-model-name", MODEL, workers=2) as running:
        yield running


def requests() -> list[dict[str, Any]]:
    return [
        {
            "model": MODEL, "prompt": [30 + i, 40, 50], "max_tokens": 390, "logprobs": 1, "stream": True, "seed": i,
            "temperature": 0.0 if i % 2 else 1.3, "n": 1 + i % 2, "extra_body": FORMS[i % len(FORMS)],
        }
        for i in range(8)
    ]  # fmt: skip


def test_a_worker_may_be_killed_under_it(stack: Stack) -> None:
    undisturbed = [asyncio.run(run_all(stack, [request]))[0] for request in requests()]
    for request, choices in zip(requests(), undisturbed, strict=True):
        for text, _, reason in choices:
            assert reason == "stop", text
            if not {"guided_json", "response_format"}.isdisjoint(request["extra_body"]):
                jsonschema.validate(json.loads(text), SCHEMA)
    deaths = stack.stats().worker_deaths

    def kill_a_busy_worker() -> None:
        kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)

    disturbed = asyncio.run(run_all(stack, requests(), kill_a_busy_worker))
    assert disturbed == undisturbed
    assert stack.stats().worker_deaths == deaths + 1
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def test_the_engine_core_may_be_killed_under_it(stack: Stack) -> None:
    """Its successor judges no grammar of what has begun."""
    undisturbed = asyncio.run(run_all(stack, requests()))
    victim = stack.children("engine-core")[0]
    assert asyncio.run(run_all(stack, requests(), lambda: kill(victim.pid))) == undisturbed
    assert not victim.is_running()
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)
