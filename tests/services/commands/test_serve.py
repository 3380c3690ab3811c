"""What `pagoda serve` starts: the children's commands, read back the way the children read them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import parser_of
from pagoda.commands.serve import Tower, refuse_model_among_names
from pagoda.processes import logs
from pagoda.processes.rundir import LONGEST
from pagoda.processes.startup import announcement
from pagoda.settings.flags import given_flags
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import resolve
from pagoda_engine_core.config import EngineConfig
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.listening import bind
from pagoda_worker.config import WorkerConfig


def tower(**flags: Any) -> Tower:
    with bind("127.0.0.1", 0) as listener:  # only its numbers are asked for
        return Tower(resolve("serve", flags, {}), Path("/models/some"), Path("/run/x"), listener, started=0.0)


def read_back(command: list[str], tier: str, config: type) -> Any:
    words = command[command.index(tier) :]
    arguments = parser_of(tier).parse_args(words)
    return resolve(tier, given_flags(arguments, tier), {}).build(config)


def configs(one: Tower) -> dict[str, Any]:
    kinds = {"gateway": GatewayConfig, "engine-core": EngineConfig, "worker": WorkerConfig}
    tiers = {spec.name: next(tier for tier in kinds if spec.name.startswith(tier)) for spec in one.children()}
    return {
        spec.name: read_back(list(spec.command()), tiers[spec.name], kinds[tiers[spec.name]]) for spec in one.children()
    }


def test_the_tiers_are_wired_to_each_other() -> None:
    found = configs(tower(workers="3", port="0", max_model_len="256", model="org/name"))
    assert list(found) == ["gateway", "engine-core", "worker-0", "worker-1", "worker-2"]
    gateway, engine, worker = found["gateway"], found["engine-core"], found["worker-1"]
    assert gateway.engine == engine.listen == "unix:/run/x/core-0.sock"
    assert worker.engine == engine.worker_endpoint == "ipc:///run/x/work-0.sock"
    assert gateway.model == worker.model == "/models/some"
    assert gateway.served_model_name == "org/name"
    assert worker.worker_id == "worker-1"
    assert engine.max_model_len == worker.max_model_len == 256


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ({"workers": "12"}, 1),
        ({"workers": "13"}, 2),
        ({"workers": "64"}, 6),
        ({"workers": "3", "engine_cores": "2"}, 2),
    ],
)
def test_engine_cores_share_the_workers(flags: dict[str, str], count: int) -> None:
    one = tower(metrics_port="9100", **flags)
    found = configs(one)
    engines = [found[f"engine-core-{index}"] if count > 1 else found["engine-core"] for index in range(count)]
    assert len(found) == 1 + count + int(flags["workers"])
    assert found["gateway"].engine == ",".join(engine.listen for engine in engines)
    shares = [[worker for worker in one.workers if worker.engine == engine.worker_endpoint] for engine in engines]
    assert sum(map(len, shares)) == int(flags["workers"])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert max(map(len, shares)) <= 12
    assert [engine.metrics_port for engine in engines] == list(range(9100, 9100 + count))


def test_sockets_fit_into_the_longest_directory() -> None:
    directory = Path("/".ljust(LONGEST, "x")) / "pagoda-12345678"
    with bind("127.0.0.1", 0) as listener:
        settings = resolve("serve", {"workers": "64", "engine_cores": "64"}, {})
        engines = Tower(settings, Path("/models/some"), directory, listener, started=0.0).engines
    paths = [engine.listen.removeprefix("unix:") for engine in engines]
    paths += [engine.worker_endpoint.removeprefix("ipc://") for engine in engines]
    assert max(map(len, paths)) == 107, "the most that a Unix socket's path may have"


def test_no_metrics_are_where_the_gateway_listens_or_nobody_can() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        for first, count, message in (
            (port, 1, f"engine core number 1 would take port {port}, the gateway's"),
            (port - 1, 2, f"engine core number 2 would take port {port}, the gateway's"),
            (65535, 2, "engine core number 2 would take port 65536, which does not exist"),
        ):
            flags = {"workers": "2", "engine_cores": str(count), "metrics_port": str(first)}
            with pytest.raises(ConfigError, match=message):
                Tower(resolve("serve", flags, {}), Path("/models/some"), Path("/run/x"), listener, started=0.0)


def test_every_engine_core_has_a_worker() -> None:
    with pytest.raises(ConfigError, match=r"engine_cores must be at most workers \(2\), got 3"):
        tower(workers="2", engine_cores="3")


@pytest.mark.parametrize(("model", "names"), [("", "m,org/name"), ("/models/some", f"m,{Path(__file__).parent}")])
def test_a_model_behind_the_names_is_no_name(model: str, names: str) -> None:
    """As with `--served-model-name m MODEL`, where MODEL is taken for a name."""
    with pytest.raises(ConfigError, match="is read as a name: put MODEL before the flags"):
        refuse_model_among_names(GatewayConfig(engine="unix:/e", model=model, served_model_name=names))


def test_a_model_may_have_several_names() -> None:
    for model, names in (("", "m"), ("org/name", "m,gpt-4,org/name")):
        refuse_model_among_names(GatewayConfig(engine="unix:/e", model=model, served_model_name=names))


def test_sec_23_a_key_reaches_the_gateway_and_nobodys_flags() -> None:
    gateway, engine_core, worker = tower(api_key="key-one-of-two,key-two-of-two").children()
    for child in (gateway, engine_core, worker):
        assert not any("of-two" in word for word in child.command())
        given = {name: text for name, text in child.environment.items() if "of-two" in text}
        assert given == ({"PAGODA_API_KEY": "key-one-of-two,key-two-of-two"} if child is gateway else {})


def test_the_store_outlives_a_gateway_unless_it_is_told_where_to_be() -> None:
    for flags, address in (({}, "scratch:///run/x/store.db"), ({"store": "redis://:word@h:1"}, "redis://:word@h:1")):
        gateway, *others = tower(**flags).children()
        assert gateway.environment["PAGODA_STORE"] == address
        for child in (gateway, *others):
            assert not any(address in word for word in child.command())
            assert child is gateway or address not in child.environment.values()


def test_workers_share_the_cores() -> None:
    shared, own = tower(workers="64"), tower(workers="2", threads="5")
    assert {config.threads for config in shared.workers} == {1}
    assert {config.threads for config in own.workers} == {5}
    assert {config.workers_here for config in shared.workers} == {64}
    assert {config.workers_here for config in tower(workers="2", workers_here="6").workers} == {6}


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ({}, ["auto", "auto:1", "auto:2"]),
        ({"device": "cuda"}, ["cuda", "cuda:1", "cuda:2"]),
        ({"device": "cuda:1"}, ["cuda:1"] * 3),
        ({"device": "cpu"}, ["cpu"] * 3),
    ],
)
def test_every_worker_takes_a_gpu_of_its_own(flags: dict[str, str], devices: list[str]) -> None:
    found = configs(tower(workers="3", **flags))
    assert [found[f"worker-{index}"].device for index in range(3)] == devices


def test_the_gateway_stops_first_and_the_workers_last() -> None:
    order = {spec.name: spec.stop_order for spec in tower().children()}
    assert order["gateway"] < order["engine-core"] < order["worker-0"]


def test_every_gateway_is_given_the_same_socket() -> None:
    one = tower(port="0")
    assert configs(one)["gateway"].port
    gateway, *others = one.children()
    [listener] = gateway.inherits
    assert [f"--listen-fd={listener}" in gateway.command() for _ in range(2)] == [True, True]
    assert not any(child.inherits for child in others)


def test_readiness_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = tower(served_model_name="mine")
    one.on_event("worker-0", {"event": "loading", "bytes": 1, "of": 2})
    one.on_event("worker-0", {"event": "loaded", "seconds": 1.0, "num_blocks": 5})
    one.on_event("gateway", {"event": "listening", "url": "http://127.0.0.1:4567"})
    one.on_event("gateway", {"event": "ready"})
    one.on_event("gateway", {"event": "unready"})
    one.on_event("gateway", {"event": "ready"})
    printed = capsys.readouterr().out
    assert printed.count("Pagoda serves mine at http://127.0.0.1:4567") == 1
    assert "curl http://127.0.0.1:4567/v1/chat/completions" in printed


@pytest.mark.parametrize("locked", [False, True])
def test_the_example_shows_a_key_where_one_must_be_shown(capsys: pytest.CaptureFixture[str], locked: bool) -> None:
    one = tower()
    if locked:
        one.on_event("gateway", {"event": "locked"})
    one.on_event("gateway", {"event": "listening", "url": "http://127.0.0.1:4567"})
    one.on_event("gateway", {"event": "ready"})
    assert ("$PAGODA_API_KEY" in capsys.readouterr().out) == locked


def test_recording_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    one = tower()
    with caplog.at_level(logging.INFO):
        for done in range(1, 36):
            one.on_event("worker-0", {"event": "recording", "graphs": done, "of": 35})
    told = [record.getMessage() for record in caplog.records]
    assert told[-1] == "worker-0: recorded 35 of 35 decode graphs"
    assert len(told) < 5


@pytest.mark.parametrize(
    ("options", "what"), [({}, "loading weights"), ({"quantization": "int4"}, "quantising to int4")]
)
def test_progress_says_what_is_done(
    options: dict[str, str], what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.processes.startup.LOG_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "pagoda.processes.startup")
    tower(**options).on_event("worker-0", {"event": "loading", "bytes": 3 << 20, "of": 5 << 20})
    assert caplog.messages == [f"worker-0: {what}, 3 of 5 MiB"]


@pytest.mark.parametrize("api_key", ["", "key-one-of-two,key-two-of-two"])
@pytest.mark.parametrize("kind", ["generate", "embed"])
def test_the_announced_python_compiles(api_key: str, kind: str) -> None:
    text = announcement("http://h:1", GatewayConfig(served_model_name="m"), 1.0, bool(api_key), kind)
    assert ("/v1/embeddings" in text) == (kind == "embed")
    assert ("PAGODA_API_KEY" in text) == bool(api_key)
    assert "of-two" not in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    compile("\n".join(lines[lines.index("from openai import OpenAI") :]), "announcement", "exec")


def test_lines_of_children_carry_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    one = tower()
    one.on_line("gateway", "hello [not markup]")
    assert capsys.readouterr().err == "[gateway] hello [not markup]\n"


def test_a_log_may_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logs.setup("gateway", "info", as_json=True)
        logging.getLogger("x").warning("one %s", "two")
        try:
            raise ValueError("inner")
        except ValueError:
            logging.getLogger("x").exception("failed")
    finally:
        logging.getLogger().handlers[:], level = before
        logging.getLogger().setLevel(level)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["process"], first["logger"], first["message"]) == (
        "warning",
        "gateway",
        "x",
        "one two",
    )
    assert "ValueError: inner" in second["exception"]
