"""The least time an operation can take on a machine with given ceilings, and the model shapes that are measured.

An operation that moves B bytes and does F operations cannot be faster than its floor, max(B / read bandwidth,
F / peak). `measure` takes the times.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_worker.kernels.segments import num_segments


@dataclass(frozen=True)
class Ceilings:
    """Bytes read per second, and operations per second with bf16 and with int8 operands, by all threads together."""

    read: float
    bf16: float
    int8: float

    def mean(self, other: Ceilings) -> Ceilings:
        """The ceilings to compare with a measurement taken between these two."""
        return Ceilings((self.read + other.read) / 2, (self.bf16 + other.bf16) / 2, (self.int8 + other.int8) / 2)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of one model that matter to kernels."""

    name: str
    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    head_norm: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each linear layer by name."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.middle, self.hidden),
            "down": (self.hidden, self.middle),
            "logits": (self.vocab, self.hidden),
        }

    @property
    def segments(self) -> dict[str, int]:
        """The number of input segments of each linear layer."""
        segments = num_segments([self.heads * self.head_dim, self.middle], [self.heads])
        return dict.fromkeys(self.matrices, 1) | {"out": segments, "down": segments}


def _shape(name: str, sizes: tuple[int, ...], head_norm: bool = False) -> ModelShape:
    names = ("hidden", "middle", "heads", "kv_heads", "head_dim", "vocab")
    return ModelShape(name=name, head_norm=head_norm, **dict(zip(names, sizes, strict=True)))


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("b135m", (576, 1536, 9, 3, 64, 49152)),
        _shape("b600m", (1024, 3072, 16, 8, 128, 151936), head_norm=True),
        _shape("b1b", (2048, 8192, 32, 8, 64, 128256)),
        _shape("8b", (4096, 14336, 32, 8, 128, 128256)),
    )
}


def parse_shape(text: str) -> ModelShape:
    """A name of SHAPES, or `hidden=1024,middle=3072,heads=16,kv_heads=8,head_dim=128,vocab=32000[,head_norm=1]`.

    Raises:
        ValueError: it is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        sizes = {name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))}
        head_norm = bool(sizes.pop("head_norm", 0))
        return ModelShape(name="custom", head_norm=head_norm, **sizes)
    except (TypeError, ValueError):
        known = ", ".join(SHAPES)
        sizes_text = "hidden=N,middle=N,heads=N,kv_heads=N,head_dim=N,vocab=N[,head_norm=1]"
        raise ValueError(f"shape must be one of {known}, or {sizes_text}; got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured operation. `unit` is the field of Ceilings that bounds its `operations`, if it has any."""

    op: str
    shape: str
    seconds: float
    num_bytes: float
    operations: float = 0.0
    unit: str = "bf16"

    def floor_s(self, ceilings: Ceilings) -> float:
        """The least time that these ceilings allow."""
        return max(self.num_bytes / ceilings.read, self.operations / float(getattr(ceilings, self.unit)))

    def share(self, ceilings: Ceilings) -> float:
        """Its speed as a share of the best possible: min(peak, bandwidth * intensity)."""
        return self.floor_s(ceilings) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What to measure, how long and up to what size. A run moves at least `cold_bytes`, to exceed the caches."""

    cold_bytes: int = 256 * 2**20
    repeats: int = 5
    max_tokens: int = 2**20  # cases with more rows, tokens or total tokens of context are skipped
    only: tuple[str, ...] = ()  # if not empty, operations with none of these in their name are skipped
    rows: tuple[int, ...] = ()  # of linear layers; empty: those of `measure`
