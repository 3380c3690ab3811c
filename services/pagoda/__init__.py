"""Pagoda's Python interface. Names are imported when first used, so that `import pagoda` costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.offline.async_llm import AsyncLLM as AsyncLLM
    from pagoda.offline.beams import BeamSearchParams as BeamSearchParams
    from pagoda.offline.llm import LLM as LLM
    from pagoda.offline.llm import GenerationFailed as GenerationFailed
    from pagoda.offline.local import LoRARequest as LoRARequest
    from pagoda.offline.outputs import CompletionOutput as CompletionOutput
    from pagoda.offline.outputs import RequestOutput as RequestOutput
    from pagoda_proto.errors import PagodaError as PagodaError
    from pagoda_proto.params import SamplingParams as SamplingParams
    from pagoda_proto.pooling.params import PoolingParams as PoolingParams

_HOMES = {
    "AsyncLLM": "pagoda.offline.async_llm",
    "BeamSearchParams": "pagoda.offline.beams",
    "CompletionOutput": "pagoda.offline.outputs",
    "GenerationFailed": "pagoda.offline.llm",
    "LLM": "pagoda.offline.llm",
    "LoRARequest": "pagoda.offline.local",
    "PagodaError": "pagoda_proto.errors",
    "PoolingParams": "pagoda_proto.pooling.params",
    "RequestOutput": "pagoda.offline.outputs",
    "SamplingParams": "pagoda_proto.params",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
