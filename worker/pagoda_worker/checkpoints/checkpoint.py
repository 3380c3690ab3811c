"""Checkpoints: checked by their headers, memory-mapped, read tensor by tensor. Opens safetensors files.

A file is 8 bytes of header length (little endian), a JSON header name -> {dtype, shape, data_offsets}, then the data.
Every number of a header is checked before use, so a damaged or hostile file is refused and does no harm. Stored tensors
are read through a private mapping. A model packs, converts or copies what it keeps, so the mapping ends with the
checkpoint, and later changes to the file affect no model that was loaded from it.
"""

from __future__ import annotations

import functools
import json
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from pagoda_worker.checkpoints.blocks import BLOCKS
from pagoda_worker.checkpoints.fingerprint import Entry, content_digest

MAX_HEADER_BYTES = 100 * 1024 * 1024
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
LOADABLE = ("F64", "F32", "F16", "BF16")
NAMES_SHOWN = 8

Progress = Callable[[int, int], None]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; `problems` holds one line per fault."""

    def __init__(self, path: Path, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__(f"{path}: " + "; ".join(self.problems))


@dataclass(frozen=True)
class Wanted:
    """What a model expects of a tensor's header. If any floating-point dtype will do, blocks are accepted, too."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = LOADABLE
    optional: bool = False

    def takes(self, dtype: str) -> bool:
        return dtype in self.dtypes or (self.dtypes == LOADABLE and dtype in BLOCKS)


@dataclass
class Checkpoint:
    """All tensors of a model. Use as a context manager: leaving it releases the mappings.

    `undone`: name -> function that turns the stored tensor into the one that the model's authors published. It may move
    rows, or change numbers of a tensor that is not in blocks.
    """

    path: Path
    entries: dict[str, Entry]
    digest: str  # of its content, see `fingerprint`
    progress: Progress | None = None
    undone: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    bytes_read: int = 0
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    @functools.cached_property  # read with every tensor
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def dtype(self) -> torch.dtype | None:
        """The floating-point dtype of most of the weights' bytes."""
        totals: dict[str, int] = {}
        for entry in self.entries.values():
            if entry.dtype in LOADABLE:
                totals[entry.dtype] = totals.get(entry.dtype, 0) + entry.num_bytes
        return DTYPES[max(totals, key=lambda name: totals[name])] if totals else None

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in `dtype` on `device`, in memory of its own. Counts as progress."""
        stored, kind = self.stored(name), self.entries[name].dtype
        if kind in BLOCKS:
            return BLOCKS[kind].widened(stored.to(device), dtype)
        return stored.to(device=device, dtype=dtype, copy=True)

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as stored, a view of the file; for blocks, their bytes. Counts as progress."""
        entry = self.entries[name]
        if entry.num_bytes:
            raw = torch.frombuffer(
                self._map(entry.file, entry.end), dtype=torch.uint8, count=entry.num_bytes, offset=entry.begin
            )
        else:
            raw = torch.empty(0, dtype=torch.uint8)
        if raw.data_ptr() % 8:
            raw = raw.clone()
        self.bytes_read += entry.num_bytes
        if self.progress is not None:
            self.progress(min(self.bytes_read, self.num_bytes), self.num_bytes)
        dtype = DTYPES.get(entry.dtype)
        tensor = raw.view(*entry.shape[:-1], -1) if dtype is None else raw.view(dtype).view(entry.shape)
        return self.undone[name](tensor) if name in self.undone else tensor

    def check(
        self,
        expected: Mapping[str, Wanted],
        ignored_suffixes: tuple[str, ...],
        tied: bool,
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        """Compare names, shapes and dtypes with what the model needs, before anything is loaded.

        A tied model may carry a copy of its embedding as `lm_head.weight`.

        Raises:
            CheckpointError: with everything that is missing, unexpected, misshapen or of a wrong dtype.
        """
        extra = {name for name in self.entries if not name.endswith(ignored_suffixes)} - set(expected)
        extra = {name for name in extra if not name.startswith(ignored_prefixes)}
        if tied:
            extra.discard("lm_head.weight")
        found = {name: self.entries[name] for name in expected if name in self.entries}
        missing = sorted(name for name, wanted in expected.items() if name not in found and not wanted.optional)
        shapes = [
            f"{name} has shape {list(entry.shape)}, expected {list(expected[name].shape)}"
            for name, entry in found.items()
            if entry.shape != expected[name].shape
        ]
        dtypes = [
            f"{name} is {entry.dtype}, expected {' or '.join(expected[name].dtypes)}"
            for name, entry in found.items()
            if not expected[name].takes(entry.dtype)
        ]
        problems = [
            *_listing("missing tensors", missing),
            *_listing("unexpected tensors", sorted(extra)),
            *_listing("wrong shapes", shapes),
            *_listing("wrong dtypes", dtypes),
        ]
        if problems:
            raise CheckpointError(self.path, problems)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        # A mapping that tensors still refer to is closed by the last such tensor.
        self._maps.clear()

    def _map(self, file: Path, end: int) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:  # ValueError: it has become empty
                raise CheckpointError(file, [f"cannot be mapped into memory: {_told(error)}"]) from error
        if len(self._maps[file]) < end:
            raise CheckpointError(file, ["the file has become shorter than its header says"])
        return self._maps[file]


def open_checkpoint(path: Path, progress: Progress | None = None) -> Checkpoint:
    """Read the headers of all safetensors files of a model directory, and enough of the tensors to identify them.

    Raises:
        CheckpointError: there are no such files, or one of them is malformed.
    """
    entries: dict[str, Entry] = {}
    for file, names in _files(path):
        header, size = _header(file)
        found = _entries(file, header, size)
        entries |= {name: found[name] for name in (found if names is None else names & set(found))}
        if names is not None and names - set(found):
            raise CheckpointError(
                path, _listing(f"tensors that {INDEX} names but {file.name} lacks", sorted(names - set(found)))
            )
    return Checkpoint(path, entries, digest_of(path, entries), progress)


def digest_of(path: Path, entries: Mapping[str, Entry]) -> str:
    """See `content_digest`. Raises CheckpointError if a file cannot be read."""
    try:
        return content_digest(entries)
    except EOFError as error:
        raise CheckpointError(Path(error.args[0]), ["the file is shorter than its header says"]) from error
    except OSError as error:
        raise CheckpointError(path, [_told(error)]) from error


def _files(path: Path) -> list[tuple[Path, set[str] | None]]:
    """The files to read, and the tensors of each according to the index (None: all)."""
    if (path / INDEX).exists():
        shards: dict[str, set[str]] = {}
        for name, file in _weight_map(path).items():
            shards.setdefault(file, set()).add(name)
        return [(path / file, names) for file, names in sorted(shards.items())]
    if (path / SINGLE).exists():
        return [(path / SINGLE, None)]
    if not path.is_dir():
        raise CheckpointError(path, ["no such directory"])
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if others:
        advice = f"only {', '.join(others[:3])} found; convert the model to safetensors, other formats are not loaded"
        raise CheckpointError(path, [advice])
    raise CheckpointError(path, [f"neither {SINGLE} nor {INDEX} found"])


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path / INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(path, [f"{INDEX} has no 'weight_map' of tensor names to files"])
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        raise CheckpointError(path, _listing(f"{INDEX} names files outside the directory", outside))
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, [_told(error)]) from error
    return json_object(content, path, "")


