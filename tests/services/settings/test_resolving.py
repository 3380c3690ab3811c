"""The settings tree: where a value comes from, and the error for one that cannot be used."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pagoda.settings import resolving as settings
from pagoda.settings.options import CommonConfig, ServeConfig
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import ALL, COMMANDS, SECTIONS, options_of, origins, resolve, to_arguments
from pagoda_engine_core.config import EngineConfig
from pagoda_gateway.config import GatewayConfig
from pagoda_worker.config import WorkerConfig

ENGINE = {"engine": "unix:/e"}
NEEDED = ENGINE | {"listen": "unix:/l", "worker_endpoint": "ipc:///w"}


def problems(command: str = "serve", flags: dict[str, Any] | None = None, **environment: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(command, flags or {}, environment)
    return caught.value.problems


def write(path: Path, text: str) -> dict[str, str]:
    path.write_text(text, encoding="utf-8")
    return {"config": str(path)}


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", "port: 1\nhost: file\nkv_cache_gib: 1.5\n")
    environment = {"PAGODA_PORT": "2", "PAGODA_HOST": "environment"}
    found = resolve("serve", {"port": "3", **file}, environment)
    gateway, worker = found.build(GatewayConfig), found.build(WorkerConfig)
    assert (gateway.port, gateway.host, worker.kv_cache_gib) == (3, "environment", 1.5)
    assert gateway.keep_alive_s == GatewayConfig().keep_alive_s
    sources = [found.source(name) for name in ("port", "host", "kv_cache_gib", "keep_alive_s")]
    assert sources == ["--port", "PAGODA_HOST", f"{file['config']}: kv_cache_gib", "default"]


def test_sec_23_a_secret_is_listed_as_one_and_its_value_nowhere(tmp_path: Path) -> None:
    found = resolve("serve", {}, {"PAGODA_API_KEY": "the-secret"})
    assert found.build(GatewayConfig).api_key == "the-secret"
    assert "the-secret" not in json.dumps(list(origins(found)))
    assert {"value": "(secret)", "source": "PAGODA_API_KEY"}.items() <= next(
        row for row in origins(found) if row["option"] == "api_key"
    ).items()
    told = problems(**{"PAGODA_API_KEY": "no, the-secret"}) + problems(
        flags=write(tmp_path / "p.yaml", "api_key: [the-secret]\n")
    )
    assert all("api_key" in line and "the-secret" not in line for line in told), told


def test_one_flag_feeds_every_tier_that_has_the_name() -> None:
    found = resolve("serve", {"max_model_len": "512", "max_rows": "7"}, {})
    assert found.build(EngineConfig).max_model_len == found.build(WorkerConfig).max_model_len == 512
    assert found.build(EngineConfig).max_rows == found.build(WorkerConfig).max_rows == 7


def test_tiers_keep_their_own_defaults_for_a_shared_name() -> None:
    found = resolve("serve", {}, {})
    assert found.build(EngineConfig) == EngineConfig()
    assert found.build(WorkerConfig) == WorkerConfig()


def test_one_environment_serves_every_tier() -> None:
    environment = {"PAGODA_KV_CACHE_GIB": "2", "PAGODA_PORT": "9000"}
    assert resolve("gateway", ENGINE, environment).build(GatewayConfig).port == 9000
    assert resolve("worker", ENGINE, environment).build(WorkerConfig).kv_cache_gib == 2.0


def test_all_problems_are_told_at_once_with_their_sources(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", "max_row: 5\nworkers: many\n")
    told = problems("serve", {"port": "99999", **file}, PAGODA_DTYPE="int3", PAGODA_PRT="1")
    assert told == (
        "unknown environment variable PAGODA_PRT; did you mean PAGODA_PORT?",
        f"unknown key 'max_row' in {file['config']}; did you mean max_rows?",
        f"workers must be a whole number, got 'many' (from {file['config']}: workers)",
        "port must be between 0 and 65535, got 99999 (from --port)",
        "dtype must be one of auto, bfloat16, float16, float32, got 'int3': half is float16, float is float32 "
        "(from PAGODA_DTYPE)",
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("host: x\nport: [", "is not YAML: line 2, column 8: while parsing a flow node"),
        ("host: x\nport: \t!", "is not YAML: line 2, column 7: while scanning for the next token"),
        ("port: 1\nhost: \x01", "is not YAML: line 2, column 7: special characters are not allowed, character 0x1"),
        ("- port", "must hold a mapping"),
        ("port: 1\nport: 2", "is not YAML: line 2, column 1: key 'port' is given twice"),
        ("host: x\nport: !!bool x", "is not YAML: line 2, column 7: this cannot be read as bool"),
        ("port: !!timestamp x", "is not YAML: line 1, column 7: this cannot be read as timestamp"),
        ("port: " + "9" * 9999, "cannot be read"),
        ("port: " + "[" * 1000, "cannot be read"),
        ("port: " + "9" * 99, "port must be between 0 and 65535, got 999"),
        ("max_num_seqs: 3", "unknown key 'max_num_seqs' in"),
        ("port: '1x'", "port must be a whole number, got '1x'"),
        ("port: 1.5", "port must be a whole number, got 1.5"),
        ("host: 7", "host must be text, got 7"),
        ("prefix_cache: 3", "prefix_cache must be true or false, got 3"),
        ("config: other.yaml", "unknown key 'config'"),
        ("kv-cache-gib: 3", "unknown key 'kv-cache-gib'"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path: Path, text: str, part: str) -> None:
    (told,) = problems("serve", write(tmp_path / "p.yaml", text))
    assert part in told
    assert "p.yaml" in told


def test_a_missing_file_is_refused() -> None:
    (told,) = problems("serve", {"config": "/no/such/file.yaml"})
    assert told.startswith("config file /no/such/file.yaml cannot be read")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert resolve("serve", write(tmp_path / "p.yaml", "# nothing\n"), {}).build(ServeConfig) == ServeConfig()


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", "port: 77")
    assert resolve("gateway", ENGINE, {"PAGODA_CONFIG": file["config"]}).build(GatewayConfig).port == 77


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("no", False), ("OFF", False)])
def test_words_for_true_and_false(text: str, value: bool) -> None:
    assert resolve("serve", {}, {"PAGODA_PREFIX_CACHE": text}).build(EngineConfig).prefix_cache is value


def test_variables_of_kubernetes_services_called_pagoda_are_none_of_ours() -> None:
    links = {
        "PAGODA_SERVICE_HOST": "10.0.0.1",
        "PAGODA_SERVICE_PORT": "8000",
        "PAGODA_SERVICE_PORT_HTTP": "8000",
        "PAGODA_PORT": "tcp://10.0.0.1:8000",
        "PAGODA_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PAGODA_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PAGODA_GATEWAY_PORT": "tcp://10.0.0.1:8000",
    }
    assert resolve("serve", {}, links).build(GatewayConfig) == GatewayConfig()


def test_variables_are_upper_case() -> None:
    assert problems("serve", {}, PAGODA_port="1") == (
        "unknown environment variable PAGODA_port; did you mean PAGODA_PORT?",
    )


def test_serve_wires_the_tiers_itself() -> None:
    assert not settings.WIRED_BY_SERVE & set(settings.command_options("serve"))
    assert {"engine", "listen", "worker_endpoint"} <= settings.WIRED_BY_SERVE


def test_every_option_has_help_and_a_simple_type() -> None:
    for option in ALL.values():
        assert option.help, option.name
        assert option.type in (int, float, bool, str), option.name


def test_a_name_with_two_types_cannot_exist() -> None:
    other = dataclasses.make_dataclass(
        "Other", [("port", str, settings.dataclasses.field(default="", metadata={"help": "x"}))]
    )
    with pytest.raises(TypeError, match="port"):
        options_of(GatewayConfig, other)


def test_origins_name_every_offered_option() -> None:
    rows = list(origins(resolve("serve", {"port": "5"}, {})))
    assert {row["option"] for row in rows} == set(settings.command_options("serve"))
    assert {"section": "gateway", "option": "port", "value": 5, "source": "--port"} in rows


def test_the_schema_accepts_what_the_settings_accept_and_refuses_unknown_keys() -> None:
    schema = settings.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"port": 1, "kv_cache_gib": 1.5, "prefix_cache": False, "model": "x"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"prt": 1}, schema)


def test_our_variables_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_PORT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = settings.child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    assert "PAGODA_PORT" not in environment
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(
    ("command", "needed"),
    [("engine-core", ["--listen", "--worker-endpoint"]), ("worker", ["--engine"]), ("gateway", ["--engine"])],
)
def test_a_process_that_stands_alone_names_what_it_needs(command: str, needed: list[str]) -> None:
    told = problems(command)
    assert [problem.split(" is needed (PAGODA_")[0] for problem in told] == needed
    assert problems(command, {flag.strip("-").replace("-", "_"): "" for flag in needed}) == told


def test_a_shared_name_has_one_rule() -> None:
    for option in ALL.values():
        assert len({rule._replace(required=False) for rule in option.rules}) == 1, option.name


def test_a_shared_name_has_one_default() -> None:
    """Else a worker would reserve memory for steps that no engine core sends. Draining differs on purpose."""
    differing = [option.name for option in ALL.values() if len({repr(value) for value in option.defaults}) > 1]
    assert differing == ["drain_timeout_s"]


NUMBERS = sorted(name for name, option in ALL.items() if option.type in (int, float))
OWNER = {name: next(c for c in COMMANDS if name in settings.command_options(c)) for name in NUMBERS}
CASES = st.sampled_from(NUMBERS)
ODD = st.one_of(
    st.integers(),
    st.floats(),
    st.integers(1, 400).map(lambda n: "9" * n),
    st.sampled_from(["", "1e999", "0x1", "1_0", "-"]),
)


@given(name=CASES, value=ODD)
def test_any_number_is_taken_within_its_bounds_or_refused_in_one_line(name: str, value: Any) -> None:
    """Either the config has a finite number within the option's bounds, or one line names the flag and the value."""
    command, rule = OWNER[name], ALL[name].rules[0]
    try:
        built = resolve(command, {name: str(value)} | (NEEDED if command != "serve" else {}), {})
    except ConfigError as error:
        for told in error.problems:
            if " must be below " in told:  # another option's rule, which this value breaks
                assert name in told
                continue
            assert told.startswith(f"{name} ")
            assert told.endswith(f"(from {ALL[name].flag})")
            assert len(told) < 500
            assert "\n" not in told
    else:
        for owner in ALL[name].owners:
            if owner in COMMANDS[command]:
                assert rule.least is not None
                assert rule.most is not None
                value = getattr(built.build(owner), name)
                assert value == rule.unset or rule.least <= value <= rule.most


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "9" * 30, "-9999999"])
def test_no_option_takes_what_is_no_amount(name: str, value: str) -> None:
    told = problems(OWNER[name], {name: value} | (NEEDED if OWNER[name] != "serve" else {}))
    assert {problem.split(" ")[0] for problem in told} == {name}
    assert all(f"(from {ALL[name].flag})" in problem for problem in told)


