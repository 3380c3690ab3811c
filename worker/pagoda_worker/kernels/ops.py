"""What a model may ask of a device: some thirty operations, declared once; a back end implements them all.

T packed tokens of B rows, H hidden size, Hq query and Hkv KV heads of D dims, G = Hq / Hkv, I intermediate size.

An adapter in use has a *slot*, the same in all layers. A token's slot says which matrices its line passes besides, so
lines of many adapters and of none share a batch: those without are not touched.

The rule every back end keeps: the bits of one row's result depend on that row alone, not on its neighbours in the
batch, nor on how its tokens were cut into chunks. `reference` is the exception: it is the arithmetic written down,
which the others are tested against.
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
from pagoda_worker.kernels.quantized import Weight
from pagoda_worker.kernels.routing import Beside, Routing
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import TokenSlots
from pagoda_worker.sampling.device_sampler import DeviceSampler, Upload
from pagoda_worker.sampling.sampler import Fault, RowState, Sample

T = TypeVar("T")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
CLAMPED = "clamped"  # of gates alone: see `Ops.gated_linear`
CLAMP, CLAMPED_GAIN = 7.0, 1.702
Forward = Callable[["Ops", Batch, Any], tuple[Tensor, ...]]
"""What a model computes of all tokens of a batch, by the given back end: (ops, batch, caches) -> results [T, ..]."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """How one layer attends. `window` counts the visible tokens, the current one included; None sees all. Where it is
    not `causal` a token also sees what comes after it, as many tokens as before it. `sinks`: it is given some.

    `chunked`: the window does not slide. Rows fall into chunks of so many tokens, and none sees beyond its own; back
    ends need not know, because each chunk is given to them as a row (see `Batch.in_chunks`).
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
    """RMS norm over each query and key head before rotation: weight [Hq + Hkv, D] float32, one line per head.

    `whole`: over all query heads together, and over all key heads, with the same weights.
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
    """Cosines and sines of all positions, [max_positions, D / 2] float32, and the positions [T] of one step.

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
    """What one adapter has for one linear layer [N, K], whose parts' ranks stand behind one another.

    `spans` are which of the ranks an output reads, [first, end): of the others `b` has zeros.
    """

    a: Tensor  # [R, K], as are `b` and the layer itself in the run dtype
    b: Tensor  # [N, R]
    scales: Tensor  # [R] float32
    spans: Tensor  # [N, 2] int32


class Expert(NamedTuple):
    """Gate above up [2 I, H] and down [H, I], with biases [2 I] and [H] in the run dtype or without any."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Added(NamedTuple):
    """What is to be added in a call: a layer's `slots`, as its back end keeps them, by the slots of the tokens."""

    slots: Any
    tokens: TokenSlots


@dataclass(frozen=True)
class SlotRoom:
    """How many adapters there is room for, and the highest rank that one may have for one matrix."""

    count: int
    rank: int


class Cache(Protocol):
    """The part of a back end's KV cache that models know. It holds one group of layers, whose own order counts them."""

    @property
    def shape(self) -> KVShape: ...

    @property
    def block_size(self) -> int: ...

    def admit(self, batch: Batch) -> None:
        """Called before a step computes."""

    def inspect(self, batch: Batch, hidden: Tensor) -> None:
        """Called after a step, with the final hidden states [T, H]."""


