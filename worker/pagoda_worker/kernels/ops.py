"""What a model may ask of a device: a dozen operations, declared once; a back end implements them all.

T packed tokens of B rows, H hidden size, Hq query and Hkv KV heads of D dims, G = Hq / Hkv, I intermediate size.

The rule every back end keeps: the bits of one row's result depend on that row alone, not on its neighbours in the
batch, nor on how its tokens were cut into chunks. `reference` is the exception: it is the arithmetic written down, which
the others are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagoda_worker.batch import Batch
from pagoda_worker.kernels.kv_cache import KVCache, KVShape

BACKENDS = ("reference", "torch")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """How one layer attends. `window` counts the visible tokens, the current one included; None sees all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMS norm over each query and key head before rotation: weight [Hq + Hkv, D] float32, one line per head."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one step, [T, 1, D] float32; the first half of `sin` is negative (see `layers.rope`)."""

    cos: torch.Tensor
    sin: torch.Tensor


class Ops(Protocol):
    """One back end on one device. `Packed` and `Plan` are its own: callers hand them back and look not inside."""

    name: str
    device: torch.device

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """weight [N, K] and bias [N] in the run dtype -> a packed form; the arguments may be freed afterwards."""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, K] -> [T, N] in the dtype of x."""

    def logits(self, hidden: torch.Tensor, packed: Any) -> torch.Tensor:
        """hidden [R, H] -> [R, V] float32, rounded to the run dtype first where the hardware accumulates into it."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor, scale: float | None) -> torch.Tensor:
        """token_ids [T] int64, table [V, H] -> [T, H] in the table's dtype, times `scale` if given."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H], weight float32 [H] or broadcastable -> x / rms(x) * weight, computed in float32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); x [T, H] may be overwritten."""

    def act_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """gate_up [T, 2 I] -> act(gate) * up [T, I]; activation is "silu" or "gelu_tanh"."""

    def rope_write(  # noqa: PLR0913 - one fused step of the layer
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        kv: KVCache,
        layer: int,
        kv_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Norm (if any) and rotate the query and key heads of qkv [T, (Hq + 2 Hkv) D], put K and V into the cache.

        Returns the query heads [T, Hq, D]. `qkv` may be overwritten.
        """

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv: KVCache, layer: int, kv_indices: torch.Tensor
    ) -> None:
        """key and value [T, Hkv, D] into the cache as they are."""

    def plan(self, batch: Batch, kv: KVCache) -> Any:
        """What all layers of a step have in common: work lists and masks. Made once per step, before any `attend`."""

    def attend(  # noqa: PLR0913 - the operands of attention
        self,
        query: torch.Tensor,
        kv: KVCache,
        layer: int,
        plan: Any,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, Hq, D] against the cache, which already holds this step's K and V -> [T, Hq * D].

        Token at position p sees positions max(0, p - window + 1) .. p of its row. Scores are (q . k) * scale, then
        softcap * tanh(score / softcap), then a softmax in float32 to whose sum exp(sinks[h]) is added per head.
        """

    def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> KVCache:
        """A cache of zeros; its layout belongs to the back end."""

    def copy_blocks(self, kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers; every source is read before any destination is written."""


class BackendError(ValueError):
    """A back end that was asked for by name and cannot be had here."""


def load_ops(device: torch.device, choice: str) -> tuple[Ops, str]:
    """The back end for `device`, and why it was chosen (for the log).

    Args:
        device: Where tensors live.
        choice: "auto" or a name of BACKENDS.

    Raises:
        BackendError: `choice` is not known, or was named and cannot run here.
    """
    if choice == "reference":
        from pagoda_worker.kernels.reference import ReferenceOps

        return ReferenceOps(device), "named in the configuration"
    if choice in ("auto", "torch"):
        from pagoda_worker.kernels.aten import AtenOps

        return AtenOps(device), "named in the configuration" if choice == "torch" else f"the best for {device.type}"
    raise BackendError(f"kernels: must be auto or one of {', '.join(BACKENDS)}, got {choice!r}")
