"""The operations of the kernel library, with named operands.

Each class mirrors a struct of csrc/program.h field by field; the operands are documented there. No other module depends
on the order of fields. Tensors are contiguous, except for the queries of attention, and become addresses, so they must
outlive the programs made from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

Form = tuple[int, int, int, int]
"""The fields of a `QuantForm`."""


class NativeLinear(NamedTuple):
    """A matrix of n rows and k columns in panels, as made by `Library.pack` or `pack_quantized`.

    bias: One entry per column of the panels.
    form: See `library.quant_form`; weights of 16 bits are bfloat16.
    segments: See `kernels.segments`.
    """

    panels: Tensor
    bias: Tensor | None
    n: int
    k: int
    form: Form
    segments: int


class Embed(NamedTuple):
    table: Tensor
    y: Tensor
    dim: int
    scale: float


class RmsNorm(NamedTuple):
    x: Tensor
    residual: Tensor | None
    sum: Tensor | None
    weight: Tensor
    y: Tensor
    dim: int
    eps: float


class Linear(NamedTuple):
    x: Tensor
    panels: Tensor
    y: Tensor
    bias: Tensor | None
    n: int
    k: int
    activation: int
    out_f32: int
    form: Form
    softcap: float = 0.0
    segments: int = 1
    slots: Tensor | None = None
    low: Tensor | None = None
    low_width: int = 0
    x_stride: int = 0
    y_stride: int = 0
    unused: int = 0


class LayerCache(NamedTuple):
    keys: Tensor
    values: Tensor | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    heads: int
    dim: int
    block_size: int
    table: int = 0


class RopeKv(NamedTuple):
    qkv: Tensor
    q: Tensor | None
    kv: LayerCache
    cos: Tensor | None
    sin: Tensor | None
    norm: Tensor | None
    heads: int
    eps: float
    whole: int = 0
    latent: Tensor | None = None
    turning: Tensor | None = None
    turns: int = 0
    unused: int = 0


class Attention(NamedTuple):
    q: Tensor
    out: Tensor
    kv: LayerCache
    sinks: Tensor | None
    heads: int
    window: int
    scale: float
    softcap: float
    bias: Tensor | None = None
    stride: int = 0
    zero: int = 0
    causal: int = 1
    q_stride: int = 0


class LayerNorm(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    y: Tensor
    dim: int
    eps: float


class Add(NamedTuple):
    x: Tensor
    y: Tensor
    dim: int
    by_position: int = 0


class Route(NamedTuple):
    logits: Tensor
    ids: Tensor
    weights: Tensor
    favour: Tensor | None
    experts: int
    chosen: int
    renormalised: int
    sigmoid: int
    groups: int
    chosen_groups: int
    group_top: int
    scale: float


class Sort(NamedTuple):
    ids: Tensor
    order: Tensor
    experts: int
    chosen: int


class Gather(NamedTuple):
    x: Tensor
    order: Tensor
    y: Tensor
    dim: int
    experts: int
    chosen: int
    unused: int = 0


class Experts(NamedTuple):
    x: Tensor
    panels: Tensor
    y: Tensor
    order: Tensor
    bias: Tensor | None
    n: int
    k: int
    activation: int
    experts: int
    chosen: int
    unused: int
    form: Form


class Combine(NamedTuple):
    products: Tensor
    order: Tensor
    weights: Tensor
    beside: Tensor | None
    gate: Tensor | None
    y: Tensor
    dim: int
    experts: int
    chosen: int
    unused: int = 0


class Shrink(NamedTuple):
    x: Tensor
    slots: Tensor
    low: Tensor
    k: int
    width: int


class Heads(NamedTuple):
    x: Tensor
    panels: Tensor
    y: Tensor
    heads: int
    n: int
    k: int
    unused: int = 0


Operation = (
    Embed
    | RmsNorm
    | Linear
    | RopeKv
    | Attention
    | LayerNorm
    | Add
    | Route
    | Sort
    | Gather
    | Experts
    | Combine
    | Shrink
    | Heads
)
KINDS: tuple[type[Operation], ...] = get_args(Operation)  # in the order of `Kind`


class Tape(Protocol):
    """Decides what happens to an operation and where its result goes. `all_tables`: whether its step has the tables of
    all groups, or only those of the operation's own group."""

    all_tables: bool

    def buffer(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor: ...

    def take(self, operation: Operation, **step: object) -> None:
        """`step`: the fields of `library.Step` that the operation reads."""


def _struct(kind: type[tuple[Any, ...]]) -> type[ctypes.Structure]:
    fields = [(name, TYPES.get(hint, ctypes.c_void_p)) for name, hint in get_type_hints(kind).items()]
    return type(kind.__name__, (ctypes.Structure,), {"_fields_": fields})


TYPES: dict[Any, Any] = {int: ctypes.c_int32, float: ctypes.c_float, Form: ctypes.c_int32 * 4}
TYPES[LayerCache] = _struct(LayerCache)
STRUCTS = {kind: _struct(kind) for kind in KINDS}


class _Operands(ctypes.Union):
    _fields_: ClassVar = [(kind.__name__, struct) for kind, struct in STRUCTS.items()]


class Op(ctypes.Structure):
    _fields_: ClassVar = [("kind", ctypes.c_int32), ("joined", ctypes.c_int32), ("operands", _Operands)]


def joins(before: Operation, after: Operation) -> bool:
    """Whether the two may be fused; for the conditions see `Op` in csrc/program.h."""
    if isinstance(before, RmsNorm) and isinstance(after, Linear):
        return after.x is before.y
    if isinstance(before, Linear) and isinstance(after, RopeKv):
        return after.qkv is before.y and not after.whole  # no head has to wait for another
    return False


def program_of(
    stages: Sequence[Sequence[Operation]], address: Callable[[Tensor], int] = Tensor.data_ptr
) -> ctypes.Array[Op]:
    """The operations as the library takes them, with those of a stage joined; `address` gives a tensor's address."""

    def plain(value: Any) -> Any:
        if isinstance(value, LayerCache):
            return TYPES[LayerCache](*map(plain, value))
        return address(value) if isinstance(value, Tensor) else value

    def op(operation: Operation, joined: bool) -> Op:
        kind = type(operation)
        return Op(KINDS.index(kind), joined, _Operands(**{kind.__name__: STRUCTS[kind](*map(plain, operation))}))

    ops = [op(operation, index > 0) for stage in stages for index, operation in enumerate(stage)]
    return (Op * len(ops))(*ops)
