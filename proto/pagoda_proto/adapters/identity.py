"""An adapter is what stands in its files: a name leads to a digest, and from there on only the digest is asked for.

So a name that is loaded anew is another adapter, whose requests share no prefix with those of the one before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pagoda_proto.errors import Problem

DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_PATH_BYTES = 4096
NAME = re.compile(r"[^\s,=/\\][^\s,=\\]{0,255}")


class Adapter(msgspec.Struct, frozen=True):
    """Weights beside a model's own. `digest` is of their content (`digest_of`), `path` the directory to read."""

    digest: str
    path: str


def digest_of(config: Mapping[str, Any], weights_sha256: bytes) -> str:
    """Of adapter_config.json, however it is spelt, and of the bytes of the weights' file."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(hashlib.sha256(canonical).digest() + weights_sha256).hexdigest()


def adapter_problems(adapter: Adapter | None) -> Iterator[Problem]:
    """What is wrong with the name of an adapter in a record."""
    if adapter is None:
        return
    if not DIGEST.fullmatch(adapter.digest):
        yield Problem("adapter", f"a digest has 64 hexadecimal digits, got {adapter.digest[:80]!a}")
    size = len(adapter.path.encode(errors="replace"))
    if not 1 <= size <= MAX_PATH_BYTES or "\0" in adapter.path:
        yield Problem("adapter", f"a path has 1 to {MAX_PATH_BYTES} bytes, none of them 0, got {size}")


def named_paths(text: str) -> dict[str, str]:
    """What the option `lora_modules` says: name=path, comma-separated.

    Raises:
        ValueError: a part is no such pair, or a name stands twice.
    """
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, path = part.partition("=")
        if not NAME.fullmatch(name) or not path:
            raise ValueError(f"lora_modules: name=path is expected, names without spaces, got {part[:200]!a}")
        if name in found:
            raise ValueError(f"lora_modules: {name!a} stands twice")
        found[name] = path
    return found
