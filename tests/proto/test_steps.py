from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from tests.fakes import make_record

from pagoda_proto.steps import Chunk, FromWorker, Message, NewRow, StepPlan, ToWorker


def test_the_unions_are_closed_and_their_tags_differ() -> None:
    messages = [*get_args(ToWorker), *get_args(FromWorker)]
    assert set(messages) == set(Message.__subclasses__()), "every message travels in exactly one direction"
    tags = [message.__struct_config__.tag for message in messages]
    assert len(set(tags)) == len(tags)


def test_every_message_says_what_it_is_for() -> None:
    assert [m.__name__ for m in Message.__subclasses__() if not m.__doc__] == []


def test_a_plan_counts_its_tokens() -> None:
    plan = StepPlan(step=1, chunks=[Chunk(1, 0, 30, False), Chunk(2, 5, 1, True)])
    assert plan.num_tokens == 31
    assert StepPlan(step=1).num_tokens == 0


def test_a_decode_step_is_small_on_the_wire() -> None:
    plan = StepPlan(step=1000, chunks=[Chunk(row_id, 500, 1, True) for row_id in range(1000, 1064)])
    assert len(msgspec.msgpack.encode(plan)) < 64 * 12


def test_defaults_are_left_out_and_come_back() -> None:
    row = NewRow(
        row_id=1,
        token_ids=[1, 2],
        num_prompt_tokens=2,
        num_computed=0,
        block_ids=[7],
        params=make_record().task.params,
        seed=0,
    )
    raw = msgspec.msgpack.encode(row)
    assert b"eos_token_ids" not in raw
    assert msgspec.msgpack.decode(raw, type=NewRow) == row


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        StepPlan(step=1).step = 2  # type: ignore[misc]
