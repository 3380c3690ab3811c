"""Combines families of operations from different back ends in one `Ops`, if one fails its check or another is faster.

It records nothing, because a recording belongs to a single back end. Otherwise each family is called directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pagoda_worker.kernel_choice import FAMILIES

if TYPE_CHECKING:
    from pagoda_worker.kernels.ops import Ops


class _Mixed:
    def __init__(self, parts: Mapping[str, Ops]) -> None:
        used = {ops.name: ops for ops in parts.values()}
        self.name = ", ".join(f"{family} {ops.name}" for family, ops in parts.items())
        self.device = next(iter(used.values())).device
        # A recorded step does not include sampling.
        self.capturable = all(ops.capturable for family, ops in parts.items() if family != "sampling")
        self.batch_invariant = all(ops.batch_invariant for ops in used.values())
        self.own_threads = all(ops.own_threads for ops in used.values())
        self.integer_linear = parts["linear"].integer_linear
        self.lookback = parts["attention"].lookback
        self.keeps_latents_once = parts["attention"].keeps_latents_once
        self.numerics = "; ".join(ops.numerics for ops in used.values())
        for family, operations in FAMILIES.items():
            for operation in operations:
                setattr(self, operation, getattr(parts[family], operation))

    def record(self, *_: Any) -> None:
        return None


def mix(parts: Mapping[str, Ops]) -> Ops:
    """The operations of each family from its back end in `parts`, which has all families, on one device."""
    backends = list(parts.values())
    same = all(ops is backends[0] for ops in backends)
    return backends[0] if same else cast("Ops", _Mixed(parts))
