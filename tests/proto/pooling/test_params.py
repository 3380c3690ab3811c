from __future__ import annotations

from typing import Any

import pytest

from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError
from pagoda_proto.params import ModelLimits
from pagoda_proto.pooling.params import CLASSIFY, EMBED, TOKEN_EMBED, PoolingParams, Readings, check_pooling

LIMITS = ModelLimits(100, 8)
EMBEDS = Readings((EMBED, TOKEN_EMBED), 32)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"output": "poem"}, "output"),
        ({"dimensions": -1}, "dimensions"),
        ({"skip": -1}, "skip"),
        ({"output": CLASSIFY, "dimensions": 3}, "dimensions"),
        ({"output": CLASSIFY, "normalize": False}, "normalize"),
        ({"activate": True}, "activate"),
    ],
)
def test_what_means_nothing_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        PoolingParams(**fields)
    assert caught.value.problems[0].param == field


@pytest.mark.parametrize(
    ("params", "ids", "readings", "field"),
    [
        (PoolingParams(), [1], Readings(), "task"),
        (PoolingParams(output=CLASSIFY), [1], EMBEDS, "task"),
        (PoolingParams(dimensions=33), [1], EMBEDS, "dimensions"),
        (PoolingParams(), [], EMBEDS, "input"),
        (PoolingParams(), [1, 100], EMBEDS, "input"),
        (PoolingParams(second_start=2), [1, 2], EMBEDS, "second_start"),
        (PoolingParams(skip=5), [1, 2], EMBEDS, "skip"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    params: PoolingParams, ids: list[int], readings: Readings, field: str
) -> None:
    with pytest.raises(InvalidParams) as caught:
        check_pooling(params, ids, LIMITS, readings)
    assert caught.value.problems[0].param == field


def test_a_prompt_may_fill_the_context_to_its_last_token() -> None:
    check_pooling(PoolingParams(dimensions=32), [1] * 8, LIMITS, EMBEDS)
    with pytest.raises(PagodaError) as caught:
        check_pooling(PoolingParams(), [1] * 9, LIMITS, EMBEDS)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "input")