numbers = st.integers(0, 65535)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)


@functools.cache
def gateway_parser() -> argparse.ArgumentParser:
    from pagoda.cli import parser_of

    return parser_of("gateway")


# argparse drops a value of "--", however it is given
@given(
    port=numbers,
    host=texts.filter(lambda text: text != "--"),
    startup_message=st.booleans(),
    keep_alive_s=st.floats(0.1, 1e6),
)
def test_arguments_carry_a_config_into_another_process(
    port: int, host: str, startup_message: bool, keep_alive_s: float
) -> None:
    from pagoda.settings.flags import given_flags

    config = GatewayConfig(port=port, host=host, startup_message=startup_message, keep_alive_s=keep_alive_s)
    parsed = gateway_parser().parse_args(["gateway", *to_arguments(config), "--engine=unix:/e"])
    assert resolve("gateway", given_flags(parsed, "gateway"), {}).build(GatewayConfig, engine="") == config


@pytest.mark.parametrize(
    "given",
    [["--lora-modules", "a=/x", "b=/y"], ["--lora-modules=a=/x", "--lora-modules=b=/y"], ["--lora-modules=a=/x,b=/y"]],
)
def test_a_flag_of_several_values_takes_them_in_any_way(given: list[str]) -> None:
    from pagoda.cli import parser_of
    from pagoda.settings.flags import given_flags

    parsed = parser_of("serve").parse_args(["serve", "model", *given, "--port=1"])
    assert given_flags(parsed, "serve") == {"model": "model", "lora_modules": "a=/x,b=/y", "port": "1"}


