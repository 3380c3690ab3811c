"""A sampler on the device chooses the same tokens as the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.fakes_model import new_row
from tests.worker.grammars.support import started

from pagoda_proto.grammars import regex
from pagoda_proto.params import SamplingParams
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.device_sampler import NO_TOKEN, GreedySampler
from pagoda_worker.sampling.sampler import Sample, sample


def row(num_outputs: int = 0, **params: Any) -> Row:
    tokens = np.arange(3 + num_outputs)
    new = new_row(1, tokens.tolist(), [0], num_prompt_tokens=3, params=SamplingParams(**params), eos_token_ids=(2,))
    return Row.of(new, tokens, np.zeros(1, np.int64))


def test_greedy_on_a_device_is_greedy_on_the_host() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with ties
    logits[2, 700], logits[3, 9], logits[4] = torch.nan, torch.inf, -torch.inf
    rows = [row(temperature=0.0) for _ in logits]
    chosen = sample(logits.clone(), rows)
    expected = [one.token_id if isinstance(one, Sample) else NO_TOKEN for one in chosen]
    assert GreedySampler().sample(logits, rows).ids.tolist() == expected
    assert expected.count(NO_TOKEN) == 3


@pytest.mark.parametrize(
    ("params", "num_outputs", "takes"),
    [
        ({"temperature": 0.0}, 0, True),
        ({"temperature": 0.7}, 0, False),
        ({"temperature": 0.0, "logprobs": 0}, 0, False),
        ({"temperature": 0.0, "presence_penalty": 0.5}, 4, False),
        ({"temperature": 0.0, "min_tokens": 3}, 2, False),
        ({"temperature": 0.0, "min_tokens": 3}, 3, True),
    ],
)
def test_it_takes_rows_that_need_nothing_from_the_host(params: dict[str, Any], num_outputs: int, takes: bool) -> None:
    assert GreedySampler().takes([row(temperature=0.0), row(num_outputs, **params)]) is takes


def test_a_grammar_is_followed_on_the_host() -> None:
    the_row = row(temperature=0.0)
    new = new_row(2, [1], [0], num_prompt_tokens=1, params=SamplingParams(temperature=0.0, grammar=regex("h")))
    formed = Row.of(new, np.array([1]), np.zeros(1, np.int64), started(regex("h")))
    assert GreedySampler().takes([the_row])
    assert not GreedySampler().takes([the_row, formed])


def test_it_takes_a_step_without_samples() -> None:
    assert GreedySampler().takes([])
