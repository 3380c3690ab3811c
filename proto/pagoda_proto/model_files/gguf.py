"""Reads GGUF files. The whole header is validated before any tensor is read, each number where it occurs.

    "GGUF", version uint32, counts of tensors and of pairs uint64
    pairs: key, type uint32, value          strings: length uint64, bytes; arrays: type uint32, length uint64, values
    tensors: name, number of dimensions uint32, dimensions uint64 (the fastest first), type uint32, offset uint64
    data: from the next multiple of `general.alignment`, offsets count from there

All little endian. Values are skipped over and only their places kept; each is read when asked for, so only a reader
that needs the vocabulary pays for it. Interpreting the tensors is up to the worker.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_PAIRS = 2**16
MAX_TENSORS = 2**17
MAX_KEY_BYTES = 2**16
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 2**28
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**16
STRING, ARRAY, BOOL = 8, 9, 7
# Value type number -> `struct` format.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
NUMBERS = {form: struct.Struct(f"<{form}") for form in SCALARS.values()}
LENGTH = NUMBERS["Q"]  # of a string, before it
# Tensor type number -> name, values per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2), 39: ("MXFP4", 32, 17),
}  # fmt: skip
UNREAD_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

T = TypeVar("T", str, int, float, bool)


class BadGguf(ValueError):
    """A GGUF file that cannot be used; the message says why."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path.name}: {problem}")


