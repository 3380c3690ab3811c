"""The two files of an adapter, as PEFT writes them: their size limits, allowed places and digest.

Gateway and worker both read them here, so a worker computes with exactly what the name meant to the gateway, or fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pagoda_proto.adapters.identity import Adapter, digest_of, each_once

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PIECE_BYTES = 1 << 20


class AdapterError(ValueError):
    """An adapter that cannot be used; the message says why."""


class AdapterGone(AdapterError):
    """There are no files where an adapter was, or others than those that were named: no fault of who asks for it."""


def identify(path: Path, max_bytes: int) -> Adapter:
    """The adapter in a directory, given by its absolute path. Reads both files completely.

    Raises:
        AdapterError: files are missing, too large, or not those of an adapter.
    """
    config = read_config(path)
    sha256 = hashlib.sha256()
    with open_weights(path, max_bytes) as file:
        while piece := file.read(PIECE_BYTES):
            sha256.update(piece)
    return Adapter(digest_of(config, sha256.digest()), str(path))


def directory_of(lora_dir: str) -> Path:
    """The directory that the option `lora_dir` names. Raises ValueError if there is none here."""
    if not os.path.isdir(lora_dir):
        raise ValueError(f"lora_dir: there is no directory {lora_dir[:200]!a} here")
    return Path(lora_dir)


def inside(path: Path, allowed: Iterable[Path]) -> Path:
    """The directory that a path resolves to, through all links, if it is an allowed one or lies below one.

    Raises:
        AdapterError: it is not.
    """
    try:
        real = path.resolve(strict=True)
        if any(real.is_relative_to(one.resolve()) for one in allowed):
            return real
    except (OSError, RuntimeError, ValueError):
        raise AdapterGone("there is no such directory") from None
    raise AdapterError("the path is outside the directories that adapters may be loaded from (lora_modules, lora_dir)")


def read_config(path: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises AdapterError."""
    with _regular(path, CONFIG, MAX_CONFIG_BYTES) as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(content, parse_constant=_no_number, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} is not a JSON object")
    return config


def open_weights(path: Path, max_bytes: int) -> BinaryIO:
    """Open adapter_model.safetensors for reading. Raises AdapterError."""
    if not (path / WEIGHTS).exists() and (path / "adapter_model.bin").exists():
        raise AdapterError(f"there is adapter_model.bin but no {WEIGHTS}; convert the adapter to safetensors")
    return _regular(path, WEIGHTS, max_bytes)


def _regular(path: Path, name: str, max_bytes: int) -> BinaryIO:
    """Open a file of the directory, but no link out of it, and no pipe, which might have no writer."""
    file = path / name
    try:
        if file.is_symlink():  # a hub's cache links to its own blobs
            inside(file, (path, *_blobs(path)))
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise AdapterError(f"{name} is not a regular file")
        if found.st_size > max_bytes:
            raise AdapterError(f"{name} has {found.st_size} bytes, more than the {max_bytes} allowed")
        return file.open("rb")
    except OSError as error:
        raise AdapterError(f"{name}: {error.strerror or error}") from error


def _blobs(path: Path) -> list[Path]:
    """Where a hub's cache keeps the files of the snapshot at `path`."""
    return [path.parent.parent / "blobs"] if path.parent.name == "snapshots" else []


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
