"""The tensors of an encoder, found below whatever prefix its checkpoint uses, and checked before any is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pagoda_worker.checkpoints.checkpoint import Checkpoint, CheckpointError, Wanted
from pagoda_worker.checkpoints.fingerprint import Entry
from pagoda_worker.checkpoints.formats.source import CheckpointSource, Formats, Quantizer
from pagoda_worker.encoders.spec import EncoderSpec, expected_tensors, linear_layers
from pagoda_worker.kernels.quantized import FORMATS, Weight, by_rows

# Heads, which their users request by name, and buffers without information.
BESIDE = (
    "cls.", "lm_head.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pooler.", "classifier.",
    "pre_classifier.", "head.", "decoder.", "embeddings.position_ids", "embeddings.token_type_ids", "score.",
    "rotary_emb.inv_freq", "linear.",
)  # fmt: skip
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


@dataclass(frozen=True)
class EncoderSource:
    """See `checkpoints.source.Source`; swaps the halves of matrices that merge them in the opposite order."""

    plain: CheckpointSource
    turned: frozenset[str]

    def tensor(self, name: str) -> torch.Tensor:
        return self.plain.tensor(name)

    def exact(self, name: str) -> torch.Tensor:
        return self.plain.exact(name)

    def widened(self, name: str) -> torch.Tensor:
        return self.plain.widened(name)

    def linear(self, name: str) -> Weight:
        weight = self.plain.linear(name)
        return by_rows(weight, _turned) if name in self.turned else weight

    def experts(self, name: str) -> Iterator[Weight]:
        return self.plain.experts(name)

    def tied(self, embedding: torch.Tensor) -> Weight:
        return self.plain.tied(embedding)


def _turned(rows: torch.Tensor) -> torch.Tensor:
    half = rows.shape[0] // 2
    return torch.cat((rows[half:], rows[:half]))


def stripped(checkpoint: Checkpoint, anchor: str) -> None:
    """Rename the checkpoint's tensors as if the model that contains `anchor` were all of it.

    Raises:
        CheckpointError: no name ends with it.
    """
    renamed = {_new_name(name): entry for name, entry in checkpoint.entries.items()}
    found = min((name for name in renamed if name.endswith(anchor)), key=len, default=None)
    if found is None:
        raise CheckpointError(checkpoint.path, [f"there is no tensor {anchor}"])
    checkpoint.entries = _below(renamed, found.removesuffix(anchor))


def _new_name(name: str) -> str:
    return next((name.removesuffix(old) + new for old, new in OLD_NAMES.items() if name.endswith(old)), name)


def _below(entries: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """Without the prefix, where present; tensors outside the model keep their names."""
    return {name.removeprefix(prefix): entry for name, entry in entries.items()}


def open_encoder_source(
    checkpoint: Checkpoint, spec: EncoderSpec, quantization: str, dtype: torch.dtype, quantizer: Quantizer
) -> EncoderSource:
    """Check the checkpoint by its headers. Its entries are renamed.

    Raises:
        CheckpointError: everything about it that does not fit.
    """
    stripped(checkpoint, f"{spec.names.words}.weight")
    beside = tuple(name for name in checkpoint.entries if name.startswith(BESIDE))
    wanted = {name: Wanted(shape) for name, shape in expected_tensors(spec).items()}
    checkpoint.check(wanted, beside, tied=False)
    formats = Formats(layers=FORMATS[quantization] if quantization else None)
    shapes = linear_layers(spec)
    plain = CheckpointSource(
        checkpoint=checkpoint,
        head="",
        transposed=frozenset(),
        shapes=shapes,
        formats=formats,
        dtype=dtype,
        quantizer=quantizer,
    )
    up = {spec.in_layer(index, spec.names.up[0]) for index in range(len(spec.layers))}
    return EncoderSource(plain, frozenset(up if spec.names.up_first else ()))
