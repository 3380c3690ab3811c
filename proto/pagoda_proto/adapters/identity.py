"""An adapter is identified by its files' content: a name resolves to a digest, and only the digest counts from then on.

So loading a name again with other files gives a different adapter, whose requests share no prefix with the old one's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from pagoda_proto.errors import Problem

DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_PATH_BYTES = 4096
NAME = re.compile(r"[^\s,=/\\][^\s,=\\]{0,255}")
FIELDS = ("name", "path", "base_model_name")  # of a JSON object in the option `lora_modules`
SEPARATORS = ", \t\r\n"


class Adapter(msgspec.Struct, frozen=True):
    """Weights added to a model's own. `digest` is that of their content (`digest_of`), `path` the directory to read."""

    digest: str
    path: str


class NamedAdapter(NamedTuple):
    """An entry of `lora_modules`: the directory, and the base model that it names ("" for the served model)."""

    path: str
    base_model_name: str = ""


def digest_of(config: Mapping[str, Any], weights_sha256: bytes) -> str:
    """The digest of adapter_config.json, in canonical form, and of the bytes of the weights file."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(hashlib.sha256(canonical).digest() + weights_sha256).hexdigest()


def adapter_problems(adapter: Adapter | None) -> Iterator[Problem]:
    """What is wrong with a record's digest and path of an adapter."""
    if adapter is None:
        return
    if not DIGEST.fullmatch(adapter.digest):
        yield Problem("adapter", f"a digest must have 64 hexadecimal digits, got {adapter.digest[:80]!a}")
    size = len(adapter.path.encode(errors="replace"))
    if not 1 <= size <= MAX_PATH_BYTES or "\0" in adapter.path:
        yield Problem("adapter", f"a path must have 1 to {MAX_PATH_BYTES} bytes, none of them 0, got {size}")


def read_lora_modules(text: str) -> dict[str, NamedAdapter]:
    """Parse the option `lora_modules`, by name: parts separated by commas or, after an object, by spaces. A part is
    name=path, or a JSON object as in vLLM: {"name": .., "path": .., "base_model_name": ..}.

    Raises:
        ValueError: a part is neither, or a name or a field occurs twice.
    """
    found: dict[str, NamedAdapter] = {}
    rest = text.lstrip(SEPARATORS)
    while rest:
        name, adapter, rest = _object(rest) if rest.startswith("{") else _pair(rest)
        if not NAME.fullmatch(name) or not adapter.path:
            rule = "must be name=path or an object with name and path, without spaces in names"
            raise ValueError(f"lora_modules: {rule}, got {(name or text)[:200]!a}")
        if unseen := [one for one in (name, *adapter) if not one.isprintable()]:
            raise ValueError(f"lora_modules: names and paths must be printable, got {unseen[0][:200]!a}")
        if name in found:
            raise ValueError(f"lora_modules: {name!a} is given twice")
        found[name] = adapter
        rest = rest.lstrip(SEPARATORS)
    return found


def _pair(text: str) -> tuple[str, NamedAdapter, str]:
    part, _, rest = text.partition(",")
    name, equals, path = part.strip().partition("=")
    if not equals:
        raise ValueError(f"lora_modules: must be name=path or a JSON object, got {part[:200]!a}")
    return name, NamedAdapter(path), rest


def _object(text: str) -> tuple[str, NamedAdapter, str]:
    try:
        fields, end = json.JSONDecoder(object_pairs_hook=each_once).raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lora_modules: {text[:200]!a} is not a JSON object: {error}") from error
    for field, value in fields.items():
        if field not in FIELDS:
            raise ValueError(f"lora_modules: {field[:80]!a} is not a field, use {', '.join(FIELDS)}")
        if not isinstance(value, str) and not (value is None and field == FIELDS[-1]):
            raise ValueError(f"lora_modules: {field} must be text, got {value!r:.100}")
    name, path, base = (fields.get(field) or "" for field in FIELDS)
    return name, NamedAdapter(path, base), text[end:]


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate fields: Python's JSON parser would let the later one silently replace the earlier."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        field = Counter(field for field, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"a field is given twice: {field[:80]!a}")
    return fields
