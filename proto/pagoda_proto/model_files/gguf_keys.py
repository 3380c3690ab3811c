"""The metadata of one architecture in a GGUF file, and its RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda_proto.model_files.gguf import Gguf

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True)
class Keys:
    """The metadata of one architecture."""

    gguf: Gguf
    prefix: str

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.gguf.keys

    def whole(self, name: str, default: int | None = None) -> int:
        key = f"{self.prefix}.{name}"
        if self.gguf.is_array(key):  # one number per layer, which only some converters write
            numbers = set(self.gguf.items(key, int) or ())
            if len(numbers) != 1:
                raise self.gguf.bad(f"{key!r} differs by layer, which is not supported")
            return numbers.pop()
        return self.gguf.take(key, int, default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.gguf.take(f"{self.prefix}.{name}", float, default)

    def text(self, name: str, default: str) -> str:
        return self.gguf.take(f"{self.prefix}.{name}", str, default)

    @property
    def head_dim(self) -> int:
        """The size of a head. Raises BadGguf unless it and the number of heads are positive."""
        heads = self.whole("attention.head_count")
        found = self.whole("attention.key_length", self.whole("embedding_length") // heads if heads > 0 else 0)
        if heads < 1 or found < 1:
            raise self.gguf.bad(f"{heads} heads of {found} dimensions are not valid")
        return found


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """`rope_scaling` of config.json. A tensor of factors per frequency becomes longrope, whatever it came from."""
    gguf, kind, factor = keys.gguf, keys.text("rope.scaling.type", "none"), keys.number("rope.scaling.factor", 0.0)
    if keys.number("rope.scale_linear", 1.0) not in (0.0, 1.0):
        raise gguf.bad(f"'{keys.prefix}.rope.scale_linear' belongs to an older format, which is not supported")
    if FREQUENCIES in gguf.tensors:
        if kind != "none":
            raise gguf.bad(f"has both {FREQUENCIES!r} and rope scaling {kind[:32]!r}")
        factors = gguf.floats(FREQUENCIES)
        return _factors(factors, factors, {"attention_factor": 1.0, "factor": 1.0})
    if kind == "longrope" or LONG in gguf.tensors:
        return _longrope(keys)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise gguf.bad(f"rope scaling {kind[:32]!r} is not one of none, linear, yarn, longrope")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(keys, factor)


def _longrope(keys: Keys) -> dict[str, Any]:
    gguf, original = keys.gguf, keys.whole("rope.scaling.original_context_length", 0)
    if LONG not in gguf.tensors or SHORT not in gguf.tensors:
        raise gguf.bad(f"rope scaling 'longrope' needs {LONG!r} and {SHORT!r}")
    more = {"factor": keys.whole("context_length") / original} if original else {}
    if keys.has("rope.scaling.attn_factor"):
        more["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return _factors(gguf.floats(SHORT), gguf.floats(LONG), more)


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise keys.gguf.bad(f"'{keys.prefix}.rope.scaling.attn_factor' with rope scaling 'yarn' is not supported")
    betas = {f"beta_{end}": keys.number(f"rope.scaling.yarn_beta_{end}", 0.0) for end in ("fast", "slow")}
    original = keys.whole("rope.scaling.original_context_length", 0) or None
    given = {name: value for name, value in betas.items() if value}
    if keys.has("rope.scaling.yarn_attn_factor"):
        given["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | given


def _factors(short: list[float], long: list[float], more: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}
