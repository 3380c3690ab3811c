"""A caller in this process may change a row's logits with its own function. A function crosses no wire, so only offline
use, with the worker in the caller's process, can pass one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pagoda_proto.params import SamplingParams

Processor = Callable[[list[int], Any], Any]
"""Takes the output tokens so far and the logits that follow them, [V] float32 in numpy; returns logits of the same
shape. Called once per position, whatever happens to the row; must depend on nothing else."""


class ProcessedParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters with a logits processor."""

    processor: Processor


def with_processor(params: SamplingParams, processor: Processor) -> ProcessedParams:
    return ProcessedParams(**msgspec.structs.asdict(params), processor=processor)


def processor_of(params: SamplingParams) -> Processor | None:
    return params.processor if isinstance(params, ProcessedParams) else None


def apply(processor: Processor, outputs: list[int], logits: Any) -> str:
    """Let it change `logits` [V] in place; returns what is wrong with it, "" if nothing. Whatever it raises ends its
    own row."""
    try:
        changed = np.asarray(processor(outputs, logits.copy()), np.float32)
    except Exception as error:  # noqa: BLE001 - a function of the caller's
        return f"the logits processor raised {type(error).__name__}: {error}"
    if changed.shape != logits.shape:
        return f"the logits processor returned logits of shape {changed.shape} instead of {logits.shape}"
    logits[:] = changed
    return ""