def test_a_file_may_list_them(tmp_path: Path) -> None:
    listed = {"lora_modules": ["a=/x", '{"name": "b", "path": "/y,z"}']}
    for text, expected in ((yaml.safe_dump(listed), ",".join(listed["lora_modules"])), ("lora_modules: a=/x", "a=/x")):
        file = write(tmp_path / "p.yaml", text)
        settings = resolve("worker", {"config": file["config"], "engine": "unix:/e"}, {})
        assert settings.given["lora_modules"].value == expected
    assert "lora_modules must be text" in problems("serve", write(tmp_path / "p.yaml", "lora_modules: [1]"))[0]


@given(st.dictionaries(st.sampled_from(sorted(set(ALL) - {"config"})), st.one_of(st.integers(), texts, st.booleans())))
def test_any_file_is_taken_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("file") / "p.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    told: tuple[str, ...] = ()
    try:
        resolve("serve", {"config": str(path)}, {})
    except ConfigError as error:
        told = error.problems
    assert all(any(name in problem for name in content) for problem in told)


def test_commands_are_made_of_sections() -> None:
    assert {config for configs in COMMANDS.values() for config in configs} <= set(SECTIONS.values())
    assert CommonConfig in COMMANDS["serve"]
    assert json.dumps(settings.json_schema())
