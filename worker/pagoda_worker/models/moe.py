"""The MLP of a layer: dense, or experts that a router chooses among for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MlpShape, MoeShape, dense_names
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.routing import Beside, Routing, choose
from pagoda_worker.models.linear import Linear, Mlp, Packer
from pagoda_worker.rows.slots import TokenSlots


class Branch(Protocol):
    def run(self, x: torch.Tensor, ops: Ops, tokens: TokenSlots | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]; `tokens` gives each token's adapter slot."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those that adapters may add to."""


@dataclass(frozen=True)
class Moe:
    """`router`, `experts` and `shared_gate` as a back end packs them."""

    shape: MoeShape
    router: Any
    experts: Any
    shared: Mlp | None
    shared_gate: Any | None

    def run(self, x: torch.Tensor, ops: Ops, tokens: TokenSlots | None = None) -> torch.Tensor:
        beside = None
        if self.shared is not None:
            gate = None if self.shared_gate is None else ops.logits(x, self.shared_gate)
            beside = Beside(self.shared.run(x, ops, tokens), gate)
        logits = ops.logits(x, self.router)
        if self.shape.routing.inputs:
            return self._by_inputs(x, logits, ops, beside)
        return ops.moe(x, logits, self.experts, self.shape.routing, self.shape.activation, beside)

    def _by_inputs(self, x: torch.Tensor, logits: torch.Tensor, ops: Ops, beside: Beside | None) -> torch.Tensor:
        """One pass per rank, on inputs multiplied by that rank's weights, added to the result of the pass before.

        Published models choose one expert, whose weight is then 1.
        """
        routing = self.shape.routing
        ids, weights = choose(logits, routing)
        one = Routing(experts=routing.experts, chosen=1, renormalised=True)
        total = x
        for rank in range(routing.chosen):
            chosen = torch.zeros_like(logits).scatter_(1, ids[:, rank : rank + 1], 1.0)
            inputs = x * weights[:, rank : rank + 1].to(x.dtype)
            total = ops.moe(inputs, chosen, self.experts, one, self.shape.activation, beside)
            beside = Beside(total, None)
        return total

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Experts take no adapters."""
        return () if self.shared is None else self.shared.linears


def load_mlp(spec: DecoderSpec, layer: LayerSpec, packer: Packer, prefix: str) -> Branch:
    """`prefix`: of the layer's names."""
    names, moe = spec.names, layer.mlp

    def dense(mlp: MlpShape) -> Mlp:
        up, down = dense_names(names, layer)
        return Mlp(packer.pack_up(prefix, up, mlp), packer.pack(prefix, [down], mlp.bias, segments=spec.segments))

    if isinstance(moe, MlpShape):
        return dense(moe)

    def small(name: str) -> Any:
        bias = packer.source.tensor(f"{prefix}{name}.bias") if moe.bias else None
        return packer.ops.pack_linear(packer.source.tensor(f"{prefix}{name}.weight"), bias)

    return Moe(
        shape=moe,
        router=small(names.router),
        experts=packer.pack_experts(prefix, names, moe),
        shared=None if moe.shared is None else dense(moe.shared),
        shared_gate=small(names.shared_gate) if moe.shared_gate else None,
    )
