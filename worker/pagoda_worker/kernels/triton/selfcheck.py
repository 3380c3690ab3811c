"""Checks, before a worker serves, that the kernels compute correctly on this device, and bit for bit where promised.

The reference back end in float64 on the CPU gives the expected results. Attention is computed for one row in several
cuts, and experts for tokens in several batches, and the bits are compared: low tiles against high ones, and split
programs against walking ones. This detects devices whose tensor cores sum in another order for another tile height.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import NewRow
from pagoda_worker.kernels.kv_cache import KVShape, planes_of
from pagoda_worker.kernels.ops import (
    Added,
    AttentionShape,
    BackendError,
    Expert,
    LowRank,
    Needs,
    Ops,
    Rotation,
    guarded,
)
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.kernels.triton.ops import TritonOps
from pagoda_worker.rows.batch import batch_of_spans
from pagoda_worker.rows.rows import Row
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots
from pagoda_worker.sampling import sampler
from pagoda_worker.sampling.device_sampler import samples_of
from pagoda_worker.sampling.sampler import Fault, Sample

ROWS, HIDDEN, OUT, BLOCK = 5, 96, 40, 16
RANKS = (3, 20)
HEADS, KV_HEADS, DEFAULT_DIM = 6, 2, 64
LENGTH = 300  # beyond one split
CHUNKS = [(3, 4), (200, 201), (201, 204), (255, 257), (220, 260), (299, 300)]  # short ones use low tiles
EXPERTS = Routing(experts=3, chosen=2, renormalised=True)
TOKENS, INPUTS, WIDTH = 60, 512, 96  # enough tokens for high tiles
BATCHES = [(0, 1), (1, 18), (30, 60)]  # few enough for low ones
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 1e-4}
CPU = torch.device("cpu")
Samples = list[Sample | Fault]
VOCAB = 5000  # beyond one slice, and beyond the ids used below; the model's own vocabulary is used if it is larger
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.7, "logprobs": 0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"allowed_token_ids": tuple(range(0, 970, 97)), "logit_bias": {97: 2.0}, "bad_words_token_ids": ((0,), (97, 97))},
    {"allowed_token_ids": (7,), "min_tokens": 2, "stop_token_ids": (7,)},
    {},  # its logits are given a NaN
]


class Verdict(NamedTuple):
    """What is wrong with the kernels on this device, and which of their results depend on how a prompt is cut."""

    wrong: str | None = None
    varies: str | None = None


def verdict(ops: TritonOps, needs: Needs) -> Verdict:
    """Raises whatever the compiler and the driver raise."""
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)
        wrong = _row_problem(ops, needs.dtype, generator)
        if needs.adapters:
            wrong = wrong or _adapter_problem(ops, needs.dtype, generator)
        if wrong:
            return Verdict(wrong)
        found = [_attention_verdict(ops, needs, generator)]
        if needs.experts:
            found.append(_experts_verdict(ops, needs.dtype, generator))
        wrong, varies = (next((words for words in kind if words), None) for kind in zip(*found, strict=True))
        return Verdict(wrong, varies)


def _row_problem(ops: TritonOps, dtype: torch.dtype, generator: torch.Generator) -> str | None:
    x, weight = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype), torch.linspace(0.5, 1.5, HIDDEN)
    plain, device = ReferenceOps(CPU), ops.device
    normed = ops.rms_norm(x.to(device), weight.to(device), 1e-5)
    if _differs(normed, plain.rms_norm(x.double(), weight, 1e-5)):
        return "norms are wrong"
    gate_up = (torch.randn(2 * OUT, HIDDEN, generator=generator) * HIDDEN**-0.5).to(dtype)
    gated = ops.gated_linear(x.to(device), ops.pack_gated(gate_up.to(device)), "silu")
    if _differs(gated, plain.gated_linear(x.double(), plain.pack_gated(gate_up.double()), "silu")):
        return "gated layers are wrong"
    return None


def _adapter_problem(ops: TritonOps, dtype: torch.dtype, generator: torch.Generator) -> str | None:
    """Lines of two adapters and of none, on a layer of zeros; together, and each alone."""
    slots = np.array([1, NO_ADAPTER, 0, 1, 0], np.int32)
    x, adapters = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype), _adapters(dtype, generator)
    plain, nothing = ReferenceOps(CPU), torch.zeros(OUT, HIDDEN)

    def added(one: Ops, lines: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        packed = one.pack_linear(nothing.to(one.device, lines.dtype))
        held = one.new_slots(packed, len(adapters), max(RANKS))
        for slot, factors in enumerate(adapters):
            a, b = (matrix.to(lines.dtype) for matrix in (factors.a, factors.b))
            one.fill_slot(held, slot, factors._replace(a=a, b=b))
        return one.linear(lines.to(one.device), packed, Added(held, TokenSlots(slots, one.device)))

    together = added(ops, x, slots)
    if _differs(together, added(plain, x.double(), slots)):
        return "the contribution of adapters is wrong"
    alone = [added(ops, x[row : row + 1], slots[row : row + 1]) for row in range(ROWS)]
    return None if torch.equal(torch.cat(alone), together) else "the contribution of an adapter depends on other rows"


def _adapters(dtype: torch.dtype, generator: torch.Generator) -> list[LowRank]:
    found = []
    for rank in RANKS:
        a, b = (torch.randn(size, rank, generator=generator) * size**-0.5 for size in (HIDDEN, OUT))
        spans = torch.tensor([[0, rank]], dtype=torch.int32).expand(OUT, 2)
        found.append(LowRank(a.T.to(dtype), 2 * b.to(dtype), torch.ones(rank), spans))
    return found


def _experts_verdict(ops: TritonOps, dtype: torch.dtype, generator: torch.Generator) -> Verdict:
    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x, logits = drawn(TOKENS, INPUTS).to(dtype), drawn(TOKENS, EXPERTS.experts)
    sizes, device, plain = ((2 * WIDTH, INPUTS), (INPUTS, WIDTH)), ops.device, ReferenceOps(CPU)
    made = [[(drawn(*size) * size[1] ** -0.5).to(dtype) for size in sizes] for _ in range(EXPERTS.experts)]
    wide = plain.pack_experts([Expert(*(one.double() for one in pair)) for pair in made], len(made))
    expected = plain.moe(x.double(), logits, wide, EXPERTS, "silu")
    packed = ops.pack_experts([Expert(*(one.to(device) for one in pair)) for pair in made], len(made))
    x, logits = x.to(device), logits.to(device)
    whole = ops.moe(x, logits, packed, EXPERTS, "silu")
    if _differs(whole, expected):
        return Verdict("experts are wrong")
    for begin, end in BATCHES:
        part = ops.moe(x[begin:end], logits[begin:end], packed, EXPERTS, "silu")
        if _differs(part, expected[begin:end]):
            return Verdict("experts of few tokens are wrong")
        if not torch.equal(part, whole[begin:end]):
            return Verdict(varies="the experts' results depend on the number of tokens")
    return Verdict()


def _attention_verdict(ops: TritonOps, needs: Needs, generator: torch.Generator) -> Verdict:
    for shape in dict.fromkeys(needs.attention or (_any_shape(needs),)):
        planes = planes_of(shape in needs.latent_attention, ops.keeps_latents_once)
        width = (shape.num_heads + planes * shape.num_kv_heads) * shape.head_dim
        qkv = torch.randn(LENGTH, width, generator=generator).to(needs.dtype)
        found = _verdict_of(ops, shape, needs.block_size or BLOCK, qkv, planes)
        if found != Verdict():
            return found
    return Verdict()


def _any_shape(needs: Needs) -> AttentionShape:
    dim = max(needs.head_dims, default=DEFAULT_DIM)
    return AttentionShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, scale=dim**-0.5)


def _verdict_of(ops: TritonOps, shape: AttentionShape, block_size: int, qkv: torch.Tensor, planes: int) -> Verdict:
    walking, plain = ops.with_tiles(replace(ops.tiles, fill=0)), ReferenceOps(CPU)
    row = _written(ops, qkv, shape, block_size, planes)
    whole = _attend(walking, *row, shape, [(0, LENGTH)])
    if _differs(whole, _attend(plain, *_written(plain, qkv.double(), shape, block_size, planes), shape, [(0, LENGTH)])):
        return Verdict(f"attention is wrong ({shape})")
    expected = torch.cat([whole[start:end] for start, end in CHUNKS])
    splitting = ops.with_tiles(replace(ops.tiles, fill=1 << 30))
    for one in (walking, splitting):
        chunks = _attend(one, *row, shape, CHUNKS)
        if _differs(chunks, expected.double()):
            return Verdict(f"attention in chunks is wrong ({shape})")
        if not torch.equal(chunks, expected):
            return Verdict(varies=f"attention depends on how a prompt is cut ({shape})")
    return Verdict()


def _written(
    ops: Ops, qkv: torch.Tensor, attention: AttentionShape, block_size: int, planes: int
) -> tuple[torch.Tensor, Any]:
    """One row of LENGTH, rotated: its queries, and a cache of its keys and values, or of keys that are also values."""
    device, dim = ops.device, attention.head_dim
    heads = attention.num_kv_heads
    shape = KVShape(num_layers=1, num_kv_heads=heads, head_dim=dim, dtype=qkv.dtype, planes=planes)
    angles = (torch.linspace(0, 6, LENGTH)[:, None] * torch.linspace(1, 0.1, dim // 2)).to(device)
    kv, everything = ops.new_kv_cache(shape, -(-LENGTH // block_size), block_size), torch.arange(LENGTH, device=device)
    turned = Rotation(angles.cos(), angles.sin(), everything)
    return ops.rope_write(qkv.to(device, copy=True), turned, None, kv, 0, everything), kv


def _attend(
    ops: Ops, query: torch.Tensor, kv: Any, attention: AttentionShape, chunks: list[tuple[int, int]]
) -> torch.Tensor:
    """Attention of tokens [start, end) of the row, with each chunk as a row of the batch."""
    blocks = torch.arange(kv.num_blocks, dtype=torch.int32, device=ops.device)
    batch = batch_of_spans(chunks, blocks.repeat(len(chunks), 1))
    return ops.attend(query[batch.positions], kv, 0, ops.plan(batch, kv), attention)


def sampling_problem(ops: TritonOps, needs: Needs) -> str | None:
    """What is wrong with the tokens and log-probabilities of two steps, if the host learns nothing in between."""
    try:
        got, expected = guarded("sampling", lambda: _sampled(ops, max(needs.vocab_size, VOCAB)))
    except BackendError as error:
        return str(error)
    same = all(_same(*both) for step in zip(got, expected, strict=True) for both in zip(*step, strict=True))
    return None if same else "sampling is wrong"


def _sampled(ops: TritonOps, vocab: int) -> tuple[list[Samples], list[Samples]]:
    """What the device chooses in each step, and what it should choose."""
    device, generator = ops.device, torch.Generator().manual_seed(1)
    there, here = _asking_rows(), _asking_rows()
    chosen, expected = [], []
    with torch.inference_mode():
        chooser = ops.device_sampler(len(there), vocab, lambda host: host.to(device))
        for _ in range(2):
            logits = 3 * torch.randn(len(there), vocab, generator=generator)
            logits[-1, 5] = torch.nan
            chosen.append(chooser.sample(logits.to(device, copy=True), there).tensors)
            expected.append(sampler.sample(logits, here))
            for promised, row, one in zip(there, here, expected[-1], strict=True):
                promised.promise()
                row.append(one.token_id if isinstance(one, Sample) else 0)
    return [samples_of(there, [tensor.cpu() for tensor in tensors]) for tensors in chosen], expected


def _asking_rows() -> list[Row]:
    prompt, rows = np.arange(3), []
    for i, asked in enumerate(ASKED):
        facts: dict[str, Any] = {"row_id": i, "num_prompt_tokens": 3, "num_computed": 0, "seed": 2**63 + i, "choice": i}
        new = NewRow(token_ids=[], block_ids=[], params=SamplingParams(**asked), **facts)
        rows.append(Row.of(new, prompt, prompt[:0]))
    return rows


def _same(got: Sample | Fault, expected: Sample | Fault) -> bool:
    if isinstance(got, Fault) or isinstance(expected, Fault) or got.logprobs is None or expected.logprobs is None:
        return got == expected
    mine, theirs = got.logprobs, expected.logprobs
    close = np.allclose([mine.logprob, *mine.top_logprobs], [theirs.logprob, *theirs.top_logprobs], atol=1e-5)
    return (got.token_id, mine.rank, mine.top_ids) == (expected.token_id, theirs.rank, theirs.top_ids) and close


def _differs(got: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = TOLERANCE[got.dtype]
    return not torch.allclose(got.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)
