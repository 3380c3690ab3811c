"""Adapter names: records carry what they mean, HTTP loads and unloads them, and keys restrict who may use them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import MODEL, Gateway, breaking, failing, make_gateway, play
from tests.gateway.keys.whole_app import running_app

from pagoda_gateway.adapters import named_adapters
from pagoda_gateway.config import GatewayConfig
from pagoda_proto.adapters.files import CONFIG, WEIGHTS, identify
from pagoda_proto.errors import ErrorCode
from pagoda_proto.options import BadOptions

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASK: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}


def write(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text("{}")
    (path / WEIGHTS).write_bytes(weights)
    return path


def gateway_with(root: Path, **options: Any) -> Gateway:
    gateway = make_gateway(root, **({"lora_dir": str(root / "adapters"), "lora_loading": True} | options))
    gateway.engine.script = play(gateway.ids("x"))
    return gateway


async def asked(gateway: Gateway, model: str) -> str:
    """The digest requested from the engine core, "" for the base model; or the code of the refusal."""
    answer = await gateway.client.post("/v1/completions", json=ASK | {"model": model})
    if answer.status_code != 200:
        return str(answer.json()["error"]["code"])
    assert answer.json()["model"] == model
    adapter = gateway.engine.generations[-1].record.adapter
    return adapter.digest if adapter else ""


async def test_a_name_loads_means_its_files_and_goes(tmp_path: Path) -> None:
    gateway, path = gateway_with(tmp_path), write(tmp_path / "adapters" / "a")
    first = identify(path, 1000).digest
    assert await asked(gateway, "one") == "model_not_found"
    answer = await gateway.client.post(LOAD, json={"lora_name": "one", "lora_path": str(path)})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'one' added successfully.")
    assert await asked(gateway, "one") == first
    assert await asked(gateway, MODEL) == ""
    models = (await gateway.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"], model["root"]) for model in models] == [
        (MODEL, None, MODEL),
        ("one", MODEL, str(path)),
    ]
    write(path, b"others")
    assert await asked(gateway, "one") == first, "a name means what it meant when it was loaded"
    refused = await gateway.client.post(LOAD, json={"lora_name": "one", "lora_path": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    again = {"lora_name": "one", "lora_path": "a", "load_inplace": True}
    assert (await gateway.client.post(LOAD, json=again)).status_code == 200
    assert await asked(gateway, "one") == identify(path, 1000).digest != first
    assert (await gateway.client.post(UNLOAD, json={"lora_name": "one"})).status_code == 200
    assert await asked(gateway, "one") == "model_not_found"


async def test_one_that_no_worker_can_use_has_no_name(tmp_path: Path) -> None:
    gateway, path = gateway_with(tmp_path), write(tmp_path / "adapters" / "a")
    gateway.engine.script = failing(ErrorCode.UNAVAILABLE)
    answer = await gateway.client.post(LOAD, json={"lora_name": "one", "lora_path": str(path)})
    assert answer.status_code == 503
    assert [model.name for model in gateway.context.catalogue] == [MODEL]


async def test_one_with_which_nothing_finite_is_computed_is_refused_by_its_path(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    write(tmp_path / "adapters" / "a")
    gateway.engine.script = breaking(code=ErrorCode.NUMERICAL_ERROR)
    answer = await gateway.client.post(LOAD, json={"lora_name": "one", "lora_path": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    assert [model.name for model in gateway.context.catalogue] == [MODEL]


async def test_who_asks_for_one_that_is_gone_is_told_so_and_may_try_again(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    write(tmp_path / "adapters" / "a")
    assert (await gateway.client.post(LOAD, json={"lora_name": "one", "lora_path": "a"})).status_code == 200
    gateway.engine.script = breaking(code=ErrorCode.ADAPTER_UNAVAILABLE)
    answer = await gateway.client.post("/v1/completions", json=ASK | {"model": "one"})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("adapter_unavailable", "worker lost")


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (LOAD, {"lora_name": MODEL, "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a b", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a\x1b[2J", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a\0b", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a\u202eb", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "one", "lora_path": "../outside"}, 400, "lora_path"),
    (LOAD, {"lora_name": "one", "lora_path": "/etc"}, 400, "lora_path"),
    (LOAD, {"lora_name": "one", "lora_path": "link"}, 400, "lora_path"),
    (LOAD, {"lora_name": "one", "lora_path": "a\0b"}, 400, "lora_path"),
    (LOAD, {"lora_name": "one", "lora_path": "none"}, 400, "lora_path"),
    (LOAD, {"lora_name": "one", "lora_path": "large"}, 400, "lora_path"),
    (LOAD, {"lora_name": "one", "lora_path": "a", "lora_int_id": 3}, 400, "lora_int_id"),
    (LOAD, {"lora_path": "a"}, 400, "lora_name"),
    (UNLOAD, {"lora_name": "one"}, 404, "lora_name"),
    (UNLOAD, {"lora_name": MODEL}, 404, "lora_name"),
]


async def test_what_cannot_be_loaded_is_refused_by_its_field(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, max_lora_bytes=100)
    adapters = tmp_path / "adapters"
    write(adapters / "a")
    write(adapters / "large", b"x" * 101)
    (adapters / "link").symlink_to(write(tmp_path / "outside"))
    for path, body, status, param in REFUSED:
        answer = await gateway.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body


async def test_without_the_option_there_is_no_loading_and_names_are_bounded(tmp_path: Path) -> None:
    closed = make_gateway(tmp_path / "closed")
    for path in (LOAD, UNLOAD):
        assert (await closed.client.post(path, json={"lora_name": "a", "lora_path": "a"})).status_code == 404
    gateway = gateway_with(tmp_path, max_lora_names=1)
    write(tmp_path / "adapters" / "a")
    statuses = [
        (await gateway.client.post(LOAD, json={"lora_name": name, "lora_path": "a"})).status_code for name in ("x", "y")
    ]
    assert statuses == [200, 400]


async def test_a_directorys_name_is_a_models_where_that_is_allowed(tmp_path: Path) -> None:
    gateway, path = gateway_with(tmp_path, lora_resolver=True), write(tmp_path / "adapters" / "found")
    write(tmp_path / "outside")
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    assert await asked(gateway, "found") == identify(path, 1000).digest
    for name in ("none", "../outside", "..", ".", "", "/etc", "found/"):
        assert await asked(gateway, name) == "model_not_found", name
    assert await asked(gateway, "link") == "invalid_argument"
    plain = gateway_with(tmp_path / "plain", lora_dir=str(tmp_path / "adapters"))
    assert await asked(plain, "found") == "model_not_found"


async def test_who_asks_for_what_is_not_there_waits_for_nobodys_load(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, lora_resolver=True)
    write(tmp_path / "adapters" / "slow")
    go, whole = asyncio.Event(), gateway.engine.script
    gateway.engine.script = lambda record: [go, *whole(record)]
    loading = asyncio.create_task(asked(gateway, "slow"))
    await gateway.engine.submitted.wait()
    async with asyncio.timeout(60):
        assert await asked(gateway, "none") == "model_not_found"
    go.set()
    assert await loading == identify(tmp_path / "adapters" / "slow", 1000).digest


async def test_keys_say_who_may_load_and_who_may_use(tmp_path: Path) -> None:
    write(tmp_path / "adapters" / "a")
    options = {"lora_dir": str(tmp_path / "adapters"), "lora_loading": True, "lora_resolver": True}
    async with running_app(tmp_path, **options) as app:
        _, client = await app.new_key(models=("a",))
        _, other = await app.new_key(models=(MODEL,))
        body = {"lora_name": "b", "lora_path": "a"}
        assert (await client.post(LOAD, json=body)).status_code == 403
        statuses = [
            (await one.post("/v1/completions", json=ASK | {"model": "a"})).status_code for one in (other, client)
        ]
        assert statuses == [404, 200], "who may not use a name does not have it loaded, either"
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["a"]


def test_names_at_start_lead_to_files_or_there_is_no_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    said = f'one={path},{{"name": "two", "path": "{path}", "base_model_name": "other"}}'
    named, adapter = named_adapters(GatewayConfig(engine="unix:/x", lora_modules=said)), identify(path, 1000)
    assert named == {"one": (adapter, ""), "two": (adapter, "other")}
    with pytest.raises(ValueError, match="'x' at"):
        named_adapters(GatewayConfig(engine="unix:/x", lora_modules=f"x={tmp_path}"))
    for options in ({"lora_modules": "one"}, {"lora_loading": True}, {"lora_resolver": True}):
        with pytest.raises(BadOptions, match=next(iter(options))):
            GatewayConfig(engine="unix:/x", **options)
    for options in ({"lora_loading": True}, {"lora_resolver": True}):
        with pytest.raises(ValueError, match="lora_dir: there is no directory '/none' here"):
            named_adapters(GatewayConfig(engine="unix:/x", lora_dir="/none", **options))
    gateway = make_gateway(tmp_path)
    with pytest.raises(ValueError, match="the model itself"):
        gateway.context.adapters.name_all({MODEL: (adapter, "")})
    gateway.context.adapters.name_all(named)
    assert [model.parent for model in gateway.context.catalogue] == [None, MODEL, "other"]


async def test_a_job_keeps_its_adapter_when_its_name_is_gone(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    adapter = identify(write(tmp_path / "adapters" / "a"), 1000)
    model = gateway.context.catalogue.of_job("gone", adapter)
    assert (model.name, model.adapter, model.parent) == ("gone", adapter, MODEL)
