"""Adapters by digest, each in a slot while rows need it, and after that until another needs the slot.

Who has a slot is looked up among the rows when one is needed, so nothing has to be given back.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from pagoda_proto.adapters.files import AdapterError, identify, inside
from pagoda_proto.adapters.identity import Adapter
from pagoda_worker.adapters.reading import Limits, Module, read_adapter
from pagoda_worker.models.linear import Factors

log = logging.getLogger(__name__)


class Adaptable(Protocol):
    def adapt(self, slot: int, factors: Mapping[str, Factors]) -> None: ...


class Adapters(Protocol):
    """What rows ask for their adapters."""

    count: int

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        """That of an adapter, which is read now if it has none; slots `in_use` stay what they are.

        Raises:
            AdapterError: it cannot be had here.
        """
        ...


class NoAdapters:
    count = 0

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        raise AdapterError("no adapters are served by this worker: neither lora_modules nor lora_dir is given")


NO_ADAPTERS = NoAdapters()


class AdapterStore:
    """`count` slots of a model that adapters may add to at `modules`, for those that lie in the `allowed` paths."""

    def __init__(
        self,
        model: Adaptable,
        modules: Mapping[str, Module],
        dtype: torch.dtype,
        *,
        count: int,
        limits: Limits,
        allowed: Sequence[Path],
    ) -> None:
        self.count = count
        self._model = model
        self._modules = modules
        self._dtype = dtype
        self._limits = limits
        self._allowed = [path.resolve() for path in allowed]
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, the one used last at the end

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        if adapter.digest not in self._slots:
            self._slots[adapter.digest] = self._read(adapter, in_use)
        self._slots.move_to_end(adapter.digest)
        return self._slots[adapter.digest]

    def load(self, path: Path) -> None:
        """Read an adapter before anybody asks for it. Raises AdapterError."""
        self.slot(identify(inside(path, self._allowed), self._limits.num_bytes), ())

    def _read(self, adapter: Adapter, in_use: Collection[int]) -> int:
        began = time.perf_counter()
        path = inside(Path(adapter.path), self._allowed)
        factors = read_adapter(path, adapter.digest, self._modules, self._limits, self._dtype)
        slot = self._free_slot(in_use)
        self._model.adapt(slot, factors)
        log.info("adapter %s read from %s in %.2f s", adapter.digest[:12], path, time.perf_counter() - began)
        return slot

    def _free_slot(self, in_use: Collection[int]) -> int:
        if len(self._slots) < self.count:
            return next(slot for slot in range(self.count) if slot not in self._slots.values())
        for digest, slot in self._slots.items():
            if slot not in in_use:
                del self._slots[digest]
                return slot
        raise AdapterError(f"all {self.count} places for adapters (max_loras) are taken by other rows")
