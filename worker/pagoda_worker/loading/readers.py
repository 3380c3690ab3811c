"""Loads models that read: an encoder, or a decoder without its output matrix, and the pooler of its states."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from pagoda_proto.pooling.kinds import CLASSIFY, GENERATE, MODULES, architecture_of, is_yes_no_reranker, kind_of
from pagoda_proto.pooling.late import Late
from pagoda_worker.checkpoints.checkpoint import Checkpoint, Progress
from pagoda_worker.checkpoints.config_reader import HARMLESS, UnsupportedConfig, check_sizes
from pagoda_worker.checkpoints.fingerprint import fingerprint
from pagoda_worker.checkpoints.formats import FIELD, read_layout
from pagoda_worker.checkpoints.formats.gguf import block_layout
from pagoda_worker.checkpoints.formats.layout import Layout
from pagoda_worker.checkpoints.formats.source import choose_formats, open_source
from pagoda_worker.checkpoints.gguf import open_weights
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.reading import read_config, vocabulary
from pagoda_worker.checkpoints.spec import DecoderSpec, as_spelled
from pagoda_worker.config import WorkerConfig
from pagoda_worker.encoders.encoder import Encoder
from pagoda_worker.encoders.families import ENCODER_HARMLESS, encoder_architecture, encoder_spec, family_of
from pagoda_worker.encoders.source import open_encoder_source
from pagoda_worker.encoders.spec import EncoderSpec
from pagoda_worker.kernels.ops import Needs, Ops
from pagoda_worker.loading.model import (
    CHOOSES_THE_CODE,
    LoadedModel,
    chosen_ops,
    decoder_needs,
    load_model,
    model_len,
    native_spec,
    run_dtype,
    settled,
)
from pagoda_worker.loading.numerics import native_implementation, numerics_id
from pagoda_worker.models import ARCHITECTURES
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.recorded import RecordedReader
from pagoda_worker.pooling import files, heads
from pagoda_worker.pooling.late import late_pooler, read_late
from pagoda_worker.pooling.pooler import Pooler

log = logging.getLogger(__name__)

# For heads and the use of vectors: no hidden state depends on them.
BESIDE_THE_DECODER = {
    "problem_type", "num_labels", "sentence_transformers", "matryoshka_dimensions", "is_matryoshka", "score_bias",
    "classifier_from_token", "method",
}  # fmt: skip


def load_any_model(config: WorkerConfig, progress: Progress | None = None) -> LoadedModel:
    """Load the model of `config.model`, whatever it is for. Raises ValueError as `load_model` does."""
    path = Path(config.model)
    fields = read_config(path)
    kind = kind_of(fields, config.model, has_modules=(path / MODULES).is_file(), asked=config.task)
    if kind == GENERATE:
        return load_model(config, progress)
    log.info("the model is for: %s", kind)
    if config.takes_adapters:
        raise UnsupportedConfig(
            f"lora_modules, lora_dir: adapters need a model that generates, and this one is for: {kind}"
        )
    check_sizes(fields)
    config, device = settled(config)
    with open_weights(path, progress) as checkpoint, torch.inference_mode():
        reading = _Reading(config, fields, kind, device, checkpoint)
        return _encoder(reading) if family_of(encoder_architecture(fields)) else _decoder(reading)


@dataclass(frozen=True)
class _Reading:
    """What to load, and from where."""

    config: WorkerConfig
    fields: dict[str, Any]
    kind: str
    device: torch.device
    checkpoint: Checkpoint

    @property
    def path(self) -> Path:
        return Path(self.config.model)


def _encoder(reading: _Reading) -> LoadedModel:
    config, fields, checkpoint = reading.config, reading.fields, reading.checkpoint
    name = encoder_architecture(fields)
    spec = encoder_spec(name, fields)
    dtype = _dtype(reading, whole=True)
    ops = chosen_ops(config, reading.device, _encoder_needs(config, dtype, spec))
    max_len = _max_len(reading, spec.max_positions, spec.max_positions)
    source = open_encoder_source(checkpoint, spec, config.quantization, dtype, ops)
    pooler = _encoder_pooler(reading, spec)
    encoder = Encoder(spec, ops, source, dtype, max_len, pairs=reading.kind == CLASSIFY)
    weights = source.plain.formats.description
    return LoadedModel(
        model=RecordedReader(encoder, max(config.max_tokens_per_step, max_len)),
        kv_groups=(),
        ops=ops,
        dtype=dtype,
        device=reading.device,
        vocab_size=spec.vocab_size,
        max_model_len=max_len,
        fingerprint=_fingerprint(fields, ENCODER_HARMLESS, checkpoint, pooler),
        numerics_id=numerics_id(ops, encoder.scratch, native_implementation(spec.ropes, max_len), weights),
        batch_invariant=ops.batch_invariant,
        pooler=pooler,
        scratch=encoder.scratch,
        second_place=encoder.second_place,
    )


def _encoder_needs(config: WorkerConfig, dtype: torch.dtype, spec: EncoderSpec) -> Needs:
    """What an encoder requires of a back end."""
    return Needs(
        dtype=dtype,
        hidden_size=spec.hidden_size,
        head_dims=(spec.layers[0].attention.head_dim,),
        inputs=tuple({spec.hidden_size, spec.width}),
        attention=tuple(layer.attention for layer in spec.layers),
        vocab_size=spec.vocab_size,
        block_size=config.block_size,
        num_threads=config.threads,
        instruction_set=config.instruction_set,
    )


def _max_len(reading: _Reading, reach: int, max_positions: int) -> int:
    """The configured length, else no longer than the files allow prompts to be."""
    max_len = model_len(reading.config.max_model_len, reach, max_positions)
    return max_len if reading.config.max_model_len else min(max_len, files.longest(reading.path) or max_len)


def _dtype(reading: _Reading, *, whole: bool) -> torch.dtype:
    """For models that read whole prompts: vectors need less precision than training did, and bfloat16 kernels are a few
    times faster."""
    config = reading.config
    if whole and config.dtype == "auto" and reading.device.type == "cpu":
        return torch.bfloat16
    return run_dtype(config.dtype, reading.fields, reading.checkpoint.dtype(), reading.device)


def _encoder_pooler(reading: _Reading, spec: EncoderSpec) -> Pooler:
    fields, path = reading.fields, reading.path
    if reading.kind == CLASSIFY:
        layers = heads.HEADS[family_of(encoder_architecture(fields))]
        return heads.classifier(reading.checkpoint, layers, heads.way_of(fields), spec.hidden_size, fields)
    late = read_late(path, fields)
    if late is not None:
        _check_reach(late, spec)
        return late_pooler(late, path, fields, reading.checkpoint, spec.hidden_size)
    return files.embedder(path, spec.hidden_size, "cls", whole=True)


def _check_reach(late: Late, spec: EncoderSpec) -> None:
    """Query padding attends to the whole query from any position: no window may be shorter, no bias go by distance."""
    windows = [layer.attention.window for layer in spec.layers if layer.attention.window]
    if late.seen or not late.filled:
        return
    if spec.biased_by_distance or late.filled > min(windows, default=late.filled):
        why = "biases by distance" if spec.biased_by_distance else f"windows of {min(windows)} tokens"
        raise UnsupportedConfig(
            f"late interaction: queries padded to {late.filled} unattended tokens are not supported with {why}"
        )


def _decoder(reading: _Reading) -> LoadedModel:
    """Prompts are computed like any decoder's, in chunks and over the prefix cache; the last state is used. A decoder
    that attends both ways reads them whole, like an encoder."""
    config, checkpoint = reading.config, reading.checkpoint
    fields = {name: value for name, value in reading.fields.items() if name not in BESIDE_THE_DECODER}
    layout, spec = read_layout(fields), _decoder_spec(checkpoint, fields)
    dtype = _dtype(reading, whole=not spec.causal)
    ops = chosen_ops(config, reading.device, decoder_needs(config, dtype, spec))
    pooler = _decoder_pooler(reading, spec)
    max_len = _max_len(reading, spec.reach, spec.max_positions)
    decoder, weights = _headless(reading, spec, layout, ops, dtype, max_len)
    quantized = spec.causal and config.kv_cache_dtype == "int8"
    groups = tuple(replace(group, quantized=quantized) for group in decoder.kv_groups)
    most = config.max_tokens_per_step if spec.causal else max(config.max_tokens_per_step, max_len)
    return LoadedModel(
        model=RecordedReader(decoder, most) if decoder.recordable else decoder,
        kv_groups=groups if spec.causal else (),
        scratch=None if spec.causal else groups[0],
        ops=ops,
        dtype=dtype,
        device=reading.device,
        vocab_size=spec.vocab_size,
        max_model_len=max_len,
        fingerprint=_fingerprint(fields, HARMLESS - CHOOSES_THE_CODE, checkpoint, pooler),
        numerics_id=numerics_id(ops, groups[0], native_implementation(spec.ropes, max_len), weights),
        batch_invariant=ops.batch_invariant,
        pooler=pooler,
    )


def _decoder_spec(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> DecoderSpec:
    """Renames the tensors of `checkpoint`, which may be a decoder saved without its output matrix."""
    name = _generating(architecture_of(fields))
    spec = native_spec(name, {key: value for key, value in fields.items() if key != FIELD})
    _with_root(checkpoint, (spec.names, *spec.spellings))
    return as_spelled(spec, checkpoint.entries)


def _headless(
    reading: _Reading, spec: DecoderSpec, layout: Layout | None, ops: Ops, dtype: torch.dtype, max_len: int
) -> tuple[Decoder, str]:
    """The decoder without output matrix and score head, and the format of its matrices, in words."""
    checkpoint = reading.checkpoint
    for key in [key for key in checkpoint.entries if key.startswith("score.")]:
        del checkpoint.entries[key]
    spec = replace(spec, tied=True, logit_scale=1.0)
    formats = choose_formats(spec, layout or block_layout(checkpoint.entries), reading.config.quantization)
    source = open_source(checkpoint, spec, formats, dtype, ops)
    return Decoder(spec, ops, source, dtype, max_len, head_size=0), formats.description


def _generating(name: str) -> str:
    """The architecture with the same decoder that has a native implementation, usually the one that generates."""
    for suffix in ("ForSequenceClassification", "Model"):
        if name.endswith(suffix) and name not in ARCHITECTURES:
            others = [name.removesuffix(suffix) + ending for ending in ("ForCausalLM", "LMHeadModel", "Model")]
            return next((other for other in others if other in ARCHITECTURES), name)
    return name


def _with_root(checkpoint: Checkpoint, spellings: Iterable[Names]) -> None:
    """If a decoder was saved without its output matrix, rename its tensors as if it had been saved with it."""
    for names in spellings:
        embedding = f"{names.top(names.embed)}.weight"
        if embedding not in checkpoint.entries and embedding.removeprefix(names.root) in checkpoint.entries:
            beside = ("score.", f"{names.head}.")
            checkpoint.entries = {
                key if key.startswith(beside) else names.top(key): entry for key, entry in checkpoint.entries.items()
            }
            return


def _decoder_pooler(reading: _Reading, spec: DecoderSpec) -> Pooler:
    checkpoint, fields, hidden_size = reading.checkpoint, reading.fields, spec.hidden_size
    if reading.kind != CLASSIFY:
        return files.embedder(reading.path, hidden_size, "last" if spec.causal else "mean", whole=not spec.causal)
    if not spec.causal:
        raise UnsupportedConfig("heads of decoders with bidirectional attention are not supported")
    if any(name.startswith("score.") for name in checkpoint.entries):
        return heads.classifier(checkpoint, heads.DECODER_HEAD, "last", hidden_size, fields)
    if not is_yes_no_reranker(fields, reading.config.model):
        raise UnsupportedConfig("there is no head for scores: the tensor score.weight is missing")
    yes, no = _answers(reading.path)
    return heads.difference(checkpoint, _output_matrix(checkpoint, spec), yes, no)


def _output_matrix(checkpoint: Checkpoint, spec: DecoderSpec) -> str:
    """The name of its tensor, of which two rows are used as stored."""
    matrix, embedding = f"{spec.names.head}.weight", f"{spec.names.top(spec.names.embed)}.weight"
    stored = [name for name in checkpoint.entries if name.startswith(f"{spec.names.head}.")]
    if stored not in ([], [matrix]):
        raise UnsupportedConfig(f"a reranker that answers yes or no must have an unquantised {matrix}, not {stored}")
    return embedding if spec.tied and not stored else matrix


def _answers(path: Path) -> tuple[int, int]:
    """The ids of "yes" and "no"."""
    yes, no = map(vocabulary(path).get, ("yes", "no"))
    if not (isinstance(yes, int) and isinstance(no, int)):
        raise UnsupportedConfig("tokenizer.json: a reranker that answers yes or no must have tokens for both")
    return yes, no


def _fingerprint(fields: Mapping[str, Any], harmless: set[str], checkpoint: Checkpoint, pooler: Pooler) -> str:
    """Of the weights, and of the pooler."""
    own = fingerprint(dict(fields), harmless, checkpoint.digest)
    return sha256(own.encode() + pooler.digest()).hexdigest()[: len(own)]
