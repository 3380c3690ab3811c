"""The linear layers of a model: matrices that read the same input become one matrix, merged here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.source import Source, joined
from pagoda_worker.checkpoints.spec import MlpShape, MoeShape
from pagoda_worker.kernels.ops import Added, Expert, LowRank, Ops, SlotRoom
from pagoda_worker.kernels.quantized import Weight, by_rows
from pagoda_worker.kernels.segments import segmented
from pagoda_worker.rows.slots import TokenSlots


@dataclass(frozen=True)
class Linear:
    """One or several matrices as a back end packs them.

    Attributes:
        packed: The packed matrix.
        columns: The outputs of each part, by name.
        activation: Of gate and up, giving act(gate) * up, or of all outputs if not `gated`; "" for none.
        order: Which output is at each place, if not in the stored order.
        slots: What adapters add, as the back end keeps it; None if adapters cannot add to it.
    """

    packed: Any
    columns: Mapping[str, slice]
    activation: str = ""
    gated: bool = True
    order: Sequence[int] | None = None
    slots: Any = None

    def linear(self, x: torch.Tensor, ops: Ops, tokens: TokenSlots | None = None) -> torch.Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] for gate and up; `ops` must belong to the back end that packed it."""
        added = None if tokens is None else Added(self.slots, tokens)
        if not self.activation:
            return ops.linear(x, self.packed, added)
        if self.gated:
            return ops.gated_linear(x, self.packed, self.activation, added)
        return ops.activated_linear(x, self.packed, self.activation, added)

    def fill(self, slot: int, factors: Mapping[str, Factors], ops: Ops) -> None:
        """Let a slot's adapter add `factors` (by part name), and nothing to the other parts."""
        ops.fill_slot(self.slots, slot, self._joined(factors) if factors else None)

    def _joined(self, factors: Mapping[str, Factors]) -> LowRank:
        ranks = list(accumulate((one.a.shape[0] for one in factors.values()), initial=0))
        first = next(iter(factors.values())).a
        outputs = max(columns.stop for columns in self.columns.values())
        b, spans = first.new_zeros(outputs, ranks[-1]), torch.zeros(outputs, 2, dtype=torch.int32)
        for (part, one), (start, end) in zip(factors.items(), pairwise(ranks), strict=True):
            b[self.columns[part], start:end] = one.b
            spans[self.columns[part]] = torch.tensor([start, end], dtype=torch.int32)
        if self.order is not None:
            places = torch.tensor(self.order)
            b, spans = b[places.to(b.device)], spans[places]
        scales = torch.cat([torch.full((one.a.shape[0],), one.scale) for one in factors.values()])
        return LowRank(torch.cat([one.a for one in factors.values()]), b, scales, spans)


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to one matrix [N, K] of a checkpoint: scale * B A; a [r, K], b [N, r] in the run dtype."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class AdapterTensors(NamedTuple):
    """What an adapter adds, by names of matrices, and the tensors it replaces in the model."""

    factors: Mapping[str, Factors]
    whole: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Mlp:
    up: Linear  # and gate, if there is one
    down: Linear

    def run(self, x: torch.Tensor, ops: Ops, tokens: TokenSlots | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]"""
        return self.down.linear(self.up.linear(x, ops, tokens), ops, tokens)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.up, self.down


@dataclass(frozen=True)
class Packer:
    """Makes the linear layers of a model from a checkpoint's. `dtype`: for matrices that are not quantised alike;
    `room`: for adapters, if any."""

    ops: Ops
    source: Source
    dtype: torch.dtype
    room: SlotRoom | None = None

    def pack(
        self,
        prefix: str,
        parts: Sequence[str],
        biased: bool,
        *,
        order: Sequence[int] | None = None,
        segments: int = 1,
    ) -> Linear:
        """The matrices `prefix` + part, stacked, with their biases; for `segments` see `kernels.segments`.

        `order`: which output is at each place; None keeps the stored order.
        """
        weight, bias, columns = self._joined(prefix, parts, biased, order)
        weight, segments = segmented(weight, segments)
        packed = self.ops.pack_linear(weight, bias, segments)
        return Linear(packed, columns, order=order, slots=self.slots(packed, len(parts)))

    def pack_up(self, prefix: str, parts: Sequence[str], mlp: MlpShape) -> Linear:
        """Gate and up, or up alone."""
        weight, bias, columns = self._joined(prefix, parts, mlp.bias, None)
        pack = self.ops.pack_gated if mlp.gated else self.ops.pack_linear
        packed = pack(weight, bias)
        slots = self.slots(packed, len(parts), gated=mlp.gated)
        return Linear(packed, columns, mlp.activation, mlp.gated, slots=slots)

    def slots(self, packed: Any, num_parts: int, *, gated: bool = False) -> Any:
        if self.room is None:
            return None
        return self.ops.new_slots(packed, self.room.count, num_parts * self.room.rank, gated=gated)

    def pack_experts(self, prefix: str, names: Names, moe: MoeShape) -> Any:
        """Gate and up, and down, of all experts of a layer, and what biases their choice besides the router."""
        count = moe.routing.experts
        favour = self.source.exact(prefix + names.favour) if moe.favour else None
        if "{}" in names.expert_down:
            experts: Iterable[Expert] = (self._expert(prefix, names, expert, moe.bias) for expert in range(count))
        else:
            experts = self._stacked_experts(prefix, names, moe)
        return self.ops.pack_experts(experts, count, favour)

    def _expert(self, prefix: str, names: Names, expert: int, biased: bool) -> Expert:
        up, down = [prefix + part.format(expert) for part in names.expert_up], prefix + names.expert_down.format(expert)
        matrices = (
            joined([self.source.linear(part) for part in up], self.dtype, self.ops.quantize),
            self.source.linear(down),
        )
        if not biased:
            return Expert(*matrices)
        up_bias = torch.cat([self.source.tensor(f"{part}.bias") for part in up])
        return Expert(*matrices, up_bias, self.source.tensor(f"{down}.bias"))

    def _stacked_experts(self, prefix: str, names: Names, moe: MoeShape) -> Iterator[Expert]:
        """From tensors that hold the matrices of all experts."""

        def apart(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat((rows[::2], rows[1::2])) if names.expert_turns else rows

        stacks = names.expert_up[0], names.expert_down
        up, down = (self.source.experts(prefix + stack) for stack in stacks)
        biases: list[Iterable[Any]] = [repeat(None)] * 2
        if moe.bias:
            biases = [self.source.tensor(f"{prefix}{stack}_bias") for stack in stacks]
        for gate_up, one, bias, down_bias in zip(up, down, *biases, strict=moe.bias):
            yield Expert(by_rows(gate_up, apart), one, None if bias is None else apart(bias), down_bias)

    def _joined(
        self, prefix: str, parts: Sequence[str], biased: bool, order: Sequence[int] | None
    ) -> tuple[Weight, torch.Tensor | None, dict[str, slice]]:
        weights = [self.source.linear(prefix + part) for part in parts]
        bias = torch.cat([self.source.tensor(f"{prefix}{part}.bias") for part in parts]) if biased else None
        edges = pairwise(accumulate((weight.shape[0] for weight in weights), initial=0))
        columns = {part: slice(*edge) for part, edge in zip(parts, edges, strict=True)}
        weight = joined(weights, self.dtype, self.ops.quantize)
        if order is not None:
            places = torch.tensor(order, device=self.ops.device)
            weight = by_rows(weight, lambda rows: rows.index_select(0, places))
            bias = None if bias is None else bias.index_select(0, places)
        return weight, bias, columns
