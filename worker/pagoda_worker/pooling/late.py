"""The pooler of late interaction, as a checkpoint's files define it; see `pagoda_proto.pooling.late`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda_proto.pooling.kinds import HF_COLBERT, architecture_of
from pagoda_proto.pooling.late import METADATA, Late, late_of, marks_of
from pagoda_proto.pooling.params import MAX_SIM, TOKEN_EMBED
from pagoda_worker.checkpoints.checkpoint import Checkpoint, read_json
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.reading import vocabulary
from pagoda_worker.pooling.files import read_modules, stages_of
from pagoda_worker.pooling.heads import dense
from pagoda_worker.pooling.pooler import Pooler, widest
from pagoda_worker.pooling.stages import Stage

SENTENCE = "config_sentence_transformers.json"


def read_late(path: Path, fields: Mapping[str, Any]) -> Late | None:
    """None for a model of another kind. Raises UnsupportedConfig, CheckpointError."""
    sentence, metadata = (read_json(path / name) if (path / name).is_file() else {} for name in (SENTENCE, METADATA))
    try:
        return late_of(fields, read_modules(path), sentence, metadata)
    except ValueError as error:
        raise UnsupportedConfig(f"late interaction: {error}") from error


def late_pooler(late: Late, path: Path, fields: Mapping[str, Any], checkpoint: Checkpoint, hidden_size: int) -> Pooler:
    """Raises UnsupportedConfig, CheckpointError."""
    stages: tuple[Stage, ...]
    if architecture_of(fields) == HF_COLBERT:
        stages = (dense(checkpoint, "linear", "identity", hidden_size),)
    else:
        stages = stages_of(path, hidden_size)
    try:
        marks = marks_of(late, vocabulary(path).get)
    except ValueError as error:
        raise UnsupportedConfig(f"late interaction: {error}") from error
    return Pooler(
        ways=("cls",),
        stages=stages,
        width=widest(stages, hidden_size),
        outputs=(TOKEN_EMBED, MAX_SIM),
        normalizes=True,
        marks=marks,
        filled=late.filled,
    )
