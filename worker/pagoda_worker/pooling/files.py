"""The files of sentence-transformers: the stages that follow the transformer, and how long a text may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagoda_proto.pooling.kinds import MODULES, TRANSFORMER_FILES
from pagoda_proto.pooling.params import EMBED, TOKEN_EMBED
from pagoda_worker.checkpoints.checkpoint import CheckpointError, open_checkpoint, read_json
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.pooling.heads import dense, optional, tensor
from pagoda_worker.pooling.pooler import Pooler, widest
from pagoda_worker.pooling.stages import LayerNorm, Stage

MAX_MODULES = 32
WAYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}  # in the order in which several are concatenated, but for the first two
ORDER = ("cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last")
ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


def read_modules(path: Path) -> list[dict[str, Any]]:
    """The modules in order; [] if there is no such file. Raises CheckpointError."""
    file = path / MODULES
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file, [f"not JSON: {error}"]) from error
    sound = isinstance(found, list) and len(found) <= MAX_MODULES and all(map(_is_module, found))
    if not sound:
        raise CheckpointError(file, [f"must be a list of at most {MAX_MODULES} modules, each with a type and a path"])
    return sorted(found, key=lambda module: module.get("idx", 0))


def _is_module(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("idx", 0), int):
        return False
    name, place = value.get("type"), value.get("path")
    return isinstance(name, str) and isinstance(place, str) and Path(place).name == place


def longest(path: Path) -> int:
    """Most tokens of a text by these files; 0 if they do not say. Raises CheckpointError."""
    for name in TRANSFORMER_FILES:
        if (path / name).is_file():
            value = read_json(path / name).get("max_seq_length")
            return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
    return 0


def embedder(path: Path, hidden_size: int, default_way: str, whole: bool) -> Pooler:
    """The pooler of an embedding model. Without these files it pools the `default_way` and normalises. `whole`: all
    tokens of a prompt are available.

    Raises:
        CheckpointError: a file or a tensor does not fit.
        UnsupportedConfig: a module or a way to pool is unknown.
    """
    modules = _followers(path)
    ways: tuple[str, ...] = (default_way,)
    skips, normalizes = False, modules is None
    stages: list[Stage] = []
    if modules is not None:
        kinds = _checked(modules, "Pooling", "Dense", "LayerNorm", "Normalize")
        if kinds.count("Pooling") != 1 or kinds[0] != "Pooling":
            raise UnsupportedConfig(f"{MODULES}: Pooling must come once, before all that follows the transformer")
    for kind, place in modules or ():
        if kind == "Pooling":
            ways, skips = _pooling(read_json(place / "config.json"))
        elif kind == "Normalize":
            normalizes = True
        else:
            width = widest(stages, hidden_size * len(ways))
            stages.append(_vector_dense(place, width) if kind == "Dense" else _layer_norm(place))
    if not whole and ways != ("last",):
        raise UnsupportedConfig(f"{MODULES}: decoders support pooling by the last token only, not {ways[0]}")
    outputs = (EMBED, TOKEN_EMBED) if whole and len(ways) == 1 else (EMBED,)
    width = widest(stages, hidden_size * len(ways))
    return Pooler(ways=ways, stages=tuple(stages), width=width, outputs=outputs, normalizes=normalizes, skips=skips)


def _followers(path: Path) -> list[tuple[str, Path]] | None:
    """Kind and folder of the modules after the transformer, without those that only act in training; None without the
    file. Raises UnsupportedConfig if another kind of module reads the text."""
    modules = [(one["type"].rpartition(".")[2], path / one["path"]) for one in read_modules(path)]
    if not modules:
        return None
    if modules[0][0] != "Transformer":
        raise UnsupportedConfig(f"{MODULES}: a first module of type {modules[0][0][:64]!r} is not supported")
    return [(kind, place) for kind, place in modules[1:] if kind != "Dropout"]


def _checked(modules: list[tuple[str, Path]], *known: str) -> list[str]:
    """The kinds of modules that follow the transformer. Raises UnsupportedConfig."""
    kinds = [kind for kind, _ in modules]
    if unknown := [kind for kind in kinds if kind not in known]:
        after = "" if "Pooling" in known else " on token vectors"
        raise UnsupportedConfig(f"{MODULES}: a module of type {unknown[0][:64]!r}{after} is not supported")
    if "Normalize" in kinds[:-1]:
        raise UnsupportedConfig(f"{MODULES}: modules after Normalize are not supported")
    return kinds


def _pooling(fields: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """How to pool, and whether an instruction is left out."""
    unknown = [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value and name not in WAYS
    ]
    if unknown:
        raise UnsupportedConfig(f"Pooling: {unknown[0][:64]} is not supported")
    wanted = {way for name, way in WAYS.items() if fields.get(name)}
    if not wanted:
        mode = fields.get("pooling_mode", "mean")
        known = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
        wanted = {known.get(str(one), str(one)) for one in (mode if isinstance(mode, list) else [mode])}
        if not wanted <= set(ORDER):
            raise UnsupportedConfig(f"Pooling: pooling_mode={str(mode)[:64]!r} is not supported")
    return tuple(way for way in ORDER if way in wanted), fields.get("include_prompt") is False


def stages_of(path: Path, hidden_size: int) -> tuple[Stage, ...]:
    """The stages applied to token states where there is no Pooling. Raises as `embedder` does."""
    stages: list[Stage] = []
    modules = _followers(path) or []
    _checked(modules, "Dense", "Normalize")
    for kind, place in modules:
        if kind == "Dense":
            stages.append(_dense(place, widest(stages, hidden_size)))
    return tuple(stages)


def _vector_dense(place: Path, inputs: int) -> Stage:
    """A Dense module after Pooling. (PyLate's, on token vectors, is saved with names that it does not use.)"""
    fields = read_json(place / "config.json")
    for name in ("module_input_name", "module_output_name"):
        if fields.get(name) not in (None, "sentence_embedding"):
            raise UnsupportedConfig(f"Dense: {name}={str(fields[name])[:64]!r} is not supported")
    return _dense(place, inputs)


def _dense(place: Path, inputs: int) -> Stage:
    fields = read_json(place / "config.json")
    if fields.get("use_residual"):
        raise UnsupportedConfig("Dense: use_residual is not supported")
    named = str(fields.get("activation_function", "Identity")).rpartition(".")[2]
    if named not in ACTIVATIONS:
        raise UnsupportedConfig(f"Dense: the activation {named[:64]!r} is not supported")
    with open_checkpoint(place) as checkpoint:
        return dense(checkpoint, "linear", ACTIVATIONS[named], inputs)


def _layer_norm(place: Path) -> Stage:
    with open_checkpoint(place) as checkpoint:
        return LayerNorm(tensor(checkpoint, "norm.weight"), optional(checkpoint, "norm.bias"), 1e-5)
