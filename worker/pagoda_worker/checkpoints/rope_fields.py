"""The fields of config.json on rotary embedding, in either spelling, read so that none is overlooked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, invalid, shown
from pagoda_worker.checkpoints.rope import RopeShape

ROPE = "config.json: rope"
ORIGINAL = "original_max_position_embeddings"
# Kind of scaling -> its required fields, and its optional ones.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), (ORIGINAL,)),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (
        ("factor",),
        (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), (ORIGINAL, "factor", "attention_factor")),
}


@dataclass(frozen=True, kw_only=True)
class RopeDefaults:
    """Defaults of a family.

    Attributes:
        partial: The share of a head that rotates; None: all, and no file may differ.
        other_names: Of kinds of scaling.
        scaling: Used if a file has none.
    """

    theta: float = 10_000.0
    partial: float | None = None
    interleaved: bool = False
    theta_field: str = "rope_theta"
    partial_field: str = "partial_rotary_factor"
    other_names: Mapping[str, str] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)


LLAMA_ROPE = RopeDefaults()


def read_rope(config: ConfigReader, head_dim: int, defaults: RopeDefaults = LLAMA_ROPE) -> RopeShape:
    """The one rotary embedding of a model.

    Raises:
        UnsupportedConfig: a kind of scaling, or a field of it, that is not implemented.
        CheckpointError: a number that makes no rotation.
    """
    defaults = taken(config, defaults)
    scaling, parameters = config.maybe("rope_scaling", dict), config.maybe("rope_parameters", dict)
    return rope_shape(config, parameters or scaling or defaults.scaling, head_dim, defaults)


def read_two_ropes(
    config: ConfigReader, head_dim: int, whole: RopeDefaults, local: RopeDefaults
) -> tuple[RopeShape, RopeShape]:
    """Those of full-attention layers and of sliding ones; in the older spelling, the latter have no scaling."""
    parameters = config.maybe("rope_parameters", dict)
    scaling = config.maybe("rope_scaling", dict) or {}
    whole, local = taken(config, whole), taken(config, local)
    if parameters is None:
        parameters = {"full_attention": scaling, "sliding_attention": {}}
    for kind in ("sliding_attention", "full_attention"):
        if not isinstance(parameters.get(kind), dict):
            raise UnsupportedConfig(f"config.json: 'rope_parameters' has no {kind!r}")
    return (
        rope_shape(config, parameters["full_attention"], head_dim, whole),
        rope_shape(config, parameters["sliding_attention"], head_dim, local),
    )


def taken(config: ConfigReader, defaults: RopeDefaults) -> RopeDefaults:
    """The defaults overridden by fields of config.json outside any scaling."""
    theta, partial = config.positive(defaults.theta_field, defaults.theta), defaults.partial
    if partial is not None:
        partial = config.positive(defaults.partial_field, partial)
    return replace(defaults, theta=theta, partial=partial)


def rope_shape(config: ConfigReader, parameters: Mapping[str, Any], head_dim: int, defaults: RopeDefaults) -> RopeShape:
    """See `read_rope`; `parameters` are `rope_parameters` or `rope_scaling`."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = defaults.other_names.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedConfig(f"config.json: rope type {shown(kind)} is not one of {', '.join(KINDS)}")
    needed, optional = KINDS[kind]
    missing = [name for name in needed if parameters.get(name) is None]
    if missing:
        raise UnsupportedConfig(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    required = {"partial_rotary_factor": (None, 1.0)} if defaults.partial is None else {}
    reader = ConfigReader(parameters, ROPE, ("rope_type", "type"), required)
    partial = 1.0 if defaults.partial is None else reader.positive("partial_rotary_factor", defaults.partial)
    plain = RopeShape(
        theta=reader.positive("rope_theta", defaults.theta),
        head_dim=head_dim,
        turning=_turning(head_dim, partial),
        interleaved=defaults.interleaved,
        kind=kind,
    )
    shape = _scaled(config, reader, plain, optional)
    reader.finish()
    return shape


def _turning(head_dim: int, partial: float) -> int:
    dims = int(head_dim * partial)
    if not 2 <= dims <= head_dim or dims % 2:
        raise invalid(
            ROPE, f"'partial_rotary_factor'={partial:g} rotates {dims} of {head_dim} dimensions, not an even part"
        )
    return 0 if dims == head_dim else dims


def _scaled(config: ConfigReader, reader: ConfigReader, plain: RopeShape, optional: tuple[str, ...]) -> RopeShape:
    """`plain` with the numbers of its kind."""
    longest = config.size("max_position_embeddings")
    outer = config.maybe_size(ORIGINAL)  # some families write it beside the scaling, where it takes precedence
    inner = reader.maybe_size(ORIGINAL) if ORIGINAL in (*optional, *KINDS[plain.kind][0]) else None
    trained = outer or inner or longest
    if plain.kind == "linear":
        return replace(plain, factor=reader.positive("factor", 1.0))
    if plain.kind == "dynamic":
        if plain.dims < 4:
            raise invalid(ROPE, f"'rope_type'='dynamic' needs at least 4 rotated dimensions, got {plain.dims}")
        return replace(plain, factor=reader.positive("factor", 1.0), original_max_position=longest)
    if plain.kind == "llama3":
        return _llama3(reader, replace(plain, original_max_position=trained))
    if plain.kind == "yarn":
        return _yarn(reader, replace(plain, original_max_position=trained))
    if plain.kind == "longrope":
        return _longrope(reader, replace(plain, original_max_position=trained), longest)
    return plain


def _llama3(reader: ConfigReader, plain: RopeShape) -> RopeShape:
    low, high = (reader.positive(f"{end}_freq_factor", 1.0) for end in ("low", "high"))
    if not low < high:
        raise invalid(ROPE, f"'high_freq_factor' must be above low_freq_factor={low:g}, got {high:g}")
    return replace(plain, factor=reader.positive("factor", 1.0), low_freq_factor=low, high_freq_factor=high)


def _yarn(reader: ConfigReader, plain: RopeShape) -> RopeShape:
    if plain.theta <= 1.0:
        raise invalid(ROPE, f"'rope_theta' must be above 1 with rope type 'yarn', got {plain.theta:g}")
    factor = reader.positive("factor", 1.0)
    # Zero counts as none, as in transformers.
    ours, all_dims = (
        reader.maybe_positive(name) if reader.maybe(name, float) else None for name in ("mscale", "mscale_all_dim")
    )
    magnitude = mscale(factor, 1.0)
    if ours is not None and all_dims is not None:
        magnitude = mscale(factor, ours) / mscale(factor, all_dims)
    return replace(
        plain,
        factor=factor,
        magnitude=reader.positive("attention_factor", magnitude),
        beta_fast=reader.positive("beta_fast", plain.beta_fast),
        beta_slow=reader.positive("beta_slow", plain.beta_slow),
        truncate=reader.take("truncate", bool, True),
    )


def mscale(factor: float, weight: float) -> float:
    """Yarn's magnitude for a context `factor` times longer."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(reader: ConfigReader, plain: RopeShape, longest: int) -> RopeShape:
    trained = plain.original_max_position
    factor = reader.positive("factor", longest / trained)
    if factor > 1.0 and trained < 2:
        raise invalid(ROPE, f"{ORIGINAL!r} must be above 1 with rope type 'longrope', got {trained}")
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return replace(
        plain,
        factor=factor,
        magnitude=reader.positive("attention_factor", magnitude),
        short_factor=_factors(reader, "short_factor", plain.dims // 2),
        long_factor=_factors(reader, "long_factor", plain.dims // 2),
    )


def _factors(reader: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    values = reader.take(name, list)
    if len(values) != count:
        raise invalid(
            ROPE, f"{name!r} must have {count} numbers, one per rotated pair of dimensions, got {len(values)}"
        )
    numbers = ConfigReader({f"{name}[{i}]": value for i, value in enumerate(values)}, ROPE)
    return tuple(numbers.positive(f"{name}[{i}]", 0.0) for i in range(count))
