"""Requests for a fake engine core, and their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.waits import Waits
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, Generate, RequestRecord

Connect = Callable[..., SessionClient]  # a started client, with its waits as keyword arguments
TICK_S = 0.02

_ids = itertools.count()


def waits(**fields: float) -> Waits:
    return Waits(**{"tick_s": TICK_S, **fields})


def record(prompt_token_ids: tuple[int, ...] = (7, 8, 9), **params: Any) -> RequestRecord:
    fields = {"max_tokens": 12} | params
    return RequestRecord(
        request_id=f"req{next(_ids)}",
        prompt_token_ids=list(prompt_token_ids),
        task=Generate(params=SamplingParams(**fields), seed=42),
    )


async def collect(generation: Any, aborted: frozenset[int] = frozenset()) -> list[Delta]:
    """Read all deltas; check that each choice is contiguous and ends once, and that the last delta ends the request.

    The ending of an `aborted` choice may be missing: the engine core may be lost before it reports it.
    """
    deltas: list[Delta] = []
    while batch := await generation.next():
        deltas += batch
    lengths: dict[int, int] = {}
    for delta in deltas:
        assert delta.result.first_index == lengths.get(delta.choice, 0)
        lengths[delta.choice] = delta.result.first_index + len(delta.result.token_ids)
    endings = [delta.choice for delta in deltas if delta.finish_reason is not None]
    assert len(endings) == len(set(endings))
    assert set(endings) - aborted == set(lengths) - aborted
    assert [d.ends_request for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert await generation.next() == []
    return deltas


def tokens_of(deltas: list[Delta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.result.token_ids]


def sample(client: SessionClient, name: str, **labels: str) -> float:
    return client._metrics.registry.get_sample_value(f"pagoda_{name}", {"model_name": "m"} | labels) or 0.0
