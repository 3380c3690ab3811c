"""The operations a model needs from a device: some thirty, declared once and implemented by every back end.

Notation: T packed tokens of B rows; H hidden size; Hq query and Hkv KV heads of D dims; G = Hq / Hkv; I intermediate
size.

Each adapter in use has a *slot*, the same in all layers. A token's slot selects the low-rank matrices applied to its
line in addition, so one batch can mix tokens of many adapters and of none; the latter are computed as without adapters.

Every back end must be batch-invariant: the bits of a row's result depend on that row alone, not on its neighbours in
the batch nor on how its tokens were cut into chunks. `reference` is the exception: it spells out the arithmetic that
the others are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pagoda_proto.steps import TopLogprobs
from pagoda_worker.kernels.kv_cache import Blocks, KVShape
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, Weight
from pagoda_worker.kernels.routing import Beside, Routing
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import TokenSlots
from pagoda_worker.sampling.device_sampler import DeviceSampler, Upload
from pagoda_worker.sampling.sampler import Fault, RowState, Sample

T = TypeVar("T")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
CLAMPED = "clamped"  # for gated layers only: see `Ops.gated_linear`
CLAMP, CLAMPED_GAIN = 7.0, 1.702
Forward = Callable[["Ops", Batch, Any], tuple[Tensor, ...]]
"""A model's forward pass over all tokens of a batch on a given back end: (ops, batch, caches) -> results [T, ..]."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """How one layer attends. `window` is the number of visible tokens, including the current one; None means all. If
    the layer is not `causal`, a token sees as many tokens after it as before it. `sinks`: it has attention sinks.

    `chunked`: the window does not slide; a row is cut into chunks of `window` tokens, and no token sees beyond its own
    chunk. Back ends need not know, because they receive each chunk as a row (see `Batch.in_chunks`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: bool = False
    chunked: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMS norm of each query and key head before rotation: weight [Hq + Hkv, D] float32, one line per head.

    `whole`: one norm over all query heads together and one over all key heads, with the same weights.
    """

    weight: Tensor
    eps: float
    whole: bool = False

    def of(self, heads: Tensor, kv_heads: int, rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
        """heads [T, Hq + Hkv, D], normed by `rms_norm`."""
        if not self.whole:
            return rms_norm(heads, self.weight, self.eps)
        sizes = [heads.shape[1] - kv_heads, kv_heads]
        parts = zip(torch.split(heads, sizes, 1), torch.split(self.weight, sizes), strict=True)
        flat = [rms_norm(part.flatten(1), weight.flatten(), self.eps) for part, weight in parts]
        return torch.cat(flat, 1).view(heads.shape)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines for all positions, [max_positions, D / 2] float32, and the positions [T] of one step.

    x * cos + roll(x, D / 2) * sin is the rotation of x (see `checkpoints.rope`).
    """

    cos_table: Tensor
    sin_table: Tensor
    positions: Tensor

    @cached_property
    def cos(self) -> Tensor:
        """[T, 1, D]"""
        cos = self.cos_table.index_select(0, self.positions)
        return torch.cat((cos, cos), -1).unsqueeze(1)

    @cached_property
    def sin(self) -> Tensor:
        """[T, 1, D], the first half negative"""
        sin = self.sin_table.index_select(0, self.positions)
        return torch.cat((-sin, sin), -1).unsqueeze(1)


class LowRank(NamedTuple):
    """One adapter's matrices for one linear layer [N, K]; the ranks of the layer's parts are concatenated.

    `spans` gives the ranks [first, end) that each output reads; `b` is zero for all others.
    """

    a: Tensor  # [R, K], in the run dtype like `b` and the layer itself
    b: Tensor  # [N, R]
    scales: Tensor  # [R] float32
    spans: Tensor  # [N, 2] int32


class Expert(NamedTuple):
    """Gate stacked on up [2 I, H], and down [H, I]; optional biases [2 I] and [H] in the run dtype."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Added(NamedTuple):
    """The adapters to apply in a call: a layer's `slots`, as its back end keeps them, and the slots of the tokens."""

    slots: Any
    tokens: TokenSlots


@dataclass(frozen=True)
class SlotRoom:
    """The number of adapters that fit, and the highest rank an adapter may have for one matrix."""

    count: int
    rank: int


class Cache(Protocol):
    """The part of a back end's KV cache that models see. It holds one group of layers, numbered within the group."""

    @property
    def shape(self) -> KVShape: ...

    @property
    def block_size(self) -> int: ...

    def admit(self, batch: Batch) -> None:
        """Called before a step computes."""

    def inspect(self, batch: Batch, hidden: Tensor) -> None:
        """Called after a step, with the final hidden states [T, H]."""


class Ops(Protocol):
    """One back end on one device. Packed weights, caches (see Cache) and plans are opaque: callers pass them back."""

    lookback: int
    """The most keys read, and masked, before the start of a window; they must be finite."""
    name: str
    device: torch.device
    capturable: bool
    """Whether a device can record a decode step and replay it with new contents in the batch's tensors. Every operation
    must then run on the device only, read lengths from `Batch.lengths` and treat `context_lens` as upper bounds; one
    plan serves all steps with the same number of rows."""
    batch_invariant: bool
    """Whether it is batch-invariant (see the module docstring); `reference` is not, nor are products by cuBLASLt."""
    own_threads: bool
    """Whether it computes in threads of its own, which torch's threads would disturb."""
    integer_linear: bool
    """Whether linear layers with quantised weights use integer arithmetic; otherwise they widen the weights."""
    keeps_latents_once: bool
    """Whether its caches may have a single plane, where the key is also the value: see `KVShape.planes`."""

    @property
    def numerics(self) -> str:
        """Everything besides the name that determines how results are rounded: tile sizes, instruction set."""

    def record(
        self, forward: Forward, kv: Sequence[Any], max_tokens: int
    ) -> Callable[[Batch], tuple[Tensor, ...]] | None:
        """Record `forward` over the caches `kv` as a single call for batches of up to `max_tokens`, with the same bits.

        The results are valid until the next call. None: this back end does not record.
        """

    def quantize(self, weight: Tensor, form: Format) -> QuantizedWeight:
        """The same bits as `quantized.quantize`."""

    def pack_linear(self, weight: Weight, bias: Tensor | None = None, segments: int = 1) -> Any:
        """weight [N, K] and bias [N] in the run dtype -> a packed form; the arguments may be freed afterwards.

        K is summed in `segments`, each of whole groups if the weight is quantised; the bias is added to their sum (see
        `segments`). A back end that is not `batch_invariant` may deviate from this.

        A back end without kernels for a quantised weight dequantises it and does not round the inputs.
        """

    def pack_gated(self, weight: Weight, bias: Tensor | None = None) -> Any:
        """weight [2 I, K] and bias [2 I], gate stacked on up -> a packed form for `gated_linear`."""

    def new_slots(self, packed: Any, count: int, rank: int, *, gated: bool = False) -> Any:
        """Allocate slots for `count` adapters of a packed layer, each of rank up to `rank` over all its parts together.

        `gated`: the layer was packed by `pack_gated`.
        """

    def fill_slot(self, slots: Any, slot: int, factors: LowRank | None) -> None:
        """Put an adapter into this slot; None: it adds nothing to this layer. Takes effect in stream order, after the
        work already launched."""

    def slot_bytes(self, inputs: int, outputs: Sequence[int], ranks: Sequence[int]) -> int:
        """Bytes that an adapter takes for a layer whose parts have these outputs and ranks."""

    def linear(self, x: Tensor, packed: Any, added: Added | None = None) -> Tensor:
        """x [T, K] -> [T, N] in the dtype of x. As in every operation that takes `added`, the adapters' part is added
        in float32, before the result is rounded or with a second rounding. Tokens without an adapter keep the bits they
        have without `added`."""

    def gated_linear(self, x: Tensor, packed: Any, activation: str, added: Added | None = None) -> Tensor:
        """x [T, K] -> act(gate) * up [T, I]; activation is "silu", "gelu_tanh", "gelu" or "clamped".

        Gate, up and act(gate) are rounded to the dtype of x where separate operations would round them. "clamped" is
        g * sigmoid(1.702 g) * (u + 1), where g is the gate, at most 7, and u is up, between -7 and 7.
        """

    def activated_linear(self, x: Tensor, packed: Any, activation: str, added: Added | None = None) -> Tensor:
        """x [T, K] -> act(x W^T) [T, N], `packed` by `pack_linear`; activation is one of ACTIVATIONS.

        The activation's input is rounded to the dtype of x, as a separate operation would round it.
        """

    def pack_experts(self, experts: Iterable[Expert], count: int, favour: Tensor | None = None) -> Any:
        """`count` experts -> one packed form; `favour` [E] float32: see `routing`."""

    def moe(
        self, x: Tensor, logits: Tensor, packed: Any, routing: Routing, activation: str, beside: Beside | None = None
    ) -> Tensor:
        """x [T, H] through the experts that `routing` chooses by logits [T, E] float32 -> [T, H].

        Each product is rounded to the dtype of x, as in linear layers.
        """

    def pack_heads(self, weight: Tensor) -> Any:
        """weight [Hq, N, K], one matrix per head, in the run dtype -> a packed form for `head_linear`."""

    def head_linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, Hq * K], each head through its own matrix -> [T, Hq * N] in the dtype of x."""

    def logits(self, hidden: Tensor, packed: Any, softcap: float | None = None, added: Added | None = None) -> Tensor:
        """hidden [R, H] -> logits [R, V] float32, or softcap * tanh(logit / softcap).

        Without a cap they may be in the run dtype if that is what the hardware produces.
        """

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        """token_ids [T] int64, table [V, H] -> [T, H] in the table's dtype, times `scale` if given."""

    def add_positions(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        """x [T, H], which may be overwritten, plus the rows `positions` [T] int64 of table [P, H]."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y [T, H], rounded once; y may be overwritten."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H], weight float32 [H] or broadcastable -> x / rms(x) * weight, computed in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), both new to the caller: x and residual [T, H] may be overwritten."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / deviation(x) * weight + bias, computed in float32: x [T, H], weight and bias [H] float32."""

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(layer_norm(x + residual), x + residual); see `add_rms_norm`."""

    def rope_write(
        self, qkv: Tensor, rotation: Rotation | None, norm: HeadNorm | None, kv: Any, layer: int, kv_indices: Tensor
    ) -> Tensor:
        """Norm and rotate (if given) the query and key heads of qkv [T, (Hq + 2 Hkv) D]; write K and V to the cache.

        `qkv` has no V if the cache has one plane. Returns the query heads [T, Hq, D], which may be a view of `qkv`;
        `qkv` may be overwritten.
        """

    def latent_write(  # noqa: PLR0913 - the operands of one kernel
        self,
        query: Tensor,
        latent: Tensor,
        turning: Tensor,
        rotation: Rotation | None,
        kv: Any,
        layer: int,
        kv_indices: Tensor,
    ) -> Tensor:
        """Like `rope_write`, for queries [T, Hq * D] and a single key in two parts, which also serves as the value.

        The key is half of `turning` [T, R], half of `latent` [T, D - R], then the other halves in the same order, so
        that rotated pairs of dims are half a head apart. The value is the unrotated key, or the key itself if the cache
        has one plane."""

    def write_kv(self, key: Tensor, value: Tensor, kv: Any, layer: int, kv_indices: Tensor) -> None:
        """Write key and value [T, Hkv, D] to the cache, quantised if it is; only the key if it has one plane."""

    def plan(self, batch: Batch, kv: Any) -> Any:
        """What all layers of a group share: work lists and masks. Made once per step, before any `attend`."""

    def attend(  # noqa: PLR0913 - the operands of one kernel
        self,
        query: Tensor,
        kv: Any,
        layer: int,
        plan: Any,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """query [T, Hq, D] against the cache, which already holds this step's K and V -> [T, Hq * D].

        The token at position p sees positions max(0, p - window + 1) .. p of its row, and up to p + window - 1 if the
        layer is not causal. Scores are (q . k) * scale, then softcap * tanh(score / softcap), plus `bias` [Hq, 2 P - 1]
        float32, indexed by key position - query position + P - 1, for rows of up to P tokens; then a softmax in
        float32, with exp(sinks[h]) added to each head's sum. A bias needs as many KV heads as query heads.
        """

    def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> Any:
        """A zeroed cache, in a layout private to the back end."""

    def copy_blocks(self, kv: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination), destinations distinct, in all layers; every source is read before any
        destination is written."""

    def export_blocks(self, kv: Any, block_ids: Sequence[int]) -> Blocks:
        """Copies of blocks, in the layout common to all back ends."""

    def import_blocks(self, kv: Any, block_ids: Sequence[int], blocks: Blocks) -> None:
        """Write blocks exported from a cache of the same shape, of this or another back end, to these block ids.

        Raises ValueError if they do not fit.
        """

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sample | Fault]:
        """logits [R, V] float32, which may be overwritten, and the R rows they belong to -> the next token of each.

        `sampler` defines how tokens are chosen. A back end may round weights in its own way, so that its tokens can
        differ from another's if a draw falls on a boundary; that is part of `numerics`.
        """

    def report(self, logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TopLogprobs]:
        """Log-probabilities of `tokens[i]` and of the `num_top` most likely tokens, for row i of logits [R, V] float32.

        Stops before the first row whose logits are not finite.
        """

    def device_sampler(self, max_rows: int, vocab_size: int, upload: Upload) -> DeviceSampler:
        """A sampler that runs on the device for up to `max_rows` rows at once; allocates all its memory here."""


