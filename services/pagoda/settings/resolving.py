"""The one settings tree: a field of a frozen config is a flag, a PAGODA_* variable and a YAML key of the same name.

A name means one thing everywhere, so a value is found by name alone: flag, else environment, else file, else the
field's default. A name that several tiers have (`model`, `max_rows`) is one option that feeds them all. One file and
one environment may serve every tier: each process takes its own options, but a name that no tier knows is rejected.

This module is the only reader of the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from pagoda.settings.hints import as_key, hint, names_of
from pagoda.settings.options import ChildConfig, CommonConfig, ModelSourceConfig, ServeConfig
from pagoda.settings.problems import ConfigError
from pagoda.settings.values import convert
from pagoda_engine_core.config import EngineConfig
from pagoda_gateway.config import GatewayConfig
from pagoda_proto.options import BadOptions, Rule
from pagoda_worker.config import WorkerConfig

PREFIX = "PAGODA_"
SECTIONS: dict[str, type] = {
    "serve": ServeConfig,
    "model source": ModelSourceConfig,
    "gateway": GatewayConfig,
    "engine core": EngineConfig,
    "worker": WorkerConfig,
    "process": CommonConfig,
    "child": ChildConfig,
}
COMMANDS: dict[str, tuple[type, ...]] = {
    "serve": (ServeConfig, ModelSourceConfig, GatewayConfig, EngineConfig, WorkerConfig, CommonConfig),
    "gateway": (ModelSourceConfig, GatewayConfig, CommonConfig, ChildConfig),
    "engine-core": (EngineConfig, CommonConfig, ChildConfig),
    "worker": (ModelSourceConfig, WorkerConfig, CommonConfig, ChildConfig),
    "offline": (ModelSourceConfig, EngineConfig, WorkerConfig),
    "keys": (GatewayConfig, CommonConfig),
    "workers": (GatewayConfig, CommonConfig),
}
# Options that are decided by a command that wires the tiers together.
WIRED_BY_SERVE = frozenset({
    "engine", "listen", "worker_endpoint", "worker_id", "keys_dir", "alive_file", "ready_file", "startup_message",
})  # fmt: skip
WIRED_OFFLINE = WIRED_BY_SERVE | {
    "metrics_port", "metrics_host", "max_queued_requests", "max_queued_tokens", "queue_timeout_s",
    "max_attempts", "worker_lease_s", "worker_suspect_s", "worker_dead_s", "step_deadline_s", "drain_timeout_s",
}  # fmt: skip
# The only options of commands that talk to what others serve.
ASKED_OF = {"keys": frozenset({"store", "config"}), "workers": frozenset({"engine", "keys_dir", "config"})}

# A Kubernetes service called pagoda* makes every pod see variables such as PAGODA_PORT=tcp://10.0.0.1:8000.
_SERVICE_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_LINK_VALUE = re.compile(r"^(tcp|udp|sctp)://")

C = TypeVar("C")


class Option(NamedTuple):
    """One name of the tree. `owners` are the configs that have it; `defaults` and `rules` are theirs, in that order."""

    name: str
    type: Any
    help: str
    owners: tuple[type, ...]
    defaults: tuple[Any, ...]
    rules: tuple[Rule, ...]

    @property
    def required(self) -> bool:
        return any(rule.required for rule in self.rules)

    @property
    def secret(self) -> bool:
        return any(rule.secret for rule in self.rules)

    @property
    def several(self) -> bool:
        return any(rule.several for rule in self.rules)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


class Value(NamedTuple):
    """A given value and its source: `--port`, `PAGODA_PORT`, `pagoda.yaml: port`."""

    value: Any
    source: str


_types_of = functools.cache(typing.get_type_hints)


def options_of(*configs: type) -> dict[str, Option]:
    """The options of these configs by name; a name that several of them have becomes one option."""
    found: dict[str, Option] = {}
    for config in configs:
        for field in dataclasses.fields(config):
            known = found.get(field.name)
            if known is None:
                known = Option(field.name, _types_of(config)[field.name], field.metadata["help"], (), (), ())
            elif known.type != _types_of(config)[field.name]:
                raise TypeError(f"option {field.name} has different types in {known.owners[0]} and {config}")
            found[field.name] = known._replace(
                owners=(*known.owners, config),
                defaults=(*known.defaults, field.default),
                rules=(*known.rules, field.metadata["rule"]),
            )
    return found


ALL = options_of(*SECTIONS.values())


def command_options(command: str) -> dict[str, Option]:
    """The options that users of a command can set."""
    options = options_of(*COMMANDS[command])
    hidden = {"serve": WIRED_BY_SERVE, "offline": WIRED_OFFLINE}
    hidden |= {name: frozenset(options.keys() - asked) for name, asked in ASKED_OF.items()}
    return {name: option for name, option in options.items() if name not in hidden.get(command, frozenset())}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values given for one command, by option name."""

    command: str
    given: Mapping[str, Value]

    def build(self, config: type[C], **wired: Any) -> C:
        """Build one tier's config. `wired` values, decided by the command, override everything given.

        Raises:
            ConfigError: the config rejects a value.
        """
        names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
        values = {name: value.value for name, value in self.given.items() if name in names}
        try:
            return config(**(values | wired))
        except BadOptions as error:
            raise ConfigError([self._with_source(*problem) for problem in error.problems]) from error

    def source(self, name: str) -> str:
        return self.given[name].source if name in self.given else "default"

    def _with_source(self, name: str, sentence: str) -> str:
        return f"{sentence} (from {self.given[name].source})" if name in self.given else sentence


