"""Transcripts survive writing and reading, say where two differ, and are checked before they are used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.transcripts import (
    MAX_TRANSCRIPT_BYTES,
    Outcomes,
    ToldChoice,
    Transcript,
    TranscriptPart,
    differences,
    other_conditions,
    part_of,
    read_transcript,
    transcript_of,
)
from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.events import Finish
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import Begun, FinishReason, Generate, Pool, RequestRecord
from pagoda_proto.steps import TopLogprobs

BEGUN = Begun(model_fingerprint="weights", numerics_id="numerics")
TOKENS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(max_value=0.0, allow_nan=False, width=32)


def record(token_ids: list[int], seed: int = 1, **params: Any) -> RequestRecord:
    return RequestRecord(
        request_id="r", prompt_token_ids=token_ids, cache_salt="tenant.", tenant="somebody", weight=3,
        task=Generate(params=SamplingParams(**params), seed=seed, eos_token_ids=(2,)), adapter=Adapter("0" * 64, "/a"),
    )  # fmt: skip


def told(*choices: list[int], logprobs: float | None = None) -> list[ToldChoice]:
    outcomes = Outcomes()
    for i, token_ids in enumerate(choices):
        entries = None if logprobs is None else [TopLogprobs(logprobs, 1, [t], [-float("inf")]) for t in token_ids]
        outcomes.take(Update(i, token_ids, entries, [Finish(FinishReason.STOP, "end")]))
    return [outcomes.choice(i) for i in range(len(choices))]


def transcript(*choices: list[int], **more: Any) -> Transcript:
    asked = record([5, 6], n=len(choices))
    job = Job(id="cmpl-1", created=7, model="m", records=(asked,))
    return transcript_of(job, [part_of(asked, BEGUN, told(*choices, **more), [])])


@st.composite
def transcripts(draw: st.DrawFn) -> Transcript:
    records, parts = [], []
    params = {"n": draw(st.integers(1, 3)), "temperature": draw(st.floats(0, 2)), "logit_bias": {3: -1.5}}
    for _ in range(draw(st.integers(1, 3))):
        records.append(
            record(draw(st.lists(TOKENS, min_size=1, max_size=4)), draw(st.integers(0, 2**64 - 1)), **params)
        )
        outputs = [draw(st.lists(TOKENS, min_size=1, max_size=4)) for _ in range(params["n"])]
        parts.append(part_of(records[-1], BEGUN, told(*outputs, logprobs=draw(st.none() | LOGPROBS)), []))
    return transcript_of(Job(id="x", created=1, model="m", records=tuple(records)), parts)


@given(transcripts())
def test_what_is_written_is_read(written: Transcript) -> None:
    read = read_transcript(msgspec.json.encode(written))
    assert read == written
    assert list(differences(written, read)) == []
    assert other_conditions(read, "weights", "numerics") == []


@given(transcripts(), st.data())
def test_a_token_that_was_changed_is_found_where_it_is(written: Transcript, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, len(written.parts) - 1))
    choice = data.draw(st.integers(0, len(written.parts[part].choices) - 1))
    position = data.draw(st.integers(0, len(written.parts[part].choices[choice].token_ids) - 1))
    changed = msgspec.to_builtins(written)
    changed["parts"][part]["choices"][choice]["token_ids"][position] ^= 1
    [found] = differences(written, msgspec.convert(changed, Transcript, strict=False))
    assert found[:3] == (part, choice, position)


@pytest.mark.parametrize(
    ("now", "position"),
    [
        (transcript([1, 2, 3], [4, 5, 6, 7], logprobs=-0.5), 3),
        (transcript([1, 2, 3], [4, 5], logprobs=-0.5), 2),
        (transcript([1, 2, 3], [4, 5, 6], logprobs=-0.25), 0),
        (transcript([1, 2, 3], [4, 5, 6]), 0),
    ],
)
def test_what_is_longer_shorter_or_less_likely_differs_from_there(now: Transcript, position: int) -> None:
    *_, found = differences(transcript([1, 2, 3], [4, 5, 6], logprobs=-0.5), now)
    assert found[1:3] == (1, position)


def test_another_ending_of_the_same_tokens_is_a_difference() -> None:
    one, other = transcript([1]), transcript([1])
    ending = msgspec.structs.replace(other.parts[0].choices[0], finish_reason=FinishReason.LENGTH, stop_reason=None)
    other.parts[0].choices[0] = ending
    [found] = differences(one, other)
    assert found.position is None
    assert "length" in str(found)


def test_other_weights_and_numerics_are_named_once_each() -> None:
    weights, numerics = other_conditions(transcript([1]), "w2", "n2")
    assert "'weights'" in weights
    assert "'w2'" in weights
    assert "'numerics'" in numerics


def test_nothing_says_who_asked() -> None:
    text = msgspec.json.encode(transcript([1])).decode()
    assert '"tenant":""' in text
    assert not any(word in text for word in ("tenant.", "somebody", '"/a"', '"weight":3'))
    assert '"adapter":"' + "0" * 64 in text


def changed(**fields: Any) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(transcript([1])) | fields)


def with_part(**fields: Any) -> bytes:
    part = msgspec.to_builtins(transcript([1]))["parts"][0] | fields
    return changed(parts=[part])


def with_record(**fields: Any) -> bytes:
    kept = msgspec.to_builtins(transcript([1]))["parts"][0]["record"]
    return with_part(record=kept | fields)


POOL = msgspec.to_builtins(Pool(pooling=PoolingParams()))
DEEP: Any = {}
for _ in range(70):
    DEEP = {"properties": {"a": DEEP}}
HOSTILE = [
    b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"parts":' * 100_000,
    b" " * (MAX_TRANSCRIPT_BYTES + 1),
    changed(format=2), changed(parts=[]), changed(more=1), changed(adapter="../x"), changed(created="now"),
    changed(how={"future": 1}), changed(how={"functions": [{"name": "f", "future": 1}]}),
    changed(how={"functions": [{"name": "f", "parameters": DEEP}]}),
    with_part(choices=[]), with_part(more=1), with_part(choices=[{"token_ids": [1.5], "finish_reason": "stop"}]),
    with_part(choices=[{"token_ids": [1], "finish_reason": "stop", "logprobs": []}]),
    with_record(tenant="me"), with_record(cache_salt="x."), with_record(adapter={"digest": "0" * 64, "path": "/etc"}),
    with_record(future=1), with_record(task=POOL), with_record(task={"type": "Generate", "params": {}, "seed": -1}),
    with_record(task={"type": "Generate", "params": {}, "seed": 2**64}),
    with_record(task={"type": "Generate", "params": {"temperature": -1}, "seed": 1}),
    with_record(task={"type": "Generate", "params": {"future": 1}, "seed": 1}),
    with_record(task={"type": "Generate", "params": {}, "seed": 1, "eos_token_ids": [-1]}),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_transcript_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"transcript"):
        read_transcript(data)


@given(st.binary(max_size=40), st.integers(0, 500))
def test_damage_is_refused_or_harmless(damage: bytes, place: int) -> None:
    whole = msgspec.json.encode(transcript([1], [2]))
    try:
        read = read_transcript(whole[:place] + damage + whole[place + len(damage) :])
    except ValueError:
        return
    assert isinstance(read.parts[0], TranscriptPart)


def test_more_than_a_transcript_holds_is_let_go_while_it_comes() -> None:
    outcomes = Outcomes()
    for _ in range(3):
        outcomes.take(Update(0, [1] * (MAX_TRANSCRIPT_BYTES // 5), None, []))
    assert outcomes.too_many
    assert not outcomes._tokens