@dataclass(frozen=True)
class GgufTensor:
    """`shape` has the slowest dimension first, as in torch; `begin` and `end` are offsets in `file`."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _Place:
    """The type of a value, the type and number of its items if it is an array, and its offset."""

    kind: int
    item: int
    count: int
    at: int


class _Header:
    """Reads a header sequentially. Raises BadGguf for anything invalid."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def number(self, kind: str) -> Any:
        form = NUMBERS[kind]
        self.have(form.size)
        self.at += form.size
        return form.unpack_from(self.data, self.at - form.size)[0]

    def have(self, count: int) -> None:
        if count > self.size - self.at:
            self._ended()

    def _ended(self) -> NoReturn:
        raise BadGguf(self.path, "the file ends within its header")

    def text(self, most: int) -> str:
        length = self.number("Q")
        self._limit(length, most)
        self.have(length)
        self.at += length
        try:
            return self.data[self.at - length : self.at].decode()
        except UnicodeDecodeError as error:
            raise BadGguf(self.path, f"a string that is not UTF-8: {error}") from error

    def _limit(self, length: int, most: int) -> None:
        if length > most:
            raise BadGguf(self.path, f"a string of {length} bytes exceeds the limit of {most}")

    def _skip_strings(self, count: int) -> None:
        """Vocabularies have hundreds of thousands, so this loop calls nothing that it can do without."""
        data, at, unpack_from = self.data, self.at, LENGTH.unpack_from
        for _ in range(count):
            if at > self.size - LENGTH.size:
                self._ended()
            (length,) = unpack_from(data, at)
            if length > MAX_STRING_BYTES:
                self._limit(length, MAX_STRING_BYTES)
            at += LENGTH.size + length
        self.at = at
        self.have(0)

    def value(self, key: str) -> _Place:
        kind = self.number("I")
        if kind == ARRAY:
            item, count = self.number("I"), self.number("Q")
            place = _Place(ARRAY, item, count, self.at)
            self._skip_items(key, item, count)
            return place
        place = _Place(kind, kind, 1, self.at)
        self._skip_items(key, kind, 1)
        return place

    def _skip_items(self, key: str, kind: int, count: int) -> None:
        if kind in SCALARS:
            size = count * NUMBERS[SCALARS[kind]].size
            self.have(size)
            self.at += size
        elif kind == STRING:
            self.have(LENGTH.size * count)
            self._skip_strings(count)
        else:
            raise BadGguf(self.path, f"{key!r} has values of type {kind}, which is unknown or nested")

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, type, shape and offset."""
        name, dimensions = self.text(MAX_NAME_BYTES), self.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise BadGguf(self.path, f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return name, self.number("I"), shape[::-1], self.number("Q")


class Gguf:
    """One file, or the parts of one model. The metadata are those of the first part.

    Attributes:
        path: The file, or the first part.
        tensors: Name -> location; every location is inside its file, and no two overlap.
    """

    def __init__(self, path: Path, places: Mapping[str, _Place], tensors: Mapping[str, GgufTensor]) -> None:
        self.path = path
        self.tensors = tensors
        self._places = places
        self._arrays: dict[str, list[Any]] = {}  # those read so far

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._places)

    def maybe(self, key: str, kind: type[T]) -> T | None:
        """A value that may be missing. Raises BadGguf if it is of another type."""
        place = self._places.get(key)
        if place is None:
            return None
        found = None if place.kind == ARRAY else _python_type(place.kind)
        if found is not kind and (found, kind) != (int, float):
            raise self.bad(f"{key!r} must be of type {kind.__name__}")
        (value,) = self._read(place)
        return kind(plain_number(value) if SCALARS.get(place.kind) == "f" else value)

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A value that must exist, unless there is a default."""
        value = self.maybe(key, kind)
        if value is None:
            value = default
        if value is None:
            raise self.bad(f"{key!r} is missing")
        return value

    def items(self, key: str, kind: type[T]) -> list[T] | None:
        """An array that may be missing. Raises BadGguf if its values are of another type."""
        place = self._places.get(key)
        if place is None:
            return None
        if place.kind != ARRAY or _python_type(place.item) is not kind:
            raise self.bad(f"{key!r} must be an array of type {kind.__name__}")
        if key not in self._arrays:
            self._arrays[key] = self._read(place)
        return self._arrays[key]

    def is_array(self, key: str) -> bool:
        return key in self._places and self._places[key].kind == ARRAY

    def floats(self, name: str) -> list[float]:
        """The values of a small tensor of type F32."""
        tensor = self.tensors[name]
        if tensor.kind != "F32" or len(tensor.shape) != 1:
            raise self.bad(f"tensor {name!r} must be one-dimensional and F32")
        data = _opened(tensor.file, lambda data: data[tensor.begin : tensor.end])
        return [plain_number(value) for value in struct.unpack(f"<{tensor.shape[0]}f", data)]

    def bad(self, problem: str) -> BadGguf:
        return BadGguf(self.path, problem)

    def _read(self, place: _Place) -> list[Any]:
        def values(data: mmap.mmap) -> list[Any]:
            if place.item == STRING:
                header = _Header(self.path, data)
                header.at = place.at
                return [header.text(MAX_STRING_BYTES) for _ in range(place.count)]
            found = struct.unpack_from(f"<{place.count}{SCALARS[place.item]}", data, place.at)
            if place.item == BOOL:
                return [value != 0 for value in found]
            return list(found)

        try:
            return _opened(self.path, values)
        except struct.error as error:
            raise self.bad("the file has become shorter than its header says") from error


def plain_number(value: float) -> float:
    """A float32 as a person would write it: with the fewest digits that give the same float32."""
    for digits in range(1, 9):
        shorter = float(f"{value:.{digits}g}")
        if abs(shorter) < 3e38 and struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value


def read_gguf(path: Path) -> Gguf:
    """Read the header of a file, and of the further parts that it names.

    Raises:
        BadGguf: one of them is invalid.
    """
    whole = _read_file(path)
    count = whole.take("split.count", int, 0)
    if count <= 1:
        return whole
    paths = part_paths(path)
    if paths is None or len(paths) != count or paths[0] != path:
        raise whole.bad(
            f"is part of {count}; name the first one, {path.stem.rsplit('-', 3)[0]}-00001-of-{count:05}.gguf"
        )
    tensors = dict(whole.tensors)
    for other in paths[1:]:
        part = _read_file(other)
        if part.tensors.keys() & tensors.keys():
            raise part.bad("repeats tensors of an earlier part")
        tensors |= part.tensors
    said = whole.maybe("split.tensors.count", int)
    if said is not None and said != len(tensors):
        raise whole.bad(f"the parts have {len(tensors)} tensors instead of {said}")
    return Gguf(path, whole._places, tensors)