class BackendError(ValueError):
    """A back end cannot serve here, for whatever reason; the message says which one and why."""


def guarded(name: str, run: Callable[[], T], but: tuple[type[Exception], ...] = ()) -> T:
    """Return what `run` returns.

    Raises:
        BackendError: `run` failed; the message names the back end. Exceptions of types `but` pass through unchanged.
    """
    try:
        return run()
    except BackendError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]  # compilers and drivers write pages
        raise BackendError(f"kernels: {name} failed: {type(error).__name__}: {first_line}") from error


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model requires of a back end. For a model we know nothing about, sizes are 0 and `attention` is empty."""

    dtype: torch.dtype
    hidden_size: int = 0
    head_dims: tuple[int, ...] = ()  # of the layers
    latents: tuple[int, ...] = ()  # other sizes that are normed
    inputs: tuple[int, ...] = ()  # K of every kind of linear layer
    attention: tuple[AttentionShape, ...] = ()  # of each layer
    latent_attention: tuple[AttentionShape, ...] = ()  # of the layers with latents, see `Ops.latent_write`
    quantized_cache: bool = False  # keys and values in int8
    adapters: bool = False
    experts: bool = False  # whether any layer has experts
    vocab_size: int = 0
    block_size: int = 0  # of the cache; 0: not yet decided
    num_threads: int = 0  # 0: as many as this process may use
    instruction_set: str = ""  # "" is the best this machine has