def json_object(content: bytes, file: Path, subject: str) -> dict[str, Any]:
    """Raises CheckpointError, naming `subject` of the `file`, unless it is a JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, [f"{subject}not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(file, [f"{subject}not a JSON object"])
    return value


def entries_of(file: Path, content: bytes | bytearray, most_header_bytes: int) -> dict[str, Entry]:
    """The entries in the header of a file with this content. Raises CheckpointError if it is malformed."""
    length = struct.unpack_from("<Q", content)[0] if len(content) >= 8 else 0
    if length > most_header_bytes or not 2 <= length <= len(content) - 8:
        raise CheckpointError(file, [f"invalid header of {length} bytes in a file of {len(content)}"])
    return _entries(file, bytes(memoryview(content)[8 : 8 + length]), len(content))


def _header(file: Path) -> tuple[bytes, int]:
    """Header bytes and file size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if length > MAX_HEADER_BYTES or not 2 <= length <= size - 8:
                raise CheckpointError(file, [f"invalid header of {length} bytes in a file of {size}"])
            return opened.read(length), size
    except OSError as error:
        raise CheckpointError(file, [_told(error)]) from error


def _entries(file: Path, header: bytes, size: int) -> dict[str, Entry]:
    fields = json_object(header, file, "header is ")
    start = 8 + len(header)
    fields.pop("__metadata__", None)
    parsed = {name: _entry(file, value, start) for name, value in fields.items()}
    bad = sorted(name for name, entry in parsed.items() if entry is None or entry.end > size)
    if bad:
        raise CheckpointError(file, _listing("entries that do not fit the file or their own shape", bad))
    return {name: entry for name, entry in parsed.items() if entry is not None}


def _entry(file: Path, value: Any, start: int) -> Entry | None:
    """One header entry, or None if it contradicts itself."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        return None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        return None
    if not isinstance(dtype, str) or dtype not in DTYPES or end - begin != prod(shape) * DTYPES[dtype].itemsize:
        return None
    return Entry(file, dtype, tuple(shape), start + begin, start + end)


def _told(error: Exception) -> str:
    """Without the path, which the message names anyway."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _listing(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return [f"{what}: {', '.join(names[:NAMES_SHOWN])}{more}"]
