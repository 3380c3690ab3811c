from __future__ import annotations

import numpy as np
import pytest

from pagoda_proto.errors import ErrorCode
from pagoda_proto.pooling.params import CLASSIFY, EMBED, MAX_POOLED_BYTES, TOKEN_EMBED, PoolingParams
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.pooling.stages import Dense, Floats
from pagoda_worker.sampling.sampler import Fault

STATES = np.arange(1, 13, dtype=np.float32).reshape(4, 3)


def read(pooler: Pooler, states: Floats = STATES, **params: object) -> Floats:
    found = pooler.read(states, PoolingParams(**params))  # type: ignore[arg-type]
    assert isinstance(found, bytes), found
    return np.frombuffer(found, "<f4")


def test_several_ways_stand_side_by_side() -> None:
    pooler = Pooler(ways=("cls", "mean"), width=6)
    np.testing.assert_allclose(read(pooler), [1, 2, 3, 5.5, 6.5, 7.5])


def test_a_request_may_change_the_length_and_the_number_of_dimensions() -> None:
    pooler = Pooler(ways=("last",), width=3, normalizes=True)
    whole = read(pooler)
    np.testing.assert_allclose(np.linalg.norm(whole), 1, rtol=1e-6)
    np.testing.assert_allclose(read(pooler, normalize=False), [10, 11, 12])
    cut = read(pooler, dimensions=2)
    np.testing.assert_allclose(cut, whole[:2] / np.linalg.norm(whole[:2]), rtol=1e-6)
    np.testing.assert_allclose(read(pooler, dimensions=2, normalize=False), [10, 11])


@pytest.mark.parametrize(("skips", "expected"), [(True, [8.5, 9.5, 10.5]), (False, [5.5, 6.5, 7.5])])
def test_an_instruction_is_left_out_of_a_mean_where_the_files_say_so(skips: bool, expected: list[float]) -> None:
    np.testing.assert_allclose(read(Pooler(ways=("mean",), width=3, skips=skips), skip=2), expected)


def test_each_token_may_have_a_vector() -> None:
    pooler = Pooler(ways=("mean",), width=3, outputs=(EMBED, TOKEN_EMBED))
    np.testing.assert_allclose(read(pooler, output=TOKEN_EMBED).reshape(4, 3), STATES)
    assert pooler.needs_all


def test_vectors_of_more_tokens_than_an_answer_holds_are_refused() -> None:
    pooler = Pooler(ways=("cls",), width=512, outputs=(EMBED, TOKEN_EMBED))
    states = np.zeros((MAX_POOLED_BYTES // 2048 + 1, 512), np.float32)
    found = pooler.read(states, PoolingParams(output=TOKEN_EMBED))
    assert isinstance(found, Fault)
    assert (found.code, "bytes" in found.message) == (ErrorCode.INVALID_ARGUMENT, True)


def test_scores_go_through_the_activation_unless_they_are_asked_for_as_they_are() -> None:
    head = Dense(np.array([[1.0, 0, 0], [0, 1, 0]], np.float32))
    pooler = Pooler(ways=("cls",), stages=(head,), width=2, outputs=(CLASSIFY,), activation="softmax")
    np.testing.assert_allclose(read(pooler, output=CLASSIFY), [0.268941, 0.731059], rtol=1e-4)
    np.testing.assert_allclose(read(pooler, output=CLASSIFY, activate=False), [1, 2])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_states_that_are_no_numbers_are_a_fault(wrong: float) -> None:
    states = STATES.copy()
    states[1, 1] = wrong
    found = Pooler(ways=("mean",), width=3).read(states, PoolingParams())
    assert isinstance(found, Fault)
    assert found.code == ErrorCode.NUMERICAL_ERROR


def test_a_digest_tells_poolers_apart() -> None:
    head = Dense(np.ones((2, 3), np.float32))
    poolers = [
        Pooler(ways=("cls",), width=3),
        Pooler(ways=("mean",), width=3),
        Pooler(ways=("mean",), width=3, normalizes=True),
        Pooler(ways=("mean",), width=2, stages=(head,)),
        Pooler(ways=("mean",), width=2, stages=(Dense(head.weight * 2),)),
    ]
    assert len({pooler.digest() for pooler in poolers}) == len(poolers)
