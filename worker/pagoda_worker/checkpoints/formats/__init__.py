"""Quantised checkpoints: the method that config.json names, and what each method stores in place of a matrix.

A method says for every linear layer how it is packed, or that it is not. Tensors of a packing are checked by their
headers like any other, and become a `QuantizedWeight`, or are widened. To add a method: a function `read(fields, where)
-> Layout` and a line in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.formats.awq import read_awq
from pagoda_worker.checkpoints.formats.compressed import read_compressed
from pagoda_worker.checkpoints.formats.fp8 import read_fp8
from pagoda_worker.checkpoints.formats.gptq import read_gptq
from pagoda_worker.checkpoints.formats.layout import Layout
from pagoda_worker.checkpoints.formats.mxfp4 import read_mxfp4

FIELD = "quantization_config"
METHODS: dict[str, Callable[[dict[str, Any], str], Layout]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def read_layout(fields: dict[str, Any]) -> Layout | None:
    """The layout named by `quantization_config` of config.json; None if there is none.

    Raises:
        UnsupportedConfig: an unsupported method, or version or option of it; the message names the field.
    """
    value = fields.get(FIELD)
    if not value:
        return None
    method = value.get("quant_method") if isinstance(value, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise UnsupportedConfig(f"config.json: {FIELD}: quant_method={method!r} is not one of {known}")
    return METHODS[method](value, f"config.json: {FIELD} ({method})")
