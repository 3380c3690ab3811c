"""Adapters made up where they are needed, as the weights are: put into the slots of a model, and no file is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from zlib import crc32

import torch
from bench.device.models import SPREAD

from pagoda_proto.adapters.files import AdapterError
from pagoda_proto.adapters.identity import Adapter
from pagoda_worker.adapters.store import Room
from pagoda_worker.checkpoints.spec import linear_layers
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.linear import AdapterTensors, Factors


class MadeUpAdapters:
    """See `store.Adapters`: those `known` have their slots from the beginning, in this order; there are no others.

    `num_bytes`: what a step reads of them all.
    """

    named: Mapping[str, Adapter] = {}
    room = Room()

    def __init__(self, count: int, num_bytes: int) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self.known = [Adapter(f"{slot:064x}", "made up") for slot in range(count)]

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        if adapter not in self.known:
            raise AdapterError("it was not made up")
        return self.known.index(adapter)


def slot_options(count: int, rank: int) -> dict[str, str | int]:
    """Worker options with room for so many; from their directory nothing is read."""
    return {"lora_dir": str(Path(__file__).parent), "max_loras": count, "max_lora_rank": rank} if count else {}


def adapt(loaded: LoadedModel, count: int, rank: int) -> MadeUpAdapters:
    """Fill `count` slots of a model that was loaded with `slot_options`: each adds to every linear layer of the stack
    but for experts, which have no place for it."""
    decoder, read = loaded.model, 0
    assert isinstance(decoder, Decoder)
    places = linear_layers(decoder.spec)
    layers = {name: places[name] for name in decoder.adapted if name != decoder.spec.names.head}
    for slot in range(count):
        factors = {name: _factors(loaded, f"{slot} {name}", *shape, rank) for name, shape in layers.items()}
        read += sum(one.a.nbytes + one.b.nbytes for one in factors.values())
        with torch.inference_mode():
            decoder.adapt(slot, AdapterTensors(factors))
    return MadeUpAdapters(count, read)


def _factors(loaded: LoadedModel, name: str, outputs: int, inputs: int, rank: int) -> Factors:
    generator = torch.Generator(loaded.device).manual_seed(crc32(name.encode()))
    a, b = (torch.empty(size, dtype=loaded.dtype, device=loaded.device) for size in ((rank, inputs), (outputs, rank)))
    return Factors(a.normal_(0, SPREAD, generator=generator), b.normal_(0, SPREAD, generator=generator), 1.0)
