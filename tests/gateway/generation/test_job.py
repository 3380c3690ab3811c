"""A job can be written down and taken up again by who has never seen the request."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proto.strategies import COUNT, RECORDS, TEXT

from pagoda_gateway.generation.job import Job, Shown

SHOWN = st.builds(
    Shown,
    n=COUNT,
    tools=st.booleans(),
    stream=st.booleans(),
    usage=st.booleans(),
    running_usage=st.booleans(),
    logprobs=st.none() | COUNT,
    prompt_logprobs=st.none() | COUNT,
    token_ids=st.booleans(),
    echoes=st.none() | st.lists(TEXT, max_size=3).map(tuple),
    prompt_only=st.booleans(),
    form_field=TEXT,
)
JOBS = st.builds(
    Job, id=TEXT, created=COUNT, model=TEXT, records=st.lists(RECORDS, min_size=1, max_size=3).map(tuple), shown=SHOWN
)


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
@given(job=JOBS)
def test_a_job_comes_back_as_it_was(form: type, job: Job) -> None:
    assert form.decode(form.encode(job), type=Job) == job


def test_every_option_is_tried() -> None:
    assert set(Shown.__struct_fields__) == {
        "n", "tools", "stream", "usage", "running_usage", "logprobs", "prompt_logprobs", "token_ids", "echoes",
        "prompt_only", "form_field",
    }  # fmt: skip
