"""A job can be serialised, and resumed by a process that has never seen the request."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proto.strategies import COUNT, RECORDS, TEXT, generating, records

from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.text.answers import HowRead
from pagoda_gateway.text.reasoning import Thinking
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_proto.records import RequestRecord

FUNCTIONS = st.builds(
    Function,
    name=TEXT,
    parameters=st.none() | st.dictionaries(TEXT, st.booleans() | TEXT, max_size=2),
    strict=st.booleans(),
)
HOW = st.builds(
    HowRead, thinking=st.none() | st.sampled_from(Thinking), functions=st.lists(FUNCTIONS, max_size=2).map(tuple)
)
SHOWN = st.builds(
    Shown,
    n=COUNT,
    how=HOW,
    stream=st.booleans(),
    usage=st.booleans(),
    running_usage=st.booleans(),
    logprobs=st.none() | COUNT,
    prompt_logprobs=st.none() | COUNT,
    token_ids=st.booleans(),
    thoughts=st.booleans(),
    echoes=st.none() | st.lists(TEXT, max_size=3).map(tuple),
    prompt_only=st.booleans(),
    form_field=TEXT,
)


def jobs(of: st.SearchStrategy[RequestRecord]) -> st.SearchStrategy[Job]:
    few = st.lists(of, min_size=1, max_size=2).map(tuple)
    return st.builds(Job, id=TEXT, created=COUNT, model=TEXT, records=few, shown=SHOWN, loose_grammar=TEXT)


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
@given(job=jobs(RECORDS))
def test_a_job_comes_back_as_it_was(form: type, job: Job) -> None:
    assert form.decode(form.encode(job), type=Job) == job


def test_every_option_is_tried() -> None:
    assert set(Shown.__struct_fields__) == {
        "n", "how", "stream", "usage", "running_usage", "logprobs", "prompt_logprobs", "token_ids", "thoughts",
        "echoes", "prompt_only", "form_field",
    }  # fmt: skip


@given(job=jobs(records(generating(ends=True))))
def test_a_loosened_job_differs_in_its_grammar_alone(job: Job) -> None:
    loosened = job.loosened()
    assert loosened.loose_grammar == ""
    assert {record.task.params.grammar for record in loosened.records} == {job.loose_grammar}
    assert [(record.request_id, record.prompt_token_ids, record.task.seed) for record in loosened.records] == [
        (record.request_id, record.prompt_token_ids, record.task.seed) for record in job.records
    ]
