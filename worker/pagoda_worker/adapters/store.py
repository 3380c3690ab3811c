"""Adapters by digest, each in a slot while rows need it, and afterwards until another adapter needs the slot.

Slots in use are looked up among the rows when one is needed, so nothing has to be released.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from pagoda_proto.adapters.files import AdapterError, identify, inside
from pagoda_proto.adapters.identity import Adapter
from pagoda_worker.adapters.places import Places
from pagoda_worker.adapters.reading import Limits, read_adapter
from pagoda_worker.models.linear import AdapterTensors

log = logging.getLogger(__name__)

MIB = 2**20


class Adaptable(Protocol):
    def adapt(self, slot: int, tensors: AdapterTensors) -> None: ...

    def differing(self, tensors: AdapterTensors) -> AdapterTensors: ...

    def adapter_bytes(self, ranks: Mapping[str, int], whole: Iterable[str]) -> int: ...


class Adapters(Protocol):
    """How rows get their adapters."""

    count: int
    named: Mapping[str, Adapter]  # by the names in `lora_modules`

    @property
    def room(self) -> Room: ...

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        """The slot of an adapter, which is read now if it has none; slots `in_use` are not reused.

        Raises:
            AdapterError: it is not available here.
        """
        ...


class Room(NamedTuple):
    """Memory for `most` adapters of up to `each_bytes`, of which `taken_bytes` are taken."""

    most: int = 0
    each_bytes: int = 0
    taken_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return max(0, self.most * self.each_bytes - self.taken_bytes)


class NoAdapters:
    count = 0
    named: Mapping[str, Adapter] = {}
    room = Room()

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        raise AdapterError("no adapters are served by this worker: neither lora_modules nor lora_dir is given")


NO_ADAPTERS = NoAdapters()


class AdapterStore:
    """`count` slots of a model whose `places` adapters may change; only adapters below the `allowed` paths are read."""

    def __init__(
        self,
        model: Adaptable,
        places: Places,
        dtype: torch.dtype,
        *,
        count: int,
        limits: Limits,
        allowed: Sequence[Path],
    ) -> None:
        self.count = count
        self.named: Mapping[str, Adapter] = {}
        self._model = model
        self._places = places
        self._dtype = dtype
        self._limits = limits
        self._allowed = [path.resolve() for path in allowed]
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, least recently used first
        self._sizes: dict[int, int] = {}  # bytes, by slot
        self._each_bytes: int | None = None
        self._most = count

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        if adapter.digest not in self._slots:
            self._slots[adapter.digest] = self._read(adapter, in_use)
        self._slots.move_to_end(adapter.digest)
        return self._slots[adapter.digest]

    def load(self, name: str, path: Path) -> int:
        """Read a named adapter before any request uses it; returns the bytes it takes. Raises AdapterError."""
        adapter = identify(inside(path, self._allowed), self._limits.num_bytes)
        self.named = {**self.named, name: adapter}
        return self._sizes[self.slot(adapter, ())]

    def bound(self, each_bytes: int, count: int) -> None:
        """From now on, refuse adapters larger than `each_bytes`; there are never more than `count`."""
        self._each_bytes, self._most = each_bytes, min(count, self.count)

    @property
    def room(self) -> Room:
        return Room(self._most, self._each_bytes or 0, sum(self._sizes.values()))

    def _read(self, adapter: Adapter, in_use: Collection[int]) -> int:
        began = time.perf_counter()
        path = inside(Path(adapter.path), self._allowed)
        read = read_adapter(path, adapter.digest, self._places, self._limits, self._dtype)
        tensors = self._model.differing(read)
        ranks = {name: one.a.shape[0] for name, one in tensors.factors.items()}
        size = self._model.adapter_bytes(ranks, tensors.whole)
        if self._each_bytes is not None and size > self._each_bytes:
            rule = f"more than the {self._each_bytes / MIB:.1f} MiB reserved for each adapter (max_lora_gib)"
            raise AdapterError(f"it takes {size / MIB:.1f} MiB of memory, {rule}")
        slot = self._free_slot(in_use)
        self._model.adapt(slot, tensors)
        self._sizes[slot] = size
        log.info("adapter %s read from %s in %.2f s", adapter.digest[:12], path, time.perf_counter() - began)
        return slot

    def _free_slot(self, in_use: Collection[int]) -> int:
        if len(self._slots) < self.count:
            return next(slot for slot in range(self.count) if slot not in self._slots.values())
        for digest, slot in self._slots.items():
            if slot not in in_use:
                del self._slots[digest]
                return slot
        raise AdapterError(f"all {self.count} adapter slots (max_loras) are in use by other rows")
