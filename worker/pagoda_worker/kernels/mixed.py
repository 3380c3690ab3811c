"""Families of operations from different back ends behind one `Ops`: where one fails its check, or another is faster.

Nothing is recorded: a recording is one back end's. Otherwise each family is called as if the others were its own.
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
        # Choosing tokens is no part of a recorded step.
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
    """The operations of each family by the back end that `parts` names for it; all families, on one device."""
    backends = list(parts.values())
    same = all(ops is backends[0] for ops in backends)
    return backends[0] if same else cast("Ops", _Mixed(parts))
