"""How much memory a model's contexts will take, from config.json alone: the weights need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda_worker.checkpoints.reading import read_config
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.devices import choose_device
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.kv_cache import KVShape, grouped
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.loading.model import decoder_needs, model_len, run_dtype, spec_of
from pagoda_worker.loading.retention import KEEP_ALL, Retention, bytes_of_row, context_cost, settled
from pagoda_worker.models.decoder import kv_shapes

MIB, KIB = 2**20, 2**10


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """See `retention.Keeping`."""

    kv_groups: tuple[KVShape, ...]
    max_model_len: int
    ops: Ops
    retentions: tuple[Retention, ...] = KEEP_ALL


def contexts_of(config: WorkerConfig) -> list[str]:
    """Lines on the memory of the longest context, and on each group of layers that keep the same tokens.

    Raises:
        UnsupportedConfig: the model has no native implementation, so this is unknown before it is loaded.
        ValueError: it cannot be served like this.
    """
    fields = read_config(Path(config.model))
    spec = spec_of(fields)
    device = choose_device(config.device)
    config = config.settled(device.type)
    dtype = run_dtype(config.dtype, fields, None, device)
    ops, _ = load_ops(device, config.kernels, decoder_needs(config, dtype, spec))
    shapes, quantized = kv_shapes(spec, dtype, ops), config.kv_cache_dtype == "int8"
    groups, _ = grouped([replace(one, quantized=quantized) for one in shapes])
    max_len = model_len(config.max_model_len, spec.reach, spec.max_positions)
    (model,) = settled(config, Foreseen(kv_groups=groups, max_model_len=max_len, ops=ops))
    return [context_cost(model, config.block_size), *_by_table(model, config.block_size)]


def _by_table(model: Foreseen, block_size: int) -> Iterator[str]:
    for table, one in enumerate(model.retentions):
        shapes = [shape for shape in model.kv_groups if shape.table == table]
        layers = sum(shape.num_layers for shape in shapes)
        taken = bytes_of_row(shapes, model.retentions, model.max_model_len, block_size) / MIB
        what = f"the last {one.kept} tokens of any context" if one.kept else "all tokens"
        each = "" if one.kept else f", {sum(shape.bytes_per_token for shape in shapes) / KIB:.1f} KiB each"
        yield f"{layers} layers keep {what}: {taken:.1f} MiB{each}"
