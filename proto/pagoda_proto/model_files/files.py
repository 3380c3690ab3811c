"""Reads a model by file names, whether it is a directory of files or a GGUF file from which they are derived."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pagoda_proto.model_files.gguf import Gguf, part_paths, read_gguf
from pagoda_proto.model_files.gguf_config import config_of, generation_of
from pagoda_proto.model_files.gguf_tokenizer import tokenizer_config_of, tokenizer_of

SUFFIX = ".gguf"
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024


class FileTooLarge(ValueError):
    """The file is larger than its reader accepts."""


class ModelFiles(Protocol):
    """The files of a model, apart from its weights."""

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """A file's content; None if there is no such file.

        Raises:
            OSError: it cannot be read.
            FileTooLarge: it has more than `max_bytes`.
            BadGguf: it would be derived from a GGUF file that lacks the necessary metadata.
        """


def model_files(path: Path) -> ModelFiles:
    return GgufFiles(path) if is_gguf(path) else DirectoryFiles(path)


def is_gguf(path: Path) -> bool:
    """Judged by the name, whether or not the file exists."""
    return path.suffix == SUFFIX and not path.is_dir()


def gguf_in(directory: Path) -> list[Path]:
    """The GGUF models of a directory: the file of each, or its first part."""
    found = sorted(path for path in directory.iterdir() if is_gguf(path))
    return [path for path in found if (parts := part_paths(path)) is None or parts[0] == path]


class DirectoryFiles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str, max_bytes: int) -> bytes | None:
        path = self._root / name
        if not path.is_file():
            return None
        if path.stat().st_size > max_bytes:
            raise FileTooLarge(f"{name}: larger than {max_bytes} bytes")
        return path.read_bytes()


class GgufFiles:
    """The files of the model from which a GGUF file was converted, as far as it says; each is derived when read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _gguf(self) -> Gguf:
        return read_gguf(self._path)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        make = _MADE.get(name)
        if make is None:
            return None
        content = make(self._gguf)
        if isinstance(content, Mapping):
            content = json.dumps(content, ensure_ascii=False)
        encoded = content.encode("utf-8", "surrogatepass")
        if len(encoded) > max_bytes:
            raise FileTooLarge(f"{self._path.name}: its {name} is larger than {max_bytes} bytes")
        return encoded


_MADE: Mapping[str, Callable[[Gguf], Mapping[str, Any] | str]] = {
    "config.json": config_of,
    "generation_config.json": generation_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
}