def part_paths(path: Path) -> list[Path] | None:
    """All parts of the set to which `path` belongs by its name; None if its name is not that of a part."""
    stem, dash, rest = path.stem.rpartition("-of-")
    prefix, _, number = stem.rpartition("-")
    if not dash or not prefix or not (len(rest) == len(number) == 5 and (rest + number).isdecimal()):
        return None
    return [path.with_name(f"{prefix}-{index:05}-of-{rest}.gguf") for index in range(1, int(rest) + 1)]


def _read_file(path: Path) -> Gguf:
    return _opened(path, lambda data: _parsed(path, _Header(path, data)))


R = TypeVar("R")


def _opened(path: Path, read: Callable[[mmap.mmap], R]) -> R:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(data)
    except OSError as error:
        raise BadGguf(path, error.strerror or str(error)) from error
    except ValueError as error:
        if isinstance(error, BadGguf):
            raise
        raise BadGguf(path, "is empty") from error


def _parsed(path: Path, header: _Header) -> Gguf:
    num_tensors, num_pairs = _opening(path, header)
    places: dict[str, _Place] = {}
    for _ in range(num_pairs):
        key = header.text(MAX_KEY_BYTES)
        if key in places:
            raise BadGguf(path, f"{key!r} occurs twice")
        places[key] = header.value(key)
    infos = [header.tensor() for _ in range(num_tensors)]
    alone = Gguf(path, places, {})
    alignment = alone.take("general.alignment", int, 32)
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise BadGguf(path, f"'general.alignment' is {alignment}, not a power of two up to {MAX_ALIGNMENT}")
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in infos:
        if name in tensors:
            raise BadGguf(path, f"tensor {name!r} occurs twice")
        if offset % alignment:
            raise BadGguf(path, f"tensor {name!r} begins at {offset}, not a multiple of {alignment}")
        tensors[name] = _placed(path, header.size, (name, kind, shape, start + offset))
    _refuse_overlap(path, tensors)
    return Gguf(path, places, tensors)


def _opening(path: Path, header: _Header) -> tuple[int, int]:
    """Read the start of the header: the numbers of tensors and of pairs."""
    header.have(4)
    header.at = 4
    if header.data[:4] != MAGIC:
        raise BadGguf(path, "is not a GGUF file")
    version = header.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        why = (
            "is big-endian, which is not supported"
            if swapped
            else f"has version {version}, but only 2 and 3 are supported"
        )
        raise BadGguf(path, why)
    num_tensors, num_pairs = header.number("Q"), header.number("Q")
    if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
        raise BadGguf(path, f"{num_tensors} tensors and {num_pairs} pairs exceed the limits")
    return num_tensors, num_pairs


def _placed(path: Path, size: int, info: tuple[str, int, tuple[int, ...], int]) -> GgufTensor:
    name, number, shape, begin = info
    if number not in TENSOR_TYPES:
        known = f"{UNREAD_TYPES.get(number, number)}, which is not supported"
        raise BadGguf(
            path, f"tensor {name!r} is of type {known}; supported are {', '.join(n for n, *_ in TENSOR_TYPES.values())}"
        )
    kind, values, num_bytes = TENSOR_TYPES[number]
    if shape[-1] % values or not all(shape):
        raise BadGguf(path, f"tensor {name!r} of shape {list(shape)} does not consist of blocks of {values} values")
    end = begin + prod(shape) // values * num_bytes
    if end > size:
        raise BadGguf(path, f"tensor {name!r} of shape {list(shape)} and type {kind} ends beyond the file")
    return GgufTensor(path, kind, shape, begin, end)


def _refuse_overlap(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    ordered = sorted(tensors.items(), key=lambda item: item[1].begin)
    for (left, one), (right, other) in pairwise(ordered):
        if other.begin < one.end:
            raise BadGguf(path, f"tensors {left!r} and {right!r} overlap")


def _python_type(kind: int) -> type[Any]:
    if kind == BOOL:
        return bool
    if kind == STRING:
        return str
    return float if SCALARS[kind] in "fd" else int
