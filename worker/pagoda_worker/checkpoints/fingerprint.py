"""Identifies a model by a digest of its arithmetic and of the weights themselves, the same for the same content.

A digest of every byte would read a checkpoint twice. Of a large tensor only blocks at even distances are read: two
trainings of one model differ nearly everywhere, so they differ there. A change confined to a few values of a large
tensor can escape. How tensors are distributed over files does not matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4096
BLOCKS_PER_TENSOR = 32
WHOLE_BYTES = BLOCK_BYTES * BLOCKS_PER_TENSOR  # tensors up to this size are read whole


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies; `begin` and `end` are offsets in its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def content_digest(tensors: Mapping[str, Entry]) -> str:
    """A digest of names, dtypes, shapes and bytes.

    Raises:
        OSError: a file cannot be read.
        EOFError: a file is shorter than its header says; the argument is its path.
    """
    of_tensor: dict[str, bytes] = {}
    in_files = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].begin))
    for file, group in groupby(in_files, key=lambda item: item[1].file):
        with ExitStack() as stack:
            descriptor = os.open(file, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if hasattr(os, "posix_fadvise"):  # no readahead between the blocks
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for name, tensor in group:
                of_tensor[name] = _digest_of(descriptor, tensor)
    whole = sha256()
    for name in sorted(of_tensor):
        tensor = tensors[name]
        whole.update(json.dumps([name, tensor.dtype, tensor.shape]).encode() + of_tensor[name])
    return whole.hexdigest()


def fingerprint(fields: Mapping[str, Any], harmless: Iterable[str], digest: str) -> str:
    """Which model: a digest of `fields` of config.json and the weights' digest.

    `harmless` fields change no logit; all others count, in whatever order.
    """
    telling = {name: value for name, value in fields.items() if name not in set(harmless)}
    return sha256(f"{json.dumps(telling, sort_keys=True)}\n{digest}".encode()).hexdigest()[:16]


def _digest_of(descriptor: int, tensor: Entry) -> bytes:
    digest = sha256()
    for start, count in _blocks(tensor.num_bytes):
        data = os.pread(descriptor, count, tensor.begin + start)
        if len(data) != count:
            raise EOFError(tensor.file)
        digest.update(data)
    return digest.digest()


def _blocks(num_bytes: int) -> list[tuple[int, int]]:
    """(start, length) of the parts to read of a tensor: all of it, or blocks from its first byte to its last."""
    if num_bytes <= WHOLE_BYTES:
        return [(0, num_bytes)] if num_bytes else []
    last = num_bytes - BLOCK_BYTES
    return [(last * index // (BLOCKS_PER_TENSOR - 1), BLOCK_BYTES) for index in range(BLOCKS_PER_TENSOR)]
