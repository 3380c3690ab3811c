"""Reads a model's JSON files by name, from a directory or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagoda_proto.model_files.files import FileTooLarge, model_files
from pagoda_proto.model_files.gguf import BadGguf
from pagoda_worker.checkpoints.checkpoint import CheckpointError, json_object

MAX_FILE_BYTES = 256 * 1024 * 1024


def read_config(path: Path) -> dict[str, Any]:
    """The fields of config.json, or what a GGUF file gives instead. Raises CheckpointError."""
    return read_fields(path, "config.json")


def read_fields(path: Path, name: str) -> dict[str, Any]:
    """A file of a model. Raises CheckpointError if it is missing, unreadable, or holds something else."""
    try:
        content = model_files(path).read(name, MAX_FILE_BYTES)
    except BadGguf as error:
        raise CheckpointError(path, [str(error).removeprefix(f"{path.name}: ")]) from error
    except FileTooLarge as error:
        raise CheckpointError(path, [str(error)]) from error
    except OSError as error:
        raise CheckpointError(path / name, [error.strerror or str(error)]) from error
    if content is None:
        raise CheckpointError(path / name, ["No such file or directory"])
    return json_object(content, path / name, "")


def vocabulary(path: Path) -> dict[str, int]:
    """Token to id, added tokens included. Raises CheckpointError as `read_fields` does, and for unknown forms."""
    definition = read_fields(path, "tokenizer.json")
    try:
        vocab = definition.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):
            vocab = {one[0]: index for index, one in enumerate(vocab)}
        found = dict(vocab) | {one["content"]: one["id"] for one in definition.get("added_tokens") or []}
        if not all(type(one) is int for one in found.values()):
            raise TypeError("an id is not a number")
        return found
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(path / "tokenizer.json", ["its vocabulary has an unknown form"]) from error
