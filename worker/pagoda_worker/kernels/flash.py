"""The `flash` attention: flash-attention (version 2 or 3) reading the cache that Triton's kernels write.

The rest of the family is Triton's. Triton's cache is [num_blocks, Hkv, block_size, D] per layer; flash-attention gets
the strided view [num_blocks, block_size, Hkv, D].

Both versions select kernels and split keys by what they are told about a batch. To make them batch-invariant, we tell
them the same about every batch: one call serves decodes, prefills and mixtures of them; its bound on new tokens never
falls below `least_queries`, below which they would select other kernels; and keys are not split, which leaves part of a
large device idle in small batches. The rest is checked on the device for the shapes of the model to be served (see
`trial`), which also measures whether this is faster than Triton.

Signatures and preconditions: https://github.com/Dao-AILab/flash-attention, `flash_attn/flash_attn_interface.py` and
`csrc/flash_attn/flash_api.cpp` (2.6 to 2.8), `hopper/flash_attn_interface.py` and `hopper/flash_api.cpp` (3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pagoda_worker.kernel_choice import FAMILIES, FLASH
from pagoda_worker.kernels import trial
from pagoda_worker.kernels.ops import AttentionShape, BackendError, Needs, Ops, guarded
from pagoda_worker.rows.batch import Batch

if TYPE_CHECKING:
    from pagoda_worker.kernels.triton.ops import TritonKVCache

DTYPES = (torch.bfloat16, torch.float16)
WIDEST_HEAD, HEAD_STEP = 256, 8


@dataclass(frozen=True)
class Plan:
    """What all layers of a step share; tensors are int32 on the device.

    The first layer computes `sums` from `lengths` in every step, because in replayed steps a plan outlives its lengths.
    """

    tables: Tensor  # [B, max_blocks]
    lengths: Tensor  # [B], number of keys of each row
    starts: Tensor  # [B + 1], first query of each row
    sums: Tensor  # [B + 1], total keys of the rows before
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Library:
    """One version of flash-attention. `call` takes query [T, Hq, D], keys and values [num_blocks, block_size, Hkv, D],
    plan and shape, and returns [T, Hq, D]."""

    title: str
    call: Callable[[Tensor, Tensor, Tensor, Plan, AttentionShape], Tensor]
    least_queries: int
    block_multiple: int

    def unfit(self, needs: Needs) -> str:
        """Why it cannot serve this model, and what to do about it; empty if it may."""
        if needs.dtype not in DTYPES:
            return f"{self.title} computes in bfloat16 or float16, not in {needs.dtype}: see --dtype"
        if any(dim > WIDEST_HEAD or dim % HEAD_STEP for dim in needs.head_dims):
            return (
                f"{self.title} needs head sizes that are multiples of {HEAD_STEP} up to {WIDEST_HEAD}, "
                f"this model's are {', '.join(map(str, needs.head_dims))}"
            )
        if any(shape.sinks for shape in needs.attention):
            return f"{self.title} does not support attention sinks, which this model has"
        if needs.block_size % self.block_multiple:
            return (
                f"{self.title} needs a block size that is a multiple of {self.block_multiple}, not {needs.block_size}: "
                f"set --block-size {self.block_multiple}"
            )
        return ""


class FlashOps:
    """The attention family of `ops.Ops`, over the cache of Triton's operations."""

    name = FLASH
    capturable = True
    lookback = 255  # no version has larger tiles of keys
    batch_invariant = True
    own_threads = False
    integer_linear = False

    def __init__(self, triton: Ops, library: Library) -> None:
        self.device = triton.device
        self.keeps_latents_once = triton.keeps_latents_once
        self.library = library
        self.numerics = library.title
        for operation in FAMILIES["attention"]:
            if operation not in ("plan", "attend"):
                setattr(self, operation, getattr(triton, operation))

    def plan(self, batch: Batch, kv: TritonKVCache) -> Plan:
        starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        return Plan(
            tables=batch.block_tables,
            lengths=batch.lengths,
            starts=starts.to(self.device, non_blocking=True),
            sums=torch.zeros(len(starts), dtype=torch.int32, device=self.device),
            most_queries=max(self.library.least_queries, *batch.query_lens),
            most_keys=kv.num_blocks * kv.block_size,
        )

    def attend(  # noqa: PLR0913 - see Ops.attend
        self,
        query: Tensor,
        kv: TritonKVCache,
        layer: int,
        plan: Plan,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Raises BackendError for `sinks`, which no version supports, and for what only encoders need."""
        if bias is not None or not shape.causal:
            raise BackendError("kernels: flash-attention supports causal layers only: choose attention=torch")
        if sinks is not None:
            raise BackendError("kernels: flash-attention does not support attention sinks: choose attention=triton")
        if layer == 0:
            torch.cumsum(plan.lengths, 0, dtype=torch.int32, out=plan.sums[1:])
        keys, values = (part.transpose(1, 2) for part in kv.layer(layer))
        return self.library.call(query, keys, values, plan, shape).flatten(1)


def installed() -> bool:
    """Whether some version is installed; loading it may still fail."""
    return any(find_spec(package) is not None for package in PACKAGES)


def load_flash(triton: Ops, needs: Needs) -> Ops:
    """The newest version that can serve `needs` and passes its check, over the cache of `triton`.

    Raises:
        BackendError: none is installed or none can serve; the message says why for each.
    """
    reasons: list[str] = []
    for package in filter(find_spec, PACKAGES):
        try:
            return guarded(package, partial(_load, package, triton, needs))
        except BackendError as error:
            reasons.append(str(error).removeprefix("kernels: "))
    if not reasons:
        raise BackendError(
            "kernels: flash needs the package flash_attn (version 2) or flash_attn_interface (version 3, Hopper)"
        )
    raise BackendError(f"kernels: flash cannot serve: {'; '.join(reasons)}")


def _load(package: str, triton: Ops, needs: Needs) -> Ops:
    """Raises BackendError, and whatever a package raises that was not built for this torch, device or shape."""
    library = PACKAGES[package](import_module(package))
    ops = cast("Ops", FlashOps(triton, library))
    unfit = library.unfit(needs)
    if unfit:
        raise BackendError(f"kernels: {unfit}")
    problem = trial.problem(ops, triton, needs)
    if problem:
        raise BackendError(f"kernels: {library.title} failed its check: {problem}")
    return ops


def _version_2(package: Any) -> Library:
    """`flash_attn_with_kvcache` is unsuitable for decodes: its kernels differ from those for prompts, and since 2.8.4
    it waits for the device. With a bound of one new token, the function used would split keys by the number of rows."""
    function = package.flash_attn_varlen_func
    return Library(
        _title("flash_attn"),
        lambda query, keys, values, plan, shape: function(
            query, keys, values, plan.starts, plan.sums, plan.most_queries, plan.most_keys,
            block_table=plan.tables, **_masks(shape),
        ),
        least_queries=2,
        block_multiple=256,
    )  # fmt: skip


def _version_3(package: Any) -> Library:
    """Here `flash_attn_with_kvcache` serves all steps. The bound on new tokens exceeds the lines of every tile: below
    that, blocks are read by other means and in other tiles."""
    function = package.flash_attn_with_kvcache
    return Library(
        _title("flash_attn_3"),
        lambda query, keys, values, plan, shape: function(
            query, keys, values, cache_seqlens=plan.lengths, page_table=plan.tables, cu_seqlens_q=plan.starts,
            max_seqlen_q=plan.most_queries, num_splits=1, **_masks(shape),
        ),
        least_queries=256,
        block_multiple=1,
    )  # fmt: skip


def _masks(shape: AttentionShape) -> dict[str, Any]:
    """flash-attention assumes that the new tokens are a row's last ones. Its window excludes the token itself."""
    return {
        "softmax_scale": shape.scale,
        "causal": True,
        "window_size": (-1, -1) if shape.window is None else (shape.window - 1, 0),
        "softcap": shape.softcap or 0.0,
    }


def _title(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} of unknown version"


PACKAGES: dict[str, Callable[[Any], Library]] = {"flash_attn_interface": _version_3, "flash_attn": _version_2}
