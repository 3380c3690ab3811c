"""From a model directory to a model that can compute, with everything the runner and the engine core must know."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pagoda_proto.adapters.files import AdapterError, directory_of
from pagoda_proto.adapters.identity import read_lora_modules
from pagoda_proto.model_files.files import is_gguf
from pagoda_proto.pooling.kinds import architecture_of
from pagoda_worker.adapters.places import places_of
from pagoda_worker.adapters.reading import Limits
from pagoda_worker.adapters.store import NO_ADAPTERS, Adapters, AdapterStore
from pagoda_worker.checkpoints.checkpoint import Checkpoint, Progress
from pagoda_worker.checkpoints.config_reader import HARMLESS, ConfigReader, UnsupportedConfig, check_sizes, shown
from pagoda_worker.checkpoints.fingerprint import fingerprint
from pagoda_worker.checkpoints.formats import FIELD, read_layout
from pagoda_worker.checkpoints.formats.gguf import block_layout, rounding_remark
from pagoda_worker.checkpoints.formats.layout import Layout
from pagoda_worker.checkpoints.formats.source import Formats, choose_formats, left_alone, open_source
from pagoda_worker.checkpoints.gguf import open_weights
from pagoda_worker.checkpoints.reading import read_config
from pagoda_worker.checkpoints.spec import DecoderSpec, MoeShape, as_spelled, both_ways, linear_layers
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.available import GIB
from pagoda_worker.device.devices import choose_device
from pagoda_worker.grammars.compiling import NO_GRAMMARS, Grammars
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Cache, Needs, Ops, SlotRoom, guarded
from pagoda_worker.loading.numerics import fixed_angles, native_implementation, numerics_id
from pagoda_worker.loading.retention import KEEP_ALL, Retention
from pagoda_worker.models import ARCHITECTURES
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.defaults import completed
from pagoda_worker.models.recorded import Recorded
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import TokenSlots

log = logging.getLogger(__name__)

CHOOSES_THE_CODE = {"architectures", "model_type"}  # do not change the arithmetic, but choose the code
OTHER_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Model(Protocol):
    """A model as the runner sees it; both methods are called under torch.inference_mode."""

    kv_groups: tuple[KVShape, ...]

    def forward(self, batch: Batch, kv: Sequence[Cache]) -> torch.Tensor:
        """Write K and V of the batch's tokens, return final hidden states [T, H]."""

    def logits(self, hidden: torch.Tensor, *, slots: TokenSlots | None = None) -> torch.Tensor:
        """hidden [R, H] -> [R, V] float32; `slots` are those of these tokens, None if none has an adapter."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    model: Model
    kv_groups: tuple[KVShape, ...]  # the model's, stored as configured
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # width of the logits
    max_model_len: int
    fingerprint: str  # which weights, and the arithmetic in config.json
    numerics_id: str
    batch_invariant: bool  # whether a token's bits depend on its row alone
    repeatable: bool = True  # whether a restarted worker gives the same bits
    grammars: Grammars = NO_GRAMMARS  # over its vocabulary
    adapters: Adapters = NO_ADAPTERS
    pooler: Pooler | None = None  # for models that read: turns states into vectors; there are no logits
    scratch: KVShape | None = None  # for models that read whole prompts: K and V that one layer needs while computing
    second_place: int = 0  # offset of the second text's positions in a pair
    retentions: tuple[Retention, ...] = KEEP_ALL  # by table
    spare_blocks: int = 0  # of each table, with ids after those that rows are given

    def new_kv_cache(self, num_blocks: int, block_size: int) -> tuple[Cache, ...]:
        """A cache for each group, with `num_blocks` blocks for groups of the first table.

        Raises BackendError if the back end supports no such cache.
        """

        def new() -> tuple[Cache, ...]:
            counts = [one.num_blocks(num_blocks) + self.spare_blocks for one in self.retentions]
            return tuple(self.ops.new_kv_cache(group, counts[group.table], block_size) for group in self.kv_groups)

        return guarded(self.ops.name, new, but=(MemoryError, torch.OutOfMemoryError, torch.AcceleratorError))


def load_model(
    config: WorkerConfig,
    progress: Progress | None = None,
    opened: Callable[[Path, Progress | None], Checkpoint] = open_weights,
    *,
    head_size: int | None = None,
) -> LoadedModel:
    """Load the model of `config.model`.

    Args:
        config: Which model, where and how.
        progress: Called with bytes loaded and bytes in all; an exception it raises ends the loading.
        opened: Opens its tensors; a benchmark makes them up.
        head_size: Number of tokens, from the first, that get logits; None: all.

    Raises:
        ValueError: the directory, its configuration or the worker's configuration cannot be used; says which and why.
    """
    path = Path(config.model)
    fields = read_config(path)
    _refuse_hopeless(fields)
    config, device = settled(config)
    spec, layout, reason = _what_to_load(config, fields)
    with opened(path, progress) as checkpoint:
        dtype = run_dtype(config.dtype, fields, checkpoint.dtype(), device)
        ops = chosen_ops(config, device, decoder_needs(config, dtype, spec))
        if spec is None:
            try:
                made = _through_transformers(config, checkpoint, ops, dtype, head_size)
            except UnsupportedConfig as error:
                raise UnsupportedConfig(f"{error}; it does not run natively: {reason}") from error
        else:
            spelled = as_spelled(spec, checkpoint.entries)
            made = _natively(config, spelled, layout, checkpoint, ops, dtype, head_size)
    return _loaded(config, made, ops, dtype, fingerprint(fields, HARMLESS - CHOOSES_THE_CODE, checkpoint.digest))


def settled(config: WorkerConfig) -> tuple[WorkerConfig, torch.device]:
    """Choose the device, complete the configuration for it, and configure torch."""
    device = choose_device(config.device)
    config = config.settled(device.type)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where kernels are launched, first by the back end's self-check
    # The first call also starts a second pool of that many threads, for good, which we do not use.
    torch.set_num_threads(1)
    torch.set_num_threads(config.threads)
    return config, device


class _Made(NamedTuple):
    """A model, and facts known only from building it. `implementation`: see `numerics_id`."""

    model: Model
    vocab_size: int
    max_model_len: int
    implementation: str
    formats: Formats = Formats()
    batch_invariant: bool = True
    adapters: Adapters = NO_ADAPTERS


def _loaded(config: WorkerConfig, made: _Made, ops: Ops, dtype: torch.dtype, weights: str) -> LoadedModel:
    """`weights` is their fingerprint."""
    kv_groups = tuple(replace(group, quantized=config.kv_cache_dtype == "int8") for group in made.model.kv_groups)
    return LoadedModel(
        model=made.model,
        kv_groups=kv_groups,
        ops=ops,
        dtype=dtype,
        device=ops.device,
        vocab_size=made.vocab_size,
        max_model_len=made.max_model_len,
        fingerprint=weights,
        numerics_id=numerics_id(ops, kv_groups[0], made.implementation, made.formats.description),
        batch_invariant=ops.batch_invariant and made.batch_invariant,
        repeatable=made.batch_invariant,
        adapters=made.adapters,
    )


def _natively(  # noqa: PLR0913 - all that a model is made of
    config: WorkerConfig,
    spec: DecoderSpec,
    layout: Layout | None,
    checkpoint: Checkpoint,
    ops: Ops,
    dtype: torch.dtype,
    head_size: int | None,
) -> _Made:
    formats = choose_formats(spec, layout or block_layout(checkpoint.entries), config.quantization)
    source = open_source(checkpoint, spec, formats, dtype, ops)
    _tell_formats(ops, dtype, spec, formats)
    if remark := rounding_remark(checkpoint.entries, linear_layers(spec)):
        log.warning("weights: %s", remark)
    max_len = model_len(config.max_model_len, spec.reach, spec.max_positions)
    with torch.inference_mode():
        room = SlotRoom(config.max_loras, config.max_lora_rank) if config.takes_adapters else None
        decoder = Decoder(spec, ops, source, dtype, max_len, head_size=head_size, room=room)
        adapters = _adapters(config, spec, decoder, dtype) if config.takes_adapters else NO_ADAPTERS
        op_by_op = ops.capturable or not decoder.recordable
        model = decoder if op_by_op else Recorded(decoder, config.max_tokens_per_step, config.max_rows)
    for found in fixed_angles(spec.ropes, max_len):
        log.info("rotary embedding: %s, for all requests alike, because max_model_len is %d", found, max_len)
    return _Made(
        model, spec.vocab_size, max_len, native_implementation(spec.ropes, max_len), formats, adapters=adapters
    )


def _adapters(config: WorkerConfig, spec: DecoderSpec, decoder: Decoder, dtype: torch.dtype) -> AdapterStore:
    """A store with the named adapters loaded, so that faults are reported at once. Raises ValueError."""
    named = {name: Path(one.path).absolute() for name, one in read_lora_modules(config.lora_modules).items()}
    below = [directory_of(config.lora_dir)] if config.lora_dir else []
    store = AdapterStore(
        decoder, places_of(spec, decoder.adapted), dtype,
        count=config.max_loras, limits=Limits(config.max_lora_rank, config.max_lora_bytes),
        allowed=[*named.values(), *below],
    )  # fmt: skip
    each, count = int(config.max_lora_gib * GIB), config.max_loras if below else len(named)
    if config.max_lora_gib:
        store.bound(each, count)
    sizes = [0]
    for name, path in named.items():
        try:
            sizes.append(store.load(name, path))
        except AdapterError as error:
            raise ValueError(f"lora_modules: {name!a} at {path}: {error}") from error
    if not config.max_lora_gib:
        store.bound(max(*sizes, _most_bytes(config, spec, decoder) if below else 0), count)
    return store


def _most_bytes(config: WorkerConfig, spec: DecoderSpec, decoder: Decoder) -> int:
    """Bytes of an adapter that adds to every matrix and replaces every norm."""
    places = places_of(spec, decoder.adapted)
    ranks = {module.name: config.max_lora_rank for module in places.modules.values()}
    return decoder.adapter_bytes(ranks, {one.name for one in places.whole.values() if len(one.shape) == 1})


def _through_transformers(
    config: WorkerConfig, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, head_size: int | None
) -> _Made:
    _refuse_native_options(config, head_size)
    from pagoda_worker.models.fallback import TransformersModel

    model = TransformersModel(checkpoint.path, ops, dtype, checkpoint)
    log.warning(
        "a step of one token takes about %.1f ms through transformers, so a request gets at most about %.0f tokens a "
        "second here",
        1e3 * model.step_seconds, 1 / model.step_seconds,
    )  # fmt: skip
    if not model.batch_invariant:
        log.warning("%s: tokens may depend on how a request is batched; bfloat16 may avoid that", dtype)
    max_len = model_len(config.max_model_len, model.max_positions, model.max_positions)
    return _Made(model, model.vocab_size, max_len, model.implementation, batch_invariant=model.batch_invariant)


def decoder_needs(config: WorkerConfig, dtype: torch.dtype, spec: DecoderSpec | None) -> Needs:
    """What a decoder requires of a back end; `spec` is None for one that runs through transformers."""
    needs = Needs(
        dtype=dtype, block_size=config.block_size, num_threads=config.threads, instruction_set=config.instruction_set
    )
    if spec is None:
        return needs
    return replace(
        needs,
        hidden_size=spec.hidden_size,
        head_dims=tuple(sorted({layer.attention.head_dim for layer in spec.layers})),
        latents=tuple(sorted({size for layer in spec.layers for size in layer.latents})),
        inputs=tuple(sorted({inputs for _, inputs in linear_layers(spec).values()})),
        attention=tuple(layer.attention for layer in spec.layers),
        latent_attention=tuple(layer.attention for layer in spec.layers if layer.latent is not None),
        quantized_cache=spec.causal and config.kv_cache_dtype == "int8",
        adapters=config.takes_adapters,
        experts=any(isinstance(layer.mlp, MoeShape) for layer in spec.layers),
        vocab_size=spec.vocab_size,
    )


def chosen_ops(config: WorkerConfig, device: torch.device, needs: Needs) -> Ops:
    """The operations; logs which were chosen. Raises BackendError."""
    ops, remarks = load_ops(device, config.kernels, needs)
    for remark in remarks:
        log.warning(remark)
    log.info("kernels: %s", ops.name)
    return ops


def _refuse_native_options(config: WorkerConfig, head_size: int | None) -> None:
    """Refuse options that the fallback lacks: transformers' own code, against which it checks itself, has none of
    them."""
    if config.takes_adapters:
        raise UnsupportedConfig("lora_modules, lora_dir: models that run through transformers do not support adapters")
    if head_size is not None:
        raise UnsupportedConfig(
            f"draft_vocab_size={head_size}: models that run through transformers consider all tokens; leave it out"
        )
    if config.kv_cache_dtype != "auto":
        raise UnsupportedConfig(
            f"kv_cache_dtype={config.kv_cache_dtype}: models that run through transformers support only auto"
        )


def _refuse_hopeless(fields: dict[str, Any]) -> None:
    """Refuse what neither the native code nor the fallback can run."""
    check_sizes(fields)
    if fields.get("is_encoder_decoder"):
        raise UnsupportedConfig("config.json: 'is_encoder_decoder': only decoder-only models are served")
    if fields.get("is_causal") is False:
        raise UnsupportedConfig("config.json: 'is_causal': a model with bidirectional attention cannot generate text")
    name = architecture_of(fields)
    if name.endswith(OTHER_HEADS):  # the fallback would put an output matrix in the place of the head
        raise UnsupportedConfig(f"config.json: architecture {shown(name)} has a head that is not supported")


def _what_to_load(config: WorkerConfig, fields: dict[str, Any]) -> tuple[DecoderSpec | None, Layout | None, str]:
    """The spec of a natively supported model (None: run it through transformers), how its matrices are quantised, and
    why it is not supported natively.

    Raises:
        UnsupportedConfig: it has no native implementation, and the fallback is off or cannot run it.
    """
    layout, name = read_layout(fields), architecture_of(fields)
    try:
        spec = spec_of(fields)
    except UnsupportedConfig as error:
        if layout is not None or config.quantization:
            asked = (
                f"quantization={config.quantization!r}" if layout is None else f"config.json: {FIELD} ({layout.method})"
            )
            raise UnsupportedConfig(
                f"{asked}: only models with a native implementation can be quantised: {error}"
            ) from error
        if not config.fallback or is_gguf(Path(config.model)):
            raise
        log.warning("%s runs through transformers' code, not natively: %s", name or "the model", error)
        return None, None, str(error)
    return spec, layout, ""


def spec_of(fields: dict[str, Any]) -> DecoderSpec:
    """The spec of a natively supported model that generates, however it is quantised. Raises as `native_spec` does."""
    spec = native_spec(architecture_of(fields), {name: value for name, value in fields.items() if name != FIELD})
    if not spec.causal:
        raise UnsupportedConfig("config.json: a model with bidirectional attention cannot generate text")
    return spec


def _tell_formats(ops: Ops, dtype: torch.dtype, spec: DecoderSpec, formats: Formats) -> None:
    if formats == Formats():
        return
    log.info("weights: %s", formats.description)
    if not ops.integer_linear:
        log.info("%s kernels have no integer arithmetic: quantised weights are widened to %s", ops.name, dtype)
    if any(form.floats and form.bits == 8 for form in formats.forms):
        log.info("weights: there are no kernels for float8, so they are widened to %s and take more memory", dtype)
    alone = left_alone(spec, formats)
    if alone:
        log.info("weights: %d matrices stay %s as inputs fill no whole groups: %s, ..", len(alone), dtype, alone[0])


def native_spec(architecture: str, fields: dict[str, Any]) -> DecoderSpec:
    """Read config.json for a natively supported architecture.

    Raises:
        UnsupportedConfig: the architecture or a field is not supported natively; the message names it.
        CheckpointError: a field has a value that no model can have.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedConfig(f"config.json: architecture {architecture!r} has no native implementation")
    module, function = ARCHITECTURES[architecture].split(":")
    reader = ConfigReader(completed(architecture, fields))
    spec: DecoderSpec = getattr(importlib.import_module(module), function)(reader)
    causal = reader.take("is_causal", bool, True)  # of any family; some embedding models set it to false
    reader.finish()
    if causal:
        return spec
    if any(layer.attention.window for layer in spec.layers):
        raise UnsupportedConfig("config.json: 'is_causal': bidirectional sliding windows are not supported")
    return both_ways(spec)


def run_dtype(choice: str, fields: dict[str, Any], stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The configured dtype, else the checkpoint's; float16 becomes bfloat16 on CPU, where it is slow and overflows."""
    if choice != "auto":
        return DTYPES[choice]
    named = DTYPES.get(str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch."))
    dtype = named or (stored if stored is not None and stored in DTYPES.values() else torch.float32)
    return torch.bfloat16 if dtype == torch.float16 and device.type == "cpu" else dtype


def model_len(configured: int, limit: int, default: int) -> int:
    """`configured` if set, else `default`. Raises ValueError if it exceeds `limit`."""
    if configured > limit:
        raise ValueError(f"max_model_len={configured} exceeds the model's own limit of {limit} tokens")
    return configured or default