def resolve(
    command: str, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, *, complete: bool = True
) -> Settings:
    """Merge the sources for a command and check every value.

    Args:
        flags: Values given on the command line, by option name; text is converted to the option's type.
        environment: The process's own if None.
        complete: False permits missing options that the command requires.

    Raises:
        ConfigError: all problems of all sources at once.
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    by_flag = {name: Value(value, ALL[name].flag) for name, value in flags.items()}
    by_variable = _from_environment(environment, problems)
    file = (by_flag.get("config") or by_variable.get("config") or Value("", "")).value
    return _check(command, _from_file(file, problems) | by_variable | by_flag, problems, complete)


def from_keywords(**keywords: Any) -> Settings:
    """The settings of an offline engine, from keyword arguments only.

    Raises:
        TypeError: there is no such option.
        ConfigError: all other problems at once.
    """
    offered = command_options("offline")
    for name in (one for one in keywords if one not in offered):
        told = hint(name, names_of(offered), as_key)
        raise TypeError(f"unknown option {name!r}{told}; options are {', '.join(sorted(offered))}")
    return _check("offline", {name: Value(value, "keyword argument") for name, value in keywords.items()}, [])


def _check(command: str, merged: Mapping[str, Value], problems: list[str], complete: bool = True) -> Settings:
    """Convert and check the given values. Raises ConfigError with `problems` and those found here."""
    mine = command_options(command)
    given: dict[str, Value] = {}
    for name, value in merged.items():
        if name in mine:
            given_value = joined(value.value) if mine[name].several and isinstance(value.value, list) else value.value
            try:
                given[name] = value._replace(value=convert(given_value, mine[name].type))
            except ValueError as error:
                why = "must be text" if mine[name].secret else error
                problems.append(f"{name} {why} (from {value.source})")
    settings = Settings(command, given)
    if complete:
        problems.extend(_missing(mine, merged))
    for config in COMMANDS[command]:
        try:
            settings.build(config)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return settings


def joined(values: Sequence[Any]) -> Any:
    """Join several texts into one; return anything else unchanged."""
    return ",".join(filter(None, values)) if all(isinstance(value, str) for value in values) else values


def _missing(options: Mapping[str, Option], given: Mapping[str, Value]) -> Iterator[str]:
    for name, option in options.items():
        if option.required and (name not in given or given[name].value == ""):
            yield f"{option.flag} is needed ({option.variable} or {name} in the settings file): {option.help}"


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, Value]:
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or _is_service_link(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in ALL and variable == ALL[name].variable:
            found[name] = Value(text, variable)
        else:
            told = hint(name, names_of(ALL), lambda one: as_key(one, lambda own: ALL[own].variable))
            problems.append(f"unknown environment variable {variable}{told}")
    return found


def _is_service_link(variable: str, text: str) -> bool:
    return bool(_SERVICE_LINK_NAME.search(variable)) or (
        variable.endswith("_PORT") and bool(_SERVICE_LINK_VALUE.match(text))
    )


class _UniqueKeys(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML silently takes the last. Reports a tag that does not fit its value
    (`!!bool x`) as an error of the file, with its position."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            why = f"this cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            keys.append(key)
        return typing.cast("dict[Any, Any]", super().construct_mapping(node, deep))


def _from_file(path: str, problems: list[str]) -> dict[str, Value]:
    if not path:
        return {}
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        content = yaml.load(text, _UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        problems.append(f"config file {path} is not YAML: {_where_and_why(error, text)}")
        return {}
    except (OSError, ValueError, RecursionError) as error:  # missing; not UTF-8; nested too deep
        problems.append(f"config file {path} cannot be read: {getattr(error, 'strerror', None) or error}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        problems.append(f"config file {path} must hold a mapping of option names to values")
        return {}
    found = {}
    for name, value in content.items():
        if name in ALL and name != "config":
            found[name] = Value(value, f"{path}: {name}")
        else:
            problems.append(f"unknown key {name!r} in {path}{hint(str(name), names_of(ALL), as_key)}")
    return found


def _where_and_why(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        at, why = error.problem_mark, ", ".join(filter(None, (error.context, error.problem)))
        return f"line {at.line + 1}, column {at.column + 1}: {why}"
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        return f"line {line}, column {column}: {error.reason}, character {error.character:#x}"
    return " ".join(str(error).split())


def to_arguments(config: Any) -> list[str]:
    """The flags that give another process this config; defaults and secrets are omitted."""
    said = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    return [
        argument(field.name, value)
        for field, value in said
        if value != field.default and not field.metadata["rule"].secret
    ]


def argument(name: str, value: Any) -> str:
    """The flag that sets an option to this value."""
    flag = ALL[name].flag
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag}={value}"


def secrets(config: Any) -> dict[str, str]:
    """The secrets that are set, which `to_arguments` omits, by environment variable."""
    fields = [field for field in dataclasses.fields(config) if field.metadata["rule"].secret]
    return {ALL[field.name].variable: value for field in fields if (value := getattr(config, field.name))}


def origins(settings: Settings) -> Iterator[dict[str, Any]]:
    """Every value of a command as section, option, value and source."""
    offered = command_options(settings.command)
    for section, config in SECTIONS.items():
        if config not in COMMANDS[settings.command]:
            continue
        built: Any = settings.build(config)
        for field in dataclasses.fields(config):
            if field.name in offered:
                value = getattr(built, field.name)
                yield {
                    "section": section,
                    "option": field.name,
                    "value": "(secret)" if value and field.metadata["rule"].secret else value,
                    "source": settings.source(field.name),
                }


def json_schema() -> dict[str, Any]:
    """JSON Schema of the settings file."""
    properties = {
        option.name: _property(option)
        for option in ALL.values()
        if option.name != "config" and ChildConfig not in option.owners
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(option: Option) -> dict[str, Any]:
    names = {int: "integer", float: "number", bool: "boolean", str: "string"}
    rule = option.rules[0]
    bounds = {"minimum": rule.least, "maximum": rule.most, "enum": list(rule.words) or None}
    said = {"type": names[option.type], "default": option.defaults[0], "description": option.help}
    told = {name: bound for name, bound in bounds.items() if bound is not None}
    return said | (told if rule.unset is None else {"anyOf": [{"const": rule.unset}, told]})


def child_environment(**extra: str) -> dict[str, str]:
    """The environment of a process we start: ours without PAGODA_* (its flags give everything but secrets), plus
    `extra`, which ours overrides."""
    return extra | {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def environment_value(name: str) -> str:
    """A variable that is not ours (`HF_HOME`, `XDG_RUNTIME_DIR`); "" if unset."""
    return os.environ.get(name, "")
