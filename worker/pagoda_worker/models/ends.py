"""Both ends of a decoder, the embedding and the output matrix: adapters may replace either, and add to either."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from pagoda_worker.checkpoints.source import Source
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.kernels.ops import Added, Ops
from pagoda_worker.kernels.quantized import Weight, by_rows
from pagoda_worker.models.linear import Factors, Linear, Packer
from pagoda_worker.rows.slots import TokenSlots

LANES = 32  # ranks are padded to a multiple of this, which every back end's products support


@dataclass(frozen=True)
class LowRankTable:
    """An embedding with an adapter: (table + scale * A^T B^T) of a token's line.

    lines: A^T [V, R]; `back` is B [H, R] as the back end packs it.
    """

    table: torch.Tensor
    lines: torch.Tensor
    back: Any
    scale: float

    def run(self, token_ids: torch.Tensor, ops: Ops, scale: float | None) -> torch.Tensor:
        """In float32, rounded once."""
        added = ops.logits(self.lines.index_select(0, token_ids), self.back).float() * self.scale
        wide = self.table.index_select(0, token_ids).float() + added
        return (wide if scale is None else wide * scale).to(self.table.dtype)


@dataclass(frozen=True)
class Embedding:
    """table [V, H] and the scale of its lines; `instead`: adapters' versions by slot, plain or low-rank."""

    table: torch.Tensor
    scale: float | None
    instead: dict[int, torch.Tensor | LowRankTable] = field(default_factory=dict)

    def run(self, token_ids: torch.Tensor, ops: Ops, tokens: TokenSlots | None) -> torch.Tensor:
        """token_ids [T] -> [T, H]; see `Decoder.replaced` for `tokens`."""
        x = ops.embed(token_ids, self.table, self.scale)
        for slot, places in tokens.groups if tokens is not None else ():
            if (other := self.instead.get(slot)) is not None:
                x[places] = self._other(other, token_ids[places], ops)
        return x

    def _other(self, other: torch.Tensor | LowRankTable, token_ids: torch.Tensor, ops: Ops) -> torch.Tensor:
        if isinstance(other, LowRankTable):
            return other.run(token_ids, ops, self.scale)
        return ops.embed(token_ids, other, self.scale)

    def fill(self, slot: int, table: torch.Tensor | None, factors: Factors | None, ops: Ops) -> None:
        """Set the slot's adapter: `table` replaces the model's, `factors` add to whichever applies."""
        own = self.table if table is None else table.to(ops.device)
        self.instead.pop(slot, None)
        if factors is not None:
            missing = filled(len(factors.a)) - len(factors.a)
            a, b = (F.pad(one, (0, missing)).to(ops.device) for one in (factors.a.T, factors.b))
            self.instead[slot] = LowRankTable(own, a.contiguous(), ops.pack_linear(b.contiguous()), factors.scale)
        elif own is not self.table:
            self.instead[slot] = own


@dataclass(frozen=True)
class Head:
    """The output matrix. `instead` are adapters' matrices, by slot, as the back end packs them; low-rank additions
    apply to either."""

    linear: Linear
    softcap: float | None
    instead: dict[int, Any] = field(default_factory=dict)

    def logits(
        self, hidden: torch.Tensor, ops: Ops, slots: TokenSlots | None, tokens: TokenSlots | None
    ) -> torch.Tensor:
        """hidden [R, H] -> [R, V]; `tokens` are `slots` if one of them may have a matrix of its own."""
        if tokens is None or not self.instead:
            return ops.logits(hidden, self.linear.packed, self.softcap, self._added(slots))
        logits = hidden.new_empty(len(hidden), next(iter(self.linear.columns.values())).stop, dtype=torch.float32)
        for packed, places in tokens.parts(self.instead, self.linear.packed):
            part = self._added(tokens.at(places))
            logits[places] = ops.logits(hidden[places], packed, self.softcap, part).float()
        return logits

    def fill(self, slot: int, weight: torch.Tensor | None, ops: Ops) -> None:
        self.instead.pop(slot, None)
        if weight is not None:
            self.instead[slot] = ops.pack_linear(weight.to(ops.device))

    def _added(self, slots: TokenSlots | None) -> Added | None:
        return None if slots is None or self.linear.slots is None else Added(self.linear.slots, slots)


def filled(rank: int) -> int:
    """The rank that a rank is padded to."""
    return -(-rank // LANES) * LANES


def content_of(weight: Weight) -> bytes | None:
    """Identifies a matrix after it is packed; None for a quantised one."""
    if not isinstance(weight, torch.Tensor):
        return None
    return hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data).digest()


def load_embedding(spec: DecoderSpec, source: Source, dtype: torch.dtype) -> Embedding:
    return Embedding(source.tensor(f"{spec.names.top(spec.names.embed)}.weight"), _embed_scale(spec, dtype))


def load_head(
    spec: DecoderSpec, packer: Packer, table: torch.Tensor, size: int | None
) -> tuple[Head | None, bytes | None]:
    """The head for the first `size` tokens (see `Decoder`), and, if adapters may replace its matrix, the digest of its
    content. `table` is the embedding's."""
    if size == 0:
        return None, None
    name = spec.names.head
    weight = packer.source.tied(table) if spec.tied else packer.source.linear(name)
    weight = by_rows(weight, lambda lines: lines[:size])
    packed = packer.ops.pack_linear(weight)
    content = None if packer.room is None else content_of(weight)
    linear = Linear(packed, {name: slice(0, weight.shape[0])}, slots=packer.slots(packed, 1))
    return Head(linear, spec.final_softcap), content


def _embed_scale(spec: DecoderSpec, dtype: torch.dtype) -> float | None:
    """The published scale, divided by the scale that the stream is kept divided by; see `load_norm`."""
    if spec.embed_scale is None and spec.residual_scale == 1.0:
        return None
    published = 1.0 if spec.embed_scale is None else torch.tensor(spec.embed_scale, dtype=dtype).item()
    return published / spec.residual_scale
