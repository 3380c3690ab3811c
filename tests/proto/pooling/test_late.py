"""Late interaction and its settings are recognised in a checkpoint's files, and nothing else is mistaken for it."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda_proto.errors import InvalidParams
from pagoda_proto.params import ModelLimits
from pagoda_proto.pooling.kinds import EMBED, kind_of
from pagoda_proto.pooling.late import Late, Marks, late_of, marks_of
from pagoda_proto.pooling.params import MAX_SIM, TOKEN_EMBED, PoolingParams, Readings, check_pooling

COLBERT = {"architectures": ["HF_ColBERT"]}
TRANSFORMER, DENSE = {"type": "sentence_transformers.models.Transformer"}, {"type": "pylate.models.Dense.Dense"}
POOLING = {"type": "sentence_transformers.models.Pooling"}


def test_the_authors_checkpoints_have_their_defaults() -> None:
    found = late_of(COLBERT, [], {}, {})
    assert found is not None
    assert found[:4] == ("[unused0]", "[unused1]", 32, False)
    assert {".", ",", "!"} <= set(found.skipped)
    said = {"query_maxlen": 48, "attend_to_mask_tokens": True, "mask_punctuation": False, "dim": 96}
    assert late_of(COLBERT, [], {}, said) == Late("[unused0]", "[unused1]", 48, True, (), 96)
    assert kind_of(COLBERT, "/m", has_modules=False) == EMBED


def test_a_dense_without_pooling_is_of_tokens() -> None:
    said = {"query_prefix": "q", "document_prefix": "d", "query_length": 16, "skiplist_words": ["x"]}
    assert late_of({}, [TRANSFORMER, DENSE], said, {}) == Late("q", "d", 16, False, ("x",))
    plain = late_of({}, [TRANSFORMER, DENSE], {"do_query_expansion": False}, {})
    assert plain is not None
    assert plain[:3] == ("[Q] ", "[D] ", 0)
    assert late_of({}, [TRANSFORMER, POOLING, DENSE], {}, {}) is None
    assert late_of({}, [TRANSFORMER], {}, {}) is None


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"query_prefix": 3}, "query_prefix"),
        ({"query_length": 0}, "query_length"),
        ({"skiplist_words": "."}, "skiplist"),
    ],
)
def test_what_cannot_be_is_refused_by_name(said: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        late_of({}, [TRANSFORMER, DENSE], said, {})


def test_markers_must_be_tokens_and_only_documents_skip() -> None:
    late = Late("q", "d", 8, False, (".", "none"))
    marks = marks_of(late, {"q": 7, "d": 8, ".": 9}.get)
    assert marks == Marks(7, 8, frozenset({9}))
    assert (marks.kept([1, 8, 9, 2]), marks.kept([1, 7, 9, 2]), marks.kept([9])) == ([0, 1, 3], [0, 1, 2, 3], [0])
    with pytest.raises(ValueError, match="no tokens"):
        marks_of(late, {"q": 7}.get)


@pytest.mark.parametrize(
    ("params", "outputs", "param"),
    [
        (PoolingParams(output=MAX_SIM), (TOKEN_EMBED, MAX_SIM), "second_start"),
        (PoolingParams(unseen=1), (EMBED,), "unseen"),
        (PoolingParams(output=TOKEN_EMBED, unseen=4), (TOKEN_EMBED, MAX_SIM), "unseen"),
        (PoolingParams(output=MAX_SIM, second_start=2, unseen=2), (TOKEN_EMBED, MAX_SIM), "unseen"),
    ],
)
def test_a_pair_has_two_texts_and_a_query_a_beginning(
    params: PoolingParams, outputs: tuple[str, ...], param: str
) -> None:
    limits = ModelLimits(vocab_size=10, max_model_len=10)
    with pytest.raises(InvalidParams) as caught:
        check_pooling(params, [1, 2, 3, 4], limits, Readings(outputs, 4))
    assert [problem.param for problem in caught.value.problems] == [param]
