"""The option `--kernels`: a back end, and exceptions for some families of operations.

    native                     everything by the native kernels
    native,attention=torch     the same, but attention and its cache by torch
    triton,attention=flash     attention by flash-attention, which computes nothing else

A family must come from one back end, because its operations share packed weights or a cache. Imports no torch: the
configuration is checked before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
BACKENDS = ("reference", "torch", "native", "triton")
FLASH = "flash"
FAMILIES = {
    "linear": (
        "quantize", "pack_linear", "pack_gated", "pack_experts", "new_slots", "fill_slot", "slot_bytes", "linear",
        "gated_linear", "activated_linear", "moe", "pack_heads", "head_linear", "logits",
    ),
    "pointwise": ("embed", "add_positions", "add", "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"),
    "attention": (
        "new_kv_cache", "copy_blocks", "export_blocks", "import_blocks", "rope_write", "latent_write", "write_kv",
        "plan", "attend",
    ),
    "sampling": ("sample", "report", "device_sampler"),
}  # fmt: skip


@dataclass(frozen=True)
class KernelChoice:
    """`overrides` names a back end per family; `base` (or "auto") serves the others."""

    base: str
    overrides: dict[str, str]


def parse_choice(text: str) -> KernelChoice:
    """Read the option `kernels`.

    Raises:
        ValueError: it names an unknown back end or family, or a family twice.
    """
    base, *rest = text.split(",")
    if base not in (AUTO, *BACKENDS):
        raise ValueError(f"kernels must be {AUTO} or one of {', '.join(BACKENDS)}, got {base!r}")
    overrides: dict[str, str] = {}
    for entry in rest:
        family, _, name = entry.partition("=")
        names = (*BACKENDS, FLASH) if family == "attention" else BACKENDS
        if family not in FAMILIES or name not in names or family in overrides:
            families = ", ".join(FAMILIES)
            raise ValueError(
                f"kernels: {entry!r} must name one of {families} once, then = and one of {', '.join(names)}"
            )
        overrides[family] = name
    return KernelChoice(base, overrides)
