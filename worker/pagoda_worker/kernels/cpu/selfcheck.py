"""Checks the kernels on this machine before a worker serves, in tens of milliseconds, with one odd shape each.

A processor, compiler or library that breaks them would otherwise show only as slightly wrong answers. The reference
back end in float64 gives the expected results; batch invariance is checked bit for bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from pagoda_proto.params import SamplingParams
from pagoda_worker.kernels.cpu.native import FLOAT_FORM, FORMS, GROUP, MINIMA_FORM, NativeOps
from pagoda_worker.kernels.kv_cache import KVShape, planes_of
from pagoda_worker.kernels.kv_cache import quantize as quantize_kv
from pagoda_worker.kernels.ops import ACTIVATIONS, CLAMPED, AttentionShape, Expert, Ops, Rotation
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, Weight, by_rows, quantize
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.rows.batch import batch_of_spans
from pagoda_worker.rows.order import Ids
from pagoda_worker.rows.penalties import Processing
from pagoda_worker.sampling import sampler

ROWS, HIDDEN, OUT, BLOCK = 13, 96, 80, 16
HEADS, KV_HEADS, DIM = 6, 2, 32
LATENT_DIM, TURNS = 96, 32  # LATENT_DIM exceeds the dims laid out at a time
TOLERANCE = 0.03  # bfloat16 results of magnitude about 1
VOCAB = 3001
MANNERS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_p=0.9, logprobs=0),
    SamplingParams(temperature=0.9, top_k=40, min_p=0.01),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={7: 4.0}, logprobs=2),
)


def problems(ops: NativeOps) -> dict[str, str]:
    """What is wrong with these kernels on this machine, by family of operations."""
    checks = {
        "linear": _linear_problem,
        "pointwise": _pointwise_problem,
        "attention": _attention_problem,
        "sampling": _sampling_problem,
    }
    with torch.inference_mode():
        found = {family: check(ops, torch.Generator().manual_seed(1)) for family, check in checks.items()}
    return {family: problem for family, problem in found.items() if problem}


def _linear_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(OUT, HIDDEN, generator=generator) * HIDDEN**-0.5).bfloat16()
    bias = torch.randn(OUT, generator=generator).bfloat16()
    found = ((name, _form_problem(ops, x, form, bias)) for name, form in _forms(weight).items())
    problem = next((f"{problem} ({name})" for name, problem in found if problem), None)
    others = (_rounding_problem(ops, weight), _activation_problem(ops, x, weight), _heads_problem(ops, x, generator))
    return next(filter(None, (problem, *others)), None) or _experts_problem(ops, x, generator)


def _rounding_problem(ops: NativeOps, weight: torch.Tensor) -> str | None:
    for bits in (8, 4):
        form = Format(bits=bits, group=GROUP, activation_bits=8)
        got, expected = ops.quantize(weight, form), quantize(weight, form)
        if not (torch.equal(got.levels, expected.levels) and torch.equal(got.scales, expected.scales)):
            return f"weights are quantised wrongly ({bits} bits)"
    return None


def _activation_problem(ops: NativeOps, x: torch.Tensor, weight: torch.Tensor) -> str | None:
    reference = ReferenceOps(ops.device)
    packed, expected = ops.pack_linear(weight), reference.pack_linear(weight.double())
    for activation in ACTIVATIONS:
        wide = reference.activated_linear(x.double(), expected, activation)
        if _differs(ops.activated_linear(x, packed, activation), wide):
            return f"layers with {activation} are wrong"
    return None


def _heads_problem(ops: NativeOps, x: torch.Tensor, generator: torch.Generator) -> str | None:
    weight = (torch.randn(HEADS, 20, HIDDEN // HEADS, generator=generator) / 4).bfloat16()
    reference, packed = ReferenceOps(ops.device), ops.pack_heads(weight)
    y = ops.head_linear(x, packed)
    if _differs(y, reference.head_linear(x.double(), reference.pack_heads(weight.double()))):
        return "layers of heads are wrong"
    if not torch.equal(ops.head_linear(x[4:5], packed)[0], y[4]):
        return "a row of a layer of heads depends on its neighbours"
    return None


def _experts_problem(ops: NativeOps, x: torch.Tensor, generator: torch.Generator) -> str | None:
    reference, routing = ReferenceOps(ops.device), Routing(experts=5, chosen=2, renormalised=False)
    logits = torch.randn(ROWS, routing.experts, generator=generator)
    sizes = (routing.experts, 2 * HEADS * DIM, HIDDEN), (routing.experts, HIDDEN, HEADS * DIM)
    stacks = [(torch.randn(size, generator=generator) * size[2] ** -0.5).bfloat16() for size in sizes]
    packed = ops.pack_experts(map(Expert, *stacks), routing.experts)
    expected = reference.pack_experts(map(Expert, *(stack.double() for stack in stacks)), routing.experts)
    for activation in ("silu", CLAMPED):
        wide = reference.moe(x.double(), logits, expected, routing, activation)
        if _differs(ops.moe(x, logits, packed, routing, activation), wide):
            return f"experts are wrong ({activation})"
    y = ops.moe(x, logits, packed, routing, "silu")
    if not torch.equal(ops.moe(x[4:5], logits[4:5], packed, routing, "silu")[0], y[4]):
        return "the experts' result for a row depends on its neighbours"
    return None


def _forms(weight: torch.Tensor) -> dict[str, Weight]:
    """The weight in every form with kernels, with the middle level as zero, zeros or minima."""
    forms: dict[str, Weight] = {"bfloat16": weight}
    for bits, activation_bits in FORMS:
        middle = quantize(weight, Format(bits=bits, group=GROUP, activation_bits=activation_bits))
        zeros = torch.arange(middle.scales.numel()).view_as(middle.scales) % 3 + (1 << bits - 1) - 1
        name = f"{bits} bits, activations {activation_bits}"
        forms[name] = middle
        forms[f"{name}, zeros"] = dataclasses.replace(middle, zeros=zeros.to(torch.uint8))
        if (bits, activation_bits) == MINIMA_FORM:
            minima = (-middle.scales.abs() * (8 - zeros % 5)).half().float()
            forms[f"{name}, minima"] = dataclasses.replace(middle, scales=middle.scales.abs(), minima=minima)
        if (bits, activation_bits) == FLOAT_FORM:
            scales = middle.scales.abs().log2().floor().exp2()
            forms["floats of 4 bits"] = dataclasses.replace(middle, scales=scales, floats=True)
    return forms


def _form_problem(ops: NativeOps, x: torch.Tensor, weight: Weight, bias: torch.Tensor) -> str | None:
    reference = ReferenceOps(ops.device)
    wide = weight if isinstance(weight, QuantizedWeight) else weight.double()
    packed, expected = ops.pack_linear(weight, bias), reference.pack_linear(wide, bias.double())
    y = ops.linear(x, packed)
    if _differs(y, reference.linear(x.double(), expected)):
        return "linear layers are wrong"
    if not torch.equal(torch.cat([ops.linear(row[None], packed) for row in x]), y):
        return "a row of a linear layer depends on its neighbours"
    twice = by_rows(weight, lambda rows: rows.repeat(1, 2))  # the same inputs in each of two segments
    sums = ops.logits(x.repeat(1, 2), ops.pack_linear(twice, None, 2))
    if not torch.equal(sums, 2 * ops.logits(x, ops.pack_linear(weight))):
        return "the segments of a linear layer are added wrongly"
    gated = ops.gated_linear(x, ops.pack_gated(weight, bias), "silu")
    if _differs(gated, reference.gated_linear(x.double(), expected, "silu")):
        return "gated layers are wrong"
    return None


def _pointwise_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    norm = torch.linspace(0.5, 1.5, HIDDEN)
    if _differs(ops.rms_norm(x, norm, 1e-5), ReferenceOps(ops.device).rms_norm(x.double(), norm, 1e-5)):
        return "norms are wrong"
    layer = ReferenceOps(ops.device).layer_norm(x.double(), norm, norm, 1e-5)
    if _differs(ops.layer_norm(x, norm, norm, 1e-5), layer):
        return "layer norms are wrong"
    return None


def _attention_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    found = (_cut_problem(ops, generator, over, shape) for over, shape in _kept(ops).items())
    return next(filter(None, found), None) or _blocks_problem(ops, generator)


def _kept(ops: NativeOps) -> dict[str, KVShape]:
    """The kinds of cache to check attention over, by their wording in messages."""
    plain = KVShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16)
    planes = planes_of(True, ops.keeps_latents_once)
    latents = dataclasses.replace(plain, num_kv_heads=1, head_dim=LATENT_DIM, planes=planes)
    both = {"": plain, " over latents": latents}
    return both | {f"{over} over int8": dataclasses.replace(one, quantized=True) for over, one in both.items()}


def _cut_problem(ops: NativeOps, generator: torch.Generator, over: str, kept: KVShape) -> str | None:
    length = 2 * BLOCK + 5
    width = (HEADS + kept.planes * kept.num_kv_heads) * kept.head_dim
    lines = torch.randn(length, width, generator=generator).bfloat16()
    together = _attend(ops, lines, [length], kept)
    wide = dataclasses.replace(kept, dtype=torch.float64)
    if _differs(together, _attend(ReferenceOps(ops.device), lines.double(), [length], wide)):
        return f"attention{over} is wrong"
    if not torch.equal(_attend(ops, lines, [BLOCK + 3] + [1] * (length - BLOCK - 3), kept), together):
        return f"attention{over} depends on how a prompt is cut"
    return None


@dataclass(frozen=True)
class Drawn:
    """A row to sample, implementing `sampler.RowState`."""

    params: SamplingParams
    seed: int
    outputs: Ids
    processing: Processing | None
    choice: int = 0

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)


def _sampling_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    logits = torch.randn(len(MANNERS), VOCAB, generator=generator) * 3
    outputs = np.arange(5, 30)
    rows = [Drawn(p, seed, outputs, Processing.of(p, (), outputs, 0)) for seed, p in enumerate(MANNERS)]
    together = ops.sample(logits.clone(), rows)
    for row, got, expected in zip(rows, together, sampler.sample(logits.clone(), rows), strict=True):
        if not _same_sample(got, expected):
            return f"sampling is wrong: {got}, not {expected}, for {row.params}"
    if [ops.sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)] != together:
        return "sampling a row depends on its neighbours"
    return None


def _same_sample(got: sampler.Sample | sampler.Fault, expected: sampler.Sample | sampler.Fault) -> bool:
    if isinstance(got, sampler.Fault) or isinstance(expected, sampler.Fault):
        return got == expected
    if got.logprobs is None or expected.logprobs is None:
        return got == expected
    ours, theirs = got.logprobs, expected.logprobs
    values = [ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs]
    whole = (got.token_id, ours.rank, ours.top_ids) == (expected.token_id, theirs.rank, theirs.top_ids)
    return whole and bool(np.allclose(*values, rtol=0, atol=1e-5))


def _blocks_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    shape = KVShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, quantized=True)
    kv = ops.new_kv_cache(shape, 3, BLOCK)
    key, value = torch.randn(2, 3 * BLOCK, KV_HEADS, DIM, generator=generator).bfloat16().unbind(0)
    ops.write_kv(key, value, kv, 0, torch.arange(3 * BLOCK))
    ops.copy_blocks(kv, [(0, 1), (1, 2)])
    after = ops.export_blocks(kv, [0, 1, 2])
    blocks = torch.stack((key, value), 1).view(3, BLOCK, 2, KV_HEADS, DIM).moveaxis(1, 3)[:, :, None]
    cells, scales = quantize_kv(blocks[[0, 0, 1]])
    if after.scales is None or not torch.equal(after.cells, cells) or not torch.equal(after.scales, scales):
        return "keys and values in int8 are rounded or copied wrongly"
    return None


def _columns(dim: int) -> tuple[slice, slice, slice]:
    """The columns of queries, of the latent, and of the rotated part of its key."""
    return slice(0, HEADS * dim), slice(HEADS * dim, -TURNS), slice(-TURNS, None)


def _attend(ops: Ops, lines: torch.Tensor, chunks: list[int], kept: KVShape) -> torch.Tensor:
    """One row, computed in chunks of these sizes, through rotation, cache and attention."""
    heads, dim = kept.num_kv_heads, kept.head_dim
    attention = AttentionShape(num_heads=HEADS, num_kv_heads=heads, head_dim=dim, scale=dim**-0.5)
    angles = torch.linspace(0, 6, len(lines))[:, None] * torch.linspace(1, 0.1, dim // 2)
    kv = ops.new_kv_cache(kept, 4, BLOCK)
    outputs, start = [], 0
    for size in chunks:
        batch = batch_of_spans([(start, start + size)], torch.arange(3, dtype=torch.int32)[None])
        positions = batch.positions
        part, rotation = lines[start : start + size].clone(), Rotation(angles.cos(), angles.sin(), positions)
        if kept.planes == 1:
            query, latent, turning = (part[:, columns].contiguous() for columns in _columns(dim))
            query = ops.latent_write(query, latent, turning, rotation, kv, 0, positions)
        else:
            query = ops.rope_write(part, rotation, None, kv, 0, positions)
        outputs.append(ops.attend(query, kv, 0, ops.plan(batch, kv), attention).clone())
        start += size
    return torch.cat(outputs)


def _differs(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return not torch.allclose(got.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE)