class Ops(Protocol):
    """One back end on one device. Packed weights, caches (see Cache) and plans are its own: callers hand them back.

    lookback: Before a window so many keys at most are read beside those in it, and masked: they must be numbers.
    """

    lookback: int

    name: str
    device: torch.device
    capturable: bool
    """Whether a device can record a decode step of these operations and replay it with other contents of the batch's
    tensors: every operation then asks only for work on the device, reads lengths from `Batch.lengths`, takes
    `context_lens` for bounds, and a plan, once made, serves all steps of its number of rows."""
    batch_invariant: bool
    """Whether it keeps the rule at the head of this module; `reference` does not, nor do products by cuBLASLt."""
    own_threads: bool
    """Whether it computes in threads of its own, in whose way those of torch would be."""
    integer_linear: bool
    """Whether linear layers compute in whole numbers where a weight is quantised; else they widen it."""
    keeps_latents_once: bool
    """Whether its caches may have one plane, where a value is its key: see `KVShape.planes`."""

    @property
    def numerics(self) -> str:
        """What of this back end decides how results are rounded, besides its name: tile sizes, instruction set."""

    def record(
        self, forward: Forward, kv: Sequence[Any], max_tokens: int
    ) -> Callable[[Batch], tuple[Tensor, ...]] | None:
        """`forward` over the caches `kv` as one call for batches of up to `max_tokens`, with the same bits.

        The results are valid until the next call. None: this back end records nothing.
        """

    def pack_linear(self, weight: Weight, bias: Tensor | None = None, segments: int = 1) -> Any:
        """weight [N, K] and bias [N] in the run dtype -> a packed form; the arguments may be freed afterwards.

        K is summed in `segments`, of whole groups each if the weight is quantised, and the bias added to their sum (see
        `segments`); a back end that is not `batch_invariant` may do otherwise.

        A back end without kernels for a quantised weight computes with its values, and with inputs as they are.
        """

    def pack_gated(self, weight: Weight, bias: Tensor | None = None) -> Any:
        """weight [2 I, K] and bias [2 I], gate above up -> a packed form for `gated_linear`."""

    def new_slots(self, packed: Any, count: int, rank: int, *, gated: bool = False) -> Any:
        """Room for what `count` adapters add to a packed layer, of up to `rank` for all its parts together.

        `gated`: it was packed by `pack_gated`.
        """

    def fill_slot(self, slots: Any, slot: int, factors: LowRank | None) -> None:
        """An adapter takes this slot, or, with None, adds nothing to this layer; after what was launched, in the order
        of its stream."""

    def slot_bytes(self, inputs: int, outputs: Sequence[int], ranks: Sequence[int]) -> int:
        """What an adapter takes whose parts of a layer have these outputs and ranks."""

    def linear(self, x: Tensor, packed: Any, added: Added | None = None) -> Tensor:
        """x [T, K] -> [T, N] in the dtype of x, with what is `added` in float32 before it is rounded, or rounded again;
        so in all operations that take it. Lines of tokens without an adapter have the bits they have without `added`.
        """

    def gated_linear(self, x: Tensor, packed: Any, activation: str, added: Added | None = None) -> Tensor:
        """x [T, K] -> act(gate) * up [T, I]; activation is "silu", "gelu_tanh", "gelu" or "clamped".

        Gate, up and act(gate) are rounded to the dtype of x where separate operations would round them. "clamped" is
        g * sigmoid(1.702 g) * (u + 1), where g is the gate, at most 7, and u is up, between -7 and 7.
        """

    def activated_linear(self, x: Tensor, packed: Any, activation: str, added: Added | None = None) -> Tensor:
        """x [T, K] -> act(x W^T) [T, N], `packed` by `pack_linear`; activation is one of ACTIVATIONS.

        What is activated is rounded to the dtype of x, where a separate operation would round it.
        """

    def pack_experts(self, experts: Iterable[Expert], count: int, favour: Tensor | None = None) -> Any:
        """`count` experts -> a packed form of them all; `favour` [E] float32: see `routing`."""

    def moe(
        self, x: Tensor, logits: Tensor, packed: Any, routing: Routing, activation: str, beside: Beside | None = None
    ) -> Tensor:
        """x [T, H] through the experts that logits [T, E] float32 choose, as `routing` says -> [T, H].

        Each product is rounded to the dtype of x, as those of linear layers are.
        """

    def pack_heads(self, weight: Tensor) -> Any:
        """weight [Hq, N, K], one matrix for each head, in the run dtype -> a packed form for `head_linear`."""

    def head_linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, Hq * K], each head through its own matrix -> [T, Hq * N] in the dtype of x."""

    def logits(self, hidden: Tensor, packed: Any, softcap: float | None = None, added: Added | None = None) -> Tensor:
        """hidden [R, H] -> [R, V] float32, or softcap * tanh(logit / softcap) of it.

        Without a cap they may be in the run dtype, where the hardware accumulates into it.
        """

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        """token_ids [T] int64, table [V, H] -> [T, H] in the table's dtype, times `scale` if given."""

    def add_positions(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        """x [T, H], which may be overwritten, plus the lines `positions` [T] int64 of table [P, H]."""

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
        """Norm and rotate (if at all) the query and key heads of qkv [T, (Hq + 2 Hkv) D], put K and V into the cache.

        For a cache of one plane `qkv` has no V. Returns the query heads [T, Hq, D]. `qkv` may be overwritten.
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
        """Like `rope_write`, with queries [T, Hq * D], and with one key for all, in two parts, which is its own value.

        The key is half of `turning` [T, R], half of `latent` [T, D - R], and the other halves: so dimensions that turn
        are half a head apart. The value is what the key is before it is turned, or in a cache of one plane the key.
        """

    def write_kv(self, key: Tensor, value: Tensor, kv: Any, layer: int, kv_indices: Tensor) -> None:
        """key and value [T, Hkv, D] into the cache, rounded if it is quantised; into one of one plane the key alone."""

    def plan(self, batch: Batch, kv: Any) -> Any:
        """What all layers of a group have in common: work lists and masks. Made once per step, before any `attend`."""

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

        Token at position p sees positions max(0, p - window + 1) .. p of its row, and if it is not causal those up to
        p + window - 1. Scores are (q . k) * scale, then softcap * tanh(score / softcap), plus `bias` [Hq, 2 P - 1]
        float32 by how far the key is from the query (entry P - 1: not at all) for rows of up to P tokens, then a
        softmax in float32 to whose sum exp(sinks[h]) is added per head. A bias needs as many KV heads as query heads.
        """

    def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> Any:
        """A cache of zeros; its layout belongs to the back end."""

    def copy_blocks(self, kv: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers; every source is read before any destination is written.

        Destinations differ.
        """

    def export_blocks(self, kv: Any, block_ids: Sequence[int]) -> Blocks:
        """Copies of blocks in the layout that all back ends understand."""

    def import_blocks(self, kv: Any, block_ids: Sequence[int], blocks: Blocks) -> None:
        """Write what `export_blocks` gave, of this or another back end's cache of the same shape, to these blocks.

        Raises ValueError when it does not fit.
        """

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sample | Fault]:
        """logits [R, V] float32, which may be overwritten, and the R rows they are of -> the next token of each.

        What a token is chosen by is said in `sampler`. A back end may round weights in its own way, so that tokens
        differ from another's where a draw falls on a border; that is part of `numerics`.
        """

    def report(self, logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TopLogprobs]:
        """Log-probabilities of `tokens[i]` and of the `num_top` likeliest, by row i of logits [R, V] float32.

        Stops before the first row whose logits are not finite.
        """

    def device_sampler(self, max_rows: int, vocab_size: int, upload: Upload) -> DeviceSampler:
        """What chooses tokens without the host for up to `max_rows` rows at once; all its memory is taken here."""


class BackendError(ValueError):
    """A back end that cannot serve here, for whatever reason; the message says which and why."""


def guarded(name: str, run: Callable[[], T], but: tuple[type[Exception], ...] = ()) -> T:
    """What `run` returns.

    Raises:
        BackendError: whatever it raised, by the name of the back end it is about; errors of `but` stay what they are.
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
    """What a model asks of a back end. For a model that is not ours to know, sizes are 0 and `attention` is empty."""

    dtype: torch.dtype
    hidden_size: int = 0
    head_dims: tuple[int, ...] = ()  # of the layers
    latents: tuple[int, ...] = ()  # sizes of what is normed besides
    inputs: tuple[int, ...] = ()  # K of every kind of linear layer
    attention: tuple[AttentionShape, ...] = ()  # of each layer
    latent_attention: tuple[AttentionShape, ...] = ()  # those of layers with latents, see `Ops.latent_write`
    quantized_cache: bool = False  # keys and values in int8
    adapters: bool = False
    experts: bool = False  # whether a layer has some
    vocab_size: int = 0
    block_size: int = 0  # of the cache; 0: not decided
    num_threads: int = 0  # 0: as many as this process may use
    instruction_set: str = ""  # "" is the best this machine has
