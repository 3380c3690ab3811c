"""A checkpoint as a source of weights: stored as they are, unpacked, or quantised during loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from pagoda_worker.checkpoints.checkpoint import Checkpoint, CheckpointError, Wanted
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.formats.layout import Layout, Packing, StackPacking, Stored
from pagoda_worker.checkpoints.spec import (
    IGNORED_SUFFIXES,
    DecoderSpec,
    expected_tensors,
    expert_stacks,
    linear_layers,
    unused_prefixes,
)
from pagoda_worker.kernels.quantized import FORMATS, Format, QuantizedWeight, Weight, dequantize

# At 4 bits the output matrix costs more accuracy than its bytes are worth: its errors go straight into the logits.
# llama.cpp keeps it wider than the layers, too.
HEAD_FORMAT = FORMATS["int8"]


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The format of each matrix, determined from config.json and the options before anything is read."""

    packings: Mapping[str, Packing] = field(default_factory=dict)  # by linear layer
    stacks: Mapping[str, StackPacking] = field(default_factory=dict)  # by tensor
    layers: Format | None = None  # what the matrices of the layers are quantised to
    activation_bits: int | None = None  # overrides that of the packings

    @property
    def forms(self) -> set[Format]:
        return {one.form for one in self.packings.values()} | {one.form for one in self.stacks.values()}

    @property
    def description(self) -> str:
        """For the log and for `numerics_id`."""
        if self.layers is not None:
            return f"{describe(self.layers)}, head int8"
        bits, forms = self.activation_bits, self.forms
        kinds = {describe(form if bits is None else replace(form, activation_bits=bits)) for form in forms}
        return " and ".join(sorted(kinds)) or "as stored"


def describe(form: Format) -> str:
    if form.floats:
        return f"float{form.bits} group {form.group}"
    grouped = (f" group {form.group}" if form.group else "") + (" with minima" if form.minima else "")
    activations = f", activations int{form.activation_bits}" if form.activation_bits < 16 else ""
    return f"int{form.bits}{grouped}{activations}"


def choose_formats(spec: DecoderSpec, layout: Layout | None, quantization: str) -> Formats:
    """The formats that the checkpoint's layout and the option `quantization` result in.

    Raises:
        UnsupportedConfig: they contradict each other.
    """
    if layout is None:
        return Formats(layers=FORMATS[quantization] if quantization else None)
    packings = {linear: packing for linear in linear_layers(spec) if (packing := layout.packing_of(linear)) is not None}
    stacks = {} if layout.stacks is None else dict.fromkeys(expert_stacks(spec), layout.stacks)
    if layout.stacks is not None and not stacks:
        raise UnsupportedConfig(
            f"quantization_config: {layout.method} needs experts stored in one tensor, and this model has none"
        )
    as_stored = Formats(packings=packings, stacks=stacks)
    if not quantization:
        return as_stored
    kinds = {(form.bits, form.activation_bits) for form in as_stored.forms}
    whole = not any(form.floats for form in as_stored.forms)
    roundable = whole and (4, 16) in kinds and kinds <= {(4, 16), (8, 8)}
    if quantization != "int4" or not roundable:
        other = (
            "or use int4, which also rounds activations to int8"
            if roundable
            else "it cannot be quantised in another way"
        )
        raise UnsupportedConfig(
            f"quantization={quantization!r}: the checkpoint is quantised already ({layout.method}: "
            f"{as_stored.description}). Leave the option empty to serve it as it is; {other}"
        )
    return Formats(packings=packings, activation_bits=8)


class Quantizer(Protocol):
    """The part of a back end (see `Ops`) that a source needs; weights are read to its device."""

    device: torch.device

    def quantize(self, weight: torch.Tensor, form: Format) -> QuantizedWeight: ...


@dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """See `checkpoints.source.Source`. Made by `open_source`, which has checked everything first.

    Attributes:
        head: The output matrix.
        transposed: Matrices that are stored [inputs, outputs].
    """

    checkpoint: Checkpoint
    head: str
    transposed: frozenset[str]
    shapes: Mapping[str, tuple[int, int]]
    formats: Formats
    dtype: torch.dtype
    quantizer: Quantizer

    @property
    def device(self) -> torch.device:
        return self.quantizer.device

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.get(name, self.dtype, self.device)

    def exact(self, name: str) -> torch.Tensor:
        return self.checkpoint.get(name, torch.float32, self.device)

    def linear(self, name: str) -> Weight:
        packing = self.formats.packings.get(name)
        if packing is not None:
            weight, bits = self._unpacked(name, packing), self.formats.activation_bits
            return weight if bits is None or isinstance(weight, torch.Tensor) else replace(weight, activation_bits=bits)
        layers = self.formats.layers
        form = HEAD_FORMAT if layers is not None and name == self.head else layers
        stored = self.checkpoint.stored(f"{name}.weight")
        return self._rounded(stored.t().contiguous() if name in self.transposed else stored, form)

    def widened(self, name: str) -> torch.Tensor:
        """Does not apply the option `quantization`."""
        packing = self.formats.packings.get(name)
        if packing is None:
            return self.tensor(f"{name}.weight")
        weight = self._unpacked(name, packing)
        return weight if isinstance(weight, torch.Tensor) else dequantize(weight).to(self.dtype)

    def _unpacked(self, name: str, packing: Packing) -> Weight:
        weight = packing.read(stored_layer(self.checkpoint, name, self.shapes[name], self.device))
        return weight.to(self.dtype) if isinstance(weight, torch.Tensor) else weight

    def experts(self, name: str) -> Iterator[Weight]:
        packing = self.formats.stacks.get(name)
        if packing is not None:
            yield from packing.read(name, lambda part: self.checkpoint.stored(part).to(self.device))
            return
        for matrix in self.checkpoint.stored(name):
            yield self._rounded(matrix.t().contiguous() if name in self.transposed else matrix, self.formats.layers)

    def _rounded(self, stored: torch.Tensor, form: Format | None) -> Weight:
        if form is None or not divides(form, (stored.shape[0], stored.shape[1])):
            return stored.to(device=self.device, dtype=self.dtype)
        return self.quantizer.quantize(stored.to(self.device), form)

    def tied(self, embedding: torch.Tensor) -> Weight:
        return embedding if self.formats.layers is None else self.quantizer.quantize(embedding, HEAD_FORMAT)


def open_source(
    checkpoint: Checkpoint, spec: DecoderSpec, formats: Formats, dtype: torch.dtype, quantizer: Quantizer
) -> CheckpointSource:
    """Check the checkpoint by its headers and its smallest tensors.

    Raises:
        CheckpointError: everything about it that does not fit.
        UnsupportedConfig: it asks for something unsupported.
    """
    shapes, plain = linear_layers(spec), expected_tensors(spec)
    wanted = {name: Wanted(shape) for name, shape in plain.items()}
    for linear, packing in formats.packings.items():
        del wanted[f"{linear}.weight"]
        packed = packing.tensors(linear, shapes[linear])
        wanted = {f"{linear}.{suffix}": one for suffix, one in packed.items()} | wanted
    stacks = expert_stacks(spec)
    for name, stack in formats.stacks.items():
        del wanted[name]
        wanted |= stack.tensors(name, stacks[name])
    checkpoint.check(wanted, IGNORED_SUFFIXES, spec.tied, unused_prefixes(spec))
    problems = _not_finite(checkpoint, [name for name in plain if name.endswith(spec.names.favour)])
    for linear, packing in formats.packings.items():
        stored = stored_layer(checkpoint, linear, shapes[linear], torch.device("cpu"))
        problems += packing.faults(stored)
        if "bias" in stored and f"{linear}.bias" not in plain and bool(stored["bias"].any()):
            problems.append(f"{linear}.bias is not zero, but the architecture has no such bias")
    if problems:
        raise CheckpointError(checkpoint.path, problems)
    return CheckpointSource(
        checkpoint=checkpoint,
        head=spec.names.head,
        transposed=_transposed(spec),
        shapes=shapes,
        formats=formats,
        dtype=dtype,
        quantizer=quantizer,
    )


def _not_finite(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Biases of a choice spoil no logit, so the first step does not show that they are no numbers."""
    bad = [name for name in names if not bool(checkpoint.stored(name).float().isfinite().all())]
    return [f"{name} has values that are not finite" for name in bad]


def _transposed(spec: DecoderSpec) -> frozenset[str]:
    names = spec.names
    stacks = expert_stacks(spec) if names.expert_inputs_first else ()
    return frozenset(stacks) | (frozenset(linear_layers(spec)) - {names.head} if names.transposed else frozenset())


def stored_layer(checkpoint: Checkpoint, linear: str, shape: tuple[int, int], device: torch.device) -> Stored:
    return Stored(linear, shape, checkpoint.entries, lambda name: checkpoint.stored(name).to(device))


def left_alone(spec: DecoderSpec, formats: Formats) -> list[str]:
    """Matrices of the layers that the option cannot quantise: their inputs do not fill whole groups."""
    form = formats.layers
    if form is None:
        return []
    return [name for name, shape in linear_layers(spec).items() if name != spec.names.head and not divides(form, shape)]


def divides(form: Format, shape: tuple[int, int]) -> bool:
    return not form.group or shape[1] % form.group == 0
