"""A caller in this process may change a row's logits by a function of its own. A function crosses no wire, so only who
has the worker in his own process can give one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pagoda_proto.params import SamplingParams

Processor = Callable[[list[int], Any], Any]
"""Output tokens so far and the logits that follow them, [V] float32 in numpy, to logits of the same shape. It is called
once per position, whatever happens to the row, and is to depend on nothing else."""


class ProcessedParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters with a function."""

    processor: Processor


def with_processor(params: SamplingParams, processor: Processor) -> ProcessedParams:
    return ProcessedParams(**msgspec.structs.asdict(params), processor=processor)


def processor_of(params: SamplingParams) -> Processor | None:
    return params.processor if isinstance(params, ProcessedParams) else None


def apply(processor: Processor, outputs: list[int], logits: Any) -> str:
    """Let it change `logits` [V] in place; what is wrong with it, "" if nothing is. Whatever it raises is its own row's
    end."""
    try:
        changed = np.asarray(processor(outputs, logits.copy()), np.float32)
    except Exception as error:  # noqa: BLE001 - a function of the caller's
        return f"the logits processor raised {type(error).__name__}: {error}"
    if changed.shape != logits.shape:
        return f"the logits processor returned logits of shape {changed.shape} instead of {logits.shape}"
    logits[:] = changed
    return ""
